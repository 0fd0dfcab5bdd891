"""Plans of calls of chunk_gla: kernels and launch parameters are decided here alone, without Triton.

The launcher runs a plan (call.py and the backends) and the cost model prices the same one (cost.py). All thresholds and
launch parameters were measured on an H200 with its 132 multiprocessors; other GPUs take the same where nothing is said.

B batch   T tokens   N sequences   H key/value heads   Hq query heads   K, V key and value width of a head
C tokens a chunk   BK, BV keys and values of a block
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

import torch

from gla_core.dispatch.backend import OpCall, checkpoint_rows
from gla_triton_kernels.runtime.architecture import Architecture, Gpu
from gla_triton_kernels.runtime.sizes import power_of_two

AnyPlan = TypeVar("AnyPlan")  # Plan, or that of a backward


class Kernel(enum.StrEnum):
    """The modules of this package that hold a kernel that is chosen by a plan."""

    FORWARD = "forward"
    FORWARD_SM90 = "forward_sm90"
    FORWARD_SM90_WIDE = "forward_sm90_wide"
    STATES = "states"
    STATES_SM90 = "states_sm90"
    BACKWARD = "backward"
    BACKWARD_SM90 = "backward_sm90"
    BACKWARD_SM90_WIDE = "backward_sm90_wide"


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelPlan:
    """A kernel and its launch parameters.

    Attributes:
        C: tokens a chunk.
        BK, BV: keys and values of a head that a block, or a warpgroup's slice of it, computes at once.
        warps: of a block; those that are specialised come on top.
        stages: chunks on their way from memory at a time.
        operand: what matrices are multiplied in; float32 stands for TF32.
        tokenwise: token by token, without matrix units.
        tma: tiles are moved by TMA, not through pointers.
        triangle: gates are summed by a product with a triangle, not by a scan.
        keys_first: the state's keys make the rows of the matrix instruction, not its values.
    """

    kernel: Kernel
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


@dataclass(frozen=True, slots=True)
class SegmentPlan:
    """A way to find the states that enter segments.

    Attributes:
        length: tokens of a segment.
        uncut: tokens up to which a packed sequence is not cut.
        states: builds the states of segments from zero; a scan makes entering states of them.
        overlap: each kernel is launched while the one before it ends (programmatic dependent launch).
    """

    length: int
    uncut: int
    states: KernelPlan
    overlap: bool


@dataclass(frozen=True, slots=True)
class Plan:
    """The kernels of a call.

    Attributes:
        outputs: computes outputs, and the state that leaves, from the state that enters a sequence or segment.
        segments: how sequences are cut into segments; None where they stay whole.
    """

    outputs: KernelPlan
    segments: SegmentPlan | None = None


WIDTH_UNIT = 8
"""Keys and values of a head that kernels for SM90 see are a multiple: TMA moves rows of whole 16 bytes."""


def seen_width(width: int, dtype: torch.dtype, gpu: Gpu) -> int:
    """Keys or values of a head that kernels see: widths.py puts zeros behind them where TMA would not do."""
    specialised = gpu.architecture.has_wgmma and dtype == torch.bfloat16
    return -(-width // WIDTH_UNIT) * WIDTH_UNIT if specialised else width


# ---- forward: whole sequences

SM90_TOKENS = 96
"""Tokens of a sequence, or of all that are packed, from which on the kernels for SM90 are faster; up to K = 64, twice
as many. Of a few packed tokens bfloat16 would also cost more accuracy than the kit allows."""
SM90_WIDE_TOKENS = 32
"""The same of packed sequences on average where K is above 128. With up to 128 keys short ones stay with the others.

The general kernel computes a long one among them several times as slowly, and is seldom faster: at K = V = 64 by up to
1.6 times, with 1,000 blocks and more of 48 tokens; beyond that not, or by a few parts in a hundred.
"""
TMA_ELEMENTS = 2**22
"""Elements of v from which on faster loads outweigh the host's time for tensor maps."""
FEW_BLOCKS = 66
"""The most blocks of 64 values that do not fill a device: there are more of them with less of V each."""
MANY_BLOCKS = 512
"""The fewest blocks of 64 values of which those of 128 still fill a device; these read q, k and g half as often."""


