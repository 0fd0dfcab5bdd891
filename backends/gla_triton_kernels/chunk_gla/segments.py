"""Sequences cut into segments that are computed side by side, and what is computed of them.

Every segment but a sequence's last has `length` tokens. The host knows the segments of B sequences of T tokens. Of
packed ones it knows the numbers of sequences N and of tokens T alone, and their boundaries are computed on the device.
Segment m of sequence n, of the rows c_n to c_{n+1}, is segment

    i = n + c_n // length + m

of N + T // length, some of which are empty: no two sequences meet, and no sum over sequences is needed. Checkpoints are
laid out in the same way. Segment i begins at row

    max over n of  min(c_n % length + (i - n) length, c_{n+1}),        and not before c_0

Where blocks start in the order of segments a long one may start last, and run alone; `order` has the longest first. Of
those the ones that another segment of their sequence follows come first, and among these the first ones of their
sequences: what is done for these alone is done for the first places of the order, and `counts` says for how many.

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
        counts: of packed sequences that are cut, [2] int32: segments that another one follows, and sequences that have
            such segments.
        most: of packed sequences, how many segments at most are followed by another one.
        launches: the one that computes bounds, order and counts.
    """

    length: int
    count: int
    per_sequence: int
    cu_seqlens: Tensor | None = None
    bounds: Tensor | None = None
    order: Tensor | None = None
    counts: Tensor | None = None
    most: int = 0
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
    N = len(cu_seqlens) - 1
    order = torch.empty(N, dtype=torch.int32, device=cu_seqlens.device)
    tensors, sizes = (cu_seqlens, order, o), (T, N, _width(o))
    launch = Launch(_order_kernel, (_programs(N, o), 1, 1), tensors, (), (*sizes, BI, BN, BLOCK))
    return Segments(T + 1, N, 0, cu_seqlens, cu_seqlens, order, launches=(launch,))


