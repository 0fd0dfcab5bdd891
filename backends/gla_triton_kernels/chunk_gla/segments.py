"""Sequences cut into segments that are computed side by side, and what is computed of them.

Every segment but a sequence's last has `length` tokens. The host knows the segments of B sequences of T tokens. Of
packed ones it knows the numbers of sequences N and of tokens T alone, and their boundaries are computed on the device.
Segment m of sequence n, of the rows c_n to c_{n+1}, is segment

    i = n + c_n // length + m

of N + T // length, some of which are empty: no two sequences meet, and no sum over sequences is needed. Checkpoints are
laid out in the same way. Segment i begins at row

    max over n of  min(c_n % length + (i - n) length, c_{n+1}),        and not before c_0

Blocks start in the order of segments, so where they are unequal a long one may start last and run alone. Where they are
to start longest first, `order` says which segment is the next one's.

N sequences   I segments   BI segments a program   BN sequences, or other segments, at a time
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

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
        before: [N, H, K, V], its rows contiguous: the initial state, or the gradient of the final one; None is 0.
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
        order: of packed sequences, [count] int32: all segments, the longest first; None where they start as they are.
        launches: which compute bounds and order.
    """

    length: int
    count: int
    per_sequence: int
    cu_seqlens: Tensor | None = None
    bounds: Tensor | None = None
    order: Tensor | None = None
    launches: tuple[Launch, ...] = ()


def whole(B: int, T: int, cu_seqlens: Tensor | None, longest_first: bool = False) -> Segments:
    """Each sequence as one segment, longer than any; packed ones may start with the longest."""
    count = B if cu_seqlens is None else len(cu_seqlens) - 1
    segments = Segments(T + 1, count, 1, cu_seqlens, cu_seqlens)
    return _ordered(segments) if longest_first else segments


def cut(B: int, T: int, length: int, cu_seqlens: Tensor | None, longest_first: bool = False) -> Segments:
    """Cut sequences into segments of `length` tokens; those of packed ones may start with the longest."""
    if cu_seqlens is None:
        per_sequence = -(-T // length)
        return Segments(length, B * per_sequence, per_sequence)
    N = len(cu_seqlens) - 1
    count = N + T // length
    bounds = torch.empty(count + 1, dtype=torch.int32, device=cu_seqlens.device)
    BI, BN = 16, 256
    grid, integers = (-(-(count + 1) // BI), 1, 1), (N, count, length, BI, BN)
    launches = (Launch(_bounds_kernel, grid, (cu_seqlens, bounds), (), integers),)
    segments = Segments(length, count, 0, cu_seqlens, bounds, launches=launches)
    return _ordered(segments) if longest_first else segments


def _ordered(segments: Segments) -> Segments:
    """The same segments of packed sequences, and their order by length."""
    bounds, count = segments.bounds, segments.count
    if bounds is None:
        raise ValueError("only packed sequences are of different lengths; expected their cu_seqlens")
    order = torch.empty(count, dtype=torch.int32, device=bounds.device)
    BI, BN = 16, 256
    launch = Launch(_order_kernel, (-(-count // BI), 1, 1), (bounds, order), (), (count, BI, BN))
    return replace(segments, order=order, launches=(*segments.launches, launch))


@triton.jit(do_not_specialize=["N", "count", "length"])
def _bounds_kernel(
    cu_seqlens_ptr,  # [N+1]
    bounds_ptr,  # [count+1]
    N,
    count,
    length,
    BI: tl.constexpr,
    BN: tl.constexpr,
):
    """Program: BI of the bounds."""
    i = tl.program_id(0) * BI + tl.arange(0, BI)  # [BI]
    bound = tl.zeros([BI], tl.int64) + tl.load(cu_seqlens_ptr)
    for n0 in range(0, N, BN):
        n = n0 + tl.arange(0, BN)  # [BN]
        start = tl.load(cu_seqlens_ptr + n, mask=n < N, other=0).to(tl.int64)  # [BN]
        end = tl.load(cu_seqlens_ptr + n + 1, mask=n < N, other=0).to(tl.int64)  # [BN]
        segments = (i[:, None] - n[None, :]).to(tl.int64)  # [BI, BN]
        begin = segments * length + (start % length)[None, :]  # [BI, BN]
        bound = tl.maximum(bound, tl.max(tl.minimum(begin, end[None, :]), 1))
    tl.store(bounds_ptr + i, bound.to(tl.int32), mask=i <= count)


@triton.jit(do_not_specialize=["count"])
def _order_kernel(
    bounds_ptr,  # [I+1]
    order_ptr,  # [I]
    count,
    BI: tl.constexpr,
    BN: tl.constexpr,
):
    """Program: the places in the order of BI segments; of two that are as long, the first comes first."""
    i = tl.program_id(0) * BI + tl.arange(0, BI)  # [BI]
    tokens = _tokens(bounds_ptr, i, count)  # [BI]
    place = tl.zeros([BI], tl.int32)
    for j0 in range(0, count, BN):
        j = j0 + tl.arange(0, BN)  # [BN]
        others = _tokens(bounds_ptr, j, count)  # [BN]
        as_long = (others[None, :] == tokens[:, None]) & (j[None, :] < i[:, None])  # [BI, BN]
        place += tl.sum(((others[None, :] > tokens[:, None]) | as_long).to(tl.int32), 1)
    tl.store(order_ptr + place, i, mask=i < count)


@triton.jit
def _tokens(bounds_ptr, i, count):
    """Tokens of these segments; -1 of those that there are not."""
    start = tl.load(bounds_ptr + i, mask=i < count, other=1)
    return (tl.load(bounds_ptr + i + 1, mask=i < count, other=0) - start).to(tl.int32)
