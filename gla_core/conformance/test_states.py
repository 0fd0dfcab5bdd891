"""Ops with a backward op of their own: states and their gradients that are handed on, and checkpoints of states."""

from __future__ import annotations

import itertools

import pytest
import torch

from gla_core.conformance.calls import (
    Arguments,
    as_logits,
    call_arguments,
    check,
    checkpoint_dtype,
    compare,
    expected,
    inputs,
    oracle_results,
    poisoned,
    public_op,
    random_logits,
    run,
    span,
    tensors,
    tokens,
    training_request,
)
from gla_core.conformance.cases import GATED_BACKWARDS, GRADIENTS_OF_STATES, PAIRS, WITH_STATES, having, over

CUTS = pytest.mark.parametrize("cut", [1, 63, 64, 77])


@over(WITH_STATES, "short", "last_chunk_partial", "packed")
def test_state_only_if_asked(backend, case, measure):
    x = {**call_arguments(case), "output_final_state": False}
    out = run(case.op, x, backend.name)
    assert "state" not in out
    compare(case.op, x, out, {"o": expected(case.op, x).results["o"]}, measure)


@over(WITH_STATES, "last_chunk_partial", "grouped", "minus_infinity", "per_head", "constant", dtypes="rotating")
@CUTS
def test_state_hand_off(backend, case, cut, measure):
    """One call equals two calls that are joined by the state."""
    x = call_arguments(case)
    before = run(case.op, span(case.op, x, None, cut), backend.name)
    after = run(case.op, span(case.op, x, cut, None, initial_state=before["state"]), backend.name)
    joined = {"o": torch.cat([before["o"], after["o"]], dim=1), "state": after["state"]}
    compare(case.op, x, joined, expected(case.op, x).results, measure)


def in_two(op: str, x: Arguments, cut: int) -> list[tuple[torch.Tensor, Arguments]]:
    """Cuts every sequence after `cut` tokens.

    Returns:
        The row numbers and the arguments of the tokens before the cuts, and the same for the tokens after them.
    """
    packed = x["cu_seqlens"] is not None
    spans = list(itertools.pairwise(x["cu_seqlens"].tolist())) if packed else [(0, x["q"].shape[1])]
    cuts = [min(start + cut, end) for start, end in spans]
    early = [(start, middle) for (start, _), middle in zip(spans, cuts, strict=True)]
    late = [(middle, end) for (_, end), middle in zip(spans, cuts, strict=True)]
    calls = []
    for half in (early, late):
        rows = torch.cat([torch.arange(a, b, device=x["q"].device) for a, b in half])
        call = {**x, **{name: y[:, rows] for name, y in tokens(op, x).items()}}
        if packed:
            call["cu_seqlens"] = torch.tensor([0, *(b - a for a, b in half)], device=x["q"].device).cumsum(0)
        calls.append((rows, call))
    return calls


@over(
    GRADIENTS_OF_STATES,
    "last_chunk_partial",
    "grouped",
    "minus_infinity",
    "packed",
    "per_head",
    "constant",
    dtypes="rotating",
)
@CUTS
def test_gradient_hand_off(backend, case, cut, measure):
    """One call equals two calls that are joined by the state and, backwards, by its gradient."""
    x, forward = call_arguments(case), public_op(case.op).name
    (_, first), _ = in_two(forward, inputs(case), cut)
    (early_rows, early), (late_rows, late) = in_two(case.op, x, cut)
    state = run(forward, first, training_request(backend, case.op))["state"]
    after = run(case.op, {**late, "initial_state": state}, backend.name)
    before = run(case.op, {**early, "dstate": after.pop("dinitial_state")}, backend.name)
    order = torch.cat([early_rows, late_rows]).argsort()
    joined = {  # the gradient of a constant gate is a sum over all tokens
        name: before[name] + d if d.ndim == 1 else torch.cat([before[name], d], dim=1)[:, order]
        for name, d in after.items()
    } | {"dinitial_state": before["dinitial_state"]}
    compare(case.op, x, joined, expected(case.op, x).results, measure)


# ---- checkpoints

INTERVALS = pytest.mark.parametrize("every", [64, 192])
FORMS = ("last_chunk_partial", "packed", "per_head", "constant")


@over(PAIRS, dtypes="rotating", requires="checkpoints")
@INTERVALS
def test_checkpoints(backend, case, every, measure, layout):
    """Checkpoints are the states before every 64th or 192nd token of a sequence; unused rows are 0."""
    x = {**call_arguments(case), "checkpoint_every": every}
    ref = expected(case.op, x)
    with poisoned(backend.can(case.op), case.device):
        out = check(case.op, x, backend.name, measure, ref)
    states = ref.results["checkpoints"]
    unused = states == 0
    measure({"unused rows": out["checkpoints"][unused]}, {"unused rows": states[unused]}, 0)
    layout(out, {"checkpoints": (states.shape, checkpoint_dtype(case.dtype))}, case.device, tensors(x))


@over(having("g", among=PAIRS), *FORMS, dtypes="rotating", requires="checkpoints")
def test_checkpoints_of_logits(backend, case, measure):
    x = call_arguments(case)
    x = as_logits(case.op, {**x, "g": random_logits(x["g"]), "checkpoint_every": 128}, 16)
    check(case.op, x, backend.name, measure)


def with_checkpoints(case, x, every, **changes):
    """Returns the arguments of a backward with the checkpoints of the oracle."""
    states = oracle_results(public_op(case.op).name, inputs(case), checkpoint_every=every, **changes)
    return {**x, "checkpoints": states["checkpoints"].to(checkpoint_dtype(case.dtype)), "checkpoint_every": every}


@over(GRADIENTS_OF_STATES, dtypes="rotating")
@INTERVALS
def test_gradients_from_checkpoints(backend, case, every, measure):
    """A backward accepts checkpoints of any origin; here the oracle makes them."""
    check(case.op, with_checkpoints(case, call_arguments(case), every), backend.name, measure)


@over(GATED_BACKWARDS, *FORMS, dtypes="rotating")
def test_gradients_of_logits_from_checkpoints(backend, case, measure):
    x = call_arguments(case)
    x = as_logits(case.op, {**x, "g": random_logits(x["g"])}, 16)
    check(case.op, with_checkpoints(case, x, 128, g=x["g"], gate_normalizer=16), backend.name, measure)
