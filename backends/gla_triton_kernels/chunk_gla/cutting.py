"""Decides how sequences are cut into segments: the length of segments, and whether a cut pays.

Plans and prices share this model. Times are in units of the time that a block of a kernel needs for 64 tokens;
`CutTimes` holds the cost of a cut in these units.

B batch   T tokens   N sequences
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from gla_core.dispatch.backend import CHUNK, OpCall, checkpoint_rows
from gla_triton_kernels.chunk_gla.kernel import CutTimes

FORWARD_CUT = CutTimes(0.5, 1.5, 4.0)
BACKWARD_CUT = CutTimes(0.1, 0.2, 0.4)
"""The gradients of 64 tokens take several times as long as their outputs."""
SUMMARY_CUT = CutTimes(building=0.0, spilling=1.5, launching=4.0)
"""The unit is the time for the state of 64 tokens, which is half of the time for their outputs. A cut adds no second
pass, and one launch instead of two. The numbers are derived from `FORWARD_CUT`; they were not measured for this op."""
MOST_WAVES = 3
"""Sequences are cut into at most this number of waves of blocks."""
INTERPRETED_SEGMENT = 32
"""Tokens of a segment if kernels are interpreted; the number is small so that short sequences are cut as well."""

AnyPlan = TypeVar("AnyPlan")  # ForwardPlan or BackwardPlan


def most_segments(N: int, T: int, length: int, packed: bool) -> int:
    """Returns the number of segments of `length` tokens of N sequences of T tokens.

    For packed sequences, T counts all tokens, and the result is an upper bound.
    """
    return (1 if packed else N) * checkpoint_rows(T, N, length, packed)


def worth_cutting(length: int, times: CutTimes) -> int:
    """Returns the length of the longest packed sequence that stays whole.

    A cut pays once the outputs of the tokens beyond one segment take longer than building the state of one segment.
    """
    return length + int(times.building * length)


def segment_length(sequences: int, T: int, blocks: int, at_once: int, packed: bool, times: CutTimes) -> int:
    """Returns the tokens of a segment; T or more if sequences stay whole.

    Sequences that fill the device stay whole. Other sequences are cut so that the blocks of their segments fill the
    device. A packed sequence is cut if it exceeds two numbers of tokens: the share of one block in all tokens, and the
    tokens that a block computes in twice the time of the launches.

    Args:
        sequences: number of sequences.
        T: tokens of one sequence; of all sequences if they are packed.
        blocks: number of blocks that compute one sequence.
        at_once: number of blocks that the device runs at once.
    """
    if packed:
        units = -(-T * blocks // (at_once * CHUNK))
        if 2 * sequences * blocks >= at_once:  # sequences of about mean length fill half of the device and stay whole
            units = max(units, -(-3 * T // (2 * sequences * CHUNK)))
        return CHUNK * max(units, math.ceil(2 * times.launching))
    chunks = -(-T // CHUNK)
    best, _ = _best_cut(chunks, sequences * blocks, at_once, times)
    return CHUNK * max(1, -(-chunks // best))


def by_rows(
    call: OpCall,
    blocks: int,
    at_once: int,
    times: CutTimes,
    whole: Callable[[OpCall], AnyPlan],
    cut: Callable[[OpCall], AnyPlan],
) -> list[tuple[OpCall, AnyPlan]]:
    """Returns the plans of the rows of a batch, each with the call of these rows.

    A few blocks that do not fit beside the others would take as long as all others together. So if some rows fill the
    device and a cut suits the remaining rows better, only the remaining rows are cut.

    Args:
        blocks, at_once: as in `segment_length`.
        whole, cut: plan calls whose sequences stay whole, and calls whose sequences may be cut.
    """
    rows = _rows_in_one_pass(call, blocks, at_once, times)
    if rows == 0:
        return [(call, cut(call))]
    first, others = (replace(call, dims={**call.dims, "B": n, "N": n}) for n in (rows, call.dims["B"] - rows))
    return [(first, whole(first)), (others, cut(others))]


def _rows_in_one_pass(call: OpCall, blocks: int, at_once: int, times: CutTimes) -> int:
    """Returns the number of rows that stay whole while the others are cut; 0 if all rows are treated alike."""
    B, T = call.dims["B"], call.dims["T"]
    rows = B * blocks // at_once * at_once // max(1, blocks)  # they fill the device, or fill it several times
    if call.variable_length or call.batch_invariant is not None or not 0 < rows < B:
        return 0
    chunks = -(-T // CHUNK)
    _, together = _best_cut(chunks, B * blocks, at_once, times)
    _, others = _best_cut(chunks, (B - rows) * blocks, at_once, times)
    whole = -(-rows * blocks // at_once) * chunks
    return rows if whole + others + times.launching / 2 < together else 0


def _best_cut(chunks: int, blocks: int, at_once: int, times: CutTimes) -> tuple[int, float]:
    """Returns the best number of segments of a sequence of `chunks` chunks, and the predicted time.

    Args:
        blocks: number of blocks that compute all sequences.
    """
    cuts = {min(chunks, waves * at_once // max(1, blocks)) for waves in range(1, MOST_WAVES + 1)}
    time, best = min((_time_of_cut(n, chunks, blocks, at_once, times), n) for n in {1, *cuts} - {0})
    return best, time


def _time_of_cut(segments: int, chunks: int, blocks: int, at_once: int, times: CutTimes) -> float:
    """Returns the predicted time with this number of segments of each sequence."""
    waves, length = -(-blocks * segments // at_once), -(-chunks // segments)
    if segments == 1:
        return waves * length
    return waves * ((1 + times.building) * length + times.spilling) + times.launching
