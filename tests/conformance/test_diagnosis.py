"""The diagnosis of a failed run of the kit: from recorded cases, from tensors, and once from a run."""

import json
import math
import re

import pytest
import torch

import gla_core as gla
from gla_core.conformance.cases import Case
from gla_core.conformance.diagnosis import FEW, diagnosis, distinct, kind
from gla_core.conformance.divergence import divergence
from gla_core.conformance.report import _failures
from gla_core.conformance.run import run
from gla_core.dispatch.backend import OP_PARAMETERS, Backend, Capabilities
from gla_core.dispatch.registry import get
from gla_core.workloads.named import select


def case(name, op="chunk_gla_fwd", dtype=torch.float32):
    (workload,) = (w for w in select(op.removesuffix("_fwd").removesuffix("_bwd")) if w.name == name)
    return Case(op, workload, dtype, "cpu")


def wrong(quantity="o", *, finite=True, ratio=None, everywhere=True, hint=None):
    place = {"at": "batch row 0, token 3, head 0", "found": "0.5", "expected": "0.25"}
    return {"quantity": quantity, "finite": finite, **place, "ratio": ratio, "everywhere": everywhere, "hint": hint}


def row(name, failed=True, test="values", op="chunk_gla_fwd", dtype=torch.float32, reason="AssertionError: o", **more):
    """Returns a case as a report has it, with the facts of its workload."""
    described = case(name, op, dtype)
    return {
        "test": f"test_values.py::test_{test}",
        "id": f"test_{test}[{described}]",
        "op": op,
        "workload": name,
        "dtype": str(dtype).removeprefix("torch."),
        "size": math.prod(described.describe().dims.values()),
        "facts": described.facts(),
        "outcome": "failed" if failed else "passed",
        "reason": reason if failed else None,
        "errors": [{"quantity": "o", "error": 0.1 if more.get("wrong", failed) else 0.0, "budget": 0.01}],
        "wrong": [wrong()] if failed else [],
        **more,
    }


def lines(*rows):
    report = diagnosis(rows, "gla conformance mine")
    assert len(report) <= 5
    return {line[:10].strip(): line[12:] for line in report}


def test_nothing_is_said_where_nothing_failed():
    assert diagnosis([row("short", failed=False)], "gla conformance mine") == []


@pytest.mark.parametrize(
    ("failed", "passed", "says"),
    [
        (["short", "packed"], ["one_chunk", "width_one"], "with initial_state"),
        (["grouped", "packed_grouped"], ["short", "packed"], "with grouped queries"),
        (["per_head", "per_head_closed"], ["short", "constant", "ungated"], "with gates per head"),
        (["constant", "constant_packed"], ["short", "per_head", "packed"], "with constant gates"),
        (["grouped_values", "per_head_grouped"], ["per_head", "grouped", "packed"], "with groups of value heads"),
        (["packed", "padded"], ["short", "ungated"], "with cu_seqlens"),
        (["short", "one_chunk"], ["ungated"], "with g"),
        (["minus_infinity"], ["extreme", "strong"], "with gates of -inf"),
        (["last_chunk_partial", "one_more_than_a_chunk"], ["short", "one_chunk"], "with more than 64 tokens"),
        (["odd_widths"], ["short", "last_chunk_partial"], "with K or V that is no multiple of 16"),
        (["ungated"], ["short", "one_chunk", "no_token"], "without g"),
        (["one_more_than_a_chunk", "one_token"], ["width_one", "no_token"], "with K > 1"),
    ],
)
def test_what_all_failed_cases_have_and_no_passed_one(failed, passed, says):
    rows = [*(row(name) for name in failed), *(row(name, failed=False) for name in passed)]
    common = lines(*rows)["in common"]
    assert common.startswith(f"every failing case of 'values' ({len(failed)}) runs {says}")
    computed = len(passed) - passed.count("no_token")  # a case that computes nothing shows nothing
    assert common.endswith(f"; no passing one ({computed}) does")


def test_a_dtype_and_a_pair_of_facts():
    half = [row(name, dtype=torch.bfloat16) for name in ("short", "packed")]
    wide = [row(name, failed=False) for name in ("short", "packed")]
    assert "runs in bfloat16; no passing one (2) does" in lines(*half, *wide)["in common"]
    assert distinct([row("packed_grouped")], [row("packed", failed=False), row("grouped", failed=False)])[0]
    pair = distinct([row("packed", facts=["a", "b", "c"])], [row("short", facts=["a", "c"]), row("short", facts=["b"])])
    assert pair == (["a", "b"], 0)
    assert len(distinct([row("packed")], [row("one_token", failed=False)])[0]) == FEW


