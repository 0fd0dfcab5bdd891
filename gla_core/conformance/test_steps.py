"""Single steps: pools of states, in place and not, values before keys, and steps in a row."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from gla_core.conformance.calls import call_arguments, check, compare, expected, oracle_results, public_op, run, twice
from gla_core.conformance.cases import STEPS, having, over, relative
from gla_core.conformance.tolerances import FORWARD
from gla_core.workloads.inputs import token_of


@over(STEPS)
def test_inplace(backend, case, measure):
    x = call_arguments(case)
    out = check(case.op, x, backend.name, measure, inplace=True)
    assert out["state"] is x["state"], "an in-place step must return the state it was given"


def guarded_pool(case):
    """Returns arguments with a pool of 6 states between two guards of 3 states, and the memory of all 12."""
    x = call_arguments(case)
    generator = torch.Generator(case.device).manual_seed(2)
    shape, dtype = x["state"].shape[1:], x["state"].dtype
    memory = torch.randn(12, *shape, generator=generator, dtype=dtype, device=case.device)
    indices = torch.tensor([3, -1, 0, 4][: len(x["q"])], dtype=torch.int64, device=case.device)
    return {**x, "state": memory[3:9], "slots": indices}, memory


@over(STEPS, dtypes="rotating")
@pytest.mark.parametrize("skipped", [-1, -2, 6, 8])
def test_inplace_writes_only_addressed_rows(backend, case, skipped, measure):
    """States that no index addresses do not change.

    An index outside the pool skips its row: the row writes nothing, and its o is 0.
    """
    x, memory = guarded_pool(case)
    if len(x["q"]) > 1:
        x["slots"][1] = skipped
    before = memory.clone()
    out = check(case.op, x, backend.name, measure, inplace=True)
    used = [i + 3 for i in x["slots"].tolist() if 0 <= i < 6]
    others = [i for i in range(12) if i not in used]
    measure({"state of others": memory[others]}, {"state of others": before[others]}, 0)
    measure({"o of a skipped row": out["o"][1:2]}, {"o of a skipped row": torch.zeros_like(out["o"][1:2])}, 0)


@over(STEPS, dtypes="rotating")
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
def test_a_pool_not_inplace(backend, case, index_dtype, measure):
    x, memory = guarded_pool(case)
    before = memory.clone()
    check(case.op, {**x, "slots": x["slots"].to(index_dtype)}, backend.name, measure)
    measure({"pool": memory}, {"pool": before}, 0)


@over(STEPS, dtypes="rotating")
@pytest.mark.parametrize("inplace", [False, True])
def test_states_with_values_first(backend, case, inplace, measure):
    x = call_arguments(case)
    ref = expected(case.op, x).results
    state = x["state"].mT.contiguous()
    out = run(case.op, {**x, "state": state}, backend.name, inplace=inplace, state_v_first=True)
    new = out["state"]
    assert (new is state) == inplace
    assert new.is_contiguous()
    compare(case.op, x, {**out, "state": new.mT}, ref, measure)


def in_a_row(op, x, backend, **options):
    """Returns o and the last state of one step after another, over the tokens of a call on sequences."""
    state, o = x["initial_state"], []
    for t in range(x["q"].shape[1]):
        token = {name: token_of(x[name], t) for name in public_op(op).tokens}
        out = run(op, {**token, "state": state}, backend.name, **options)
        state = out["state"]
        o.append(out["o"])
    return {"o": torch.stack(o, dim=1), "state": state}


@over(STEPS, "small", "grouped", "ungated")
def test_steps_in_a_row(backend, case, measure):
    """Twenty steps in place equal the recurrence over twenty tokens."""
    whole = relative(case.op, "initial_state")
    workload = dataclasses.replace(case.workload, op=public_op(whole).public)
    x = call_arguments(dataclasses.replace(case, op=whole, workload=workload), T=20, initial_state=True)
    ref = oracle_results(whole, x)
    out = in_a_row(case.op, x, backend, inplace=True)
    assert out["state"] is x["initial_state"]
    compare(whole, x, out, ref, measure)


@over(
    having("initial_state", "g"),
    *("short", "one_more_than_a_chunk", "grouped", "minus_infinity", "per_head_closed", "constant", "grouped_values"),
    also="state",
    dtypes="rotating",
)
def test_chunk_equals_steps(backend, case, measure):
    x = call_arguments(case, initial_state=True)
    steps = in_a_row(relative(case.op, "state"), x, backend)
    compare(case.op, x, steps, run(case.op, x, backend.name), measure, twice(FORWARD))
