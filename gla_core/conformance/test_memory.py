"""Every op: strided arguments, memory that held NaN, the same bits run after run, and inputs that are left alone."""

from __future__ import annotations

import pytest
import torch

from gla_core.conformance.calls import (
    call_arguments,
    check,
    compare,
    described,
    expected,
    fill_freed_memory,
    gradients,
    heads_first,
    inputs,
    last_two_swapped,
    loss_gradients,
    oracle_gradients,
    output_shape,
    poisoned,
    repeated,
    results,
    run,
    tensors,
    three_runs,
    tokens,
    training_request,
    with_room,
    written_tensors,
)
from gla_core.conformance.cases import (
    BACKWARDS,
    DRAFTS,
    EVERY_OP,
    FORWARDS,
    PROMPTS,
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
    "recurrent_gla_replay": "small packed grouped odd_widths",
}
PER_SEQUENCE = ("read_slots", "slots", "ring_start", "num_accepted")


# ---- layouts of arguments


def strided(name, x):
    """Returns the arguments as views: heads before tokens, rows amid others, and room between the heads of states."""
    views = {n: torch.stack([x[n], -x[n]], -1)[..., 0] for n in PER_SEQUENCE if x.get(n) is not None}
    for n, argument in described(name).items():
        if not isinstance(y := x.get(n), torch.Tensor) or y.ndim < 2 or n in views:
            continue
        dims = argument.dims(y)
        if not dims:  # a tensor of any shape
            views[n] = torch.nn.functional.pad(y, (3, 2))[..., 3:-2]
        elif dims[0] == "B":
            views[n] = heads_first(y) if dims[1].startswith("T") else second_of_three(y)
        elif n == "initial_state":
            views[n] = with_room(y)
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
        x = call_arguments(case)
        check(case.call, strided(case.call, x), backend.name, measure, expected(case.call, x), **options)


@over(WITH_STATES, dtypes="rotating")
def test_initial_states_with_values_first(backend, case, measure):
    x = call_arguments(case)
    views = {n: heads_first(y) for n, y in tokens(case.op, x).items()}
    if x["initial_state"] is not None:
        views["initial_state"] = last_two_swapped(x["initial_state"])
    check(case.op, {**x, **views}, backend.name, measure, expected(case.op, x))


@over(
    tuple(op for op in FORWARDS if {"pool", "state"} & set(ABSTRACT_OPS[op].written)),
    few={
        PROMPTS: "scattered_slots grouped odd_widths checkpoints",
        DRAFTS: "scattered_slots grouped odd_widths",
        "recurrent_gla_replay": "packed grouped odd_widths",
    },
    dtypes="rotating",
)
def test_written_states_with_values_first(backend, case, measure):
    x = call_arguments(case)
    ref, name = expected(case.op, x), "pool" if "pool" in x else "state"
    x[name] = last_two_swapped(x[name])
    swapped = {name: x[name].mT}
    assert swapped[name].is_contiguous() or case.workload.sizes.get("page")
    check(case.op, x, backend.name, measure, ref, **swapped, state_v_first=True)


@over(BACKWARDS, dtypes="rotating")
@pytest.mark.parametrize("states", [with_room, last_two_swapped], ids=["with_room", "values_first"])
def test_gradients_of_strided_views(backend, case, states, measure):
    """Inputs and incoming gradients may be strided views."""
    x = inputs(case)
    views = {n: heads_first(y) for n, y in tokens(case.op, x).items()}
    if x["initial_state"] is not None:
        views["initial_state"] = states(x["initial_state"])
    do, dstate = loss_gradients(case.op, x).values()
    loss = {"o": heads_first(do), "state": states(dstate)}
    out = gradients(case.op, {**x, **views}, training_request(backend), loss=loss)
    compare(case.op, x, out, oracle_gradients(case.op, x), measure)


@over(BACKWARDS, "short", "grouped", "packed", "per_head", dtypes="rotating")
@pytest.mark.parametrize("dimensions", [(0,), (1,), (0, 1, 2, 3)], ids=["first", "second", "all"])
def test_gradients_of_repeated_values(backend, case, dimensions, measure):
    """Gates and incoming gradients may have strides of 0; the gradient of a sum has stride 0 in all dimensions."""
    x = inputs(case)
    x["g"] = repeated(x["g"], *dimensions[: x["g"].ndim])
    loss = {n: repeated(d, *dimensions) for n, d in loss_gradients(case.op, x).items()}
    out = gradients(case.op, x, training_request(backend), loss=loss)
    compare(case.op, x, out, oracle_gradients(case.op, x, loss), measure)


# ---- memory of results


@over(EVERY_OP, functions=True, dtypes="rotating")
def test_no_uninitialised_output(backend, case, measure):
    x = call_arguments(case)
    ref = expected(case.call, x)
    with poisoned(backend.can(case.op), case.device):
        check(case.call, x, backend.name, measure, ref)


@over(EVERY_OP, few=FEW, functions=True, dtypes="rotating", requires="deterministic")
def test_same_bits(backend, case, measure):
    x = call_arguments(case)
    first, *again = three_runs(lambda: results(case.call, x, backend.name), case.device)
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
    x = call_arguments(case)
    next(iter(tensors(x).values())).requires_grad_()
    for y in run(case.call, x, training_request(backend, case.op)).values():
        y.mul_(2)


@over(
    having("out"),
    few={DRAFTS: "small packed grouped odd_widths", "recurrent_gla_replay": "small packed grouped odd_widths"},
    dtypes="rotating",
)
def test_out(backend, case, measure):
    """The result may be rows of a larger tensor, whose other rows keep their bits."""
    x = call_arguments(case)
    B, T, *rest = output_shape(x["q"], x["v"])
    larger = normal((B * T + 5, *rest), case.dtype, torch.Generator(case.device).manual_seed(2))
    before, out = larger.clone(), larger[2:-3].unflatten(0, (B, T))
    returned = check(case.op, x, backend.name, measure, out=out)
    assert returned["o"] is out, f"{case.op} must return the tensor `out` that it was given"
    for rows in (slice(None, 2), slice(-3, None)):
        measure({"rows beside out": larger[rows]}, {"rows beside out": before[rows]}, 0)


# ---- memory of arguments

FEW_INPUTS = {
    "recurrent_gla_layer_step": "small odd_widths pool",
    DRAFTS: "small packed scattered_slots",
    "recurrent_gla_replay": "small packed grouped",
}


@over(EVERY_OP, few=FEW_INPUTS, functions=True, dtypes="rotating")
def test_inputs_unchanged(backend, case, measure):
    check_inputs_unchanged(backend, case, measure, ())


@over(WRITING, dtypes="rotating")
def test_inputs_unchanged_inplace(backend, case, measure):
    like = [result.like for result in ABSTRACT_OPS[case.op].results if result.written]
    check_inputs_unchanged(backend, case, measure, like, inplace=True)


def check_inputs_unchanged(backend, case, measure, written, **options):
    x, before = call_arguments(case), call_arguments(case)
    fill_freed_memory(float("nan"), case.device)
    run(case.call, x, backend.name, **options)
    kept = [n for n in tensors(x) if n not in {*written, *written_tensors(case.call, x)}]
    measure({n: x[n] for n in kept}, {n: before[n] for n in kept}, 0)
