"""Sequences cut into segments that are computed side by side, and what is computed of them.

Every segment but a sequence's last has `length` tokens. The host knows the segments of B sequences of T tokens. Of
packed ones it knows the numbers of sequences N and of tokens T alone, and their boundaries are computed on the device;
those of up to `uncut` tokens are not cut. Segment m of sequence n, of the rows c_n to c_{n+1}, is segment

    i = n + c_n // length + m

of N + T // length, some of which are empty: no two sequences meet, and no sum over sequences is needed. Checkpoints are
laid out in the same way.

Where blocks start in the order of segments a long one may start last, and run alone; `order` has the longest first. Of
those the ones that another segment of their sequence follows come first, and among these the first ones of their
sequences: what is done for these alone is done for the first places of the order, and `counts` says for how many. All
that a block asks about its segment stands in its place, so that it waits for memory once (common.py: `segment_at`).

N sequences   T tokens   I segments   BI segments a program   BN sequences at a time   D numbers of a token of o
"""

# pyright: reportGeneralTypeIssues=false
from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from gla_core.dispatch.backend import swapped
from gla_triton_kernels.chunk_gla.cutting import most_segments
from gla_triton_kernels.chunk_gla.shared.padding import BLOCK, ROWS, clear_rows
from gla_triton_kernels.runtime.launch import Launch


class Recurrence(NamedTuple):
    """The tensors of a recurrence through sequences: of states, or of their gradients backwards in time.

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
        uncut: tokens up to which a packed sequence is one segment.
        count: how many there are; of packed sequences with the empty ones.
        per_sequence: how many a sequence has; 0 of packed sequences.
        cu_seqlens: of packed sequences, where each begins.
        order: of packed sequences, [count, 5] int32: all segments, the longest first; of each its number i, its first
            row and end, and those of its sequence. Of an empty one they are all the same.
        counts: of packed sequences that are cut, [2] int32: segments that another one follows, and sequences that have
            such segments. Nothing is written there where the longest are not the first.
        most: of packed sequences, how many segments at most are followed by another one.
        launches: the one that computes order and counts.
    """

    length: int
    uncut: int
    count: int
    per_sequence: int
    cu_seqlens: Tensor | None = None
    order: Tensor | None = None
    counts: Tensor | None = None
    most: int = 0
    launches: tuple[Launch, ...] = ()


def state_strides(prefix: str, x: Tensor | None) -> dict[str, int | None]:
    """Returns the strides of states x [N, H, K, V] as a kernel's arguments, whose names begin with `prefix`.

    The stride of values is None, or that of keys where they lie together. All are 0 or None where x is None.
    """
    n, h, k, v = (0, 0, 0, 0) if x is None else x.stride()
    k, v = (None, v) if x is not None and swapped(x) else (k, None)
    return {f"{prefix}n": n, f"{prefix}h": h, f"{prefix}k": k, f"{prefix}v": v}


def lengths_of(T: int, segments: Segments) -> dict[str, int]:
    """Returns the lengths of sequences of T tokens and of their segments as a kernel's arguments."""
    return {"T": T, "segment": segments.length, "segments": segments.per_sequence}


def whole(B: int, T: int, cu_seqlens: Tensor | None, o: Tensor | None = None) -> Segments:
    """Takes each sequence as one segment, longer than any; the arguments are those of `cut`."""
    if cu_seqlens is None:
        return Segments(T + 1, T, B, 1)
    N = len(cu_seqlens) - 1
    order = cu_seqlens.new_empty(N, 5, dtype=torch.int32)
    arguments = {
        "cu_seqlens_ptr": cu_seqlens,
        "order_ptr": order,
        "o_ptr": o,
        "T": T,
        "N": N,
        "D": _width(o),
        "BI": BI,
        "BN": BN,
        "BD": BLOCK,
    }
    launch = Launch(_order_kernel, (_programs(N, o), 1, 1), arguments, ONE_WARP)
    return Segments(T + 1, T, N, 0, cu_seqlens, order, launches=(launch,))


