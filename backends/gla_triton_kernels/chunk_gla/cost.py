"""Predicted seconds of chunk_gla_fwd: the price of the very plan that a call would run.

../cost.py says how the time of a kernel is counted. Constants, in seconds where nothing else is said:

    host, host_launch          of the host for a call, and more for each launch
    host_hopper, host_packed   more where the kernels are those for SM90, where sequences are packed
    gap                        of the device between two calls outside of a CUDA graph
    launch                     between the starts of two kernels
    bandwidth                  bytes a second
    start, hopper_start        before a block's first step, in general kernels and in those for SM90
    hopper_step, hopper_tile   64 tokens in forward_sm90.py: of each step, and more for every 64 columns of keys
    hopper_narrow              its step with 64 columns of v, as a part of one with 128
    tile_step, query_step      64 tokens in forward.py with bfloat16 products and K = 128; in proportion to K. More
                               for every further query of a group
    wide_step                  16 tokens in forward.py with bfloat16 products and K = 256
    wide_packed_step           the same where sequences are packed, and loaded without TMA
    tf32_step                  16 tokens in forward.py with TF32 products and K = 128
    token_step                 one token in forward.py without matrix units and K = 128
    gate_rate                  elements of k a second in the first kernel of forward_sm90_wide.py
    state_step                 64 tokens in its second
    shared                     blocks with tile_step that share a multiprocessor at no cost to each other
    ragged                     a packed sequence's incomplete chunk
    build_step                 64 tokens in states_sm90.py
    build_start, build         before a block's first step in states.py; a step of it as a part of one of the outputs'
    scan_step                  a segment in scan.py
    idle                       of the kernels before the outputs where no packed sequence is long enough to be cut
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from gla_core.dispatch.backend import OpCall, checkpoint_dtype
from gla_triton_kernels import MAX_WIDTH
from gla_triton_kernels.chunk_gla.plan import (
    STATE_KEYS,
    AnyPlan,
    Kernel,
    KernelPlan,
    Plan,
    SegmentPlan,
    plan_one_pass,
    plan_rows,
    seen_width,
)
from gla_triton_kernels.cost import Constants, gpu_of_constants, in_all
from gla_triton_kernels.runtime.architecture import Gpu


class BlockTime(NamedTuple):
    """Work and time of a block of a kernel: tokens a step, columns of v, seconds before the first step and of each.

    `shared` blocks run on a multiprocessor at no cost to each other. A block has all keys unless `keys` says how many.
    """

    tokens: int
    columns: int
    start: float
    step: float
    shared: float = 1
    keys: int = MAX_WIDTH


class Cut(NamedTuple):
    """The segments of sequences: their number, tokens of an average one and of the longest."""

    number: float
    mean: float
    longest: float


def one_pass(call: OpCall, c: Constants) -> float:
    """Seconds of a call whose sequences stay whole."""
    seen = seen_by_kernels(call, c)
    return copying(call, seen, c) + _whole_sequences(seen, planned(plan_one_pass, seen, c), c)


def segments(call: OpCall, c: Constants) -> float:
    """Seconds of a call whose sequences are cut into segments, unless they fill the device."""
    seen = seen_by_kernels(call, c)
    return copying(call, seen, c) + sum(_segments(rows, plan, c) for rows, plan in planned(plan_rows, seen, c))


def _segments(call: OpCall, plan: Plan, c: Constants) -> float:
    """Seconds of a call that builds states, scans them and computes outputs, if its sequences are cut."""
    if plan.segments is None:
        return _whole_sequences(call, plan, c)
    block = _block_time(call, plan.outputs, c)
    outputs = kernel_seconds(call, block, cut(call, plan.segments.length, plan.segments.uncut), moved_bytes(call), c)
    if plan.segments.states.kernel is Kernel.STATES_SM90:
        states = plan.segments.states
        block = BlockTime(states.C, states.BV, c["hopper_start"], c["build_step"], keys=STATE_KEYS)
    else:
        block = block._replace(start=c["build_start"], step=c["build"] * block.step)
    # Of a state each number is written, scanned and read, in float32.
    final = bool(call.scalars.get("output_final_state"))
    before = states_seconds(call, plan.segments, call.dims["H"], block, 16, final, c)
    device = sum(before) + _gates_seconds(call, plan, c) + outputs + c["idle"] * call.variable_length
    return in_all(call, device, _host_seconds(call, plan, 3, c), c["gap"])


def _whole_sequences(call: OpCall, plan: Plan, c: Constants) -> float:
    """Seconds of a call whose outputs are computed without states of segments before them."""
    device = kernel_seconds(call, _block_time(call, plan.outputs, c), whole(call), moved_bytes(call), c)
    return in_all(call, _gates_seconds(call, plan, c) + device, _host_seconds(call, plan, 1, c), c["gap"])


def _gates_seconds(call: OpCall, plan: Plan, c: Constants) -> float:
    """Device seconds of the kernel for wide heads that comes before the outputs."""
    if plan.outputs.kernel is not Kernel.FORWARD_SM90_WIDE:
        return 0.0
    B, T, H, K = (call.dims[name] for name in ("B", "T", "H", "K"))
    return c["launch"] + B * T * H * K / c["gate_rate"]


def _host_seconds(call: OpCall, plan: Plan, launches: int, c: Constants) -> float:
    """Returns host seconds of a call with `launches` launches, besides those for wide heads and packed sequences."""
    wide = plan.outputs.kernel is Kernel.FORWARD_SM90_WIDE
    launches += wide + call.variable_length * (2 if wide else 1)
    more = c["host_hopper"] * (plan.outputs.kernel is not Kernel.FORWARD) + c["host_packed"] * call.variable_length
    return host_seconds(launches, c) + more


def _block_time(call: OpCall, kernel: KernelPlan, c: Constants) -> BlockTime:
    """Returns the time of a block of a kernel that computes outputs."""
    H, Hq = call.dims["H"], call.dims["Hq"]
    if kernel.kernel is Kernel.FORWARD_SM90:
        step = c["hopper_step"] + c["hopper_tile"] * (kernel.BK // 64)
        step *= c["hopper_narrow"] if kernel.BV == 64 else 1
        return BlockTime(kernel.C, kernel.BV, c["hopper_start"], step)
    if kernel.kernel is Kernel.FORWARD_SM90_WIDE:
        return BlockTime(kernel.C, kernel.BV, c["hopper_start"], c["state_step"])
    width = kernel.BK / 128
    # Values are counted in blocks of K up to 256: beyond it they are narrower, and their steps as much shorter.
    if kernel.tokenwise:
        return BlockTime(1, 32, c["start"], c["token_step"] * width, 4)
    if kernel.operand == torch.float32:
        return BlockTime(16, 32, c["start"], c["tf32_step"] * width, 2)
    if kernel.BK > 128:
        step = c["wide_packed_step" if call.variable_length else "wide_step"]
        return BlockTime(16, 128, c["start"], step * width / 2)
    step = c["tile_step"] + c["query_step"] * (Hq / max(H, 1) - 1)
    return BlockTime(64, kernel.BV, c["start"], step * width, c["shared"])


# ---- for the backward as well


def seen_by_kernels(call: OpCall, c: Constants) -> OpCall:
    """The call with the widths of heads that kernels see."""
    gpu = gpu_of_constants(c)
    widths = {name: seen_width(call.dims[name], call.dtype, gpu) for name in ("K", "V")}
    return dataclasses.replace(call, dims={**call.dims, **widths})


def copying(call: OpCall, seen: OpCall, c: Constants) -> float:
    """Seconds of the copies to the widths that kernels see, and back: q, k and g, v and o, and in a backward do too."""
    B, T, H, Hq, K, V = (call.dims[name] for name in ("B", "T", "H", "Hq", "K", "V"))
    of_keys = 0 if seen.dims["K"] == K else B * T * K * ((H + Hq) * call.dtype.itemsize + H * _gate_itemsize(call))
    of_values = 0 if seen.dims["V"] == V else B * T * V * (H + Hq) * call.dtype.itemsize
    launches = 3 * (of_keys > 0) + 2 * (of_values > 0)
    twice = 2 if call.op == "chunk_gla_bwd" else 1
    return twice * (launches * c["launch"] + 2 * (of_keys + of_values) / c["bandwidth"])


def planned(plan: Callable[[OpCall, Gpu, bool], AnyPlan], call: OpCall, c: Constants) -> AnyPlan:
    """Returns the plan of a call, by `plan`, on the GPU whose facts stand among the constants."""
    return plan(call, gpu_of_constants(c), _aligned(call))


def whole(call: OpCall) -> Cut:
    """Sequences that stay whole."""
    T, N = call.dims["T"], max(call.dims["N"], 1)
    return Cut(N, T / N, _longest(call)) if call.variable_length else Cut(N, T, T)


def cut(call: OpCall, length: int, uncut: int) -> Cut:
    """Sequences that are cut into segments of `length` tokens, but for packed ones of up to `uncut`."""
    T, N = max(call.dims["T"], 1), call.dims["N"]
    if not call.variable_length:
        return Cut(N * math.ceil(T / length), length, length)
    if _longest(call) <= uncut:
        return whole(call)
    # Of a packed sequence the last segment is short, and half as long as the others where sequences are long.
    number = max(N, T / length + N / 2)
    return Cut(number, T / number, min(length, _longest(call)))


def _longest(call: OpCall) -> float:
    """Tokens of the longest of packed sequences; where nothing is said of it, it has half as many again as the mean."""
    T, N = call.dims["T"], max(call.dims["N"], 1)
    return min(T, 1.5 * T / N) if call.longest is None else max(min(T, call.longest), T / N)


def kernel_seconds(call: OpCall, block: BlockTime, segments: Cut, size: float, c: Constants) -> float:
    """Device seconds of a kernel that goes through segments, or whole sequences, and moves `size` bytes."""
    H, K, V = (call.dims[name] for name in ("H", "K", "V"))
    blocks = segments.number * H * math.ceil(K / block.keys) * math.ceil(V / block.columns)
    if call.variable_length:  # unequal blocks, the longest first: all multiprocessors are busy until short ones run
        mean, longest = (
            block.start + c["ragged"] + tokens / block.tokens * block.step
            for tokens in (segments.mean, segments.longest)
        )
        seconds = max(longest, (blocks / c["multiprocessors"] + 0.5) * mean / block.shared)
    else:
        waves = max(1.0, math.ceil(blocks / c["multiprocessors"]) / block.shared)
        seconds = waves * (block.start + math.ceil(segments.mean / block.tokens) * block.step)
    return c["launch"] + max(seconds, size / c["bandwidth"])


def states_seconds(
    call: OpCall, plan: SegmentPlan, heads: int, block: BlockTime, moved: int, ends: bool, c: Constants
) -> tuple[float, float]:
    """Device seconds to build the states of segments from zero, and to scan them.

    Args:
        heads: of the tokens that are met. moved: bytes that a number of a state is on its ways to memory and back.
        ends: whether what leaves sequences is asked for, and so all sequences are scanned, not only those that are cut.
    """
    B, T, H, K, V, N = (call.dims[name] for name in ("B", "T", "H", "K", "V", "N"))
    length, number = plan.length, cut(call, plan.length, plan.uncut).number
    built = number if ends else number - N  # segments; without `ends`, those with another one after them
    if call.variable_length:
        number = built
    read = token_bytes(call, heads) * min(1, built * length / max(B * T, 1))
    build = kernel_seconds(call, block, Cut(built, length, length), read, c) if built else c["launch"]
    in_a_row = _longest(call) / length if call.variable_length else number / max(N, 1)
    scan = c["launch"] + in_a_row * c["scan_step"] + moved * number * H * K * V / c["bandwidth"]
    return build, scan


def host_seconds(launches: int, c: Constants) -> float:
    """Returns host seconds of a call with `launches` launches; repeated, they are a graph, as quick as two of them."""
    return c["host"] + c["host_launch"] * min(launches, 2)


def moved_bytes(call: OpCall) -> float:
    """Bytes of q, k, v, g, o or do, of the states that enter and leave, and of checkpoints where they are returned."""
    H, Hq, K, V, N = (call.dims[name] for name in ("H", "Hq", "K", "V", "N"))
    states = 2 * N * H * K * V * 4 if call.state_dtype else 0
    checkpoints = checkpoint_bytes(call, call.scalars["checkpoint_every"]) if call.checkpoints else 0
    return token_bytes(call, Hq + H) + states + checkpoints


def token_bytes(call: OpCall, heads: int) -> int:
    """Returns the bytes of the gates, and of `heads` heads of keys and of values, or of what is as wide."""
    B, T, H, K, V = (call.dims[name] for name in ("B", "T", "H", "K", "V"))
    return B * T * (heads * (K + V) * call.dtype.itemsize + H * K * _gate_itemsize(call))


def checkpoint_bytes(call: OpCall, every: int) -> float:
    """Returns the bytes of the states that enter chunks of `every` tokens, as checkpoints hold them."""
    B, T, H, K, V = (call.dims[name] for name in ("B", "T", "H", "K", "V"))
    return B * T / every * H * K * V * checkpoint_dtype(call.dtype).itemsize


def _gate_itemsize(call: OpCall) -> int:
    """Bytes of a gate; 0 without."""
    return call.gate_dtype.itemsize if call.gate_dtype else 0


def _aligned(call: OpCall) -> bool:
    """Returns whether TMA can address q, k, v, g and o, contiguous: their rows begin at multiples of 16 bytes."""
    rows = (call.dims["K"] * call.dtype.itemsize, call.dims["V"] * call.dtype.itemsize)
    return all(size % 16 == 0 for size in (*rows, call.dims["K"] * _gate_itemsize(call)))
