"""Predicts the seconds of plans of forwards, backwards and summaries over sequences.

The price of a plan is the sum of the device seconds of its kernels. cutting.py compares prices to decide how sequences
are cut. `auto` compares the seconds of calls, which also count the time of the host. price.py holds the formula for a
kernel and names the constants of a device, ../cost.py holds the formula for a call, and kernels hold the times of their
blocks. An op has two more constants, in seconds:

    host, host_launch   host time of a call, and additional host time of each launch

B batch   T tokens   N sequences   H key heads   Hq query heads   Hv value heads   Ho heads of o, the more of Hq and Hv
K, V key and value width
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from gla_core.dispatch.backend import CHUNK, Constants, OpCall
from gla_core.dispatch.tensors import checkpoint_dtype
from gla_triton_kernels.chunks.kernel import BackwardPlan, ForwardPlan, SegmentPlan
from gla_triton_kernels.chunks.price import (
    AnyPlan,
    BlockTime,
    Heads,
    PriceFunction,
    Prices,
    checkpoint_bytes,
    cut,
    gate_elements,
    gate_itemsize,
    kernel_seconds,
    moved_bytes,
    queries_of_state,
    states_seconds,
    token_bytes,
    whole,
)
from gla_triton_kernels.cost import gpu_of_constants, in_all
from gla_triton_kernels.gla.seen import forward_of_pool, seen_by_kernels, takes
from gla_triton_runtime.architecture import Gpu


def predictor(
    plan: Callable[[OpCall, Gpu], list[tuple[OpCall, AnyPlan]]], prices: PriceFunction[AnyPlan]
) -> Callable[[OpCall, Constants], float]:
    """Returns the function that predicts the seconds of a call under the plans of a backend.

    Args:
        plan: takes a call with the widths that kernels see, and a GPU; returns the plans of the rows of a batch.
        prices: prices a plan with the call of its rows.
    """

    def seconds(call: OpCall, c: Constants) -> float:
        gpu = gpu_of_constants(c)
        seen = seen_by_kernels(call, gpu)
        kernels = [*_copies(call, seen, c), *(x for rows, planned in plan(seen, gpu) for x in prices(rows, planned, c))]
        return in_all(call, sum(kernels), c["host"] + c["host_launch"] * len(kernels))

    return seconds


def _copies(call: OpCall, seen: OpCall, c: Constants) -> Prices:
    """Returns the seconds of the launches that copy tensors to and from the widths that kernels see."""
    B, T, H, Hq, Hv, K, V = (call.dims[name] for name in ("B", "T", "H", "Hq", "Hv", "K", "V"))
    size, gate = call.dtype.itemsize, gate_itemsize(call) if call.gate_form in (None, "key") else 0
    copied = [heads * K * each for heads, each in ((Hq, size), (H, size), (Hv, gate)) if seen.dims["K"] != K and each]
    copied += [heads * V * size for heads in (Hv, max(Hq, Hv)) if seen.dims["V"] != V]
    twice = 2 if takes(call, "do") else 1  # a backward copies inputs and gradients
    return twice * [c["launch"] + 2 * B * T * per_token / c["bandwidth"] for per_token in copied]  # read and written


def _for_packed(call: OpCall, number: int, c: Constants) -> Prices:
    """Returns the seconds of short launches that only packed sequences need, such as the one that cuts them."""
    return [c["launch"]] * number if call.variable_length else []


def forward_prices(call: OpCall, plan: ForwardPlan, c: Constants) -> Prices:
    """Returns the device seconds of the kernels of a forward."""
    kernel, segments = plan.outputs, plan.segments
    block = kernel.time(call, plan.parameters)
    before = kernel.before(call, c)
    through = whole(call) if segments is None else cut(call, segments.length, segments.uncut)
    if kernel.heads_apart:
        through = through._replace(number=through.number * queries_of_state(call))
    outputs = kernel_seconds(call, block, through, moved_bytes(call), c)
    if segments is None:
        return [*_for_packed(call, 1 + len(before), c), *before, outputs]
    # Each float32 element of a state is written, read and written by the scan, and read for outputs: 16 bytes in all.
    states = _states(call, segments, _state_heads(call), 16, bool(call.scalars.get("output_final_state")), c)
    return [*_for_packed(call, 1 + len(before), c), *states, *before, outputs]


def pool_predictor(plan: Callable[[OpCall, Gpu], list[tuple[OpCall, ForwardPlan]]]) -> Callable[..., float]:
    """Returns the function that predicts the seconds of a forward with states in a pool."""

    def seconds(call: OpCall, c: Constants) -> float:
        planned = plan(forward_of_pool(call), gpu_of_constants(c))
        kernels = [x for rows, each in planned for x in forward_prices(rows, each, c)]
        states = math.prod(call.dims[name] for name in ("N", "Hv", "K", "V"))
        kept = 4 * states / c["bandwidth"] if "checkpoint_offsets" in call.given else 0.0
        return in_all(call, sum(kernels) + kept, c["host"] + c["host_launch"] * len(kernels))

    return seconds


def _state_heads(call: OpCall) -> Heads:
    """Returns the heads of k and v."""
    return Heads(call.dims["H"], call.dims["Hv"])


def _gradient_heads(call: OpCall) -> Heads:
    """Returns the heads of q and do."""
    return Heads(call.dims["Hq"], max(call.dims["Hq"], call.dims["Hv"]))


def _states(call: OpCall, plan: SegmentPlan, heads: Heads, moved: int, ends: bool, c: Constants) -> Prices:
    """Returns the seconds of the kernels that compute the states of segments; see `states_seconds`."""
    return states_seconds(call, plan.length, plan.uncut, heads, _states_block(call, plan, heads), moved, ends, c)


def _states_block(call: OpCall, plan: SegmentPlan, heads: Heads) -> BlockTime:
    """Returns the time of a block of states. A state sums one product for each head of values that shares it."""
    block = plan.states.time(call, plan.parameters)
    return block._replace(step=block.step * heads.values / max(call.dims["Hv"], 1))


def backward_prices(call: OpCall, plan: BackwardPlan, c: Constants) -> Prices:
    """Returns the device seconds of the kernels of a backward."""
    prices = _for_packed(call, plan.gradients.layouts + (plan.entering is not None), c)
    ends = call.state_dtype is not None
    if plan.entering is not None:  # written and read in float32, then written in the checkpoints' dtype
        itemsize = checkpoint_dtype(call.dtype).itemsize
        prices += _states(call, plan.entering, _state_heads(call), 4 + 4 + itemsize, ends, c)
    if plan.forward is not None:
        scalars = {**call.scalars, "checkpoint_every": CHUNK, "output_final_state": False}
        prices += forward_prices(replace(call, scalars=scalars, checkpoints=True), plan.forward, c)
    if plan.leaving is not None:
        prices += _states(call, plan.leaving, _gradient_heads(call), 4 + 4 + 4, ends, c)
    return [*prices, *_gradients(call, plan, c)]


def _gradients(call: OpCall, plan: BackwardPlan, c: Constants) -> Prices:
    """Returns the seconds of the kernels that compute gradients, sum partial results, add pairs and clear padding."""
    B, T, H, Hq, Hv, K, V = (call.dims[name] for name in ("B", "T", "H", "Hq", "Hv", "K", "V"))
    kernel, heads = plan.gradients, queries_of_state(call) if plan.gradients.heads_apart else 1
    key_parts, value_parts = kernel.partials(call, plan.parameters)
    size, gate, group = call.dtype.itemsize, gate_itemsize(call), 1 if kernel.by_groups else Hv // max(H, 1)
    gate_parts = key_parts * heads * (1 if call.gate_form in (None, "key") else value_parts)
    results = [  # for dq, dk, dv, dg: number of elements, bytes of an element, number of partial results
        (B * T * Hq * K, size, key_parts * group),
        (B * T * H * K, size, key_parts * heads * group),
        (B * T * Hv * V, size, value_parts * heads),
        *([(gate_elements(call), gate, gate_parts)] if gate else []),
    ]
    written = sum(number * (4 * parts if parts > 1 else itemsize) for number, itemsize, parts in results)
    moved = moved_bytes(call) + checkpoint_bytes(call, CHUNK) + written
    through = whole(call) if plan.leaving is None else cut(call, plan.leaving.length, plan.leaving.uncut)
    through = through._replace(number=through.number * heads)
    gradients = kernel.seconds(call, plan.parameters, through, moved, c)
    summed = [
        c["launch"] + number * (4 * parts + itemsize) / c["bandwidth"]
        for number, itemsize, parts in results
        if parts > 1
    ]
    # The launch that adds pairs has little to do, because nearly all chunks are mild.
    pairs = [c["launch"]] if kernel.adds_pairs and gate else []
    constant = [c["launch"]] if call.gate_form == "constant" else []  # the launch that sums a number of each segment
    return [*gradients, *summed, *constant, *pairs, *_for_packed(call, 1, c)]  # the last launch clears padding


def summary_prices(call: OpCall, plan: SegmentPlan, c: Constants) -> Prices:
    """Returns the device seconds of the kernels of a summary."""
    state = 4 * call.dims["Hv"] * call.dims["K"] * call.dims["V"]  # bytes of a state
    heads = _gradient_heads(call) if call.scalars.get("backwards") else Heads(call.dims["Hq"], call.dims["Hv"])
    if plan.length < call.dims["T"]:
        return [*_for_packed(call, 1, c), *_states(call, plan, heads, 4 + 4, True, c)]
    size = token_bytes(call, heads) + call.dims["N"] * state
    return [*_for_packed(call, 1, c), kernel_seconds(call, _states_block(call, plan, heads), whole(call), size, c)]
