"""The kit as users run it: from another folder, on the reference and on a partial backend of a plugin."""

import contextlib
import dataclasses
import functools
import inspect
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import gla_core as gla
from gla_core.conformance import summary
from gla_core.conformance.calls import oracle_gradients, oracle_results, reference_results, with_loss
from gla_core.conformance.cases import WRITING, Case, cases, excluded, fitted, refusals
from gla_core.conformance.facts import forms
from gla_core.conformance.run import run
from gla_core.conformance.subject import sources
from gla_core.conformance.tolerances import FORWARD, relative_error
from gla_core.dispatch.backend import OP_PARAMETERS, Backend, Capabilities
from gla_core.dispatch.registry import get
from gla_core.ops import ABSTRACT_OPS, PUBLIC_OPS
from gla_core.ops.spec import Role
from gla_core.workloads.inputs import arguments
from gla_core.workloads.named import select
from tests.reference import function

PLUGIN = """
import torch
from gla_core.dispatch.backend import Backend, Capabilities, hookimpl

def online_softmax(x, dim):
    return torch.softmax(x, dim).contiguous()

@hookimpl
def gla_register_backends():
    can = Capabilities(dtypes=frozenset({torch.float32}))
    return [Backend("partial", "1.2", {"online_softmax": online_softmax}, can)]
"""