def test_a_fact_that_few_passed_cases_have_and_no_fact_that_many_have():
    """A wrong initial state shows nothing where strong gates forget it."""
    failed = [row("short", facts=["with initial_state", "in float32"])] * 2
    passed = [row(name, failed=False, facts=["in float32"]) for name in ("one_chunk", "width_one", "packed_grouped")]
    forgotten = row("extreme", failed=False, facts=["with initial_state", "in float32"])
    common = lines(*failed, *passed, forgotten)["in common"]
    assert common == "every failing case of 'values' (2) runs with initial_state; 1 of 4 passing ones do"
    assert "in common" not in lines(*failed, *passed[:2], forgotten)


def test_the_property_with_most_workloads_is_examined_and_few_that_fail_are_named():
    values = [row("short"), row("grouped", failed=False), row("ungated", failed=False)]
    scale = [row("short", test="scale"), row("grouped", test="scale", failed=False)]
    others = [row("short", test=name, failed=False) for name in ("padding", "same_bits", "checkpoints")]
    common = lines(*scale, *values, *others)["in common"]
    assert common.startswith("only 'scale' and 'values' fail; 3 other properties of the op pass; every")
    every = lines(row("short"), row("grouped"), *others)["in common"]
    assert every == "only 'values' fails; 3 other properties of the op pass; every case of 'values' fails"


def test_the_smallest_case_its_first_wrong_place_and_the_command_that_shows_it():
    report = lines(row("grouped"), row("short", dtype=torch.bfloat16), row("short"), row("ungated", failed=False))
    place = "test_values[chunk_gla_fwd-short-float32]: o is first wrong at batch row 0, token 3, head 0: 0.5, not 0.25"
    assert report["smallest"] == place
    command = 'gla conformance mine -k "test_values.py and test_values[chunk_gla_fwd-short-float32]" -- --tb=short'
    assert report["to see it"] == command
    assert "factor" not in report


@pytest.mark.parametrize(
    ("known", "says"),
    [
        ({"ratio": 5.66, "hint": "is scale applied?"}, "o is 5.66 x what is expected, everywhere: is scale applied?"),
        ({"ratio": 0.5, "everywhere": False}, "o is 0.5 x what is expected, where it is wrong"),
    ],
)
def test_a_constant_factor(known, says):
    assert lines(row("short", wrong=[wrong(**known)]))["factor"] == says


CHANGED = row("short", test="inputs_unchanged", wrong=[wrong("q", ratio=0.25)])
REASON = "gla_core.dispatch.errors.BackendError: chunk_gla_fwd: returned o as bfloat16"
ANOTHER_DTYPE = row("short", reason=REASON, wrong=[])
NAN = row("short", wrong=[wrong(finite=False)])
RAISES = row("short", reason="IndexError: too many indices", wrong=[])
VALUES = row("grouped", test="scale")


@pytest.mark.parametrize(
    ("root", "name", "says"),
    [
        (CHANGED, "changed inputs", "chunk_gla_fwd changes its inputs: q (1 case)"),
        (ANOTHER_DTYPE, "results", "chunk_gla_fwd: returned o as bfloat16 (1 case)"),
        (NAN, "NaN", "chunk_gla_fwd gives NaN or infinity where there should be none: o (1 case)"),
        (RAISES, "errors", "chunk_gla_fwd: IndexError: too many indices (1 case)"),
    ],
)
def test_root_causes_come_before_wrong_values(root, name, says):
    assert (kind(root), kind(VALUES)) == (name, "values")
    report = lines(VALUES, root)
    assert report["begin with"].startswith(says)
    assert report["begin with"].endswith("; the other failures (1) may follow from this")
    assert next(_failures([VALUES, root], verbose=False)).startswith(f"FAILED test_values.py::{root['id']}")
    assert "begin with" not in lines(VALUES)


def test_nan_in_fewer_cases_than_wrong_values_is_their_consequence():
    report = lines(NAN, VALUES, row("short", test="scale"))
    assert report["begin with"].startswith("chunk_gla_fwd gives wrong values (2 cases)")


