"""The kernels for Hopper (SM90): their refusals, launch parameters and prices. Imports no Triton.

The kernels use warp specialisation: TMA loads the tiles of a chunk while warpgroups multiply earlier tiles. Launch
parameters were chosen by measurements on an H200, which has 132 multiprocessors.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from gla_core.dispatch.backend import CHUNK, GATES, Constants, OpCall, Reason
from gla_core.dispatch.tensors import ceil_div, checkpoint_dtype
from gla_triton_kernels import MAX_WIDTH
from gla_triton_kernels.chunks.cutting import most_segments
from gla_triton_kernels.chunks.kernel import (
    GradientKernel,
    GradientParameters,
    OutputKernel,
    Parameters,
    StateKernel,
    partials_of_blocks,
)
from gla_triton_kernels.chunks.price import (
    BlockTime,
    Cut,
    checkpoint_bytes,
    cut,
    gate_itemsize,
    kernel_seconds,
    moved_bytes,
    queries_of_state,
)
from gla_triton_kernels.gla.seen import not_addressable
from gla_triton_kernels.gla.sm90 import Division, fastest_division, jobs_of_heads, second_warpgroup, warpgroup_columns
from gla_triton_runtime.architecture import Gpu

if TYPE_CHECKING:
    from gla_triton_kernels.chunks.kernel import LaunchFunction

TILES = 200 * 2**10
"""The maximum number of bytes of the shared memory of a multiprocessor that tiles may fill."""
STATE_KEYS = 128
"""The maximum number of keys of a state that a block of states.py computes."""

START = 2.5e-6
"""Seconds before the first step of a block. This and the times below were fitted to times on an H200."""
START_APART = 0.5e-6
"""The additional seconds of forward.py if query heads share a state: 4 of them took 2 % more than 4 value heads."""
FORWARD_STEP, FORWARD_TILE, NARROW = 0.64e-6, 1.05e-6, 0.71
"""Seconds of forward.py for 64 tokens: of a block with 128 values, a constant and a time for each 64 keys; and the time
of a block with 64 values, as a share of the time with 128."""
HEAD_STEP, HEAD_TILE = 1.35e-6, 0.46e-6
HEAD_SLICE = {64: 1.5e-6, 32: 0.79e-6, 16: 0.65e-6}
"""The same for forward_head.py, and the time of each further slice of 128 keys by the columns of v of a warpgroup."""
SHARE = 1.1
"""The time of a chunk of a block that takes a share of all chunks, as a multiple of the time without shares."""
WIDE_STEP, GATE_RATE = 1.5e-6, 2.8e11
"""Seconds of the second kernel of forward_wide.py for 64 tokens and 128 keys, and elements of k per second of its first
kernel."""
STATE_STEP, STATE_TILE = 0.12e-6, 0.65e-6
"""Seconds of states.py for 64 tokens, and for each 64 keys of a block."""
GRADIENT_START, GRADIENT_STEP, GRADIENT_TILE = 5e-6, 2.3e-6, 1.48e-6
"""Seconds of backward.py: before the first step of a block, for 64 tokens, and for each tile of 64 keys and values.
These times and those of state_gradients.py and backward_wide.py were fitted to times on an H100."""
HEAD_GRADIENT_START, HEAD_GRADIENT_STEP, HEAD_GRADIENT_TILE = 10e-6, 2.6e-6, 0.85e-6
"""The same for backward_head.py."""
STATE_GRADIENT_STEP, STATE_GRADIENT_TILE = 0.54e-6, 0.15e-6
"""Seconds of state_gradients.py for 64 tokens: a constant, and a time for each 64 values of a block."""
GROUP_START, GROUP_STEP, GROUP_NARROW = 6e-6, 2.5e-6, 0.68
"""Seconds of backward_group.py: of a block before the first head, for 64 values of a head, and the share of the latter
with 64 keys."""
MOST_QUERIES = 8
"""The maximum number of query heads of a state that forward_wide.py computes. With 16, it took 0.63 ms, and the general
kernel, which computes a state once, took 0.43."""
STATES_ALONE = 0.74
"""The time of forward_head.py without outputs, as a share of its time with outputs."""
SUM_RATE = 3e12
"""Bytes per second of the sums of partial results."""
WIDE_CHUNK, WIDE_TILE, WIDE_SLICE = 3.2e-6, 1.7e-6, 5.8e-6
"""Seconds of backward_wide.py for a chunk: a constant, a time for each tile of 64 keys and values, and a time for each
slice of 128 keys of wider heads."""


def _refusal(call: OpCall, gpu: Gpu) -> Reason | None:
    """Returns the reason why no kernel for SM90 can compute a call, or None."""
    if not gpu.facts.has_wgmma:
        return f"needs Hopper (compute capability 9.0); the GPU is of the kind {gpu.facts.known_as}"
    if call.dtype == torch.float32 and call.float32_matmul_precision == "highest":
        return 'computes float32 in the precision of TF32; the matmul precision is "highest"'
    if call.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"computes bfloat16, float16 and float32; q is {str(call.dtype).removeprefix('torch.')}"
    K, V = call.dims["K"], call.dims["V"]
    if call.dtype == torch.float32 and (K % 8 or V % 8):  # rows of float16 are multiples of 16 bytes
        return f"computes float32 for K and V that are multiples of 8; K is {K} and V is {V}"
    if (name := not_addressable(call)) is not None:
        return f"needs tensors that TMA can address: addresses and strides are multiples of 16 bytes; {name} is not one"
    return None


def _refuse_dtype(call: OpCall) -> Reason | None:
    """Returns the reason why the gradients of wide heads cannot be computed in the dtype of a call, or None."""
    return f"computes bfloat16; q is {str(call.dtype).removeprefix('torch.')}" if call.dtype != torch.bfloat16 else None


def _refuse_key_gates(call: OpCall) -> Reason | None:
    """Returns the reason why the kernels with one gate for each key cannot compute a call, or None."""
    if call.gate_form in ("constant", "head"):
        return f"computes gates {GATES['key']}; g has one {GATES[call.gate_form]}"
    if call.gate_dtype is None and call.dims["Hv"] > call.dims["H"]:
        return f"computes value heads in groups if each key has a gate; v has {call.dims['Hv']} and k {call.dims['H']}"
    return None


def _refuse_no_gates(call: OpCall) -> Reason | None:
    """Returns the reason why a call without gates is left to a faster kernel, or None."""
    return "computes calls with gates; there are none" if call.gate_dtype is None else None


def _refuse_head_gates(call: OpCall) -> Reason | None:
    """Returns the reason why the kernels with one gate for each head, or no gates, cannot compute a call, or None."""
    gates = call.gate_form or ("key" if call.gate_dtype is not None else None)
    return f"computes one gate for each head, or none; g has one {GATES['key']}" if gates == "key" else None


# ---- states


def _load_states() -> LaunchFunction:
    from gla_triton_kernels.gla.sm90.states import launch_states

    return launch_states


def _states(call: OpCall, gpu: Gpu, length: int, outputs: Parameters) -> Parameters:
    """Returns the launch parameters of states.py.

    A warpgroup has 64 keys. A block has two warpgroups, or one if K is at most 64. Two blocks of one warpgroup share a
    multiprocessor. If all blocks of one warpgroup can run at once with 64 columns of v each, they have 64 columns
    instead of 128, which takes a tenth to a fifth less time.
    """
    T, N, Hv, K, V = (call.dims[name] for name in ("T", "N", "Hv", "K", "V"))
    BK, C, gate = 64, 64, 0 if call.gate_form in ("constant", "head") else gate_itemsize(call)
    keys, shared = (BK, 2) if K <= BK else (2 * BK, 1)
    built = T // length if call.variable_length else most_segments(N, T, length, False)  # an upper bound if packed
    fit = K <= BK and built * Hv * ceil_div(V, 64) <= shared * gpu.multiprocessors
    BV = 64 if V <= 64 or fit else 128
    size = C * ((keys + BV) * 2 + keys * gate)  # bytes of the tiles of a chunk
    return Parameters(C=C, BK=BK, BV=BV, stages=min(4, TILES // (shared * size)), tma=True)


def _states_time(call: OpCall, x: Parameters) -> BlockTime:
    keys, shared = (1, 2) if call.dims["K"] <= x.BK else (2, 1)
    return BlockTime(x.C, x.BV, START, STATE_STEP + STATE_TILE * keys, shared, keys=STATE_KEYS)


STATES = StateKernel(
    name="sm90.states",
    load=_load_states,
    refusal=_refusal,
    parameters=_states,
    block_keys=lambda parameters: STATE_KEYS,
    at_once=lambda call, parameters: 2 if call.dims["K"] <= parameters.BK else 1,
    time=_states_time,
)


# ---- outputs


def _load_forward() -> LaunchFunction:
    from gla_triton_kernels.gla.sm90.forward import launch_outputs

    return launch_outputs


def _load_forward_head() -> LaunchFunction:
    from gla_triton_kernels.gla.sm90.forward_head import launch_outputs

    return launch_outputs


def _load_forward_wide() -> LaunchFunction:
    from gla_triton_kernels.gla.sm90.forward_wide import launch_outputs

    return launch_outputs


def _output_refusal(call: OpCall, gpu: Gpu) -> Reason | None:
    H, Hq, V = (call.dims[name] for name in ("H", "Hq", "V"))
    if (reason := _refusal(call, gpu)) is not None:
        return reason
    if V % 8:  # rows of o are multiples of 16 bytes
        return f"computes V that are multiples of 8; V is {V}"
    if Hq != H and "pool" in call.given:  # the block of one query head could write a state before another one reads it
        return f"computes as many query heads as key/value heads if states are in a pool; q has {Hq} and k has {H}"
    return None


def _forward_refusal(call: OpCall, gpu: Gpu) -> Reason | None:
    if (reason := _output_refusal(call, gpu) or _refuse_key_gates(call)) is not None:
        return reason
    return None if call.dims["K"] <= 128 else f"computes K up to 128; K is {call.dims['K']}"


def _forward_head_refusal(call: OpCall, gpu: Gpu) -> Reason | None:
    return _output_refusal(call, gpu) or _refuse_head_gates(call)


def _forward_wide_refusal(call: OpCall, gpu: Gpu) -> Reason | None:
    K = call.dims["K"]
    if (reason := _output_refusal(call, gpu) or _refuse_key_gates(call)) is not None:
        return reason
    if not (K > 128 and K % 8 == 0):
        return f"computes K from 136 in steps of 8; K is {K}"
    if (shared := call.dims["Hq"] // max(call.dims["Hv"], 1)) > MOST_QUERIES:
        return f"computes up to {MOST_QUERIES} query heads of a state, each with a state of its own; there are {shared}"
    return _refuse_no_gates(call)


def _forward(call: OpCall, gpu: Gpu, sequences: int) -> Parameters:
    """Returns the launch parameters of forward.py. The bits of the results do not depend on the columns of a block."""
    V, heads = call.dims["V"], sequences * _heads(call)
    jobs = {1: heads * ceil_div(V, 64)} | ({2: heads * ceil_div(V, 128)} if V > 64 else {})
    x = _division(call, gpu, jobs, 1 / NARROW, sequences)
    return replace(_output_parameters(call, 64 * x.warpgroups), programs=x.programs)


def _division(call: OpCall, gpu: Gpu, jobs: dict[int, int], second: float, sequences: int) -> Division:
    """Returns the division of jobs among blocks; see `fastest_division`."""
    if call.variable_length:
        fit = jobs[1] <= gpu.multiprocessors
        return Division(1 if fit or 2 not in jobs else 2, None)
    chunks, may_share = ceil_div(call.dims["T"], CHUNK), sequences == call.dims["B"]
    return fastest_division(jobs, second, chunks, gpu.multiprocessors, may_share)


def _forward_head(call: OpCall, gpu: Gpu, sequences: int) -> Parameters:
    """Returns the launch parameters of forward_head.py.

    Two state warpgroups of a block have two value heads if a warpgroup can have all values of a head.
    """
    K, V, W = call.dims["K"], call.dims["V"], warpgroup_columns(call.dims["K"])
    jobs = jobs_of_heads(sequences * _heads(call), K, V, _in_pairs(call))
    x = _division(call, gpu, jobs, second_warpgroup(K), sequences)
    return replace(_in_turns(_output_parameters(call, x.warpgroups * W)), programs=x.programs)


def _in_turns(x: Parameters) -> Parameters:
    """Returns the parameters with an even number of stages, which two gate warpgroups can take in turns."""
    return replace(x, stages=x.stages // 2 * 2)


def _in_pairs(call: OpCall) -> bool:
    """Returns whether blocks of forward_head.py can have two value heads."""
    one_warpgroup = call.dims["V"] <= warpgroup_columns(call.dims["K"])
    return one_warpgroup and call.dims["Hv"] // max(call.dims["H"], 1) % 2 == 0


def _forward_wide(call: OpCall, gpu: Gpu, sequences: int) -> Parameters:
    """Returns the launch parameters of forward_wide.py, which divides the keys of a head into slices."""
    W = warpgroup_columns(call.dims["K"])
    return _output_parameters(call, W if call.dims["V"] <= W else 2 * W)


def _output_parameters(call: OpCall, BV: int) -> Parameters:
    BK = 64 if call.dims["K"] <= 64 else 128
    stages = 2 if BK == 128 else 4 if BV == 64 else 3  # the most that fit into shared memory
    return Parameters(C=64, BK=BK, BV=BV, stages=stages, tma=True)


def _heads(call: OpCall) -> int:
    """Returns the number of heads of o."""
    return max(call.dims["Hq"], call.dims["Hv"])


def _blocks(call: OpCall, gpu: Gpu) -> tuple[int, int]:
    return _heads(call) * ceil_div(call.dims["V"], 128), gpu.multiprocessors


def _forward_time(call: OpCall, x: Parameters) -> BlockTime:
    step = (FORWARD_STEP + FORWARD_TILE * (x.BK // 64)) * (NARROW if x.BV == 64 else 1)
    step *= 1 if x.programs is None else SHARE
    return BlockTime(x.C, x.BV, _forward_start(call), step, even=x.programs is not None)


def _forward_start(call: OpCall) -> float:
    """Returns the seconds before the first step of a block of forward.py or forward_head.py."""
    return START + (START_APART if call.dims["Hq"] > call.dims["Hv"] else 0.0)


def _forward_head_time(call: OpCall, x: Parameters) -> BlockTime:
    slices, W = ceil_div(call.dims["K"], x.BK), warpgroup_columns(call.dims["K"])
    step = HEAD_STEP + HEAD_TILE * (x.BK // 64) + HEAD_SLICE[W] * (slices - 1)
    shared = 2 if x.BV == 2 * W and _in_pairs(call) else 1  # value heads of a block
    step *= 1 if x.programs is None else SHARE
    step /= second_warpgroup(call.dims["K"]) if x.BV == W else 1
    return BlockTime(x.C, x.BV, _forward_start(call), step, shared, even=x.programs is not None)


def _forward_wide_time(call: OpCall, x: Parameters) -> BlockTime:
    return BlockTime(x.C, x.BV, START, WIDE_STEP * ceil_div(call.dims["K"], x.BK))


def _conversions_seconds(call: OpCall, c: Constants) -> list[float]:
    """Returns the seconds of the launches of half.py for q, k and v: 4 bytes are read and 2 are written."""
    if call.dtype != torch.float32:
        return []
    B, T, H, Hq, Hv, K, V = (call.dims[name] for name in ("B", "T", "H", "Hq", "Hv", "K", "V"))
    return [c["launch"] + 6 * B * T * elements / c["bandwidth"] for elements in (Hq * K, H * K, Hv * V)]


def _gates_seconds(call: OpCall, c: Constants) -> list[float]:
    B, T, K = (call.dims[name] for name in ("B", "T", "K"))
    return [c["launch"] + B * T * _heads(call) * K / GATE_RATE * c["step"]]


FORWARD = OutputKernel(
    name="sm90.forward",
    load=_load_forward,
    refusal=_forward_refusal,
    states=STATES,
    parameters=_forward,
    blocks=_blocks,
    time=_forward_time,
    before=_conversions_seconds,
    may_lack_outputs=True,
    heads_apart=True,
)
FORWARD_HEAD = OutputKernel(
    name="sm90.forward_head",
    load=_load_forward_head,
    refusal=_forward_head_refusal,
    states=STATES,
    parameters=_forward_head,
    blocks=_blocks,
    time=_forward_head_time,
    before=_conversions_seconds,
    may_lack_outputs=True,
    heads_apart=True,
)
FORWARD_WIDE = OutputKernel(
    name="sm90.forward_wide",
    load=_load_forward_wide,
    refusal=_forward_wide_refusal,
    states=STATES,
    parameters=_forward_wide,
    blocks=_blocks,
    time=_forward_wide_time,
    before=lambda call, c: [*_conversions_seconds(call, c), *_gates_seconds(call, c)],
    heads_apart=True,
)


# ---- gradients


def _load_backward() -> LaunchFunction:
    from gla_triton_kernels.gla.sm90.backward import launch_gradients

    return launch_gradients


def _load_backward_head() -> LaunchFunction:
    from gla_triton_kernels.gla.sm90.backward_head import launch_gradients

    return launch_gradients


def _load_backward_group() -> LaunchFunction:
    from gla_triton_kernels.gla.sm90.backward_group import launch_gradients

    return launch_gradients


def _load_backward_wide() -> LaunchFunction:
    from gla_triton_kernels.gla.sm90.backward_wide import launch_gradients

    return launch_gradients


def _gradient_refusal(call: OpCall, gpu: Gpu) -> Reason | None:
    if (reason := _refusal(call, gpu)) is not None:
        return reason
    K, V = call.dims["K"], call.dims["V"]
    if K % 8 or V % 8:  # rows of gradients are multiples of 16 bytes
        return f"computes K and V that are multiples of 8; K is {K} and V is {V}"
    return None


def _backward_refusal(call: OpCall, gpu: Gpu) -> Reason | None:
    return _gradient_refusal(call, gpu) or _refuse_key_gates(call) or _refuse_no_gates(call)


def _backward_head_refusal(call: OpCall, gpu: Gpu) -> Reason | None:
    return _gradient_refusal(call, gpu) or _refuse_head_gates(call)


def _backward_group_refusal(call: OpCall, gpu: Gpu) -> Reason | None:
    if (reason := _factors_refusal(call, gpu)) is not None:
        return reason
    H, Hv, V = (call.dims[name] for name in ("H", "Hv", "V"))
    if Hv == H and V <= 128:  # no two blocks of backward_head.py write parts of the same dq and dk
        return f"computes value heads in groups, or V above 128; v has {Hv} heads and k {H}, and V is {V}"
    return None


def _factors_refusal(call: OpCall, gpu: Gpu) -> Reason | None:
    H, Hq = call.dims["H"], call.dims["Hq"]
    if (reason := _gradient_refusal(call, gpu) or _refuse_dtype(call) or _refuse_head_gates(call)) is not None:
        return reason
    return f"computes as many query heads as key/value heads; q has {Hq} and k has {H}" if Hq != H else None


def _backward_wide_refusal(call: OpCall, gpu: Gpu) -> Reason | None:
    if (reason := _gradient_refusal(call, gpu) or _refuse_key_gates(call)) is not None:
        return reason
    V = call.dims["V"]  # with less, no two blocks of backward.py repeat the work on q, k and g of the same keys
    return None if V > 128 else f"computes heads with V above 128; V is {V}"


def _gradient_parameters(call: OpCall, gpu: Gpu, segments: int) -> GradientParameters:
    BK, BV = (128 if call.dims[name] > 64 else 64 for name in ("K", "V"))
    return GradientParameters(BK=BK, BV=BV, warps=4, programs=gpu.multiprocessors)


def _group_parameters(call: OpCall, gpu: Gpu, segments: int) -> GradientParameters:
    """Returns the launch parameters of backward_group.py.

    The value heads of a group are divided among blocks if this takes less time: a partial wave is then shorter, but
    more blocks load q and k, and more partial sums of dq and dk are added. The bits of these sums depend on it, so
    batch invariant calls divide a group in the same way whatever the batch is.
    """
    x, R = _gradient_parameters(call, gpu, segments), call.dims["Hv"] // max(call.dims["H"], 1)
    sizes = dict.fromkeys(ceil_div(R, pieces) for pieces in range(1, R + 1))
    if call.batch_invariant is not None:
        return replace(x, heads=min(R, 8))
    return replace(x, heads=min(sizes, key=lambda heads: _group_seconds(call, replace(x, heads=heads))))


def _group_seconds(call: OpCall, x: GradientParameters) -> float:
    """Returns the seconds of the blocks of backward_group.py, and of the sums of their dq and dk."""
    B, T, N, H, Hv, K, V = (call.dims[name] for name in ("B", "T", "N", "H", "Hv", "K", "V"))
    chunks = T // CHUNK + N if call.variable_length else B * ceil_div(T, CHUNK)
    pieces = ceil_div(Hv // max(H, 1), x.heads)
    waves = ceil_div(chunks * H * pieces * ceil_div(K, x.BK), x.programs)
    summed = 0.0 if pieces == 1 else 2 * B * T * H * K * 8 * pieces / SUM_RATE
    step = GROUP_STEP * (1 if x.BK > 64 else GROUP_NARROW)
    return waves * (GROUP_START + x.heads * ceil_div(V, 64) * step) + summed


def _wide_parameters(call: OpCall, gpu: Gpu, segments: int) -> GradientParameters:
    """Returns the launch parameters of backward_wide.py and state_gradients.py.

    A block of state_gradients.py has 64, 128 or 192 values. A larger block takes longer for a chunk, but may need fewer
    waves of blocks. The bits of results do not depend on it.
    """
    K, V = call.dims["K"], call.dims["V"]

    def chunk_seconds(BV: int) -> float:
        blocks = segments * _heads(call) * ceil_div(K, 64) * ceil_div(V, BV)
        return ceil_div(blocks, gpu.multiprocessors) * _state_gradient_step(BV)

    return GradientParameters(BK=64, BV=min((64, 128, 192), key=chunk_seconds), warps=4, programs=gpu.multiprocessors)


def _state_gradient_step(BV: int) -> float:
    """Returns the seconds of a block of state_gradients.py for a chunk."""
    return STATE_GRADIENT_STEP + STATE_GRADIENT_TILE * BV / 64


def _backward_seconds(call: OpCall, x: GradientParameters, through: Cut, size: float, c: Constants) -> list[float]:
    tiles = x.BK * x.BV / 64**2
    step = GRADIENT_STEP + GRADIENT_TILE * tiles
    block = BlockTime(CHUNK, x.BV, GRADIENT_START, step, keys=x.BK)
    return [*_operands_seconds(call, c), kernel_seconds(call, block, through, size, c)]


def _operands_seconds(call: OpCall, c: Constants) -> list[float]:
    """Returns the seconds of the launches of half.py and operands.py, which read float32 and write float16."""
    if call.dtype == torch.bfloat16:
        return []
    B, T, V = (call.dims[name] for name in ("B", "T", "V"))
    states = c["launch"] + 1.5 * checkpoint_bytes(call, CHUNK) / c["bandwidth"]
    do = [c["launch"] + 6 * B * T * _heads(call) * V / c["bandwidth"]] if call.dtype == torch.float32 else []
    return [*_conversions_seconds(call, c), *do, states]


def _backward_head_seconds(call: OpCall, x: GradientParameters, through: Cut, size: float, c: Constants) -> list[float]:
    step = HEAD_GRADIENT_STEP + HEAD_GRADIENT_TILE * x.BK * x.BV / 64**2
    block = BlockTime(CHUNK, x.BV, HEAD_GRADIENT_START, step, keys=x.BK)
    return [*_operands_seconds(call, c), kernel_seconds(call, block, through, size, c)]


def _backward_group_seconds(
    call: OpCall, x: GradientParameters, through: Cut, size: float, c: Constants
) -> list[float]:
    """Returns the seconds of three kernels: the first writes P, the second reads P, and the third computes dg."""
    P, Hv = checkpoint_bytes(call, CHUNK), call.dims["Hv"]
    W = warpgroup_columns(call.dims["K"])
    states = _forward_head_time(call, _output_parameters(call, 2 * W))
    states = states._replace(step=STATES_ALONE * states.step, even=not call.variable_length)
    before = kernel_seconds(call, states, through, moved_bytes(call) / 2 + P, c)
    seconds = max(_group_seconds(call, x) * c["step"], (size + P) / c["bandwidth"])
    dots = call.dims["B"] * call.dims["T"] * Hv * 4 * 9
    return [before, c["launch"] + seconds, c["launch"] + dots / c["bandwidth"]]


def _backward_wide_seconds(call: OpCall, x: GradientParameters, through: Cut, size: float, c: Constants) -> list[float]:
    """Returns the seconds of two kernels, and of the launches before them.

    The first kernel writes P, and the second reads it and the states, in two bytes an element. P has one state for each
    chunk and head of o.
    """
    K, V = call.dims["K"], call.dims["V"]
    heads, entering = queries_of_state(call), checkpoint_bytes(call, CHUNK)
    read = entering * 2 / checkpoint_dtype(call.dtype).itemsize
    P, size = heads * read, size + (read - entering)
    block = BlockTime(CHUNK, x.BV, START, _state_gradient_step(x.BV), keys=x.BK)
    states = kernel_seconds(call, block, through, moved_bytes(call) / 2 + P, c)
    slices, tiles = ceil_div(K, 128), min(2, ceil_div(K, 64)) * ceil_div(V, 64)
    step = slices * (WIDE_CHUNK + WIDE_TILE * tiles + (WIDE_SLICE if slices > 1 else 0))
    chunks = cut(call, CHUNK, CHUNK)
    chunks = chunks._replace(number=chunks.number * heads)
    gradients = kernel_seconds(call, BlockTime(CHUNK, MAX_WIDTH, 0, step), chunks, size + P, c)
    return [*_operands_seconds(call, c), states, gradients]


BACKWARD = GradientKernel(
    name="sm90.backward",
    load=_load_backward,
    refusal=_backward_refusal,
    parameters=_gradient_parameters,
    heads_apart=True,
    adds_pairs=True,
    partials=partials_of_blocks,
    seconds=_backward_seconds,
)
BACKWARD_HEAD = GradientKernel(
    name="sm90.backward_head",
    load=_load_backward_head,
    refusal=_backward_head_refusal,
    parameters=_gradient_parameters,
    heads_apart=True,
    adds_pairs=False,
    partials=partials_of_blocks,
    seconds=_backward_head_seconds,
)
BACKWARD_GROUP = GradientKernel(
    name="sm90.backward_group",
    load=_load_backward_group,
    refusal=_backward_group_refusal,
    parameters=_group_parameters,
    heads_apart=False,
    adds_pairs=False,
    partials=lambda call, x: (1, ceil_div(call.dims["K"], x.BK)),
    seconds=_backward_group_seconds,
    layouts=2,
    by_groups=True,
)
BACKWARD_FACTORS = replace(BACKWARD_GROUP, refusal=_factors_refusal)
"""backward_group.py for calls whose v has factors, with groups of any size."""
BACKWARD_WIDE = GradientKernel(
    name="sm90.backward_wide",
    load=_load_backward_wide,
    refusal=_backward_wide_refusal,
    parameters=_wide_parameters,
    heads_apart=True,
    adds_pairs=True,
    partials=lambda call, x: (1, 1),  # a block has all keys and values
    seconds=_backward_wide_seconds,
    layouts=2,
)
