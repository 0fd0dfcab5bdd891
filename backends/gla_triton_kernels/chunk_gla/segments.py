"""Sequences cut into segments that are computed side by side, and what is computed of them.

Every segment but a sequence's last has `length` tokens. The host knows the segments of B sequences of T tokens. Of
packed ones it knows the numbers of sequences N and of tokens T alone, and their boundaries are computed on the device.
Segment m of sequence n, of the rows c_n to c_{n+1}, is segment

    i = n + c_n // length + m

of N + T // length, some of which are empty: no two sequences meet, and no sum over sequences is needed. Checkpoints are
laid out in the same way. Segment i begins at row

    max over n of  min(c_n % length + (i - n) length, c_{n+1}),        and not before c_0

N sequences   BI segments a program   BN sequences at a time
"""

from __future__ import annotations

from dataclasses import dataclass
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
        bounds: of packed sequences, [count+1] int32: segment i is rows bounds[i] to bounds[i+1].
        launches: which compute bounds.
    """

    length: int
    count: int
    per_sequence: int
    cu_seqlens: Tensor | None = None
    bounds: Tensor | None = None
    launches: tuple[Launch, ...] = ()


def whole(B: int, T: int, cu_seqlens: Tensor | None) -> Segments:
    """Each sequence as one segment, longer than any."""
    count = B if cu_seqlens is None else len(cu_seqlens) - 1
    return Segments(T + 1, count, 1, cu_seqlens, cu_seqlens)


def cut(B: int, T: int, length: int, cu_seqlens: Tensor | None) -> Segments:
    """Cut sequences into segments of `length` tokens."""
    if cu_seqlens is None:
        per_sequence = -(-T // length)
        return Segments(length, B * per_sequence, per_sequence)
    N = len(cu_seqlens) - 1
    count = N + T // length
    bounds = torch.empty(count + 1, dtype=torch.int32, device=cu_seqlens.device)
    BI, BN = 16, 256
    grid, integers = (-(-(count + 1) // BI), 1, 1), (N, count, length, BI, BN)
    launches = (Launch(_bounds_kernel, grid, (cu_seqlens, bounds), (), integers),)
    return Segments(length, count, 0, cu_seqlens, bounds, launches)


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
