"""Every op: strided arguments, memory that held NaN, the same bits run after run, and inputs that are left alone."""

from __future__ import annotations

import math

import pytest
import torch

from gla_core.conformance import calls
from gla_core.conformance.cases import (
    DRAFTS,
    EVERY_OP,
    FORWARDS,
    GATED_BACKWARDS,
    GRADIENTS_OF_STATES,
    PROMPTS,
    REPLAYS,
    WITH_STATES,
    WRITING,
    having,
    over,
)
from gla_core.ops import ABSTRACT_OPS
from gla_core.workloads.inputs import normal

FEW = {
    "recurrent_gla_layer_step": "small odd_widths grouped",
    DRAFTS: "small packed grouped odd_widths",
    REPLAYS: "small packed grouped odd_widths",
}
PER_SEQUENCE = ("read_slots", "slots", "ring_start", "num_accepted")


# ---- layouts of arguments


def strided(name, x):
    """Returns the arguments as views: heads before tokens, rows amid others, and room between the heads of states."""
    views = {n: torch.stack([x[n], -x[n]], -1)[..., 0] for n in PER_SEQUENCE if x.get(n) is not None}
    for n, argument in calls.described(name).items():
        if not isinstance(y := x.get(n), torch.Tensor) or y.ndim < 2 or n in views:
            continue
        dims = argument.dims(y)
        if not dims:  # a tensor of any shape
            views[n] = torch.nn.functional.pad(y, (3, 2))[..., 3:-2]
        elif dims[0] == "B":
            views[n] = calls.heads_first(y) if dims[1].startswith("T") else second_of_three(y)
        elif n == "initial_state":
            views[n] = calls.with_room(y)
        elif n == "state":
            views[n] = y.transpose(0, 1).contiguous().transpose(0, 1)
    return {**x, **views}


def second_of_three(y):
    """Returns the values of y [B, ...] as a slice of [B, 3, ...]."""
    return torch.stack([y, y, y], 1)[:, 1]


@over(
    FORWARDS,
    few={"chunk_gla_summary": "short packed", "online_softmax": "small odd_columns other_dimension"},
    functions=True,
    dtypes="rotating",
)
def test_strided_views(backend, case, measure):
    for options in ({}, {"inplace": True}) if case.op in WRITING else ({},):
        x = calls.call_arguments(case)
        calls.check(case.call, strided(case.call, x), backend.name, measure, calls.expected(case.call, x), **options)


@over(WITH_STATES, dtypes="rotating")
def test_initial_states_with_values_first(backend, case, measure):
    x = calls.call_arguments(case)
    views = {n: calls.heads_first(y) for n, y in calls.tokens(case.op, x).items()}
    if x["initial_state"] is not None:
        views["initial_state"] = calls.last_two_swapped(x["initial_state"])
    calls.check(case.op, {**x, **views}, backend.name, measure, calls.expected(case.op, x))


@over(
    tuple(op for op in FORWARDS if {"pool", "state"} & set(ABSTRACT_OPS[op].written)),
    few={
        PROMPTS: "scattered_slots grouped odd_widths checkpoints",
        DRAFTS: "scattered_slots grouped odd_widths",
        REPLAYS: "packed grouped odd_widths",
    },
    dtypes="rotating",
)
def test_written_states_with_values_first(backend, case, measure):
    x = calls.call_arguments(case)
    ref, name = calls.expected(case.op, x), "pool" if "pool" in x else "state"
    x[name] = calls.last_two_swapped(x[name])
    swapped = {name: x[name].mT}
    assert swapped[name].is_contiguous() or case.workload.sizes.get("page")
    calls.check(case.op, x, backend.name, measure, ref, **swapped, state_v_first=True)


@over(GRADIENTS_OF_STATES, dtypes="rotating")
@pytest.mark.parametrize("states", [calls.with_room, calls.last_two_swapped], ids=["with_room", "values_first"])
def test_gradients_of_strided_views(backend, case, states, measure):
    """Inputs and incoming gradients may be strided views."""
    x = calls.inputs(case)
    views = {n: calls.heads_first(y) for n, y in calls.tokens(case.op, x).items()}
    if x["initial_state"] is not None:
        views["initial_state"] = states(x["initial_state"])
    do, dstate = calls.loss_gradients(case.op, x).values()
    loss = {"o": calls.heads_first(do), "state": states(dstate)}
    out = calls.gradients(case.op, {**x, **views}, calls.training_request(backend, case.op), loss=loss)
    calls.compare(case.op, x, out, calls.oracle_gradients(case.op, x), measure)


