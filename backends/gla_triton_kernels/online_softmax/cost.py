"""Predicts the seconds of a softmax or its gradient; ../cost.py explains how the time of a call is counted. Constants:

launch, host      seconds between the starts of two kernels, and seconds of the host for a call
bandwidth         bytes a second
block_bandwidth   bytes a second of one block
"""

from __future__ import annotations

from gla_core.dispatch.backend import Constants, OpCall
from gla_triton_kernels.cost import in_all
from gla_triton_kernels.online_softmax.plan import Kernel, plan_one_pass
from gla_triton_kernels.online_softmax.rows import rows_of_call

MOST_IN_CACHE = 2**17
"""The size in bytes up to which a row is still in the L2 cache at its second read, while blocks fill an H200."""
UNALIGNED = 3
"""The time of rows that are loaded column by column, relative to aligned rows, on an H200 with 50257 columns."""


def one_pass(call: OpCall, c: Constants) -> float:
    """Returns the seconds of a call with one block per row.

    A block reads its row once if the row fits on chip or in the cache, and twice if not, and writes it once. With many
    rows, the bandwidth of memory is the limit.
    """
    rows, read = rows_of_call(call), _tensors_read(call)
    row = rows.N * rows.itemsize
    once = plan_one_pass(rows).kernel is Kernel.ON_CHIP or read * row <= MOST_IN_CACHE
    row *= (read if once else 2 * read) + 1
    return in_all(call, c["launch"] + max(row / c["block_bandwidth"], rows.R * row / c["bandwidth"]), c["host"])


def splits(call: OpCall, c: Constants) -> float:
    """Returns the seconds of a call with rows in splits: two kernels read x, and dy, and one of them writes the result.

    Columns that are loaded one by one take `UNALIGNED` times as long.
    """
    rows = rows_of_call(call)
    size = rows.R * rows.N * rows.itemsize * (UNALIGNED if rows.vector == 1 else 1)
    return in_all(call, 2 * c["launch"] + (2 * _tensors_read(call) + 1) * size / c["bandwidth"], c["host"])


def _tensors_read(call: OpCall) -> int:
    """Returns the number of tensors that a call reads: x, and dy for a gradient."""
    return 2 if call.op == "online_softmax_bwd" else 1
