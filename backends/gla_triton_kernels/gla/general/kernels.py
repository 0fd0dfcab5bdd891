"""Describes the kernels for every GPU: their refusals, launch parameters and prices. Imports no Triton.

Launch parameters were measured on an H200, which has 132 multiprocessors. Other GPUs take the same parameters unless a
line says otherwise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from gla_core.dispatch.backend import CHUNK, Constants, OpCall, Reason
from gla_core.dispatch.tensors import ceil_div
from gla_triton_kernels.chunks.kernel import (
    GradientKernel,
    GradientParameters,
    OutputKernel,
    Parameters,
    StateKernel,
    partials_of_blocks,
)
from gla_triton_kernels.chunks.price import BlockTime, Cut, kernel_seconds, queries_of_state
from gla_triton_kernels.gla.seen import not_addressable
from gla_triton_runtime.architecture import Architecture, Gpu
from gla_triton_runtime.sizes import power_of_two

if TYPE_CHECKING:
    from gla_triton_kernels.chunks.kernel import LaunchFunction

TMA_ELEMENTS = 2**22
"""The least number of elements of v for which TMA is used: its faster loads then outweigh the host's time for tensor
maps."""
FEW_BLOCKS = 66
"""The largest number of blocks of 64 values that is replaced by more blocks with fewer values, to fill the device."""
MANY_BLOCKS = 512
"""The least number of blocks of 64 values for which blocks of 128 also fill the device; they read q, k and g half as
often."""
LEAST_BLOCK = 64
"""The fewest keys and values of a block of gradients: Triton 3.6 and 3.7 miscompile narrower ones on Hopper."""

LITTLE_SHARED_MEMORY = 100 * 1024
"""The number of bytes of shared memory below which kernels have one pipeline stage: no chunk is loaded ahead."""
CHUNK_THREADS = 256
"""Threads of a block of backward_chunks.py."""
CHUNK_BLOCK, NARROW_CHUNK_BLOCK = 32, 16
"""The maximum number of keys and of values of a block of backward_chunks.py: tiles of this width fit into registers.

