"""Plans of calls of chunk_gla_bwd: kernels and launch parameters are decided here alone, without Triton.

As plan.py does for the forward, whose dimensions these are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gla_core.dispatch.backend import OpCall
from gla_triton_kernels.chunk_gla.plan import (
    FORWARD_CUT,
    CutTimes,
    Kernel,
    SegmentPlan,
    rows_in_one_pass,
    segment_length,
    split_rows,
    states_of_segments,
    worth_cutting,
)
from gla_triton_kernels.runtime.architecture import Architecture, Gpu
from gla_triton_kernels.runtime.sizes import power_of_two

CHUNK = 64
"""Tokens of a chunk: the least interval of checkpoints, so that the state that enters every chunk is there."""
BACKWARD_CUT = CutTimes(0.1, 0.2, 0.4)
"""A chunk's gradients take several times as long as its outputs."""
LEAST_BLOCK = 64
"""Keys and values of a block at least: Triton 3.6 gets narrower ones wrong on Hopper."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientPlan:
    """The kernel that computes gradients, and its launch parameters.

    A block [BK, BV] of the states of a head is gated linear attention of its own: dq, dk and dg are sums over blocks of
    values, and dv over blocks of keys.

    Attributes:
        BK, BV: keys and values of a block; in the kernel for wide heads, of one that computes gradients of states.
        warps: of a block; those that are specialised come on top.
        precision: what matrices are multiplied in: "bf16", or float32 split into bfloat16 parts, "bf16x3" or "bf16x6".
    """

    kernel: Kernel
    BK: int
    BV: int
    warps: int
    precision: str = "bf16"


@dataclass(frozen=True, slots=True)
class BackwardPlan:
    """The kernels of a call.

    Attributes:
        gradients: computes dq, dk, dv and dg of a sequence or segment, backwards, from the states that enter its chunks
            and the gradient of the state that leaves it.
        entering: how the states that enter chunks are found; None where checkpoints hold them.
        leaving: how the gradients of the states that leave segments are found; None where sequences stay whole.
    """

    gradients: GradientPlan
    entering: SegmentPlan | None
    leaving: SegmentPlan | None = None


def plan_whole_sequences(call: OpCall, gpu: Gpu, aligned: bool) -> BackwardPlan:
    """Whole sequences in one pass backwards.

    Args:
        aligned: whether TMA can address q, k, v, g and do.
    """
    return BackwardPlan(_gradients(call, gpu, aligned), _entering(call, gpu, aligned))


def plan_segments_backward(call: OpCall, gpu: Gpu, aligned: bool) -> BackwardPlan:
    """Segments of sequences at once, or one pass where whole sequences fill the device.

    Args:
        aligned: whether TMA can address q, k, v, g and do.
    """
    if call.batch_invariant is not None:
        return _plan_invariant(call, gpu, aligned, call.batch_invariant)
    T, N = call.dims["T"], call.dims["N"]
    gradients = _gradients(call, gpu, aligned)
    blocks, at_once, times = _cut_of(call, gpu, gradients)
    length = segment_length(N, T, blocks, at_once, call.variable_length, times)
    if gpu.architecture is Architecture.INTERPRETED:
        length = min(length, CHUNK)
    if length >= T:
        return plan_whole_sequences(call, gpu, aligned)
    leaving = _states(call, gpu, aligned, length, worth_cutting(length, times))
    return BackwardPlan(gradients, _entering(call, gpu, aligned), leaving)


def plan_rows_backward(call: OpCall, gpu: Gpu, aligned: bool) -> list[tuple[OpCall, BackwardPlan]]:
    """Plans of the rows of a batch, as `plan_rows` of plan.py makes them.

    Args:
        aligned: whether TMA can address q, k, v, g and do.
    """
    rows = rows_in_one_pass(call, *_cut_of(call, gpu, _gradients(call, gpu, aligned)))
    return split_rows(
        call,
        rows,
        lambda x: plan_whole_sequences(x, gpu, aligned),
        lambda x: plan_segments_backward(x, gpu, aligned),
    )


def _cut_of(call: OpCall, gpu: Gpu, kernel: GradientPlan) -> tuple[int, int, CutTimes]:
    """Blocks that compute one sequence, how many the device runs at once, and what a cut takes."""
    at_once = gpu.multiprocessors * (2 if kernel.BK == kernel.BV == 64 else 1)
    # Of the kernels for wide heads one alone goes through sequences, as quick as a forward's.
    times = FORWARD_CUT if kernel.kernel is Kernel.BACKWARD_SM90_WIDE else BACKWARD_CUT
    return _blocks(call, kernel), at_once, times


def _plan_invariant(call: OpCall, gpu: Gpu, aligned: bool, tokens: int) -> BackwardPlan:
    """Plans the same arithmetic for any batch, as plan.py: a gradient of an initial state always comes of a scan."""
    gradients, entering = _gradients(call, gpu, aligned), _entering(call, gpu, aligned)
    whole = call.dims["T"] <= tokens and call.state_dtype is None
    return BackwardPlan(gradients, entering, None if whole else _states(call, gpu, aligned, tokens, tokens))


def _blocks(call: OpCall, kernel: GradientPlan) -> int:
    """Blocks that compute one sequence or segment."""
    heads = call.dims["H"] if kernel.kernel is Kernel.BACKWARD else call.dims["Hq"]
    return heads * -(-call.dims["K"] // kernel.BK) * -(-call.dims["V"] // kernel.BV)


def _entering(call: OpCall, gpu: Gpu, aligned: bool) -> SegmentPlan | None:
    """Plans the states that enter chunks: they are checkpoints, or made as those of segments of a chunk are."""
    if call.scalars.get("checkpoint_every") == CHUNK:
        return None
    return _states(call, gpu, aligned, CHUNK, CHUNK)


def _states(call: OpCall, gpu: Gpu, aligned: bool, length: int, uncut: int) -> SegmentPlan:
    kernel = states_of_segments(call, gpu, aligned, length)
    return SegmentPlan(length, uncut, kernel, gpu.architecture.overlaps_kernels)


def fits_sm90(call: OpCall, gpu: Gpu, aligned: bool) -> bool:
    """Returns whether a kernel for SM90 computes the gradients: it is the fastest wherever it can."""
    K, V = call.dims["K"], call.dims["V"]
    specialised = gpu.architecture.has_wgmma and call.dtype == torch.bfloat16
    return specialised and aligned and K % 8 == V % 8 == 0  # rows of gradients of 16 bytes


def gradients_sm90(K: int, V: int) -> GradientPlan:
    """The kernel for SM90 and heads of these widths."""
    several = K > 128 or V > 128  # blocks of a head, each of which would repeat the work on q, k and g
    kernel = Kernel.BACKWARD_SM90_WIDE if several and K <= 256 else Kernel.BACKWARD_SM90
    BK, BV = (128 if several or width > 64 else 64 for width in (K, V))
    return GradientPlan(kernel=kernel, BK=BK, BV=BV, warps=4)


def _gradients(call: OpCall, gpu: Gpu, aligned: bool) -> GradientPlan:
    """The kernel that computes gradients, and its launch parameters."""
    K, V = call.dims["K"], call.dims["V"]
    if fits_sm90(call, gpu, aligned):
        return gradients_sm90(K, V)
    widest, warps, precision = 64, 4, "bf16"
    if call.dtype == torch.bfloat16 and not gpu.architecture.has_little_shared_memory:
        widest, warps = 128, 8
    if call.dtype != torch.bfloat16:
        highest = call.dtype == torch.float32 and call.float32_matmul_precision == "highest"
        precision = "bf16x6" if highest else "bf16x3"
    least = 16 if gpu.architecture is Architecture.INTERPRETED else LEAST_BLOCK
    BK, BV = (min(widest, power_of_two(width, least)) for width in (K, V))
    return GradientPlan(kernel=Kernel.BACKWARD, BK=BK, BV=BV, warps=warps, precision=precision)
