"""Defines kernels of ops over sequences as values, and the plans that consist of them. Imports no Triton.

A kernel is a value: a name, a refusal, launch parameters, prices, and a function that loads its code and returns the
function that describes its launches. `kernels.py` of a generation's folder holds the values. forward.py and backward.py
of a family list the kernels for outputs and for gradients, best first. A call takes the first kernel that does not
refuse it.

B batch   T tokens   N sequences   H key heads   Hq query heads   Hv value heads   K, V key and value width
C tokens of a chunk   BK, BV keys and values of a block   block: the threads that compute together on a multiprocessor
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import torch

from gla_core.dispatch.backend import Constants, OpCall, Reason
from gla_core.dispatch.tensors import ceil_div
from gla_triton_kernels.chunks.price import BlockTime, Cut
from gla_triton_runtime.architecture import Gpu

if TYPE_CHECKING:
    from gla_triton_runtime.launch import Launch

    LaunchFunction = Callable[..., list[Launch]]


# ---- plans


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """Launch parameters of a kernel that computes outputs or states.

    Attributes:
        C: tokens of a chunk.
        BK, BV: keys and values of a head that a block, or a warpgroup of it, computes at once.
        warps: number of warps of a block; in a kernel with specialised warps, of its first kind of warps.
        stages: number of pipeline stages: chunks that are in shared memory at once.
        operand: dtype of the operands of matrix products; float32 stands for TF32.
        tokenwise: whether the kernel computes token by token, without tensor cores.
        tma: whether TMA moves tiles; otherwise they are moved through pointers.
        triangle: whether a product with a triangular matrix sums the gates; otherwise a scan does.
        keys_first: whether the keys of a state are the rows of the matrix instruction; otherwise the values are.
        precision: precision of products of float32 operands, "tf32" or "ieee".
        programs: number of blocks that share the work evenly; None stands for a block for each part of it.
    """

    C: int
    BK: int
    BV: int
    warps: int = 4
    stages: int = 2
    operand: torch.dtype = torch.bfloat16
    tokenwise: bool = False
    tma: bool = False
    triangle: bool = False
    keys_first: bool = False
    precision: str = "tf32"
    programs: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientParameters:
    """Launch parameters of a kernel that computes gradients.

    Each block [BK, BV] of the states of a head is computed as a separate gated linear attention. dq, dk and dg are then
    sums over blocks of values, and dv is a sum over blocks of keys.

    Attributes:
        BK, BV: keys and values of a block. In the kernel for wide heads, keys and values of a block of the launch that
            computes gradients of states.
        warps: number of warps of a block; in a kernel with specialised warps, of its first kind of warps.
        precision: precision of matrix products: "bf16", or float32 split into bfloat16 parts, "bf16x3" or "bf16x6".
        programs: the number of multiprocessors, which a persistent kernel uses; other kernels ignore it.
        heads: value heads of a block, for a kernel that sums dq and dk over them.
    """

    BK: int
    BV: int
    warps: int
    heads: int = 1
    precision: str = "bf16"
    programs: int = 1


@dataclass(frozen=True, slots=True)
class SegmentPlan:
    """The plan of the states that enter segments.

    Attributes:
        length: tokens of a segment.
        uncut: tokens of the longest packed sequence that is not cut.
        states, parameters: the kernel that computes the state of each segment from a zero initial state, and its launch
            parameters. A scan then computes the states that enter segments.
        overlap: whether a kernel may start while its predecessor ends (programmatic dependent launch).
    """

    length: int
    uncut: int
    states: StateKernel
    parameters: Parameters
    overlap: bool


@dataclass(frozen=True, slots=True)
class ForwardPlan:
    """The plan of outputs.

    Attributes:
        outputs, parameters: the kernel and its launch parameters. It computes the outputs and the leaving state of a
            sequence or segment from the entering state.
        segments: the plan of the states that enter segments; None if sequences stay whole.
    """

    outputs: OutputKernel
    parameters: Parameters
    segments: SegmentPlan | None = None


@dataclass(frozen=True, slots=True)
class BackwardPlan:
    """The plan of gradients.

    Attributes:
        gradients, parameters: the kernel and its launch parameters. It goes backwards through a sequence or segment
            and computes dq, dk, dv and dg from the states that enter its chunks and the gradient of its leaving state.
        entering: the plan of the states that enter chunks, as segments of one chunk; None if checkpoints hold them.
        forward: the plan of a forward that computes these checkpoints, and whose outputs are dropped; None if the
            checkpoints are given, or if there are none and `entering` is the plan of the states.
        leaving: the plan of the gradients of the states that leave segments; None if sequences stay whole.
    """

    gradients: GradientKernel
    parameters: GradientParameters
    entering: SegmentPlan | None
    forward: ForwardPlan | None = None
    leaving: SegmentPlan | None = None


# ---- kernels


@dataclass(frozen=True, kw_only=True, eq=False)
class Kernel:
    """A kernel: its name, its code, and what it refuses.

    Attributes:
        name: its folder and file, such as "sm90.forward".
        load: imports the kernel's module and returns the function that describes its launches.
        refusal: takes a call with the widths that kernels see, and a GPU. Returns the reason why the kernel cannot
            compute the call, or None if it can.
    """

    name: str
    load: Callable[[], LaunchFunction]
    refusal: Callable[[OpCall, Gpu], Reason | None]


@dataclass(frozen=True, kw_only=True, eq=False)
class StateKernel(Kernel):
    """A kernel that computes the state of each segment from a zero initial state.

    Attributes:
        parameters: takes a call, a GPU, the tokens of a segment, and the parameters of the kernel for the outputs.
            Returns the launch parameters.
        block_keys: takes the parameters, returns the keys of a block.
        at_once: takes a call and the parameters, returns the number of blocks that fit on a multiprocessor.
        time: takes a call and the parameters, returns the time of a block.
    """

    parameters: Callable[[OpCall, Gpu, int, Parameters], Parameters]
    block_keys: Callable[[Parameters], int]
    at_once: Callable[[OpCall, Parameters], int]
    time: Callable[[OpCall, Parameters], BlockTime]


@dataclass(frozen=True, kw_only=True, eq=False)
class OutputKernel(Kernel):
    """A kernel that computes the outputs of sequences or segments.

    Attributes:
        states: the kernel that computes the states of segments for this kernel.
        parameters: takes a call, a GPU, and the number of sequences or segments; returns the launch parameters.
        blocks: takes a call and a GPU, returns the number of blocks of a sequence, and the number of blocks that the
            GPU runs at once.
        time: takes a call and the parameters, returns the time of a block.
        before: takes a call and constants, returns the seconds of each launch that prepares inputs of this kernel.
        may_lack_outputs: whether the kernel can leave out the outputs, if only checkpoints are needed.
        heads_apart: whether each query head of a group is computed separately, with a state of its own.
    """

    states: StateKernel
    parameters: Callable[[OpCall, Gpu, int], Parameters]
    blocks: Callable[[OpCall, Gpu], tuple[int, int]]
    time: Callable[[OpCall, Parameters], BlockTime]
    before: Callable[[OpCall, Constants], list[float]] = lambda call, c: []
    may_lack_outputs: bool = False
    heads_apart: bool = False


@dataclass(frozen=True, kw_only=True, eq=False)
class GradientKernel(Kernel):
    """A kernel that computes the gradients of sequences or segments.

    Attributes:
        parameters: takes a call, a GPU, and the number of sequences or segments; returns the launch parameters.
        heads_apart: whether each query head of a group is computed separately. A further launch then sums the partial
            gradients of the group.
        adds_pairs: whether a further launch adds the terms of pairs of tokens in chunks that are not mild.
        partials: takes a call and the parameters. Returns the number of partial results of dq, dk and dg of a head,
            and the number of partial results of dv.
        seconds: takes a call, the parameters, the segments, the number of bytes that are moved, and constants. Returns
            the seconds of each launch.
        at_once: takes the parameters, returns the number of blocks that fit on a multiprocessor.
        layouts: number of launches that compute the segments of packed sequences for the kernel.
        by_chunks: whether the kernel computes all chunks in parallel. It then reads the gradients of the states that
            leave chunks.
        by_groups: whether the launches of the kernel sum dq and dk over the value heads of a group.
    """

    parameters: Callable[[OpCall, Gpu, int], GradientParameters]
    heads_apart: bool
    adds_pairs: bool
    partials: Callable[[OpCall, GradientParameters], tuple[int, int]]
    seconds: Callable[[OpCall, GradientParameters, Cut, float, Constants], list[float]]
    at_once: Callable[[GradientParameters], int] = lambda parameters: 1
    layouts: int = 1
    by_chunks: bool = False
    by_groups: bool = False


def partials_of_blocks(call: OpCall, x: GradientParameters) -> tuple[int, int]:
    """Returns the number of blocks of values, and of blocks of keys. Each block writes its own partial gradients."""
    return ceil_div(call.dims["V"], x.BV), ceil_div(call.dims["K"], x.BK)


AnyKernel = TypeVar("AnyKernel", bound=Kernel)


def first_able(kernels: Sequence[AnyKernel], call: OpCall, gpu: Gpu) -> AnyKernel:
    """Returns the first kernel that does not refuse a call. The last kernel of a tuple refuses no call."""
    return next(kernel for kernel in kernels if kernel.refusal(call, gpu) is None)


def refusals(kernels: Sequence[Kernel], chosen: Kernel, call: OpCall, gpu: Gpu) -> list[str]:
    """Returns a line for each kernel before the chosen one that refuses a call."""
    reasons = ((kernel.name, kernel.refusal(call, gpu)) for kernel in kernels[: list(kernels).index(chosen)])
    return [f"not {name}: {reason}" for name, reason in reasons if reason is not None]
