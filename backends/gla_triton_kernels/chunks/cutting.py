"""Decides how sequences are cut into segments: it computes the prices of a few lengths and takes the lowest price.

A price is the predicted seconds of a plan on the device. The cost.py of a family of ops computes prices for this module
and for its cost models, which add the time of the host.

B batch   T tokens   N sequences
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from gla_core.dispatch.backend import CHUNK, Constants, OpCall, worst_case
from gla_core.dispatch.tensors import ceil_div, checkpoint_rows
from gla_triton_kernels.chunks.price import AnyPlan, PriceFunction
from gla_triton_runtime.architecture import Gpu

H200: Constants = {"launch": 1.5e-6, "bandwidth": 3.8e12, "step": 1.0}
"""The constants for prices of cuts, on every GPU. A calibration does not change them, because it would change the cuts,
and therefore the bits of the results."""
WORTH_CUTTING = 0.9
"""Sequences are cut if the price with a cut is below this share of the price without one. The limit is below 1 because
the host has to launch more kernels."""
MOST_WAVES = 3
"""The sequences of a batch are cut into at most this number of waves of blocks."""
SCANNED = 4
"""About the square root of (time of a chunk / time to scan a segment). Because a scan goes through segments one after
the other, a sequence takes the least time with SCANNED * sqrt(number of chunks) segments."""
LEAST_UNKNOWN = 4
"""The least number of chunks of a segment of packed sequences whose lengths are not known. Shorter segments would cut
most sequences of many calls, which would cost time."""
INTERPRETED_SEGMENT = 32
"""Tokens of a segment if kernels are interpreted; the number is small so that short sequences are cut as well."""


def most_segments(N: int, T: int, length: int, packed: bool) -> int:
    """Returns the number of segments of `length` tokens of N sequences of T tokens.

    For packed sequences, T counts all tokens, and the result is an upper bound.
    """
    return (1 if packed else N) * checkpoint_rows(T, N, length, packed)


def uncut_length(length: int) -> int:
    """Returns the length of the longest packed sequence that stays whole among segments of `length` tokens.

    A cut pays if the outputs of the tokens after the first segment take longer than the state of one segment.
    """
    return length * 5 // 4


def segment_length(
    call: OpCall, gpu: Gpu, blocks: int, at_once: int, plan: Callable[[int], AnyPlan], prices: PriceFunction[AnyPlan]
) -> int:
    """Returns the tokens of a segment; T or more if sequences stay whole.

    If the lengths of packed sequences are not known, lengths are compared by a product of prices: the square of the
    price for sequences near the mean length, times the price for one sequence with all tokens. `auto` weighs them in
    the same way when it picks a backend.

    Args:
        blocks: number of blocks that compute one sequence.
        at_once: number of blocks that the device runs at once.
        plan: takes the tokens of a segment, and returns the plan. With T tokens or more, sequences stay whole.
    """
    T, call = call.dims["T"], _without_states(call)
    lengths, at_worst = _lengths(call, blocks, at_once), worst_case(call)
    if not lengths:
        return T

    def weighed(length: int) -> float:
        planned = plan(length)
        expected = _price(call, planned, gpu, prices)
        return expected if at_worst is None else expected * expected * _price(at_worst, planned, gpu, prices)

    totals = {length: weighed(length) for length in (T, *lengths)}
    best = min(lengths, key=totals.__getitem__)
    limit = WORTH_CUTTING if at_worst is None else WORTH_CUTTING**3
    return best if totals[best] < limit * totals[T] else T


def _price(call: OpCall, plan: AnyPlan, gpu: Gpu, prices: PriceFunction[AnyPlan]) -> float:
    """Returns the price of a plan on a GPU, with the constants of an H200."""
    return sum(prices(call, plan, {**H200, "multiprocessors": float(gpu.multiprocessors)}))


def _without_states(call: OpCall) -> OpCall:
    """Returns the call without states and checkpoints.

    Cuts must not depend on states and checkpoints: the bits of o are then the same whether a caller asks for them or
    not.
    """
    scalars = {**call.scalars, "output_final_state": False}
    return replace(call, state_dtype=None, checkpoints=False, scalars=scalars)


def _lengths(call: OpCall, blocks: int, at_once: int) -> list[int]:
    """Returns candidates for the length of segments, in tokens.

    For a batch, they are the lengths with which the blocks of all segments fill the device once or a few times, and one
    length that may give fewer segments, which take less time to scan. For packed sequences there are two candidates:
    the length with which the blocks of all tokens fill the device once, and 1.5 times the mean length, which keeps most
    sequences whole.
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
    gpu: Gpu,
    blocks: int,
    at_once: int,
    whole: Callable[[OpCall], AnyPlan],
    cut: Callable[[OpCall], AnyPlan],
    prices: PriceFunction[AnyPlan],
) -> list[tuple[OpCall, AnyPlan]]:
    """Returns the plans of the rows of a batch, each with the call of these rows.

    If a few blocks do not fit on the device beside the others, they take as long as all others together. So if some
    rows fill the device, this function also considers a plan that cuts only the remaining rows, and takes the cheaper
    plan.

    Args:
        blocks, at_once: see `segment_length`.
        whole, cut: functions that plan a call. With `whole`, sequences stay whole; with `cut`, they may be cut.
    """
    together = [(call, cut(call))]
    rows = _rows_in_one_pass(call, blocks, at_once)
    if rows == 0:
        return together
    first, others = (replace(call, dims={**call.dims, "B": n, "N": n}) for n in (rows, call.dims["B"] - rows))
    apart = [(first, whole(first)), (others, cut(others))]
    if apart[1][1] == whole(others):
        return together
    return apart if are_cheaper(apart, together, gpu, prices) else together


def are_cheaper(
    plans: list[tuple[OpCall, AnyPlan]], others: list[tuple[OpCall, AnyPlan]], gpu: Gpu, prices: PriceFunction[AnyPlan]
) -> bool:
    """Returns whether the price of some plans is below the price of others."""
    price, limit = (
        sum(_price(_without_states(rows), plan, gpu, prices) for rows, plan in each) for each in (plans, others)
    )
    return price < limit


def _rows_in_one_pass(call: OpCall, blocks: int, at_once: int) -> int:
    """Returns the number of rows that fill the device; 0 if no rows would remain or the call must not be divided."""
    B = call.dims["B"]
    rows = B * blocks // at_once * at_once // max(1, blocks)  # they fill the device, or fill it several times
    return rows if not call.variable_length and call.batch_invariant is None and 0 < rows < B else 0