def kit(folder, *arguments, module="", path=None):
    """Runs the kit in `folder`, by pytest's own command line."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("GLA_", "PYTEST_"))}
    environment["OMP_NUM_THREADS"] = "1"  # at these sizes threads cost more than they gain
    if path is not None:
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(path), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "pytest", "-q", "--pyargs", f"gla_core.conformance{module}", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def read_cases(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow
def test_the_reference_passes_every_case(tmp_path, capsys):
    """Every op passes: values and gradients of all small workloads, and the rest of the smallest, in float32.

    The smallest workloads have values and gradients in every dtype. Graphs are of two ops:
    tests/ops/test_torch_integration.py compiles all of them. `make conformance` runs everything.
    """
    report = tmp_path / "cases.jsonl"
    values = "(test_values[ or test_gradients[) and (float32 or short or small)"
    rest = "float32 and (small or short) and not test_torch"
    graphs = "test_torch and small and (recurrent_gla_step- or online_softmax)"
    code = run("reference", report=str(report), select=f"{values} or test_refusals or {rest} or {graphs}")
    printed = capsys.readouterr().out
    assert code == 0, printed[-5000:]
    rows = read_cases(report)
    counts = summary.counts(rows)
    assert counts["passed"] > 750
    assert f"passed {counts['passed']} of {counts['passed']} cases" in printed
    assert (counts["failed"], counts["open"], counts["refusals"]) == (0, 0, len(OP_PARAMETERS))
    assert len([row for row in rows if row["errors"]]) > 0.9 * len(rows)
    values = {(r["op"], r["workload"], r["dtype"]) for r in rows if r["test"].endswith(("::test_values", "_gradients"))}
    for op in OP_PARAMETERS:
        for workload in select(op.removesuffix("_fwd").removesuffix("_bwd"), ["ci"]):
            every = workload.name in ("short", "small")
            for dtype in ("float64", "float32", "float16", "bfloat16") if every else ("float32",):
                assert (op, workload.name, dtype) in values


def sample(path):
    """Runs some tests of the kit on the reference, and returns what it printed and the text of the report."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        case = {"module": "test_gradients", "select": "[chunk_gla_bwd-grouped-"}
        code = run("reference", report=str(path), commit="a1", **case)
    assert code == 0
    return printed.getvalue(), path.read_text()


@pytest.fixture(scope="module")
def sampled(tmp_path_factory):
    """The output and the report of a run of some tests of the kit."""
    return sample(tmp_path_factory.mktemp("sample") / "report.json")


def test_the_summary_says_what_ran_where_and_the_worst_error_with_its_budget(sampled):
    report = json.loads(sampled[1])
    assert report["format"] == 2
    assert report["backend"] == {"name": "reference", "version": get("reference").version}
    assert report["versions"]["torch"] == torch.__version__
    assert report["versions"]["gla_core"] == gla.__version__
    assert report["device"]["type"] == "cpu"
    assert report["commit"] == "a1"
    assert report["declared"]["ops"] == list(get("reference").ops)
    assert report["declared"]["dtypes"] == ["float32", "float64", "float16", "bfloat16"]
    assert report["not_declared"] == report["failed"] == report["open"] == []
    (checked,) = [row for row in report["properties"] if row["property"] == "gradients"]
    assert (checked["op"], checked["failed"], checked["open"]) == ("chunk_gla_bwd", 0, 0)
    worst = checked["worst"]
    assert worst["case"].startswith("test_gradients.py::test_gradients[")
    assert worst["quantity"] in ("dq", "dk", "dv", "dg", "dinitial_state")
    assert 0 < worst["error"] <= worst["budget"]


def test_every_case_has_a_line_with_its_errors_and_their_budgets(tmp_path):
    sample(tmp_path / "cases.jsonl")
    (row,) = [
        row
        for row in read_cases(tmp_path / "cases.jsonl")
        if row["id"] == "test_gradients[chunk_gla_bwd-grouped-bfloat16]"
    ]
    assert (row["test"], row["op"]) == ("test_gradients.py::test_gradients", "chunk_gla_bwd")
    assert (row["workload"], row["dtype"]) == ("grouped", "bfloat16")
    assert [error["quantity"] for error in row["errors"]] == ["dq", "dk", "dv", "dg", "dinitial_state"]
    assert {error["budget"] for error in row["errors"]} == {5e-3}
    assert all(0 < error["error"] <= 5e-3 for error in row["errors"])


def test_a_table_and_the_files_that_are_judged_end_the_run_and_the_report_names_no_place(sampled):
    judged = inspect.getfile(get("reference").ops["online_softmax"])
    for text in ("conformance of reference", "error/budget", "chunk_gla_bwd", f"judges online_softmax from {judged}"):
        assert text in sampled[0]
    for word in (str(Path(gla.__file__).parents[1]), str(Path.home()), os.uname().nodename, "/tmp/"):
        assert len(word) < 4 or word not in sampled[1]  # a machine may be named "cpu", and a home folder be "/"


@pytest.mark.parametrize("function", [functools.partial(torch.softmax, dtype=None), torch.softmax, str.join])
def test_a_function_without_a_file_of_its_own_is_no_error(function):
    """Functions of compiled extensions have no source file."""
    (line,) = sources(Backend("compiled", "0", {"online_softmax": function}))
    assert line.startswith("judges online_softmax from ")


@pytest.fixture(scope="module")
def partial(tmp_path_factory):
    """A plugin with one op in one dtype, on the path as if it were installed."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "partial_plugin.py").write_text(PLUGIN)
    info = folder / "partial_plugin-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: partial-plugin\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text("[gla_core.backends]\npartial = partial_plugin\n")
    return folder


@pytest.mark.slow
@pytest.mark.thorough
def test_a_partial_backend_passes_on_what_it_declares(partial, tmp_path):
    """The report is complete with several processes, too."""
    chosen = ("-k", "not test_torch", "-n", "2")
    done = kit(tmp_path, "--gla-backend", "partial", "--gla-report", "cases.jsonl", *chosen, path=partial)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr
    assert "conformance of partial 1.2 on cpu" in done.stdout
    rows = read_cases(tmp_path / "cases.jsonl")
    added = "online_softmax_bwd"  # the core computes it in PyTorch
    others = [op for op in OP_PARAMETERS if op not in ("online_softmax", added)]
    lines = done.stdout.splitlines()
    assert [line for line in lines if line.startswith("not declared")] == [
        f"not declared: {', '.join(others)} (calls of them are refused)",
        "not declared: dtype float64, dtype float16, dtype bfloat16, cuda_graphs",
    ]
    assert not [line for line in lines for op in others if line.startswith(op)]  # their refusals are not listed
    computed = [row for row in rows if not row["test"].startswith("test_refusals.py")]
    assert {(row["op"], row["dtype"]) for row in computed} == {("online_softmax", "float32"), (added, "float32")}
    refused = {(r["op"], r["dtype"]): r["reason"] for r in rows if r["test"].endswith("::test_refused")}
    assert refused["online_softmax", "float16"] == "computes float32; x is float16"
    reason = f"does not implement chunk_gla_bwd; it implements online_softmax, {added}"
    assert refused["chunk_gla_bwd", "float32"] == reason
    assert {op for op, _ in refused} == set(OP_PARAMETERS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "pass --gla-backend NAME, the backend to judge: {own_backends}"),
        (("--gla-backend", "refrence"), "did you mean 'reference'?"),
        (("--gla-backend", "reference", "--gla-device", "tpu"), "the device is 'tpu'; expected cpu or cuda"),
    ],
)
def test_a_wrong_question_is_a_usage_error(arguments, message, own_backends, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert pytest.main(["-q", "--pyargs", "gla_core.conformance", *arguments]) == pytest.ExitCode.USAGE_ERROR
    printed = capsys.readouterr()
    assert message.format(own_backends=", ".join(own_backends)) in printed.err
    assert "passed" not in printed.out


# ---- the cases of a backend, and the outcome of refused ones


COMPUTED_BY_ANOTHER = (
    "chunk_gla_bwd",
    "chunk_gla_pool",
    "chunk_ssd_bwd",
    "recurrent_gla_layer_step",
    "recurrent_ssd_step",
    "recurrent_gla_steps",
    "recurrent_gla_replay",
    "chunk_delta_bwd",
    "chunk_delta_pool",
    "recurrent_delta_steps",
    "recurrent_delta_replay",
)
"""The ops that the core computes by another one under `batch_invariant`, and which a backend may have alone."""


def judge(backend, tmp_path, **options):
    """Runs the kit; returns the exit code, and every case."""
    with gla.register(backend):
        code = run(backend.name, report=str(tmp_path / "cases.jsonl"), **options)
    return code, read_cases(tmp_path / "cases.jsonl")


def test_a_case_that_supports_refuses_is_open(tmp_path):
    def supports(call):
        return "needs an even number of columns" if call.dims["columns"] % 2 else None

    backend = Backend("even", "0", {"online_softmax": get("reference").ops["online_softmax"]}, supports=supports)
    code, rows = judge(backend, tmp_path, module="test_values", select="values[ and float32")
    outcomes = {row["workload"]: (row["outcome"], row["reason"]) for row in rows}
    assert code == 0
    assert outcomes["minus_infinity"] == ("passed", None)
    assert outcomes["small"] == ("open", "not supported: even: needs an even number of columns")
    assert summary.counts(rows) == {"passed": 3, "failed": 0, "open": 3, "refusals": 0}
    (why,) = summary.reasons(rows, "open")
    assert (why["reason"], why["cases"]) == ("not supported: even: needs an even number of columns", 3)
    assert "test_values.py::test_values[online_softmax-small-float32]" in why["such as"]


@pytest.mark.parametrize(
    "op",
    [
        op
        if op in ("chunk_ssd_bwd", "chunk_gla_pool", "recurrent_gla_steps")
        else pytest.param(op, marks=pytest.mark.thorough)
        for op in get("reference").ops
    ],
)
def test_a_backend_of_one_op_passes_and_what_the_core_refuses_is_open(op, tmp_path):
    """The core computes some ops by another one under `batch_invariant`, and refuses a backend that lacks it."""
    backend = Backend("alone", "0", {op: function(op)})
    properties = "same_bits or batch_invariance or test_values[ and (small or short) and float32"
    code, rows = judge(backend, tmp_path, select=f"[{op}- and ({properties})")
    assert code == 0
    still_open = [row["reason"] for row in rows if row["outcome"] == "open"]
    assert all("is computed part by part" in reason for reason in still_open)
    assert bool(still_open) == (op in COMPUTED_BY_ANOTHER)


@pytest.mark.parametrize(
    ("limits", "out"),
    [
        (
            {},
            {
                "grouped_values": "has no groups of value heads; v has 6 heads and k has 2",
                "per_head": "takes a gate for each key [B, T, Hv, K]; g has one for each token and head [B, T, Hv]",
                "constant": "takes a gate for each key [B, T, Hv, K]; g has one for each head [Hv]: expand it, or",
            },
        ),
        (
            {"variable_length": False, "grouped_queries": False},
            {"packed": "has no packed sequences", "grouped": "has no grouped queries; q has 6 heads and k has 2"},
        ),
        (
            {"key_widths": range(16, 257, 16), "value_widths": range(32, 65, 32)},
            {
                "odd_widths": "computes K from 16 to 256 in steps of 16; K is 19",
                "short": "computes V from 32 to 64 in steps of 32; V is 16",
            },
        ),
        ({"gradients": False, "deterministic": False}, {"": "has no gradients", " ": "is not deterministic"}),
    ],
    ids=lambda value: next(iter(value), "default") if isinstance(value, dict) else "",
)
def test_what_the_capabilities_exclude_is_refused_and_the_rest_computed(limits, out, tmp_path):
    """The names in `out` are those of workloads that the capabilities exclude; a blank stands for no workload."""
    ops = {op: get("reference").ops[op] for op in ("chunk_gla_fwd", "chunk_gla_bwd")}
    backend = Backend("limited", "0", ops, Capabilities(dtypes=frozenset({torch.float32}), **limits))
    code, rows = judge(backend, tmp_path, module="test_refusals", select="test_refused")
    assert code == 0
    refused = [row for row in rows if row["op"] == "chunk_gla_fwd"]
    for reason in out.values():
        assert any(row["reason"].startswith(reason) for row in refused)
    computed = {case.workload.name for case in cases(backend, "cpu", "chunk_gla_fwd")}
    assert "minus_infinity" in computed
    assert not computed.intersection(out)
    assert {name for name in out if name.strip()} <= {row["workload"] for row in refused}
    assert bool(cases(backend, "cpu", "chunk_gla_bwd")) == limits.get("gradients", True)
    assert bool(cases(backend, "cpu", "chunk_gla_fwd", requires="deterministic")) == limits.get("deterministic", True)


class Collected:
    """A pytest plugin that keeps the cases and the marks of every test by its name, and runs none."""

    def __init__(self):
        self.cases, self.few = {}, {}

    def pytest_collection_finish(self, session):
        for item in session.items:
            mark = item.get_closest_marker("over")
            if mark is not None:
                self.cases.setdefault(item.originalname, []).append(item.callspec.params["case"])
                self.few[item.originalname] = mark.kwargs.get("few") or {}


SETTINGS = ("-c", inspect.getfile(summary).replace("summary.py", "pytest.ini"))


def test_the_few_workloads_of_a_property_are_workloads_of_its_op():
    """A name that no workload has would leave out its cases."""
    kept = Collected()
    options = ("--gla-backend", "reference", "--collect-only", "-q")
    assert pytest.main([*options, *SETTINGS, "--pyargs", "gla_core.conformance"], [kept]) == 0
    assert any(kept.few.values())
    for test, few in kept.few.items():
        tested = {case.op for case in kept.cases[test]}
        for ops, names in few.items():
            group = [op for op in ((ops,) if isinstance(ops, str) else ops) if op in tested]
            known = {op: {workload.name for workload in select(ABSTRACT_OPS[op].public)} for op in group}
            assert set(names.split()) == set(names.split()).intersection(set().union(*known.values())), (test, ops)
            for op in group:
                run = {case.workload.name for case in kept.cases[test] if case.op == op}
                assert run == known[op].intersection(names.split()) != set(), (test, op)


def test_a_case_for_every_function_of_an_op():
    few = {"chunk_gla_summary": "short"}
    chosen = cases(get("reference"), "cpu", "chunk_gla_summary", few=few, functions=True, dtypes="one")
    assert list(map(str, chosen)) == ["chunk_gla_summary-short-float32", "chunk_gla_gradient_summary-short-float32"]


def test_every_op_has_the_cases_that_follow_from_its_description(monkeypatch):
    """Each optional argument is given in one case and left out in another, also for a CUDA device that is not here."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    kept = Collected()
    modules = [f"gla_core.conformance.{name}" for name in ("test_torch", "test_autocast", "test_cuda")]
    options = ("--gla-backend", "reference", "--gla-device", "cuda", "--collect-only", "-q")
    assert pytest.main([*options, *SETTINGS, "--pyargs", *modules], [kept]) == 0
    every, public = set(ABSTRACT_OPS), {spec.name for spec in PUBLIC_OPS.values()}
    gradients = {"chunk_gla_bwd", "chunk_gla_summary", "chunk_ssd_bwd", "online_softmax_bwd", "softmax_attention_bwd"}
    gradients |= {"chunk_delta_bwd", "chunk_delta_summary"}
    covered = {"opcheck": every, "no_wait": every, "graph": every, "compiled": public, "autocast": public}
    covered |= {f"{name}_inplace": set(WRITING) for name in covered}
    covered |= {"compiled_with_backward": gradients, "autocast_of_gradients": gradients}
    for test, ops in covered.items():
        assert {case.op for case in kept.cases[f"test_{test}"]} == ops, test
        for op in ops:
            made = [case for case in kept.cases[f"test_{test}"] if case.op == op]
            computed = [case for case in cases(get("reference"), "cuda", op) if case.describe().dims.get("T") != 0]
            assert forms_of(made) == forms_of(computed), (test, op)


def forms_of(made):
    return {form for case in made for form in forms(case.describe(), case.workload.sizes)}


def test_widths_that_no_workload_has_are_fitted():
    (workload,) = (w for w in select("chunk_gla") if w.name == "odd_widths")
    narrow = fitted(workload, Capabilities(key_widths=range(16, 257, 16), value_widths=range(64, 129, 64)))
    assert (narrow.name, narrow.sizes["K"], narrow.sizes["V"]) == ("odd_widths_k16_v64", 16, 64)
    assert fitted(workload, Capabilities()) is workload


def test_cases_and_refusals_do_not_meet():
    can = Capabilities(dtypes=frozenset({torch.float16}), variable_length=False, key_widths=range(16, 65, 16))
    can = dataclasses.replace(can, gates=frozenset({"key", "head"}))
    backend = Backend("limited", "0", dict(get("reference").ops), can)
    for op in OP_PARAMETERS:
        allowed = cases(backend, "cpu", op)
        # This backend takes no packed sequences, and no float32, in which a step computes a step of Mamba-2.
        refuses_all = ABSTRACT_OPS[op].requires(Role.OFFSETS) or op == "recurrent_ssd_step"
        assert bool(allowed) != refuses_all
        assert all(isinstance(case, Case) and excluded(backend, case) is None for case in allowed)
    refused = refusals(backend, "cpu")
    assert all(excluded(backend, case) for case in refused)
    assert {case.dtype for case in refused} == {torch.float64, torch.float32, torch.bfloat16, torch.float16}


@pytest.mark.parametrize(
    ("op", "name"),
    [
        *(
            ("chunk_gla", name)
            for name in ("grouped", "packed", "padded", "ungated", "per_head", "constant", "grouped_values")
        ),
        *(("chunk_ssd", name) for name in ("packed", "grouped", "odd_widths")),
    ],
)
def test_large_workloads_are_judged_by_what_the_oracle_says_of_small_ones(op, name):
    """Large workloads are judged by the reference in float64, which equals the oracle on small ones."""
    (workload,) = (w for w in select(op) if w.name == name)
    x = arguments(workload, dtype=torch.bfloat16) | {"output_final_state": True}
    results = reference_results(op, x) | reference_results(f"{op}_bwd", with_loss(f"{op}_bwd", x))
    expected = oracle_results(op, x) | oracle_gradients(op, x)
    assert results.keys() == expected.keys()
    errors = {name: relative_error(results[name], ref) for name, ref in expected.items()}
    assert max(errors.values()) <= FORWARD[torch.float64], errors


# ---- the summary, of made-up cases


def case(name, outcome="passed", reason=None, **errors):
    listed = [{"quantity": quantity, "error": error, "budget": 0.01} for quantity, error in errors.items()]
    test = {"op": "online_softmax", "test": "test_x.py::test_values", "id": f"test_values[{name}]"}
    return {**test, "outcome": outcome, "reason": reason, "errors": listed}


def test_the_worst_error_is_the_one_that_is_largest_beside_its_budget():
    rows = [case("a", y=0.004), case("b", y=0.008, z=0.002), case("c", "failed", "off", y=float("nan"))]
    (row,) = summary.properties(rows[:2])
    assert row["worst"] == {"case": "test_x.py::test_values[b]", "quantity": "y", "error": 0.008, "budget": 0.01}
    assert summary.ratio_text(row["worst"]) == "0.80"
    (row,) = summary.properties(rows)
    assert (row["worst"]["case"], row["worst"]["error"]) == ("test_x.py::test_values[c]", None)
    assert summary.ratio_text(row["worst"]) == "infinite"
    assert summary.properties([case("a")])[0]["worst"] is None


def test_a_reason_is_given_once_and_names_few_of_its_cases():
    rows = [case(f"{number}", "failed", "off") for number in range(9)]
    (row,) = summary.reasons(rows, "failed")
    assert (row["reason"], row["cases"], len(row["such as"])) == ("off", 9, summary.NAMED)
    assert summary.reasons(rows, "open") == []
