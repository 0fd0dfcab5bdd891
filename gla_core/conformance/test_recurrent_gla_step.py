"""recurrent_gla_step: values, pools of states, in place and not, layouts, memory."""

from __future__ import annotations

import pytest
import torch

from gla_core.conformance import oracle
from gla_core.conformance.calls import expected_step, output_shape, poisoned, run_step, step, three_runs
from gla_core.conformance.cases import over
from gla_core.conformance.tolerances import FORWARD
from gla_core.dispatch.tensors import log_gates
from gla_core.workloads.inputs import gla_inputs, normal, token_of

STEP = "recurrent_gla_step"


@over(STEP)
def test_values(backend, case, measure, layout):
    x = step(case)
    out = run_step(x, backend.name)
    like = {"o": (output_shape(x["q"], x["v"]), case.dtype), "state": (x["state"].shape, x["state"].dtype)}
    measure(out, expected_step(x), FORWARD[case.dtype])
    layout(out, like, case.device, {name: y for name, y in x.items() if y is not None})


@over(STEP, gated=True, dtypes="in_turn")
def test_gates_from_logits(backend, case, measure):
    x = step(case)
    generator = torch.Generator(case.device).manual_seed(3)
    x["g"] = 3 * normal(tuple(x["g"].shape), x["g"].dtype, generator)
    expected = expected_step({**x, "g": log_gates(x["g"], 16, torch.float64)})
    measure(run_step(x, backend.name, gate="logsigmoid"), expected, FORWARD[case.dtype])


@over(STEP, at_size=True)
def test_values_at_size(backend, case, measure):
    x = step(case)
    measure(run_step(x, backend.name), expected_step(x), FORWARD[case.dtype])


@over(STEP)
def test_inplace(backend, case, measure):
    x = step(case)
    expected = expected_step(x)
    out = run_step(x, backend.name, inplace=True)
    assert out["state"] is x["state"], "an in-place step must return the state it was given"
    measure(out, expected, FORWARD[case.dtype])


def guarded_pool(case):
    """Returns inputs with a pool of 6 states between two guards of 3 states, and the memory of all 12."""
    x = step(case)
    rows = len(x["q"])
    generator = torch.Generator(case.device).manual_seed(2)
    shape, dtype = x["state"].shape[1:], x["state"].dtype
    memory = torch.randn(12, *shape, generator=generator, dtype=dtype, device=case.device)
    x["state"], x["state_indices"] = (
        memory[3:9],
        torch.tensor([3, -1, 0, 4][:rows], dtype=torch.int64, device=case.device),
    )
    return x, memory


@over(STEP, dtypes="in_turn")
@pytest.mark.parametrize("skipped", [-1, -2, 6, 8])
def test_inplace_writes_only_addressed_rows(backend, case, skipped, measure):
    """States that no index addresses do not change.

    An index outside the pool skips its row: the row writes nothing, and its o is 0.
    """
    x, memory = guarded_pool(case)
    if len(x["q"]) > 1:
        x["state_indices"][1] = skipped
    before, expected = memory.clone(), expected_step(x)
    out = run_step(x, backend.name, inplace=True)
    measure(out, expected, FORWARD[case.dtype])
    used = [i + 3 for i in x["state_indices"].tolist() if 0 <= i < 6]
    others = [i for i in range(12) if i not in used]
    measure({"state of others": memory[others]}, {"state of others": before[others]}, 0)
    measure({"o of a skipped row": out["o"][1:2]}, {"o of a skipped row": torch.zeros_like(out["o"][1:2])}, 0)


@over(STEP, dtypes="in_turn")
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
def test_a_pool_not_inplace(backend, case, index_dtype, measure):
    x, memory = guarded_pool(case)
    x["state_indices"] = x["state_indices"].to(index_dtype)
    before = memory.clone()
    out = run_step(x, backend.name)
    measure(out, expected_step(x), FORWARD[case.dtype])
    measure({"pool": memory}, {"pool": before}, 0)