def cut(
    B: int,
    T: int,
    length: int,
    uncut: int,
    cu_seqlens: Tensor | None,
    o: Tensor | None = None,
    longest_first: bool = True,
) -> Segments:
    """Cuts sequences into segments of `length` tokens.

    Args:
        uncut: as of `Segments`, at least length.
        o: of packed sequences, [1, T, ...], contiguous: rows that belong to no sequence are made 0 beside; None leaves
            that to another launch.
        longest_first: else the order of packed segments is that of their numbers, for blocks that all take as long.
    """
    if cu_seqlens is None:
        return Segments(length, length, most_segments(B, T, length, False), most_segments(1, T, length, False))
    N = len(cu_seqlens) - 1
    count = most_segments(N, T, length, True)
    order, counts = (cu_seqlens.new_empty(shape, dtype=torch.int32) for shape in ((count, 5), (2,)))
    arguments = {
        "cu_seqlens_ptr": cu_seqlens,
        "order_ptr": order,
        "counts_ptr": counts,
        "o_ptr": o,
        "T": T,
        "N": N,
        "count": count,
        "length": length,
        "uncut": uncut,
        "D": _width(o),
        "LONGEST_FIRST": longest_first,
        "BI": BI,
        "BN": BN,
        "BD": BLOCK,
    }
    launch = Launch(_lay_out_kernel, (_programs(count, o), 1, 1), arguments, ONE_WARP)
    return Segments(length, uncut, count, 0, cu_seqlens, order, counts, max(T - 1, 0) // length, (launch,))


BI, BN = 4, 64
ONE_WARP = {"num_warps": 1}
"""Sums over sequences then need no barrier."""


def _programs(places: int, o: Tensor | None) -> int:
    """Returns the programs of a launch for `places` places of an order, and to clear what belongs to no sequence."""
    return max(-(-places // BI), 0 if o is None else -(-o.shape[1] // ROWS))


def _width(o: Tensor | None) -> int:
    """Numbers of a token of o [1, T, ...]."""
    return 0 if o is None else o[0, 0].numel()


@triton.jit(do_not_specialize=["T", "N", "D"])
def _order_kernel(
    cu_seqlens_ptr,  # [N+1]
    order_ptr,  # [N, 5]
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
    start, end = _rows(cu_seqlens_ptr, i, N)  # [BI]
    tokens = (end - start)[:, None]  # [BI, 1]
    before = tl.zeros([BI, BN], tl.int32)
    for n0 in range(0, N, BN):
        n = n0 + tl.arange(0, BN)  # [BN]
        others_start, others_end = _rows(cu_seqlens_ptr, n, N)  # [BN]
        others = (others_end - others_start)[None, :]  # [1, BN]
        as_long = (others == tokens) & (n[None, :] < i[:, None])  # [BI, BN]
        before += ((others > tokens) | as_long).to(tl.int32)
    _put(order_ptr, tl.sum(before, 1), i, start, end, start, end, N)


@triton.jit
def _rows(cu_seqlens_ptr, n, N):
    """First row and end of sequences n, int32; one before the first where there is none: fewer than no tokens."""
    start = tl.load(cu_seqlens_ptr + n, mask=n < N, other=1)
    end = tl.load(cu_seqlens_ptr + n + 1, mask=n < N, other=0)
    return start.to(tl.int32), end.to(tl.int32)


@triton.jit
def _put(order_ptr, place, i, start, end, origin, last, count):
    """Writes segments i < count to their places: first rows and ends, and those of their sequences."""
    row = order_ptr + place * 5
    tl.store(row, i, mask=i < count)
    tl.store(row + 1, start, mask=i < count)
    tl.store(row + 2, end, mask=i < count)
    tl.store(row + 3, origin, mask=i < count)
    tl.store(row + 4, last, mask=i < count)


@triton.jit(do_not_specialize=["T", "N", "count", "length", "uncut", "D"])
def _lay_out_kernel(
    cu_seqlens_ptr,  # [N+1]
    order_ptr,  # [I, 5]
    counts_ptr,  # [2]
    o_ptr,  # [T, D] or None
    T,
    N,
    count,
    length,
    uncut,
    D,
    LONGEST_FIRST: tl.constexpr,
    BI: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
):
    """Program: BI segments, written to their places in the order."""
    if o_ptr is not None:
        clear_rows(o_ptr, D, tl.load(cu_seqlens_ptr), tl.load(cu_seqlens_ptr + N), T, BD)
    i = tl.program_id(0) * BI + tl.arange(0, BI)  # [BI]
    if tl.program_id(0) * BI >= count:
        return
    zero = tl.zeros([BI, BN], tl.int32)  # of what is added up over sequences, once all have been met
    start, end, origin, last = zero, zero, zero, zero
    for n0 in range(0, N, BN):
        start_n, end_n, first, followed, rest = cut_of(cu_seqlens_ptr, n0 + tl.arange(0, BN), N, length, uncut)  # [BN]
        own = i[:, None] - first[None, :]  # [BI, BN], of which segment of a sequence i would be
        here = (own >= 0) & (own < (followed + (rest > 0).to(tl.int32))[None, :])
        start_i = start_n[None, :] + own * length  # [BI, BN]
        start += tl.where(here, start_i, 0)
        end += tl.where(here, tl.where(own < followed[None, :], start_i + length, end_n[None, :]), 0)
        origin += tl.where(here, start_n[None, :], 0)
        last += tl.where(here, end_n[None, :], 0)
    place = _longest_first(cu_seqlens_ptr, counts_ptr, i, N, length, uncut, BN) if LONGEST_FIRST else i
    _put(order_ptr, place, i, tl.sum(start, 1), tl.sum(end, 1), tl.sum(origin, 1), tl.sum(last, 1), count)


@triton.jit
def _longest_first(cu_seqlens_ptr, counts_ptr, i, N, length, uncut, BN: tl.constexpr):
    """The places [BI] of segments i in the order, of which two as long stay as they are; the first program counts.

    A followed segment comes behind the first ones of cut sequences, unless it is one of them, and behind the followed
    ones before it; the last one of a sequence behind all followed ones and the longer last ones; and an empty segment
    behind all that are not.
    """
    zero = tl.zeros([i.shape[0], BN], tl.int32)  # of what is added up over sequences, once all have been met
    kind, tokens, followed_before, cut_before, not_empty_before = zero, zero, zero, zero, zero
    followed, cut, not_empty = tl.zeros([BN], tl.int32), tl.zeros([BN], tl.int32), tl.zeros([BN], tl.int32)
    for n0 in range(0, N, BN):
        _, _, first, followed_n, rest = cut_of(cu_seqlens_ptr, n0 + tl.arange(0, BN), N, length, uncut)  # [BN]
        own = i[:, None] - first[None, :]  # [BI, BN], of which segment of a sequence i would be
        segments = followed_n + (rest > 0).to(tl.int32)  # [BN]
        is_cut = (followed_n > 0).to(tl.int32)  # [BN]
        # 1 of a segment that another one follows, 2 where it is its sequence's first.
        kind += tl.where((own >= 0) & (own < followed_n[None, :]), tl.where(own == 0, 2, 1), 0)
        tokens += tl.where(own == followed_n[None, :], rest[None, :], 0)  # of a sequence's last segment, else 0
        followed_before += tl.minimum(tl.maximum(own, 0), followed_n[None, :])
        cut_before += tl.where(own > 0, is_cut[None, :], 0)
        not_empty_before += tl.minimum(tl.maximum(own, 0), segments[None, :])
        followed += followed_n
        cut += is_cut
        not_empty += segments
    all_followed, all_cut, last_tokens = tl.sum(followed), tl.sum(cut), tl.sum(tokens, 1)
    if tl.program_id(0) == 0:
        tl.store(counts_ptr, all_followed)
        tl.store(counts_ptr + 1, all_cut)
    before = zero  # of the last ones of sequences
    for n0 in range(0, N, BN):
        _, _, first, followed_n, rest = cut_of(cu_seqlens_ptr, n0 + tl.arange(0, BN), N, length, uncut)  # [BN]
        as_long = (rest[None, :] == last_tokens[:, None]) & ((first + followed_n)[None, :] < i[:, None])
        before += ((rest[None, :] > last_tokens[:, None]) | as_long).to(tl.int32)
    kind, cut_before = tl.sum(kind, 1), tl.sum(cut_before, 1)  # [BI]
    of_followed = tl.where(kind == 2, cut_before, all_cut + tl.sum(followed_before, 1) - cut_before)
    of_empty = tl.sum(not_empty) + i - tl.sum(not_empty_before, 1)
    of_last = tl.where(last_tokens > 0, all_followed + tl.sum(before, 1), of_empty)
    return tl.where(kind > 0, of_followed, of_last)


@triton.jit
def cut_of(cu_seqlens_ptr, n, N, length, uncut):
    """Returns first row, end, place of the first segment, followed segments, and tokens of the last, of sequences n."""
    start = tl.load(cu_seqlens_ptr + n, mask=n < N, other=0).to(tl.int32)
    end = tl.load(cu_seqlens_ptr + n + 1, mask=n < N, other=0).to(tl.int32)
    followed = tl.where(end - start > uncut, (end - start - 1) // length, 0)
    return start, end, n + start // length, followed, end - start - followed * length
