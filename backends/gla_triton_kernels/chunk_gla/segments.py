"""Sequences cut into segments that are computed side by side, and what is computed of them.

Every segment but a sequence's last has `length` tokens. The host knows the segments of B sequences of T tokens. Of
packed ones it knows the numbers of sequences N and of tokens T alone, and their boundaries are computed on the device.
Segment m of sequence n, of the rows c_n to c_{n+1}, is segment

    i = n + c_n // length + m

of N + T // length, some of which are empty: no two sequences meet, and no sum over sequences is needed. Checkpoints are
laid out in the same way. Segment i begins at row

    max over n of  min(c_n % length + (i - n) length, c_{n+1}),        and not before c_0

Where blocks start in the order of segments a long one may start last, and run alone; `order` has the longest first. A
segment with another one of its sequence after it is full, and at most T // length are full: so what is done for these
alone is done for so many places of the order, however many sequences there are.

N sequences   T tokens   I segments   BI segments a program   BN sequences at a time   D numbers of a token of o
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from gla_core.dispatch.backend import swapped
from gla_triton_kernels.chunk_gla.padding import BLOCK, ROWS, clear_rows
from gla_triton_kernels.runtime.launch import Launch


class Recurrence(NamedTuple):
    """What is carried through sequences: states, or their gradients backwards in time.

        S  <-  diag(exp g_t) S + k_t^T v_t                      for t from first to last
        dS <-  diag(exp g_t) (dS + scale * q_t^T do_t)          for t from last to first

    The order of segments, first and last among them, is that in which a recurrence meets them. Of grouped queries, dS
    is that of a key/value head, and takes the products of all its query heads.

    Attributes:
        left: k [B, T, H, K], or q [B, T, Hq, K].
        right: v [B, T, H, V], or do [B, T, Hq, V].
        g: log gates [B, T, H, K]; None without.
        before: [N, H, K, V], values or keys contiguous: the initial state, or the gradient of the final one; None is 0.
        after: [N, H, K, V], contiguous: takes the final state, or the gradient of the initial one; None if nobody asks.
        scale: of the products backwards; forwards there is none.
        backwards: whether it goes from the last token to the first.
    """

    left: Tensor
    right: Tensor
    g: Tensor | None
    before: Tensor | None
    after: Tensor | None
    scale: float = 1.0
    backwards: bool = False


@dataclass(frozen=True, slots=True)
class Segments:
    """Segments in order, sequence by sequence.

    Attributes:
        length: tokens of a segment; the last one of a sequence may have fewer.
        count: how many there are; of packed sequences with the empty ones.
        per_sequence: how many a sequence has; 0 of packed sequences.
        cu_seqlens: of packed sequences, where each begins.
        bounds: of packed sequences, [count+1]: segment i is rows bounds[i] to bounds[i+1].
        order: of packed sequences, [count] int32: all segments, the longest first.
        full: of packed sequences, how many segments at most have `length` tokens.
        launches: the one that computes bounds and order.
    """

    length: int
    count: int
    per_sequence: int
    cu_seqlens: Tensor | None = None
    bounds: Tensor | None = None
    order: Tensor | None = None
    full: int = 0
    launches: tuple[Launch, ...] = ()


def state_strides(x: Tensor | None) -> tuple[int | None, ...]:
    """Strides of states [N, H, K, V]; None for that of values, or of keys, where they lie together."""
    if x is None:
        return 0, 0, 0, None
    n, h, k, v = x.stride()
    return (n, h, None, v) if swapped(x) else (n, h, k, None)


def whole(B: int, T: int, cu_seqlens: Tensor | None, o: Tensor | None = None) -> Segments:
    """Each sequence as one segment, longer than any; the arguments are those of `cut`."""
    if cu_seqlens is None:
        return Segments(T + 1, B, 1)
    return _laid_out(T, T + 1, len(cu_seqlens) - 1, cu_seqlens, None, o)


def cut(B: int, T: int, length: int, cu_seqlens: Tensor | None, o: Tensor | None = None) -> Segments:
    """Cut sequences into segments of `length` tokens.

    Args:
        o: of packed sequences, [1, T, ...], contiguous: rows that belong to no sequence are made 0 beside; None leaves
            that to another launch.
    """
    if cu_seqlens is None:
        per_sequence = -(-T // length)
        return Segments(length, B * per_sequence, per_sequence)
    count = len(cu_seqlens) - 1 + T // length
    bounds = torch.empty(count + 1, dtype=torch.int32, device=cu_seqlens.device)
    return _laid_out(T, length, count, cu_seqlens, bounds, o)


def _laid_out(T: int, length: int, count: int, cu_seqlens: Tensor, bounds: Tensor | None, o: Tensor | None) -> Segments:
    """Segments of packed sequences; the bounds of whole sequences are the offsets themselves."""
    order = torch.empty(count, dtype=torch.int32, device=cu_seqlens.device)
    BI, BN = 16, 256
    programs = max(-(-(count + 1) // BI), 0 if o is None else -(-T // ROWS))
    sizes = (T, len(cu_seqlens) - 1, count, length, 0 if o is None else o.numel() // T)
    launch = Launch(_lay_out_kernel, (programs, 1, 1), (cu_seqlens, bounds, order, o), (), (*sizes, BI, BN, BLOCK))
    bounds = cu_seqlens if bounds is None else bounds
    return Segments(length, count, 0, cu_seqlens, bounds, order, T // length, (launch,))


@triton.jit(do_not_specialize=["T", "N", "count", "length", "D"])
def _lay_out_kernel(
    cu_seqlens_ptr,  # [N+1]
    bounds_ptr,  # [I+1], or None where segments are whole sequences
    order_ptr,  # [I]
    o_ptr,  # [T, D] or None
    T,
    N,
    count,
    length,
    D,
    BI: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
):
    """Program: BI of the bounds, and the places of these segments in the order; of two as long the first comes first.

    A sequence has full segments, and a rest that has fewer tokens. So a full segment comes behind the full ones before
    it, a rest behind all full ones and the longer rests, and an empty segment behind all that are not.
    """
    if o_ptr is not None:
        clear_rows(o_ptr, D, tl.load(cu_seqlens_ptr), tl.load(cu_seqlens_ptr + N), T, BD)
    i = tl.program_id(0) * BI + tl.arange(0, BI)  # [BI]
    if tl.program_id(0) * BI > count:
        return
    bound = tl.zeros([BI], tl.int64) + tl.load(cu_seqlens_ptr)
    tokens = tl.zeros([BI], tl.int32)
    full_before = tl.zeros([BI], tl.int32)
    not_empty_before = tl.zeros([BI], tl.int32)
    full, not_empty = 0, 0
    for n0 in range(0, N, BN):
        start, end, first, fulls, rest = _cut(cu_seqlens_ptr, n0 + tl.arange(0, BN), N, length)  # [BN]
        own = i[:, None] - first[None, :]  # [BI, BN], of which segment of a sequence i would be
        begin = own.to(tl.int64) * length + start[None, :]  # [BI, BN]
        bound = tl.maximum(bound, tl.max(tl.minimum(begin, end[None, :]), 1))
        segments = fulls + (rest > 0).to(tl.int32)  # [BN]
        has = tl.where(own == fulls[None, :], rest[None, :], length)  # [BI, BN]
        tokens += tl.sum(tl.where((own >= 0) & (own < segments[None, :]), has, 0), 1)
        full_before += tl.sum(tl.minimum(tl.maximum(own, 0), fulls[None, :]), 1)
        not_empty_before += tl.sum(tl.minimum(tl.maximum(own, 0), segments[None, :]), 1)
        full += tl.sum(fulls)
        not_empty += tl.sum(segments)
    if bounds_ptr is not None:
        tl.store(bounds_ptr + i, bound.to(tl.int32), mask=i <= count)
    place = full + tl.zeros([BI], tl.int32)  # of rests
    for n0 in range(0, N, BN):
        _, _, first, fulls, rest = _cut(cu_seqlens_ptr, n0 + tl.arange(0, BN), N, length)  # [BN]
        as_long = (rest[None, :] == tokens[:, None]) & ((first + fulls)[None, :] < i[:, None])  # [BI, BN]
        place += tl.sum(((rest[None, :] > tokens[:, None]) | as_long).to(tl.int32), 1)
    place = tl.where(tokens == length, full_before, place)
    place = tl.where(tokens == 0, not_empty + i - not_empty_before, place)
    tl.store(order_ptr + place, i, mask=i < count)


@triton.jit
def _cut(cu_seqlens_ptr, n, N, length):
    """Of sequences n [BN]: first row, end, place of the first segment, full segments, and tokens of the rest."""
    start = tl.load(cu_seqlens_ptr + n, mask=n < N, other=0).to(tl.int64)
    end = tl.load(cu_seqlens_ptr + n + 1, mask=n < N, other=0).to(tl.int64)
    tokens = (end - start).to(tl.int32)
    return start, end, n + (start // length).to(tl.int32), tokens // length, tokens % length