@over(STEP, dtypes="no_float64")
@pytest.mark.parametrize("state_dtype", [torch.bfloat16, torch.float16], ids=str)
def test_pool_dtypes(backend, case, state_dtype, measure):
    x = step(case)
    x["state"] = x["state"].to(state_dtype)
    expected = expected_step(x)
    for inplace in (False, True):
        out = run_step(x, backend.name, inplace=inplace)
        assert out["state"].dtype == state_dtype
        measure({"o": out["o"]}, {"o": expected["o"]}, FORWARD[case.dtype])
        budget = max(FORWARD[case.dtype], FORWARD[state_dtype])
        measure({"state": out["state"]}, {"state": expected["state"]}, budget)


@over(STEP, "small", "odd_widths", "pool", dtypes="in_turn")
@pytest.mark.parametrize("scale", [1.0, -0.3, 0.0])
def test_scale(backend, case, scale, measure):
    x = step(case)
    measure(run_step(x, backend.name, scale), expected_step(x, scale), FORWARD[case.dtype])


@over(STEP, "small", "grouped", "ungated")
def test_steps_in_a_row(backend, case, measure):
    """Twenty steps in place equal the recurrence over twenty tokens."""
    x = gla_inputs(
        **{**case.workload.sizes, "T": 20, "initial_state": True, "dtype": case.dtype, "device": case.device}
    )
    o, state = oracle.chunk_gla(x.q, x.k, x.v, x.g, None, x.initial_state)
    outs = []
    for t in range(20):
        token = {name: token_of(getattr(x, name), t) for name in "qkvg"}
        outs.append(
            run_step({**token, "state": x.initial_state, "state_indices": None}, backend.name, inplace=True)["o"]
        )
    measure({"o": torch.stack(outs, 1), "state": x.initial_state}, {"o": o, "state": state}, FORWARD[case.dtype])


def _second_of_three(y):
    """Returns the values of y [B, ...] as a slice of [B, 3, ...]; those of a constant gate [Hv] as one of [3, Hv]."""
    dimension = min(y.ndim - 1, 1)
    return torch.stack([y, y, y], dimension).select(dimension, 1)


@over(STEP, dtypes="in_turn")
def test_strided_views(backend, case, measure):
    """Tokens may be slices of [B, 3, H, ...], and states transposed from [H, P, K, V], in place or not."""
    x = step(case)
    expected = expected_step(x)
    views = {name: None if x[name] is None else _second_of_three(x[name]) for name in "qkvg"}
    for inplace in (False, True):
        views["state"] = x["state"].transpose(0, 1).contiguous().transpose(0, 1)
        out = run_step({**views, "state_indices": x["state_indices"]}, backend.name, inplace=inplace)
        measure(out, expected, FORWARD[case.dtype])


@over(STEP, dtypes="in_turn")
@pytest.mark.parametrize("inplace", [False, True])
def test_states_with_values_first(backend, case, inplace, measure):
    x = step(case)
    expected = expected_step(x)
    state = x["state"].mT.contiguous()
    given = {**x, "state": state}
    out = run_step(given, backend.name, inplace=inplace, state_v_first=True)
    o, new = out["o"], out["state"]
    assert (new is state) == inplace
    assert new.is_contiguous()
    measure({"o": o, "state": new.mT}, expected, FORWARD[case.dtype])


@over(STEP, dtypes="in_turn")
def test_no_uninitialised_output(backend, case, measure):
    x = step(case)
    with poisoned(backend.can(case.op), case.device):
        out = run_step(x, backend.name)
    measure(out, expected_step(x), FORWARD[case.dtype])


@over(STEP, dtypes="in_turn", requires="deterministic")
def test_same_bits(backend, case, measure):
    x = step(case)
    first, *again = three_runs(lambda: run_step(x, backend.name), case.device)
    for out in again:
        measure(out, first, 0)


@over(STEP, dtypes="in_turn")
@pytest.mark.parametrize("inplace", [False, True])
def test_inputs_unchanged(backend, case, inplace, measure):
    x, before = step(case), step(case)
    run_step(x, backend.name, inplace=inplace)
    kept = [name for name, y in x.items() if y is not None and not (inplace and name == "state")]
    measure({name: x[name] for name in kept}, {name: before[name] for name in kept}, 0)