@over(GATED_BACKWARDS, "short", "grouped", "packed", "per_head", dtypes="rotating")
@pytest.mark.parametrize("dimensions", [(0,), (1,), (0, 1, 2, 3)], ids=["first", "second", "all"])
def test_gradients_of_repeated_values(backend, case, dimensions, measure):
    """Gates and incoming gradients may have strides of 0; the gradient of a sum has stride 0 in all dimensions."""
    x = calls.inputs(case)
    x["g"] = calls.repeated(x["g"], *dimensions[: x["g"].ndim])
    loss = {n: calls.repeated(d, *dimensions) for n, d in calls.loss_gradients(case.op, x).items()}
    out = calls.gradients(case.op, x, calls.training_request(backend, case.op), loss=loss)
    calls.compare(case.op, x, out, calls.oracle_gradients(case.op, x, loss), measure)


# ---- memory of results


@over(EVERY_OP, functions=True, dtypes="rotating")
def test_no_uninitialised_output(backend, case, measure):
    x = calls.call_arguments(case)
    ref = calls.expected(case.call, x)
    with calls.poisoned(backend.can(case.op), case.device):
        calls.check(case.call, x, backend.name, measure, ref)


@over(EVERY_OP, few=FEW, functions=True, dtypes="rotating", requires="deterministic")
def test_same_bits(backend, case, measure):
    x = calls.call_arguments(case)
    first, *again = calls.three_runs(lambda: calls.results(case.call, x, backend.name), case.device)
    for out in again:
        measure(out, first, 0)


@over(
    tuple(op for op in FORWARDS if ABSTRACT_OPS[op].differentiable),
    few={
        WITH_STATES: "short no_token",
        "chunk_gla_summary": "short",
        "online_softmax": "small other_dimension nothing",
        "softmax_attention": "small grouped",
    },
    dtypes="one",
    requires="gradients",
)
def test_results_can_be_changed_in_place(backend, case):
    """In-place changes work with autograd, too."""
    x = calls.call_arguments(case)
    next(iter(calls.tensors(x).values())).requires_grad_()
    for y in calls.run(case.call, x, calls.training_request(backend, case.op)).values():
        y.mul_(2)


@over(
    having("out"),
    few={DRAFTS: "small packed grouped odd_widths", REPLAYS: "small packed grouped odd_widths"},
    dtypes="rotating",
)
def test_out(backend, case, measure):
    """The result may be rows of a larger tensor at any address, whose other rows keep their bits."""
    generator = torch.Generator(case.device).manual_seed(2)
    for skipped in (0, 1):
        x = calls.call_arguments(case)
        B, T, *rest = calls.output_shape(x["q"], x["v"])
        sizes = (B * T + 5, *rest)
        larger = normal((skipped + math.prod(sizes),), case.dtype, generator)[skipped:].view(sizes)
        before, out = larger.clone(), larger[2:-3].unflatten(0, (B, T))
        returned = calls.check(case.op, x, backend.name, measure, out=out)
        assert returned["o"] is out, f"{case.op} must return the tensor `out` that it was given"
        for rows in (slice(None, 2), slice(-3, None)):
            measure({"rows beside out": larger[rows]}, {"rows beside out": before[rows]}, 0)


# ---- memory of arguments

FEW_INPUTS = {
    "recurrent_gla_layer_step": "small odd_widths pool",
    DRAFTS: "small packed scattered_slots",
    REPLAYS: "small packed grouped",
}


@over(EVERY_OP, few=FEW_INPUTS, functions=True, dtypes="rotating")
def test_inputs_unchanged(backend, case, measure):
    check_inputs_unchanged(backend, case, measure, ())


@over(WRITING, dtypes="rotating")
def test_inputs_unchanged_inplace(backend, case, measure):
    like = [result.like for result in ABSTRACT_OPS[case.op].results if result.written]
    check_inputs_unchanged(backend, case, measure, like, inplace=True)


def check_inputs_unchanged(backend, case, measure, written, **options):
    x, before = calls.call_arguments(case), calls.call_arguments(case)
    calls.fill_freed_memory(float("nan"), case.device)
    calls.run(case.call, x, backend.name, **options)
    kept = [n for n in calls.tensors(x) if n not in {*written, *calls.written_tensors(case.call, x)}]
    measure({n: x[n] for n in kept}, {n: before[n] for n in kept}, 0)