def test_opcheck_comes_after_wrong_values():
    """Two runs that differ, as with unwritten memory, fail it in words that hide the cause."""
    reason = "torch.testing._internal.optests.generate_tests.OpCheckError: opcheck(op, ...): test_aot_dispatch failed"
    opcheck = row("short", test="opcheck", reason=reason, wrong=[], errors=[])
    assert kind(opcheck) == "opcheck"
    assert lines(opcheck, VALUES)["begin with"].startswith("chunk_gla_fwd gives wrong values (1 case)")
    assert lines(opcheck)["begin with"].startswith(f"chunk_gla_fwd: {reason[:40]}")


def test_a_result_too_large_to_look_at_is_one_of_wrong_values():
    row_of_large = row("short", wrong=[], errors=[{"quantity": "o", "error": 0.1, "budget": 0.01}])
    assert kind(row_of_large) == "values"
    assert lines(row_of_large)["smallest"] == "test_values[chunk_gla_fwd-short-float32]"


def test_what_is_0_everywhere():
    report = lines(row("short", wrong=[wrong("state", ratio=-0.0)]))
    assert report["factor"] == "state is 0 everywhere"


def test_inputs_that_are_changed_have_a_factor_of_their_own():
    assert lines(CHANGED)["factor"] == "q is 0.25 x what it was before"
    assert lines({**CHANGED, "wrong": [wrong("q", ratio=0.0)]})["factor"] == "q is set to 0"


def test_the_first_op_that_fails_is_told_of():
    backward = row("short", op="chunk_gla_bwd", test="gradients")
    report = lines(backward, backward, row("short"))
    first = "chunk_gla_fwd gives wrong values (1 case); the other failures (2) may follow from this"
    assert report["begin with"] == first


def test_three_failures_a_property_are_listed_and_all_on_request():
    rows = [row(name) for name in ("short", "grouped", "packed", "padded", "ungated")]
    listed = list(_failures(rows, verbose=False))
    assert listed[3:] == ["       and 2 more of values (-v shows all)"]
    assert listed[0] == "FAILED test_values.py::test_values[chunk_gla_fwd-short-float32]: o"
    assert len(list(_failures(rows, verbose=True))) == 5


# ---- the places where a result is wrong


def outputs(B, T, H):
    return torch.randn(B, T, H, 16, dtype=torch.float64)


@pytest.mark.parametrize(
    ("factor", "hint"),
    [
        (4.0, "is scale applied?"),
        (0.25, "is scale applied twice?"),
        (-1.0, "is a sign wrong?"),
        (math.log(2), "is the base 2 or e?"),
        (1.7, None),
        (0.0, None),
    ],
)
def test_a_factor_of_all_numbers(factor, hint):
    ref = outputs(2, 17, 2)
    place = divergence("o", factor * ref + 1e-9 * torch.randn_like(ref), ref, 1e-5, case("short"))
    assert place["ratio"] == pytest.approx(factor, abs=1e-6)
    assert (place["everywhere"], place["hint"]) == (True, hint)
    assert place["at"] == "batch row 0, token 0, head 0"


@pytest.mark.parametrize(("workload", "groups"), [("grouped", 3), ("grouped_values", 3), ("per_head_grouped", 3)])
def test_a_factor_of_a_group_of_heads(workload, groups):
    ref = outputs(1, 17, 1)
    place = divergence("dk", ref / groups, ref, 1e-5, case(workload, "chunk_gla_bwd"))
    assert (place["ratio"], place["hint"]) == (pytest.approx(1 / groups), "are the heads of a group summed?")


def test_the_first_wrong_place_and_no_factor_where_there_is_none():
    ref = outputs(2, 17, 2)
    out = ref.clone()
    out[1, 5, 1, 3:] += torch.randn(13)
    place = divergence("o", out, ref, 1e-5, case("short"))
    assert (place["at"], place["ratio"], place["everywhere"]) == ("batch row 1, token 5, head 1", None, False)
    out = ref.clone()
    out[:, 9:] *= 2
    place = divergence("o", out, ref, 1e-5, case("short"))
    assert (place["at"], place["ratio"], place["everywhere"]) == ("batch row 0, token 9, head 0", 2.0, False)


def test_numbers_have_as_many_digits_as_show_that_they_differ():
    ref = torch.full((1, 1, 1, 16), 2.71828182, dtype=torch.float64)
    place = divergence("o", ref + 1e-4, ref, 1e-5, case("short"))
    assert (place["found"], place["expected"]) == ("2.7184", "2.7183")
    place = divergence("o", 2 * ref, ref, 1e-5, case("short"))
    assert (place["found"], place["expected"]) == ("5.44", "2.72")


