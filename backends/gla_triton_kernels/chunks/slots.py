"""Finds the slots of a pool that packed sequences read and write, for ops whose states are in a pool.

A serving engine names slots in up to five tensors; the files of such ops in gla_core/ops/ explain each of them. The
kernel that computes the segments of packed sequences reduces them to four numbers for each sequence, so that other
kernels need no further conditions:

    read     the slot of the initial state of the sequence, or -1 if it starts from 0
    write    the slot of its final state, or -1
    kept     the slot of its checkpoint, or -1
    before   the number of tokens before its checkpoint, or -1

N sequences   P slots of the pool   BI sequences of a program
"""

# pyright: reportGeneralTypeIssues=false
from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from gla_triton_kernels.slots import slot_or_none


class Slots(NamedTuple):
    """The slots that a serving engine names, with the size of its pool.

    Attributes:
        read: slots of initial states, [N], integers.
        write: slots of final states, [N], integers; None stands for `read`.
        has_state: whether a sequence has an initial state, [N], bool; None if every sequence has one.
        before, kept: numbers of tokens before checkpoints, and slots of checkpoints, [N]; None without checkpoints.
        P, pad: the number of slots of the pool, and the slot that is never used.
    """

    read: Tensor
    write: Tensor | None
    has_state: Tensor | None
    before: Tensor | None
    kept: Tensor | None
    P: int
    pad: int


def slot_arguments(slots: Slots | None, numbers: Tensor | None) -> dict[str, Any]:
    """Returns arguments of a kernel that calls `find_slots`; `numbers` [N, 4] receives the four numbers."""
    named: dict[str, Tensor | None] = dict.fromkeys(("read", "write", "has_state", "before", "kept"))
    if slots is not None:
        named = {name: getattr(slots, name) for name in named}
    return {
        **{f"{name}_ptr": x for name, x in named.items()},
        "numbers_ptr": numbers,
        "P": 0 if slots is None else slots.P,
        "PAD": 0 if slots is None else slots.pad,
        **{f"stride_{name}": 0 if x is None else x.stride(0) for name, x in named.items()},
    }


@triton.jit
def find_slots(pointers, strides, numbers_ptr, P, PAD, n, tokens, N):
    """Writes the four numbers of the sequences n < N.

    Args:
        pointers: to the slots that are read [N], and to write, has_state, before and kept, each [N] or None.
        strides: of each of them.
        numbers_ptr: [N, 4].
        P, PAD: the number of slots of the pool, and the slot that is never used.
        n, tokens: sequences [BI], and their numbers of tokens [BI].
    """
    read_ptr, write_ptr, has_state_ptr, before_ptr, kept_ptr = pointers
    stride_read, stride_write, stride_has_state, stride_before, stride_kept = strides
    there = n < N
    n = n.to(tl.int64)
    read = slot_or_none(tl.load(read_ptr + n * stride_read, mask=there, other=-1), P, PAD)
    write = read
    if write_ptr is not None:
        write = slot_or_none(tl.load(write_ptr + n * stride_write, mask=there, other=-1), P, PAD)
    if has_state_ptr is not None:
        read = tl.where(tl.load(has_state_ptr + n * stride_has_state, mask=there, other=0) != 0, read, -1)
    row = numbers_ptr + n * 4
    tl.store(row, read, mask=there)
    tl.store(row + 1, write, mask=there)
    if kept_ptr is not None:
        before = tl.load(before_ptr + n * stride_before, mask=there, other=0)
        kept = slot_or_none(tl.load(kept_ptr + n * stride_kept, mask=there, other=-1), P, PAD)
        inside = (kept >= 0) & (before > 0) & (before < tokens)
        tl.store(row + 2, tl.where(inside, kept, -1), mask=there)
        tl.store(row + 3, tl.where(inside, before, -1).to(tl.int32), mask=there)
