"""Predicted seconds of chunk_gla_fwd: the price of the very plan that a call would run.

../cost.py says how the time of a kernel is counted. Constants, in seconds where nothing else is said:

    host, host_launch          of the host for a call, and more for each launch
    launch                     between the starts of two kernels
    bandwidth                  bytes a second
    start, hopper_start        before a block's first step, in general kernels and in those for SM90
    hopper_step, hopper_tile   64 tokens in forward_sm90.py: of each step, and more for every 64 columns of keys
                               and of values
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
    uneven                     tokens of the longest of packed sequences over their mean
    build_step                 64 tokens in states_sm90.py
    build_start, build         before a block's first step in states.py; a step of it as a part of one of the outputs'
    scan_step                  a segment in scan.py
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from gla_core.dispatch.backend import OpCall
from gla_triton_kernels.chunk_gla.plan import Kernel, KernelPlan, plan_one_pass, plan_segments
from gla_triton_kernels.cost import Constants, gpu_of_constants, in_all


class BlockTime(NamedTuple):
    """What a block of a kernel does and takes: tokens a step, columns of v, seconds before the first step and of each.

    `shared` blocks run on a multiprocessor at no cost to each other.
    """

    tokens: int
    columns: int
    start: float
    step: float
    shared: float = 1


def one_pass(call: OpCall, c: Constants) -> float:
    """Seconds of a call whose sequences stay whole."""
    return _whole_sequences(call, plan_one_pass(call, gpu_of_constants(c), _aligned(call)).outputs, c)


def segments(call: OpCall, c: Constants) -> float:
    """Seconds of a call whose sequences are cut into segments, unless they fill the device: states, scan, outputs."""
    plan = plan_segments(call, gpu_of_constants(c), _aligned(call))
    if plan.segments is None:
        return _whole_sequences(call, plan.outputs, c)
    B, T, H, K, V, N = (call.dims[name] for name in ("B", "T", "H", "K", "V", "N"))
    packed, length = call.variable_length, plan.segments.length
    # Of a packed sequence the last segment is short, and half as long as the others where sequences are long.
    count = max(N, T / length + N / 2) if packed else N * math.ceil(T / length)
    mean = T / count if packed else length
    longest = max(1, min(c["uneven"], length / mean))
    block = _block_time(call, plan.outputs, c)
    outputs = _kernel_seconds(call, block, count, mean, _bytes(call), c, longest)
    if plan.segments.states.kernel is Kernel.STATES_SM90:
        block = BlockTime(plan.segments.states.C, plan.segments.states.BV, c["hopper_start"], c["build_step"])
    else:
        block = block._replace(start=c["build_start"], step=c["build"] * block.step)
    built = max(0, T / length - N / 2) if packed else count - N  # segments with another one after them
    read = B * T * H * ((K + V) * call.dtype.itemsize + (K * call.gate_dtype.itemsize if call.gate_dtype else 0))
    build = _kernel_seconds(call, block, built, length, read, c) if built else c["launch"]
    moved = 4 * count * H * K * V * 4  # bytes: each state is written, scanned and read
    scan = c["launch"] + count / max(N, 1) * c["scan_step"] + moved / c["bandwidth"]
    return in_all(call, build + scan + outputs, _host_seconds(4 if packed else 3, c))


def _whole_sequences(call: OpCall, kernel: KernelPlan, c: Constants) -> float:
    """Seconds of a call whose outputs are computed by `kernel` alone; the one for wide heads is two."""
    B, T, H, K, N = (call.dims[name] for name in ("B", "T", "H", "K", "N"))
    mean = B * T / max(N, 1)
    device = _kernel_seconds(call, _block_time(call, kernel, c), N, mean, _bytes(call), c, c["uneven"])
    if kernel.kernel is not Kernel.FORWARD_SM90_WIDE:
        return in_all(call, device, _host_seconds(1, c))
    gates = c["launch"] + B * T * H * K / c["gate_rate"]
    return in_all(call, gates + device, _host_seconds(2, c))


def _kernel_seconds(
    call: OpCall, block: BlockTime, sequences: float, length: float, size: float, c: Constants, longest: float = 1
) -> float:
    """Device seconds of a kernel that goes through sequences, or segments.

    Args:
        length: tokens of each, on average. size: bytes that are moved. longest: times the average that the longest
            of packed ones has.
    """
    blocks = sequences * call.dims["H"] * math.ceil(call.dims["V"] / block.columns)
    if call.variable_length:  # unequal blocks, in no order: all multiprocessors are busy until the last blocks run
        seconds = block.start + c["ragged"] + length / block.tokens * block.step
        waves = max(longest, (blocks / c["multiprocessors"] + longest / 2) / block.shared)
    else:
        seconds = block.start + math.ceil(length / block.tokens) * block.step
        waves = max(1.0, math.ceil(blocks / c["multiprocessors"]) / block.shared)
    return c["launch"] + max(waves * seconds, size / c["bandwidth"])


def _block_time(call: OpCall, kernel: KernelPlan, c: Constants) -> BlockTime:
    """What a block takes of a kernel that computes outputs."""
    H, Hq = call.dims["H"], call.dims["Hq"]
    if kernel.kernel is Kernel.FORWARD_SM90:
        step = c["hopper_step"] + c["hopper_tile"] * ((kernel.BK + kernel.BV) // 64)
        return BlockTime(kernel.C, kernel.BV, c["hopper_start"], step)
    if kernel.kernel is Kernel.FORWARD_SM90_WIDE:
        return BlockTime(kernel.C, kernel.BV, c["hopper_start"], c["state_step"])
    width = kernel.BK / 128
    # Values are counted in blocks of K up to 256: beyond it they are narrower, and their steps as much shorter.
    if kernel.tokenwise:
        return BlockTime(1, 32, c["start"], c["token_step"] * width, 2)
    if kernel.operand == torch.float32:
        return BlockTime(16, 32, c["start"], c["tf32_step"] * width, 2)
    if kernel.BK > 128:
        step = c["wide_packed_step" if call.variable_length else "wide_step"]
        return BlockTime(16, 128, c["start"], step * width / 2)
    step = c["tile_step"] + c["query_step"] * (Hq / max(H, 1) - 1)
    return BlockTime(64, kernel.BV, c["start"], step * width, c["shared"])


def _host_seconds(launches: int, c: Constants) -> float:
    """Host seconds of a call with so many launches."""
    return c["host"] + c["host_launch"] * launches


def _bytes(call: OpCall) -> int:
    """Bytes of q, k, v, g, o and of the states that enter and leave."""
    B, T, H, Hq, K, V, N = (call.dims[name] for name in ("B", "T", "H", "Hq", "K", "V", "N"))
    gates = H * K * call.gate_dtype.itemsize if call.gate_dtype else 0
    states = 2 * N * H * K * V * 4 if call.state_dtype else 0
    return B * T * ((Hq + H) * (K + V) * call.dtype.itemsize + gates) + states


def _aligned(call: OpCall) -> bool:
    """Whether TMA can address q, k, v, g and o where they are contiguous: their rows begin at multiples of 16 bytes."""
    K, V = call.dims["K"], call.dims["V"]
    gates = K * call.gate_dtype.itemsize if call.gate_dtype else 0
    return K * call.dtype.itemsize % 16 == V * call.dtype.itemsize % 16 == gates % 16 == 0