def test_rounding_is_not_the_first_wrong_place():
    ref = outputs(2, 17, 2)
    out = ref * (1 + 1e-3 * torch.rand_like(ref))
    out[1, 3] += 1
    assert divergence("o", out, ref, 4e-3, case("short"))["at"] == "batch row 1, token 3, head 0"
    assert divergence("o", out, ref, 1, case("short"))["at"] == "batch row 1, token 3, head 1"  # the largest


@pytest.mark.parametrize(
    ("row", "at"),
    [(0, "sequence 1, token 0, head 1"), (66, "sequence 4, token 0, head 1"), (198, "sequence 5, token 2, head 1")],
)
def test_a_place_of_packed_sequences(row, at):
    ref = outputs(1, 199, 2)  # lengths 0, 65, 1, 0, 130, 3, 0
    out = ref.clone()
    out[0, row, 1] = 7
    assert divergence("o", out, ref, 1e-5, case("packed"))["at"] == at


def test_places_of_other_results():
    ref = torch.zeros(2, 2, 16, 16)
    out = ref.clone()
    out[1, 1, 2, 3] = 1
    assert divergence("state", out, ref, 0, case("short"))["at"] == "sequence 1, head 1"
    assert divergence("dq", out, ref, 0, case("short", "chunk_gla_bwd"))["at"] == "batch row 1, token 1, head 2"
    assert divergence("something", out, ref, 0, case("short"))["at"] == "index [1, 1, 2, 3]"
    assert divergence("state", out, ref, 0, None)["at"] == "index [1, 1, 2, 3]"
    per_head, constant = case("per_head", "chunk_gla_bwd"), case("constant", "chunk_gla_bwd")
    assert divergence("dg", out[1], ref[1], 0, per_head)["at"] == "batch row 1, token 2, head 3"
    assert divergence("dg", out[1, 1, 2], ref[1, 1, 2], 0, constant)["at"] == "head 3"
    step = case("small", "recurrent_gla_step")
    assert divergence("state", out, ref, 0, step)["at"] == "state 1, head 1"


def test_numbers_that_are_none():
    ref = outputs(2, 17, 2)
    out = ref.clone()
    out[0, 4] = torch.nan
    place = divergence("o", out, ref, 1e-5, case("short"))
    assert (place["finite"], place["at"], place["found"]) == (False, "batch row 0, token 4, head 0", "nan")
    assert divergence("o", ref, out, 1e-5, case("short"))["finite"]  # NaN is expected


# ---- a run

FWD = get("reference").ops["chunk_gla_fwd"]


def scale_ignored(q, k, v, g, scale, initial_state, output_final_state, cu_seqlens, checkpoint_every):
    return FWD(q, k, v, g, 1.0, initial_state, output_final_state, cu_seqlens, checkpoint_every)


def test_a_run_ends_with_a_diagnosis_before_the_verdict(tmp_path, capsys):
    backend = Backend("mine", "0", {"chunk_gla_fwd": scale_ignored}, Capabilities(dtypes=frozenset({torch.float32})))
    options = {
        "module": "test_values",
        "select": "chunk_gla_fwd and (values[ or scale) and (short or width_one or ungated-)",
    }
    with gla.register(backend):
        code = run("mine", report=str(tmp_path / "cases.jsonl"), options=["--color=yes"], **options)
    assert code == 1
    coloured = capsys.readouterr().out
    assert (
        "\x1b[31mFAILED test_values.py::test_values[chunk_gla_fwd-short-float32]: o: relative error 3, allowed 1e-5"
        in coloured
    )
    printed = re.sub("\x1b\\[[0-9;]*m", "", coloured).splitlines()
    table = printed[printed.index(next(line for line in printed if line.startswith("chunk_gla_fwd "))) :]
    first = [line.split()[0] for line in table]
    assert first == ["chunk_gla_fwd", "values", "scale", "in", "smallest", "factor", "to", "mine"]
    assert "every failing case of 'values' (2) runs" in table[3]
    assert "o is first wrong at batch row 0, token 0, head 0" in table[4]
    assert table[5].endswith("o is 4 x what is expected, everywhere: is scale applied?")
    lowered = ("chunk_gla_pool", "chunk_ssd_fwd")
    others = ", ".join(op for op in OP_PARAMETERS if op not in ("chunk_gla_fwd", *lowered))
    assert f"not declared: {others} (calls of them are refused)" in printed
    row = json.loads((tmp_path / "cases.jsonl").read_text().splitlines()[0])
    assert (row["facts"][0], row["wrong"][0]["hint"]) == ("in float32", "is scale applied?")