def plan_one_pass(call: OpCall, gpu: Gpu, aligned: bool) -> Plan:
    """Whole sequences in one pass.

    Args:
        aligned: whether TMA can address q, k, v, g and o.
    """
    kernel = Kernel.FORWARD if _are_short(call) else best_kernel(call, gpu, aligned)
    return Plan(_outputs(call, gpu, aligned, kernel, call.dims["N"]))


def _are_short(call: OpCall) -> bool:
    """Returns whether sequences have too few tokens for the kernels for SM90 to be the faster ones."""
    T, K, N = (call.dims[name] for name in ("T", "K", "N"))
    if SM90_TOKENS * (1 if K > 64 else 2) > T:
        return True
    return call.variable_length and K > 128 and T / max(N, 1) < SM90_WIDE_TOKENS


def best_kernel(call: OpCall, gpu: Gpu, aligned: bool) -> Kernel:
    """The kernel that computes the outputs of long sequences: the one for this architecture if it takes the call."""
    H, Hq, K, V = (call.dims[name] for name in ("H", "Hq", "K", "V"))
    specialised = gpu.architecture.has_wgmma and call.dtype == torch.bfloat16 and Hq == H
    if not (specialised and aligned and V % 8 == 0):  # rows of o of 16 bytes
        return Kernel.FORWARD
    if K <= 128:
        return Kernel.FORWARD_SM90
    wide = K <= 256 and K % 8 == 0 and call.gate_dtype is not None
    return Kernel.FORWARD_SM90_WIDE if wide else Kernel.FORWARD


