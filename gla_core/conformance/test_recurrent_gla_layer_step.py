"""recurrent_gla_layer_step: values, every form of gates, norms and output gates, pools of states, layouts, memory."""

from __future__ import annotations

import pytest
import torch

import gla_core as gla
from gla_core.conformance.calls import (
    expected_layer_step,
    layer_step,
    output_shape,
    poisoned,
    run_layer_step,
    three_runs,
)
from gla_core.conformance.cases import over
from gla_core.conformance.tolerances import FORWARD
from gla_core.workloads.inputs import normal

LAYER_STEP = "recurrent_gla_layer_step"
TOKENS = ("q", "k", "v", "g", "output_gate")


def tensors(x):
    return {name: y for name, y in x.items() if isinstance(y, torch.Tensor)}


@over(LAYER_STEP)
def test_values(backend, case, measure, layout):
    x = layer_step(case)
    expected = expected_layer_step(x)
    out = run_layer_step(x, backend.name)
    measure(out, expected, FORWARD[case.dtype])
    layout({"o": out["o"]}, {"o": (output_shape(x["q"], x["v"]), case.dtype)}, case.device, tensors(x))


@over(LAYER_STEP, at_size=True)
def test_values_at_size(backend, case, measure):
    x = layer_step(case)
    expected = expected_layer_step(x)
    measure(run_layer_step(x, backend.name), expected, FORWARD[case.dtype])


@over(LAYER_STEP, gated=True, dtypes="in_turn")
def test_gates_from_logits(backend, case, measure):
    x = layer_step(case)
    x["g"] = 3 * normal(tuple(x["g"].shape), x["g"].dtype, torch.Generator(case.device).manual_seed(3))
    expected = expected_layer_step(x, gate_normalizer=4)
    out = run_layer_step(x, backend.name, gate="logsigmoid", gate_normalizer=4)
    measure(out, expected, FORWARD[case.dtype])


@over(LAYER_STEP, "small", "odd_widths", dtypes="in_turn")
@pytest.mark.parametrize(("scale", "norm_eps"), [(1e-3, 1e-5), (-0.3, 1.0), (0.0, 1e-5)])
def test_scale_and_eps(backend, case, scale, norm_eps, measure):
    """The norm removes a factor of its input only as far as the mean square exceeds eps."""
    x = {**layer_step(case), "norm_eps": norm_eps}
    expected = expected_layer_step(x, scale)
    measure(run_layer_step(x, backend.name, scale=scale), expected, FORWARD[case.dtype])


@over(LAYER_STEP, "small", "pool", dtypes="no_float64")
@pytest.mark.parametrize("state_dtype", [torch.bfloat16, torch.float16], ids=str)
def test_pool_dtypes(backend, case, state_dtype, measure):
    """The state is rounded where it is written, and not before the output."""
    x = layer_step(case)
    x["state"] = x["state"].to(state_dtype)
    expected = expected_layer_step(x)
    out = run_layer_step(x, backend.name)
    measure({"o": out["o"]}, {"o": expected["o"]}, FORWARD[case.dtype])
    budget = max(FORWARD[case.dtype], FORWARD[state_dtype])
    measure({"state": out["state"]}, {"state": expected["state"]}, budget)


@over(LAYER_STEP, "pool", dtypes="in_turn")
@pytest.mark.parametrize("skipped", [-1, 6])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
def test_skipped_rows(backend, case, skipped, index_dtype, measure):
    """The o of a skipped row is 0, even if its output gate is NaN; no state that no index addresses changes."""
    x = layer_step(case)
    x["state_indices"] = x["state_indices"].to(index_dtype)
    x["state_indices"][1], x["output_gate"][1] = skipped, torch.nan
    expected = expected_layer_step(x)
    out = run_layer_step(x, backend.name)
    measure(out, expected, FORWARD[case.dtype])
    others = [i for i in range(6) if i not in x["state_indices"].tolist()]
    measure({"state of others": out["state"][others]}, {"state of others": expected["state"][others]}, 0)


def beside_others(y):
    """Returns the values of y [B, heads, ...] as a slice of wider rows."""
    rows = y.flatten(1)
    return torch.cat([rows, rows], 1)[:, rows.shape[1] :].unflatten(1, y.shape[1:])


@over(LAYER_STEP, dtypes="in_turn")
def test_slices_of_one_projection(backend, case, measure):
    """Tokens may be slices of one row, at any distance from the next row, and states transposed from [H, P, K, V]."""
    x = layer_step(case)
    expected = expected_layer_step(x)
    x |= {name: beside_others(y) for name in TOKENS if (y := x[name]) is not None and y.ndim > 1}
    x["state"] = x["state"].transpose(0, 1).contiguous().transpose(0, 1)
    measure(run_layer_step(x, backend.name), expected, FORWARD[case.dtype])


@over(LAYER_STEP, dtypes="in_turn")
def test_state_with_values_first(backend, case, measure):
    x = layer_step(case)
    expected = expected_layer_step(x)
    x["state"] = x["state"].mT.contiguous()
    out = run_layer_step(x, backend.name, state_v_first=True)
    measure({"o": out["o"], "state": x["state"].mT}, expected, FORWARD[case.dtype])


@over(LAYER_STEP, dtypes="in_turn")
def test_no_uninitialised_output(backend, case, measure):
    x = layer_step(case)
    expected = expected_layer_step(x)
    with poisoned(backend.can(case.op), case.device):
        out = run_layer_step(x, backend.name)
    measure(out, expected, FORWARD[case.dtype])


@over(LAYER_STEP, "small", "odd_widths", "grouped", dtypes="in_turn", requires="deterministic")
def test_same_bits(backend, case, measure):
    first, *again = three_runs(lambda: run_layer_step(layer_step(case), backend.name), case.device)
    for out in again:
        measure(out, first, 0)


@over(LAYER_STEP, "small", "odd_widths", "pool", dtypes="in_turn")
def test_inputs_unchanged(backend, case, measure):
    x, before = layer_step(case), layer_step(case)
    run_layer_step(x, backend.name)
    kept = [name for name in tensors(x) if name != "state"]
    measure({name: x[name] for name in kept}, {name: before[name] for name in kept}, 0)


@over(LAYER_STEP, "small", "grouped", "per_head", dtypes="in_turn", requires="deterministic")
def test_same_bits_in_any_company(backend, case, measure):
    """Under `batch_invariant` a row has the same bits alone, and in a batch."""
    with gla.batch_invariant(64):
        together = run_layer_step(layer_step(case), backend.name)
        for b in range(len(together["o"])):
            x = layer_step(case)
            own = {name: x[name][b : b + 1] for name in (*TOKENS, "state")}
            alone = run_layer_step({**x, **own}, backend.name)
            measure(alone, {name: y[b : b + 1] for name, y in together.items()}, 0)