def cut(B: int, T: int, length: int, cu_seqlens: Tensor | None, o: Tensor | None = None) -> Segments:
    """Cut sequences into segments of `length` tokens.

    Args:
        o: of packed sequences, [1, T, ...], contiguous: rows that belong to no sequence are made 0 beside; None leaves
            that to another launch.
    """
    if cu_seqlens is None:
        per_sequence = -(-T // length)
        return Segments(length, B * per_sequence, per_sequence)
    N = len(cu_seqlens) - 1
    count = N + T // length
    bounds, order, counts = (cu_seqlens.new_empty(n, dtype=torch.int32) for n in (count + 1, count, 2))
    tensors, sizes = (cu_seqlens, bounds, order, counts, o), (T, N, count, length, _width(o))
    launch = Launch(_lay_out_kernel, (_programs(count + 1, o), 1, 1), tensors, (), (*sizes, BI, BN, BLOCK))
    return Segments(length, count, 0, cu_seqlens, bounds, order, counts, max(T - 1, 0) // length, (launch,))


BI, BN = 16, 256


def _programs(places: int, o: Tensor | None) -> int:
    """That a launch takes for so many places of an order, and to clear what belongs to no sequence."""
    return max(-(-places // BI), 0 if o is None else -(-o.shape[1] // ROWS))


def _width(o: Tensor | None) -> int:
    """Numbers of a token of o [1, T, ...]."""
    return 0 if o is None else o[0, 0].numel()


@triton.jit(do_not_specialize=["T", "N", "D"])
def _order_kernel(
    cu_seqlens_ptr,  # [N+1]
    order_ptr,  # [N]
    o_ptr,  # [T, D] or None
    T,
    N,
    D,
    BI: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
):
    """Program: the places of BI sequences in the order; of two as long the first comes first."""
    if o_ptr is not None:
        clear_rows(o_ptr, D, tl.load(cu_seqlens_ptr), tl.load(cu_seqlens_ptr + N), T, BD)
    i = tl.program_id(0) * BI + tl.arange(0, BI)  # [BI]
    if tl.program_id(0) * BI >= N:
        return
    tokens = _tokens(cu_seqlens_ptr, i, N)[:, None]  # [BI, 1]
    place = tl.zeros([BI], tl.int32)
    for n0 in range(0, N, BN):
        n = n0 + tl.arange(0, BN)  # [BN]
        others = _tokens(cu_seqlens_ptr, n, N)[None, :]  # [1, BN], -1 behind all sequences
        as_long = (others == tokens) & (n[None, :] < i[:, None])  # [BI, BN]
        place += tl.sum(((others > tokens) | as_long).to(tl.int32), 1)
    tl.store(order_ptr + place, i, mask=i < N)


@triton.jit
def _tokens(cu_seqlens_ptr, n, N):
    """Of sequences n; -1 where there is none."""
    start = tl.load(cu_seqlens_ptr + n, mask=n < N, other=1)
    end = tl.load(cu_seqlens_ptr + n + 1, mask=n < N, other=0)
    return end - start


@triton.jit(do_not_specialize=["T", "N", "count", "length", "D"])
def _lay_out_kernel(
    cu_seqlens_ptr,  # [N+1]
    bounds_ptr,  # [I+1]
    order_ptr,  # [I]
    counts_ptr,  # [2]
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

    A followed segment comes behind the first ones of cut sequences, unless it is one of them, and behind the followed
    ones before it; the last one of a sequence behind all followed ones and the longer last ones; and an empty segment
    behind all that are not.
    """
    if o_ptr is not None:
        clear_rows(o_ptr, D, tl.load(cu_seqlens_ptr), tl.load(cu_seqlens_ptr + N), T, BD)
    i = tl.program_id(0) * BI + tl.arange(0, BI)  # [BI]
    if tl.program_id(0) * BI > count:
        return
    bound = tl.zeros([BI], tl.int64) + tl.load(cu_seqlens_ptr)
    last_tokens = tl.zeros([BI], tl.int32)  # of a segment that is its sequence's last, else 0
    is_followed = tl.zeros([BI], tl.int32)  # 1, or 2 where it is its sequence's first
    followed_before = tl.zeros([BI], tl.int32)
    cut_before = tl.zeros([BI], tl.int32)
    not_empty_before = tl.zeros([BI], tl.int32)
    followed, cut, not_empty = 0, 0, 0
    for n0 in range(0, N, BN):
        start, end, first, own_followed, rest = _cut(cu_seqlens_ptr, n0 + tl.arange(0, BN), N, length)  # [BN]
        own = i[:, None] - first[None, :]  # [BI, BN], of which segment of a sequence i would be
        begin = own.to(tl.int64) * length + start[None, :]  # [BI, BN]
        bound = tl.maximum(bound, tl.max(tl.minimum(begin, end[None, :]), 1))
        is_cut = (own_followed > 0).to(tl.int32)  # [BN]
        segments = own_followed + (rest > 0).to(tl.int32)  # [BN]
        kind = tl.where(own == 0, 2, 1)  # [BI, BN]
        is_followed += tl.sum(tl.where((own >= 0) & (own < own_followed[None, :]), kind, 0), 1)
        last_tokens += tl.sum(tl.where(own == own_followed[None, :], rest[None, :], 0), 1)
        followed_before += tl.sum(tl.minimum(tl.maximum(own, 0), own_followed[None, :]), 1)
        cut_before += tl.sum(tl.where(own > 0, is_cut[None, :], 0), 1)
        not_empty_before += tl.sum(tl.minimum(tl.maximum(own, 0), segments[None, :]), 1)
        followed += tl.sum(own_followed)
        cut += tl.sum(is_cut)
        not_empty += tl.sum(segments)
    tl.store(bounds_ptr + i, bound.to(tl.int32), mask=i <= count)
    if tl.program_id(0) == 0:
        tl.store(counts_ptr, followed)
        tl.store(counts_ptr + 1, cut)
    place = followed + tl.zeros([BI], tl.int32)  # of last ones
    for n0 in range(0, N, BN):
        _, _, first, own_followed, rest = _cut(cu_seqlens_ptr, n0 + tl.arange(0, BN), N, length)  # [BN]
        before = (first + own_followed)[None, :] < i[:, None]  # [BI, BN]
        as_long = (rest[None, :] == last_tokens[:, None]) & before
        place += tl.sum(((rest[None, :] > last_tokens[:, None]) | as_long).to(tl.int32), 1)
    of_followed = tl.where(is_followed == 2, cut_before, cut + followed_before - cut_before)
    empty = not_empty + i - not_empty_before
    place = tl.where(is_followed > 0, of_followed, tl.where(last_tokens > 0, place, empty))
    tl.store(order_ptr + place, i, mask=i < count)


@triton.jit
def _cut(cu_seqlens_ptr, n, N, length):
    """Of sequences n [BN]: first row, end, place of the first segment, followed segments, and tokens of the last."""
    start = tl.load(cu_seqlens_ptr + n, mask=n < N, other=0).to(tl.int64)
    end = tl.load(cu_seqlens_ptr + n + 1, mask=n < N, other=0).to(tl.int64)
    tokens = (end - start).to(tl.int32)
    followed = tl.maximum(tokens - 1, 0) // length
    return start, end, n + (start // length).to(tl.int32), followed, tokens - followed * length