Blocks are narrow if float32 is multiplied at full precision. On consumer cards of Blackwell, where the compiler spills
more, all blocks are narrow except those of bfloat16 with a gate for each key or none.
"""

START = 0.5e-6
"""Seconds before the first step of a block. This and the times below were fitted to times on an H200."""
TILE_STEP, QUERY_STEP = 6.9e-6, 2.2e-6
"""Seconds for the outputs of 64 tokens with bfloat16 products and K = 128, and for each additional query head."""
WIDE_STEP, TF32_STEP, TOKEN_STEP = 5.7e-6, 4.4e-6, 1.4e-6
"""Seconds for the outputs of 16 tokens with K = 256; of 16 tokens with TF32 products and K = 128; and of one token
without tensor cores and K = 128."""
STATE_STEP, TF32_STATES, TOKEN_STATES = 1.7e-6, 2.0, 6.0
"""Seconds of states.py for 64 tokens with bfloat16 products, and the factors on this time with TF32 products and token
by token."""
GRADIENT_START, GRADIENT_STEP, GRADIENT_TILE = 46e-6, 6.8e-6, 6.4e-6
"""Seconds of a block of gradients with bfloat16 products: before its first step, for 64 tokens, and for their products
with 64 keys and 64 values."""
SPLIT_PRODUCTS = {"bf16": 1.0, "bf16x3": 4.4, "bf16x6": 15.0}
"""Time of gradients by the precision of their products, as a multiple of the time in bfloat16."""
WIDEST_CHUNK = 512
"""The most keys for which the tiles of a chunk fit into shared memory. Heads with more are computed token by token."""
SHARED = 1.1
"""Number of blocks of outputs with bfloat16 products that share a multiprocessor without slowing each other down."""
QUERY_SHARE = 0.45
"""Time of the gradients of each additional query head, as a share of the time of the first."""


def _never(call: OpCall, gpu: Gpu) -> None:
    """Refuses no call."""


def _holds_operands(gpu: Gpu) -> bool:
    """Returns whether products take operands from registers. Tiles that fit on Hopper would then spill."""
    return not gpu.facts.has_wgmma and gpu.architecture is not Architecture.INTERPRETED


def _is_exact(call: OpCall) -> bool:
    """Returns whether a call computes in float32, without matrix units."""
    return call.dtype == torch.float32 and call.float32_matmul_precision == "highest"


def _float32_products(gpu: Gpu) -> str:
    """Returns the precision of products of float32 operands, which have been rounded to TF32."""
    return "tf32" if gpu.facts.has_tf32 else "ieee"


# ---- states


def _load_states() -> LaunchFunction:
    from gla_triton_kernels.gla.general.states import launch_states

    return launch_states


def _states(call: OpCall, gpu: Gpu, length: int, outputs: Parameters) -> Parameters:
    BK, BV, stages, operand, tokenwise = 64, 64, 3, torch.float32, _is_exact(call)
    if call.dtype == torch.bfloat16:
        operand = torch.bfloat16
    elif tokenwise:
        BK, stages = 128, 4
    else:
        BV = 32  # with TF32 operands; see _forward
    return Parameters(
        C=min(32, power_of_two(length, 16)),
        BK=min(BK, power_of_two(call.dims["K"], 16)),
        BV=min(BV, power_of_two(call.dims["V"], 16)),
        stages=stages,
        operand=operand,
        tokenwise=tokenwise,
        tma=outputs.tma,
        precision=outputs.precision,
    )


def _states_time(call: OpCall, x: Parameters) -> BlockTime:
    slower = TOKEN_STATES if x.tokenwise else 1 if x.operand == call.dtype else TF32_STATES
    return BlockTime(64, x.BV, START, STATE_STEP * slower, keys=x.BK)


STATES = StateKernel(
    name="general.states",
    load=_load_states,
    refusal=_never,
    parameters=_states,
    block_keys=lambda parameters: parameters.BK,
    at_once=lambda call, parameters: 2,
    time=_states_time,
)


# ---- outputs


def _load_forward() -> LaunchFunction:
    from gla_triton_kernels.gla.general.forward import launch_outputs

    return launch_outputs


def _forward(call: OpCall, gpu: Gpu, sequences: int) -> Parameters:
    B, T, Hv, K, V = (call.dims[name] for name in ("B", "T", "Hv", "K", "V"))
    BK, blocks, length = power_of_two(K, 16), sequences * Hv * ceil_div(V, 64), B * T // max(sequences, 1)
    if call.batch_invariant is not None:  # the plan depends on this length alone, not on the batch
        blocks, length = FEW_BLOCKS + 1, call.batch_invariant
    # The rounding errors of bfloat16 do not average out over few terms.
    in_bfloat16 = call.dtype == torch.bfloat16 and 32 < BK <= WIDEST_CHUNK and (length > 16 or BK > 128)
    if not in_bfloat16:
        # BV is at most 32: with 64 rows, wgmma would take TF32 operands from registers, which Triton 3.6 gets wrong.
        C, BV, warps, stages = {256: (16, 32, 8, 2), 512: (16, 16, 8, 1), 1024: (16, 16, 8, 1)}.get(BK, (16, 32, 4, 2))
    elif BK == 512:
        C, BV, warps, stages = 16, 32, 8, 2
    elif BK == 256:
        C, BV, warps, stages = 16, 128, 8, 3
    elif blocks <= FEW_BLOCKS:
        C, BV, warps, stages = 32 if BK == 128 else 64, 32, 4, 3
    elif blocks >= MANY_BLOCKS and BK == 128 and V > 64:
        C, BV, warps, stages = 32, 128, 4, 2
    else:
        C, BV, warps, stages = 64, 64, 4, 2 if BK == 128 else 3
    if _holds_operands(gpu):
        C, BV = min(C, 32), min(BV, 64)
    if gpu.facts.shared_memory < LITTLE_SHARED_MEMORY:
        stages = 1
    # TMA does not stop at the end of a packed sequence.
    tma = gpu.facts.has_tma and not call.variable_length and B * T * Hv * V >= TMA_ELEMENTS
    return Parameters(
        C=min(C, power_of_two(length, 16)),
        BK=BK,
        BV=min(BV, power_of_two(V, 16)),
        warps=warps,
        stages=stages,
        operand=torch.bfloat16 if in_bfloat16 else torch.float32,
        tokenwise=_is_exact(call) or BK > WIDEST_CHUNK,
        tma=tma and not_addressable(call) is None,
        precision=_float32_products(gpu),
        triangle=in_bfloat16 and BK <= 256,
        keys_first=in_bfloat16 and BK == 256 and V > 64 and not _holds_operands(gpu),
    )


def _forward_blocks(call: OpCall, gpu: Gpu) -> tuple[int, int]:
    Hv, Hq, K, V = (call.dims[name] for name in ("Hv", "Hq", "K", "V"))
    return Hv * ceil_div(V, 64), (4 if Hq > Hv and K <= 128 < 2 * V else 2) * gpu.multiprocessors


def _forward_time(call: OpCall, x: Parameters) -> BlockTime:
    width = x.BK / 128
    # The price counts blocks of values as for K up to 256. For larger K, blocks are narrower and their steps shorter in
    # proportion.
    if x.tokenwise:
        return BlockTime(1, 32, START, TOKEN_STEP * width, 4)
    if x.operand == torch.float32:
        return BlockTime(16, 32, START, TF32_STEP * width, 2)
    if x.BK > 128:
        return BlockTime(16, 128, START, WIDE_STEP * width / 2)
    step = TILE_STEP + QUERY_STEP * (queries_of_state(call) - 1)
    return BlockTime(64, x.BV, START, step * width, SHARED)


FORWARD = OutputKernel(
    name="general.forward",
    load=_load_forward,
    refusal=_never,
    states=STATES,
    parameters=_forward,
    blocks=_forward_blocks,
    time=_forward_time,
)


# ---- gradients


def _load_backward() -> LaunchFunction:
    from gla_triton_kernels.gla.general.backward import launch_gradients

    return launch_gradients


def _backward(call: OpCall, gpu: Gpu, segments: int) -> GradientParameters:
    widest, warps = (128, 8) if call.dtype == torch.bfloat16 else (64, 4)
    least = 16 if gpu.architecture is Architecture.INTERPRETED else LEAST_BLOCK
    BK, BV = (min(widest, power_of_two(call.dims[name], least)) for name in ("K", "V"))
    return GradientParameters(BK=BK, BV=BV, warps=warps, precision=_precision(call))


def _load_backward_chunks() -> LaunchFunction:
    from gla_triton_kernels.gla.general.backward_chunks import launch_gradients

    return launch_gradients


def _chunks_refusal(call: OpCall, gpu: Gpu) -> Reason | None:
    if gpu.facts.has_wgmma:
        return f"multiplies narrow blocks, which Triton 3.6 and 3.7 miscompile on {gpu.facts.known_as}"
    return "is tested by itself where kernels are interpreted" if gpu.architecture is Architecture.INTERPRETED else None


def _backward_chunks(call: OpCall, gpu: Gpu, segments: int) -> GradientParameters:
    precision = _precision(call)
    narrow = precision == "bf16x6"
    if gpu.architecture is Architecture.SM120:
        narrow = precision != "bf16" or call.gate_form in ("head", "constant")
    most = NARROW_CHUNK_BLOCK if narrow else CHUNK_BLOCK
    BK, BV = (min(most, power_of_two(call.dims[name], 16)) for name in ("K", "V"))
    return GradientParameters(BK=BK, BV=BV, warps=CHUNK_THREADS // gpu.facts.lanes, precision=precision)


def _precision(call: OpCall) -> str:
    """Returns the precision of the products of gradients."""
    if call.dtype == torch.bfloat16:
        return "bf16"
    return "bf16x6" if call.dtype == torch.float32 and call.float32_matmul_precision == "highest" else "bf16x3"


def _backward_seconds(call: OpCall, x: GradientParameters, through: Cut, size: float, c: Constants) -> list[float]:
    tiles, further = x.BK * x.BV / 64**2, queries_of_state(call) - 1
    step = (GRADIENT_STEP + GRADIENT_TILE * tiles) * SPLIT_PRODUCTS[x.precision] * (1 + QUERY_SHARE * further)
    block = BlockTime(CHUNK, x.BV, GRADIENT_START, step, keys=x.BK)
    return [kernel_seconds(call, block, through, size, c)]


BACKWARD = GradientKernel(
    name="general.backward",
    load=_load_backward,
    refusal=_never,
    parameters=_backward,
    heads_apart=False,
    adds_pairs=False,
    partials=partials_of_blocks,
    seconds=_backward_seconds,
    at_once=lambda parameters: 2 if parameters.BK == parameters.BV == 64 else 1,
)

BACKWARD_CHUNKS = GradientKernel(
    name="general.backward_chunks",
    load=_load_backward_chunks,
    refusal=_chunks_refusal,
    parameters=_backward_chunks,
    heads_apart=False,
    adds_pairs=False,
    partials=lambda call, parameters: (1, 1),
    seconds=_backward_seconds,  # as on segments of one chunk, since no GPU that runs it was measured
    by_chunks=True,
)
