"""Chooses the launch parameters of the kernels of the delta rule. Imports no Triton.

K, V key and value width   BK, BV keys and values of a block
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from gla_core.dispatch.backend import CHUNK, OpCall
from gla_core.dispatch.tensors import ceil_div
from gla_triton_runtime.architecture import Architecture, Gpu
from gla_triton_runtime.sizes import power_of_two

MOST_KEYS = 256
"""The most keys of a head whose state the kernels over sequences keep on chip."""
MOST_KEYS_OF_TRANSITION = 128
"""The most keys of a dense transition that the scan holds on chip."""
FEW = 32
"""The most keys or values over which rounding errors do not average out, so that all products are of float32."""
LEAST_ON_HOPPER = 64
"""The fewest keys or values of a tile on Hopper: the assembler of Triton 3.6 and 3.7 leaves descriptors of narrower
ones out."""
LEAST_CHUNKS, LEAST_SEGMENTS = 4, 4
"""The fewest chunks of a segment, and the fewest segments of a sequence that is cut."""
LITTLE_SHARED_MEMORY = 100 * 1024
"""The number of bytes of shared memory below which no chunk is loaded ahead."""


@dataclass(frozen=True, slots=True)
class ChunkParameters:
    """Launch parameters of a kernel that computes chunks in parallel.

    Attributes:
        BK: keys of a tile.
        BV, stages: values of a tile, and number of tiles that are loaded at once, for gradients.
        warps: number of warps of a program.
        precision: precision of products: "units" for float16 in units (general/common.py), "bf16", or float32 split
            into bfloat16 parts, "bf16x3" or "bf16x6".
        solve: precision of products of matrices that are not in units.
        sums: precision of sums of gates, a name of `sums` in gla/general/backward.py.
    """

    BK: int
    BV: int
    stages: int
    warps: int
    precision: str
    solve: str
    sums: str


@dataclass(frozen=True, slots=True)
class StateParameters:
    """Launch parameters of a kernel that carries states, or gradients of states, through sequences.

    Attributes:
        BK: number of keys K, rounded up.
        BV: number of values of a block.
        warps: number of warps of a program.
        stages: number of chunks that are loaded at once.
        precision: as in `ChunkParameters`.
    """

    BK: int
    BV: int
    warps: int
    stages: int
    precision: str


@dataclass(frozen=True, slots=True)
class PassParameters:
    """Launch parameters of a pass over sequences.

    Attributes:
        chunks, states: those of pairs.py, and of the kernel that carries states.
        length: tokens of a segment; None if sequences stay whole.
    """

    chunks: ChunkParameters
    states: StateParameters
    length: int | None


@dataclass(frozen=True, slots=True)
class GradientParameters:
    """Launch parameters of the two kernels of gradients.py, which compute all values, and a block of keys.

    Attributes:
        kept: dtype of the states of chunks, of their gradients, and of what the first kernel leaves to the second.
    """

    values: ChunkParameters
    keys: ChunkParameters
    kept: torch.dtype


def plan_pass(call: OpCall, gpu: Gpu, cut: bool) -> PassParameters:
    """Returns the launch parameters of a pass over sequences, forwards or backwards.

    Args:
        cut: whether to cut sequences into segments if they do not fill the device.
    """
    states = parameters_of_states(call, gpu)
    length = tokens_of_segment(call, gpu, states.BV, LEAST_SEGMENTS) if cut else None
    return PassParameters(parameters_of_chunks(call, gpu), states, length)


def tokens_of_segment(call: OpCall, gpu: Gpu, BV: int, least: int) -> int | None:
    """Returns the tokens of a segment, so that the segments of all sequences fill the device; None for no cut.

    Transitions take about as long as outputs, so two or three segments of a sequence would not pay. A sequence in
    chunks of `CHUNK` tokens has the same bits in one call as in several, so batch-invariant calls need no cut. A step
    of the scan takes about as long as a chunk, so a sequence has no more segments than a segment has chunks.

    Args:
        BV: values of a block.
        least: the fewest segments of a sequence that is cut.
    """
    T, N, Hv, K, V = (call.dims[name] for name in ("T", "N", "Hv", "K", "V"))
    if call.batch_invariant is not None or T == 0 or N == 0 or K > MOST_KEYS_OF_TRANSITION:
        return None
    if gpu.architecture is Architecture.INTERPRETED:
        return CHUNK if T > CHUNK else None
    blocks = Hv * ceil_div(V, BV)
    longest = T if call.longest is None else min(T, call.longest)
    chunks = ceil_div(longest, CHUNK)
    if call.variable_length:
        filling = ceil_div(T * blocks, gpu.multiprocessors * CHUNK)
    else:
        filling = ceil_div(chunks, max(1, gpu.multiprocessors // max(1, N * blocks)))
    length = CHUNK * max(LEAST_CHUNKS, filling, math.isqrt(chunks))
    return length if least * length <= longest else None


def in_segments(length: int | None) -> str:
    """Returns the end of a line of `explain`, for segments of `length` tokens; '' if sequences stay whole."""
    return "" if length is None else f", in segments of {length} tokens"


def has_key_gates(call: OpCall) -> bool:
    """Returns whether each key has a gate."""
    return call.gate_dtype is not None and call.gate_form in (None, "key")


def precision_of(call: OpCall, gpu: Gpu) -> str:
    """Returns the precision of products with states."""
    in_units = call.dtype != torch.float32 and min(call.dims["K"], call.dims["V"]) > FEW
    return "units" if in_units else _float32_precision(call, gpu)


def _float32_precision(call: OpCall, gpu: Gpu) -> str:
    """Returns the precision of products of float32."""
    if gpu.architecture is Architecture.INTERPRETED:
        return "ieee"  # the interpreter does not split operands
    return "bf16x6" if call.dtype == torch.float32 and call.float32_matmul_precision == "highest" else "bf16x3"


def _chunk_parameters(call: OpCall, gpu: Gpu, BK: int, BV: int, warps: int) -> ChunkParameters:
    precise = _float32_precision(call, gpu)
    sums = {"ieee": "ieee", "bf16x6": "three parts"}.get(precise, "two parts")
    BK, BV = max(_least_keys(gpu), min(BK, power_of_two(call.dims["K"]))), min(BV, power_of_two(call.dims["V"], 16))
    warps = max(4, warps * 32 // gpu.facts.lanes)
    return ChunkParameters(BK, BV, 1, warps, precision_of(call, gpu), precise, sums)


def _least_keys(gpu: Gpu) -> int:
    """Returns the fewest keys of a tile."""
    return LEAST_ON_HOPPER if gpu.facts.has_wgmma else 16


def parameters_of_chunks(call: OpCall, gpu: Gpu) -> ChunkParameters:
    """Returns the launch parameters of pairs.py."""
    units = precision_of(call, gpu) == "units"
    if has_key_gates(call):
        return _halved_parameters(call, gpu, 16, 8 if gpu.architecture is Architecture.SM120 else 4)
    return _chunk_parameters(call, gpu, 128 if units else 32, 16, 4 if units and gpu.facts.has_wgmma else 8)


def _halved_parameters(call: OpCall, gpu: Gpu, BV: int, warps: int) -> ChunkParameters:
    """Returns the launch parameters of a program that halves tiles, of which it holds many.

    The compiler spills more on SM120.
    """
    if gpu.facts.has_wgmma:
        return _chunk_parameters(call, gpu, LEAST_ON_HOPPER, BV, 8)
    little = gpu.architecture is Architecture.SM120 or precision_of(call, gpu) != "units"
    return _chunk_parameters(call, gpu, 16 if little else 32, BV, warps)


def parameters_of_states(call: OpCall, gpu: Gpu) -> StateParameters:
    """Returns the launch parameters of a kernel that carries states.

    A program of eight warps takes 128 values where products read states from registers by warpgroups, so that operands
    are read once, if such programs fill the device.
    """
    N, Hv, K, V = (call.dims[name] for name in ("N", "Hv", "K", "V"))
    precision, BK = precision_of(call, gpu), power_of_two(K, _least_keys(gpu))
    if gpu.architecture is Architecture.INTERPRETED:
        return StateParameters(BK, min(64, power_of_two(V, 16)), 4, 1, precision)
    BV, warps, stages = 32 if gpu.architecture is Architecture.SM100 else 64, 8, 2
    if precision != "units":
        BV, warps, stages = 16, 8, 1
    elif BK > 128:
        BV, warps, stages = (32, 4, 2) if gpu.facts.has_wgmma else (32, 8, 1)
    elif gpu.facts.has_wgmma:
        fills = call.batch_invariant is None and N * Hv * ceil_div(V, 128) >= 3 * gpu.multiprocessors // 4
        BV, warps = (128, 8) if fills else (64, 4)
    if gpu.facts.shared_memory < LITTLE_SHARED_MEMORY:
        stages = 1
    return StateParameters(BK, min(BV, power_of_two(V, 16)), max(4, warps * 32 // gpu.facts.lanes), stages, precision)


def parameters_of_gradients(call: OpCall, gpu: Gpu) -> GradientParameters:
    """Returns the launch parameters of gradients.py."""
    by_key, units = has_key_gates(call), precision_of(call, gpu) == "units"
    narrow = 16 if gpu.architecture is Architecture.AMD else 32
    values = _chunk_parameters(call, gpu, MOST_KEYS, (64 if by_key else narrow) if units else 16, 8)
    halved = by_key or not units
    keys = _halved_parameters(call, gpu, 64, 8) if halved else _chunk_parameters(call, gpu, 64, 64, 4)
    if gpu.facts.has_wgmma:
        values = replace(values, BV=LEAST_ON_HOPPER, warps=8 if by_key and not units else 4)
    if units and call.dtype == torch.bfloat16:
        stages = 3 if gpu.facts.has_wgmma and not by_key else 1
        return GradientParameters(values, replace(keys, precision="bf16", stages=stages), torch.bfloat16)
    return GradientParameters(values, replace(keys, precision=keys.solve), torch.float32)