def _forward_sm90(call: OpCall, gpu: Gpu, kernel: Kernel, sequences: int) -> KernelPlan:
    """Returns launch parameters of the kernels for SM90 that compute outputs of `sequences` sequences or segments.

    The one for wide heads takes keys in slices. The other takes a fifth less time where a block has 64 columns of v,
    which pays where the device runs all of these blocks at once; the bits are the same.
    """
    H, K, V = (call.dims[name] for name in ("H", "K", "V"))
    fit = kernel is Kernel.FORWARD_SM90 and sequences * H * -(-V // 64) <= gpu.multiprocessors
    BK, BV = (64 if K <= 64 else 128), (64 if V <= 64 or fit else 128)
    stages = 2 if BK == 128 else 4 if BV == 64 else 3  # as many as shared memory holds
    return KernelPlan(kernel=kernel, C=64, BK=BK, BV=BV, stages=stages, tma=True)


def _forward(call: OpCall, gpu: Gpu, aligned: bool, sequences: int) -> KernelPlan:
    """Returns launch parameters of the general kernel that computes outputs of `sequences` sequences or segments."""
    B, T, H, K, V = (call.dims[name] for name in ("B", "T", "H", "K", "V"))
    BK, blocks, length = power_of_two(K, 16), sequences * H * -(-V // 64), B * T // max(sequences, 1)
    if call.batch_invariant is not None:  # as for some sequences of some length
        blocks, length = FEW_BLOCKS + 1, call.batch_invariant
    # What bfloat16 costs in accuracy does not average out over few terms.
    in_bfloat16 = call.dtype == torch.bfloat16 and BK > 32 and (length > 16 or BK > 128)
    if not in_bfloat16:
        # At most 32 wide: with 64 rows, wgmma would take TF32 operands from registers, which Triton 3.6 gets wrong.
        C, BV, warps, stages = {256: (16, 32, 8, 2), 512: (16, 16, 8, 1)}.get(BK, (16, 32, 4, 2))
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
    if gpu.architecture.has_little_shared_memory:
        C, stages = min(C, 32), 1
    return KernelPlan(
        kernel=Kernel.FORWARD,
        C=min(C, power_of_two(length, 16)),
        BK=BK,
        BV=min(BV, power_of_two(V, 16)),
        warps=warps,
        stages=stages,
        operand=torch.bfloat16 if in_bfloat16 else torch.float32,
        tokenwise=call.dtype == torch.float32 and call.float32_matmul_precision == "highest",
        # TMA knows no ends of packed sequences.
        tma=gpu.architecture.has_tma and aligned and not call.variable_length and B * T * H * V >= TMA_ELEMENTS,
        triangle=in_bfloat16 and BK <= 256,
        keys_first=in_bfloat16 and BK == 256 and V > 64,
    )


# ---- forward: segments and a scan

SEGMENT_UNIT = 64
"""Tokens of which a segment has a multiple: the longest chunk of the kernels."""


class CutTimes(NamedTuple):
    """Costs of cutting sequences into segments, in the time that a block needs for the outputs of 64 tokens.

    Attributes:
        building: the state of 64 tokens. spilling: a block writes a state, scans and reads it.
        launching: two more launches.
    """

    building: float
    spilling: float
    launching: float


FORWARD_CUT = CutTimes(0.5, 1.5, 4.0)
MOST_WAVES = 3
"""Waves of blocks that sequences are cut into at most."""
STATE_KEYS = 128
"""Keys of a state that a block of states_sm90.py builds at most."""
INTERPRETED_SEGMENT = 32
"""Tokens of a segment where kernels are interpreted: few, so that short sequences are cut as well."""
SM90_TILES = 200 * 2**10
"""Bytes of a multiprocessor's shared memory that tiles may fill."""


def plan_segments(call: OpCall, gpu: Gpu, aligned: bool) -> Plan:
    """Segments of sequences at once, or one pass where whole sequences fill the device.

    Args:
        aligned: whether TMA can address q, k, v, g and o.
    """
    T, N = call.dims["T"], call.dims["N"]
    if call.batch_invariant is not None and T > 0:
        return _plan_invariant(call, gpu, aligned, call.batch_invariant)
    kernel = best_kernel(call, gpu, aligned)
    if call.variable_length and _are_short(call):  # most segments are short sequences
        kernel = Kernel.FORWARD
    length = segment_length(N, T, *_blocks(call, gpu, kernel), call.variable_length, FORWARD_CUT)
    if gpu.architecture is Architecture.INTERPRETED:
        length = min(length, INTERPRETED_SEGMENT)
    if length >= T:
        return plan_one_pass(call, gpu, aligned)
    outputs = _outputs(call, gpu, aligned, kernel, most_segments(N, T, length, call.variable_length))
    return Plan(outputs, _before(call, gpu, outputs, length, worth_cutting(length, FORWARD_CUT)))


def worth_cutting(length: int, times: CutTimes) -> int:
    """Returns the tokens of a packed sequence beyond which segments of `length` tokens take less time than the whole.

    It is as long as a segment, and as what of its outputs takes as long as to build the segment's state.
    """
    return length + int(times.building * length)


def most_segments(N: int, T: int, length: int, packed: bool) -> int:
    """Returns the most segments of `length` tokens that N sequences are cut into; packed ones have T tokens in all."""
    return (1 if packed else N) * checkpoint_rows(T, N, length, packed)


def plan_rows(call: OpCall, gpu: Gpu, aligned: bool) -> list[tuple[OpCall, Plan]]:
    """Plans of the rows of a batch: of those that fill the device in one pass, if others are left, and of the others.

    Args:
        aligned: whether TMA can address q, k, v, g and o.
    """
    rows = rows_in_one_pass(call, *_blocks(call, gpu, best_kernel(call, gpu, aligned)), FORWARD_CUT)
    return split_rows(call, rows, lambda x: plan_one_pass(x, gpu, aligned), lambda x: plan_segments(x, gpu, aligned))


def _blocks(call: OpCall, gpu: Gpu, kernel: Kernel) -> tuple[int, int]:
    """Blocks of this kernel that compute the outputs of one sequence, and how many the device runs at once."""
    H, Hq, K, V = (call.dims[name] for name in ("H", "Hq", "K", "V"))
    if kernel is not Kernel.FORWARD:
        return H * -(-V // 128), gpu.multiprocessors
    return H * -(-V // 64), (4 if Hq > H and K <= 128 < 2 * V else 2) * gpu.multiprocessors


def _plan_invariant(call: OpCall, gpu: Gpu, aligned: bool, tokens: int) -> Plan:
    """Plans the same arithmetic whatever the batch, on segments of `tokens` tokens, which calls may begin and end with.

    A final state always comes of a scan, since that is what enters the next segment of a sequence that is not cut.
    """
    kernel = best_kernel(call, gpu, aligned)
    T, N = call.dims["T"], call.dims["N"]
    whole = tokens >= T and not call.scalars["output_final_state"]
    segments = N if whole else most_segments(N, T, tokens, call.variable_length)
    outputs = _outputs(call, gpu, aligned, kernel, segments)
    return Plan(outputs, None if whole else _before(call, gpu, outputs, tokens, tokens))


def _before(call: OpCall, gpu: Gpu, outputs: KernelPlan, length: int, uncut: int) -> SegmentPlan:
    """Plans the states that enter segments, which come before their outputs; see `SegmentPlan`."""
    states = _states(call, length, outputs) if outputs.kernel is Kernel.FORWARD else _states_sm90(call, gpu, length)
    return SegmentPlan(length, uncut, states, gpu.architecture.overlaps_kernels)


def _outputs(call: OpCall, gpu: Gpu, aligned: bool, kernel: Kernel, segments: int) -> KernelPlan:
    """Returns launch parameters of this kernel, which computes the outputs of `segments` segments."""
    if kernel is Kernel.FORWARD:
        return _forward(call, gpu, aligned, segments)
    return _forward_sm90(call, gpu, kernel, segments)


def segment_length(sequences: int, T: int, blocks: int, at_once: int, packed: bool, times: CutTimes) -> int:
    """Tokens of a segment; T or more where sequences stay whole.

    Sequences that fill the device stay whole. Others are cut so that the blocks of their segments fill it; a cut costs
    another pass over k, v and g, a scan, and two launches. Of packed ones those are cut that are longer than what one
    block would do if all had as much, and than what one does in twice the time of the launches.

    Args:
        sequences: how many there are. T: tokens of one of them, or of all where they are packed.
        blocks: that compute one sequence. at_once: blocks that a device runs at once.
        times: what a cut takes.
    """
    if packed:
        units = -(-T * blocks // (at_once * SEGMENT_UNIT))
        if 2 * sequences * blocks >= at_once:  # sequences of about the mean fill half of the device, and stay whole
            units = max(units, -(-3 * T // (2 * sequences * SEGMENT_UNIT)))
        return SEGMENT_UNIT * max(units, math.ceil(2 * times.launching))
    chunks = -(-T // SEGMENT_UNIT)
    best, _ = _best_cut(chunks, sequences * blocks, at_once, times)
    return SEGMENT_UNIT * max(1, -(-chunks // best))


def rows_in_one_pass(call: OpCall, blocks: int, at_once: int, times: CutTimes) -> int:
    """Returns the number of rows of a batch that go through one pass while the others are cut; 0 where all go one way.

    A few blocks that do not fit beside the others take as long as all of those did; cut into segments, a part of it.

    Args:
        blocks, at_once, times: as those of `segment_length`.
    """
    B, T = call.dims["B"], call.dims["T"]
    rows = B * blocks // at_once * at_once // max(1, blocks)  # that fill the device, several times if there are as many
    if call.variable_length or call.batch_invariant is not None or not 0 < rows < B:
        return 0
    chunks = -(-T // SEGMENT_UNIT)
    _, together = _best_cut(chunks, B * blocks, at_once, times)
    _, others = _best_cut(chunks, (B - rows) * blocks, at_once, times)
    whole = -(-rows * blocks // at_once) * chunks
    return rows if whole + others + times.launching / 2 < together else 0


def split_rows(
    call: OpCall, rows: int, whole: Callable[[OpCall], AnyPlan], cut: Callable[[OpCall], AnyPlan]
) -> list[tuple[OpCall, AnyPlan]]:
    """Returns the calls of the first `rows` rows of a batch, if any, and of the others, each with its plan.

    Args:
        whole, cut: plan the first call and the second.
    """
    if rows == 0:
        return [(call, cut(call))]
    first, others = (replace(call, dims={**call.dims, "B": n, "N": n}) for n in (rows, call.dims["B"] - rows))
    return [(first, whole(first)), (others, cut(others))]


def _best_cut(chunks: int, blocks: int, at_once: int, times: CutTimes) -> tuple[int, float]:
    """Into how many segments each sequence is best cut, and the predicted time, in chunks of one block.

    Args:
        blocks: that compute all sequences.
    """
    cuts = {min(chunks, waves * at_once // max(1, blocks)) for waves in range(1, MOST_WAVES + 1)}
    time, best = min((_time_of_cut(n, chunks, blocks, at_once, times), n) for n in {1, *cuts} - {0})
    return best, time


def _time_of_cut(segments: int, chunks: int, blocks: int, at_once: int, times: CutTimes) -> float:
    """Returns the predicted time where each sequence is cut into `segments` segments, in chunks of one block."""
    waves, length = -(-blocks * segments // at_once), -(-chunks // segments)
    if segments == 1:
        return waves * length
    return waves * ((1 + times.building) * length + times.spilling) + times.launching


def states_of_segments(call: OpCall, gpu: Gpu, aligned: bool, length: int) -> KernelPlan:
    """Returns the kernel that builds states of segments, or their gradients, in a call that computes no outputs."""
    if best_kernel(call, gpu, aligned) is not Kernel.FORWARD:
        return _states_sm90(call, gpu, length)
    return _states(call, length, _forward(call, gpu, aligned, call.dims["N"]))


def _states(call: OpCall, length: int, outputs: KernelPlan) -> KernelPlan:
    """Launch parameters of the general kernel that builds states, beside those of the one that computes outputs."""
    BK, BV, stages, operand = 64, 64, 3, torch.float32
    if call.dtype == torch.bfloat16:
        operand = torch.bfloat16
    elif outputs.tokenwise:
        BK, stages = 128, 4
    else:
        BV = 32  # with TF32 operands; see _forward
    return KernelPlan(
        kernel=Kernel.STATES,
        C=min(32, power_of_two(length, 16)),
        BK=min(BK, power_of_two(call.dims["K"], 16)),
        BV=min(BV, power_of_two(call.dims["V"], 16)),
        stages=stages,
        operand=operand,
        tokenwise=outputs.tokenwise,
        tma=outputs.tma,
    )


def _states_sm90(call: OpCall, gpu: Gpu, length: int) -> KernelPlan:
    """Returns the launch parameters of the kernel for SM90 that builds the states of segments of `length` tokens.

    A warpgroup takes 64 keys, and a block two of them, or one up to K = 64. Two of these smaller blocks share a
    multiprocessor; where all of them run at once they have 64 columns of v, and take a tenth to a fifth less time.
    """
    T, N, H, K, V = (call.dims[name] for name in ("T", "N", "H", "K", "V"))
    BK, C = 64, 64
    keys, shared = (BK, 2) if K <= BK else (2 * BK, 1)
    built = T // length if call.variable_length else most_segments(N, T, length, False)  # of packed ones at most
    fit = K <= BK and built * H * -(-V // 64) <= shared * gpu.multiprocessors
    BV = 64 if V <= 64 or fit else 128
    gate = 0 if call.gate_dtype is None else call.gate_dtype.itemsize
    size = C * ((keys + BV) * call.dtype.itemsize + keys * gate)  # bytes of the tiles of a chunk
    return KernelPlan(
        kernel=Kernel.STATES_SM90, C=C, BK=BK, BV=BV, stages=min(4, SM90_TILES // (shared * size)), tma=True
    )
