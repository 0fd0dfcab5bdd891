"""Decides how sequences are cut into segments: a few lengths are priced, and the one with the lowest price is taken.

A price is the predicted seconds of a plan on the device. cost.py holds the prices, and cost models add the host's time
to them, so whether a cut pays is computed in one place.

B batch   T tokens   N sequences
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from gla_core.dispatch.backend import CHUNK, Constants, OpCall, ceil_div, checkpoint_rows
from gla_triton_kernels.runtime.architecture import Gpu

H200: Constants = {"launch": 1.5e-6, "bandwidth": 3.8e12, "step": 1.0}
"""The constants with which plans price cuts on every GPU. A plan does not depend on a calibration, because another cut
gives other bits."""
WORTH_CUTTING = 0.9
"""Sequences are cut if the price falls to this factor or less, since the host has to launch more kernels."""
MOST_WAVES = 3
"""The sequences of a batch are cut into at most this number of waves of blocks."""
SCANNED = 4
"""About the square root of the time of a chunk divided by the time to scan a segment. A sequence with this number of
segments, times the square root of its chunks, takes the least time, since segments are scanned one after the other."""
LEAST_UNKNOWN = 4
"""Chunks of the shortest segment of packed sequences whose lengths are not known. Shorter segments would cut most
sequences of many calls, at a loss."""
INTERPRETED_SEGMENT = 32
"""Tokens of a segment if kernels are interpreted; the number is small so that short sequences are cut as well."""

AnyPlan = TypeVar("AnyPlan")  # ForwardPlan or BackwardPlan
Price = Callable[[OpCall, int], float]
"""Takes a call and the tokens of a segment, and returns seconds; sequences stay whole if the tokens are T or more."""


def constants_of_plans(gpu: Gpu) -> Constants:
    """Returns the constants with which plans for a GPU price their cuts."""
    return {**H200, "multiprocessors": float(gpu.multiprocessors)}


def most_segments(N: int, T: int, length: int, packed: bool) -> int:
    """Returns the number of segments of `length` tokens of N sequences of T tokens.

    For packed sequences, T counts all tokens, and the result is an upper bound.
    """
    return (1 if packed else N) * checkpoint_rows(T, N, length, packed)


def uncut_length(length: int) -> int:
    """Returns the length of the longest packed sequence that stays whole among segments of `length` tokens.

    A cut pays once the outputs of the tokens beyond one segment take longer than building the state of one segment.
    """
    return length * 5 // 4


def segment_length(call: OpCall, blocks: int, at_once: int, price: Price) -> int:
    """Returns the tokens of a segment; T or more if sequences stay whole.

    If the lengths of packed sequences are not known, the price for lengths near the mean is multiplied by the price for
    one sequence that has all tokens. The former counts twice, as when `auto` picks a backend.

    Args:
        blocks: number of blocks that compute one sequence.
        at_once: number of blocks that the device runs at once.
    """
    T, call = call.dims["T"], _without_states(call)
    unknown = call.variable_length and call.longest is None
    cases = (call, call, replace(call, longest=T)) if unknown else (call,)

    def weighed(length: int) -> float:
        return math.prod(price(case, length) for case in cases)

    best = min(_lengths(call, blocks, at_once), key=weighed, default=T)
    return best if weighed(best) < WORTH_CUTTING ** len(cases) * weighed(T) else T


def _without_states(call: OpCall) -> OpCall:
    """Returns the call without states and checkpoints. The cut of a call does not depend on them, and so the bits of o
    are the same whether a caller asks for them or not.
    """
    scalars = {**call.scalars, "output_final_state": False}
    return replace(call, state_dtype=None, checkpoints=False, scalars=scalars)


def _lengths(call: OpCall, blocks: int, at_once: int) -> list[int]:
    """Returns the lengths of segments that are priced.

    In a batch, the blocks of all segments fill the device once or a few times, or there are fewer segments, which takes
    less time to scan. Of packed sequences, a segment has the share of a block in all tokens, or it is as long as most
    sequences of about mean length.
    """
    T, N = call.dims["T"], call.dims["N"]
    chunks = ceil_div(T, CHUNK)
    if chunks < 2 or N * blocks == 0:
        return []
    if call.variable_length:
        least = LEAST_UNKNOWN if call.longest is None else 1
        units = {max(least, ceil_div(chunks * blocks, at_once)), max(least, ceil_div(3 * chunks, 2 * N))}
    else:
        once = at_once // (N * blocks)
        numbers = (min(once, int(SCANNED * chunks**0.5)), *(n * once for n in range(1, MOST_WAVES + 1)))
        units = {ceil_div(chunks, min(chunks, number)) for number in numbers if number > 1}
    return [CHUNK * unit for unit in units]


def by_rows(
    call: OpCall,
    blocks: int,
    at_once: int,
    whole: Callable[[OpCall], AnyPlan],
    cut: Callable[[OpCall], AnyPlan],
    price: Callable[[OpCall, AnyPlan], float],
) -> list[tuple[OpCall, AnyPlan]]:
    """Returns the plans of the rows of a batch, each with the call of these rows.

    A few blocks that do not fit beside the others would take as long as all others together. So if some rows fill the
    device and a cut suits the remaining rows better, only the remaining rows are cut.

    Args:
        blocks, at_once: as in `segment_length`.
        whole, cut: plan calls whose sequences stay whole, and calls whose sequences may be cut.
        price: takes a call and its plan, returns seconds.
    """
    together = [(call, cut(call))]
    rows = _rows_in_one_pass(call, blocks, at_once)
    if rows == 0:
        return together
    first, others = (replace(call, dims={**call.dims, "B": n, "N": n}) for n in (rows, call.dims["B"] - rows))
    apart = [(first, whole(first)), (others, cut(others))]
    if apart[1][1] == whole(others):
        return together
    return min(together, apart, key=lambda plans: sum(price(_without_states(rows), plan) for rows, plan in plans))


def _rows_in_one_pass(call: OpCall, blocks: int, at_once: int) -> int:
    """Returns the number of rows that fill the device, if others are left over that do not; otherwise 0."""
    B = call.dims["B"]
    rows = B * blocks // at_once * at_once // max(1, blocks)  # they fill the device, or fill it several times
    return rows if not call.variable_length and call.batch_invariant is None and 0 < rows < B else 0
