"""Predicted seconds of chunk_gla_summary: the price of the very plan that a call would run.

cost.py says how a kernel that goes through segments is priced. Constants, in seconds where nothing else is said:

    host, host_launch          of the host for a call, and more for each launch
    launch                     between the starts of two kernels
    bandwidth                  bytes a second
    hopper_start, build_step   before a block's first step in states_sm90.py, and 64 tokens of it
    build_start, build         the same in states.py with bfloat16 products, of a block of 64 keys and values
    tf32, tokenwise            times as slow with TF32 products, and token by token
    scan_step                  a segment in scan.py
    ragged                     a packed sequence's incomplete chunk

Those shipped for an H200 were not fitted to this op. They are those of parallel_scan's forward, whose first kernels
these are; 64 tokens of states take half the time of their outputs, and a launch twice that time (`FORWARD_CUT`).
"""

from __future__ import annotations

from gla_core.dispatch.backend import OpCall
from gla_triton_kernels.chunk_gla.cost import BlockTime, cut, host_seconds, kernel_seconds, planned, token_bytes, whole
from gla_triton_kernels.chunk_gla.plan import STATE_KEYS, Kernel, KernelPlan, SegmentPlan
from gla_triton_kernels.chunk_gla.plan_summary import plan_cut_summary, plan_whole_summary
from gla_triton_kernels.cost import Constants, in_all


def whole_sequences(call: OpCall, c: Constants) -> float:
    """Seconds of a call whose sequences stay whole."""
    return _seconds(call, planned(plan_whole_summary, call, c), c)


def segments(call: OpCall, c: Constants) -> float:
    """Seconds of a call whose sequences are cut into segments, unless they fill the device."""
    return _seconds(call, planned(plan_cut_summary, call, c), c)


def _seconds(call: OpCall, plan: SegmentPlan, c: Constants) -> float:
    T, H, Hq, K, V, N = (call.dims[name] for name in ("T", "H", "Hq", "K", "V", "N"))
    block, state = _block_time(call, plan.states, c), 4 * H * K * V  # bytes
    read = token_bytes(call, Hq)
    if plan.length >= T:
        return in_all(call, kernel_seconds(call, block, whole(call), read + N * state, c), host_seconds(1, c))
    pieces = cut(call, plan.length, plan.uncut)
    built = kernel_seconds(call, block, pieces, read + pieces.number * state, c)
    scanned = c["launch"] + pieces.number / max(N, 1) * c["scan_step"] + (pieces.number + N) * state / c["bandwidth"]
    bounds = c["launch"] if call.variable_length else 0
    return in_all(call, bounds + built + scanned, host_seconds(3 if call.variable_length else 2, c))


def _block_time(call: OpCall, kernel: KernelPlan, c: Constants) -> BlockTime:
    """Returns the time of a block of a kernel that builds states."""
    if kernel.kernel is Kernel.STATES_SM90:
        return BlockTime(kernel.C, kernel.BV, c["hopper_start"], c["build_step"], keys=STATE_KEYS)
    heads = call.dims["Hq"] / max(call.dims["H"], 1)
    slower = c["tokenwise"] if kernel.tokenwise else 1 if kernel.operand == call.dtype else c["tf32"]
    step = c["build"] * slower * heads * kernel.BK * kernel.BV / 64**2
    return BlockTime(64, kernel.BV, c["build_start"], step, keys=kernel.BK)
