"""Predicted seconds of chunk_gla_bwd: the price of the very plan that a call would run.

cost.py says how a kernel that goes through segments is priced. Constants, in seconds where nothing else is said:

    host, host_launch          of the host for a call, and more for each launch
    launch                     between the starts of two kernels
    bandwidth                  bytes a second
    start, hopper_start        before a block's first step, in backward.py and in the kernels for SM90
    hopper_step, hopper_tile   64 tokens in backward_sm90.py: of each step, and more for every tile of 64 keys by 64
                               values
    hopper_shared              blocks of one such tile that share a multiprocessor at no cost to each other
    wide_state_step            64 tokens in the first kernel of backward_sm90_wide.py
    wide_keys, wide_tile       a chunk of a head in the second: 64 keys of it, and more for each tile
    step, tile, shared         the same in backward.py with bfloat16 products
    bf16x3, bf16x6             times as slow as with bfloat16 products in general kernels, by the plan's precision
    query                      part of such a step that every further query of a group takes
    build_step                 64 tokens in states_sm90.py
    build_start, build         before a block's first step in states.py; 64 tokens of a head with bfloat16 products
    scan_step                  a segment in scan.py
    ragged                     a packed sequence's incomplete chunk
"""

from __future__ import annotations

import math
from typing import NamedTuple

from gla_core.dispatch.backend import OpCall, checkpoint_dtype
from gla_triton_kernels import MAX_WIDTH
from gla_triton_kernels.chunk_gla.cost import (
    BlockTime,
    Cut,
    checkpoint_bytes,
    copying,
    cut,
    host_seconds,
    kernel_seconds,
    moved_bytes,
    planned,
    seen_by_kernels,
    states_seconds,
    whole,
)
from gla_triton_kernels.chunk_gla.plan import STATE_KEYS, Kernel, SegmentPlan
from gla_triton_kernels.chunk_gla.plan_backward import (
    CHUNK,
    BackwardPlan,
    GradientPlan,
    plan_rows_backward,
    plan_whole_sequences,
)
from gla_triton_kernels.cost import Constants, in_all


class Gradient(NamedTuple):
    """One of dq, dk, dv and dg: its numbers, bytes of one, and how many partial results are summed to it."""

    numbers: int
    itemsize: int
    parts: int


def whole_sequences(call: OpCall, c: Constants) -> float:
    """Seconds of a call whose sequences stay whole."""
    seen = seen_by_kernels(call, c)
    return copying(call, seen, c) + _seconds(seen, planned(plan_whole_sequences, seen, c), c)


def segments(call: OpCall, c: Constants) -> float:
    """Seconds of a call whose sequences are cut into segments, unless they fill the device."""
    seen = seen_by_kernels(call, c)
    return copying(call, seen, c) + sum(_seconds(rows, plan, c) for rows, plan in planned(plan_rows_backward, seen, c))


def _seconds(call: OpCall, plan: BackwardPlan, c: Constants) -> float:
    """Seconds of a call that launches one kernel after the other."""
    H, Hq, slower = call.dims["H"], call.dims["Hq"], _slower(plan.gradients, c)
    cuts = 1 + (plan.entering is not None) + (plan.gradients.kernel is Kernel.BACKWARD_SM90_WIDE)
    bounds = [c["launch"]] * cuts if call.variable_length else []  # of packed sequences, each time that they are cut
    kernels = [
        *bounds,
        *_states(call, plan.entering, H, checkpoint_dtype(call.dtype).itemsize, slower, c),
        *_states(call, plan.leaving, Hq, 4, slower, c),
        *_gradients(call, plan, c),
    ]
    return in_all(call, sum(kernels), host_seconds(len(kernels), c))


def _states(
    call: OpCall, plan: SegmentPlan | None, heads: int, itemsize: int, slower: float, c: Constants
) -> list[float]:
    """Seconds of the kernels that find the states that enter segments, or the gradients of those that leave them.

    Args:
        heads: of the tokens that are met. itemsize: bytes of a number of what is found. slower: as `_slower` says.
    """
    if plan is None:
        return []
    if plan.states.kernel is Kernel.STATES_SM90:
        block = BlockTime(CHUNK, plan.states.BV, c["hopper_start"], c["build_step"], keys=STATE_KEYS)
    else:
        step = c["build"] * slower * heads / max(call.dims["H"], 1)
        block = BlockTime(CHUNK, plan.states.BV, c["build_start"], step, keys=plan.states.BK)
    # Each number is written and scanned in float32.
    return [*states_seconds(call, plan, heads, block, 4 + 4 + itemsize, call.state_dtype is not None, c)]


def _gradients(call: OpCall, plan: BackwardPlan, c: Constants) -> list[float]:
    """Seconds of the kernels that compute gradients: all at once, sums of parts, pairs, padding."""
    found = _found(call, plan.gradients)
    written = sum(x.numbers * (4 * x.parts if x.parts > 1 else x.itemsize) for x in found)
    size = moved_bytes(call) + checkpoint_bytes(call, CHUNK) + written
    through = whole(call) if plan.leaving is None else cut(call, plan.leaving.length, plan.leaving.uncut)
    through = through._replace(number=through.number * _heads_apart(call, plan.gradients))
    if plan.gradients.kernel is Kernel.BACKWARD_SM90_WIDE:
        gradients = _wide_seconds(call, plan.gradients, through, size, c)
    else:
        gradients = kernel_seconds(call, _block_time(call, plan.gradients, c), through, size, c)
    sums = [c["launch"] + x.numbers * (4 * x.parts + x.itemsize) / c["bandwidth"] for x in found if x.parts > 1]
    # Nearly all chunks are mild, and have no pairs left to add.
    pairs = [c["launch"]] if plan.gradients.kernel is not Kernel.BACKWARD and call.gate_dtype else []
    padding = [c["launch"]] if call.variable_length else []
    return [gradients, *sums, *pairs, *padding]


def _wide_seconds(call: OpCall, kernel: GradientPlan, through: Cut, size: float, c: Constants) -> float:
    """Seconds of the two kernels for wide heads, which write and read P, as many bytes as checkpoints every chunk."""
    K, V = call.dims["K"], call.dims["V"]
    heads = _heads_apart(call, kernel)
    P = heads * checkpoint_bytes(call, CHUNK)
    block = BlockTime(CHUNK, kernel.BV, c["hopper_start"], c["wide_state_step"], keys=kernel.BK)
    states = kernel_seconds(call, block, through, moved_bytes(call) / 2 + P, c)
    keys = math.ceil(K / 64)
    step = keys * (c["wide_keys"] + c["wide_tile"] * math.ceil(V / 64))
    through = cut(call, CHUNK, CHUNK)
    through = through._replace(number=through.number * heads)
    return states + kernel_seconds(call, BlockTime(CHUNK, MAX_WIDTH, 0, step), through, size + P, c)


def _heads_apart(call: OpCall, kernel: GradientPlan) -> int:
    """Returns the number of query heads of a group that are computed by themselves, and then summed."""
    return 1 if kernel.kernel is Kernel.BACKWARD else call.dims["Hq"] // max(call.dims["H"], 1)


def _found(call: OpCall, kernel: GradientPlan) -> list[Gradient]:
    """The gradients of q, k, v and g."""
    B, T, H, Hq, K, V = (call.dims[name] for name in ("B", "T", "H", "Hq", "K", "V"))
    blocks_k, blocks_v = math.ceil(K / kernel.BK), math.ceil(V / kernel.BV)
    if kernel.kernel is Kernel.BACKWARD_SM90_WIDE:
        blocks_k = blocks_v = 1  # a block has all keys and values
    size, heads = call.dtype.itemsize, _heads_apart(call, kernel)
    q, k = Gradient(B * T * Hq * K, size, blocks_v), Gradient(B * T * H * K, size, blocks_v * heads)
    g = [k._replace(itemsize=call.gate_dtype.itemsize)] if call.gate_dtype else []
    return [q, k, Gradient(B * T * H * V, size, blocks_k * heads), *g]


def _block_time(call: OpCall, kernel: GradientPlan, c: Constants) -> BlockTime:
    """Returns the time of a block of the kernel that computes gradients."""
    tiles = kernel.BK * kernel.BV / 64**2
    if kernel.kernel is Kernel.BACKWARD_SM90:
        start, step, shared = c["hopper_start"], c["hopper_step"] + c["hopper_tile"] * tiles, c["hopper_shared"]
    else:
        further = call.dims["Hq"] / max(call.dims["H"], 1) - 1
        step = (c["step"] + c["tile"] * tiles) * _slower(kernel, c) * (1 + c["query"] * further)
        start, shared = c["start"], c["shared"]
    return BlockTime(CHUNK, kernel.BV, start, step, shared if tiles <= 1 else 1, keys=kernel.BK)


def _slower(kernel: GradientPlan, c: Constants) -> float:
    """Times as slow as with bfloat16 products."""
    return 1 if kernel.precision == "bf16" else c[kernel.precision]
