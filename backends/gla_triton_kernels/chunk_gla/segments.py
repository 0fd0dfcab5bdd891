"""Sequences cut into segments that are computed side by side.

Every segment but a sequence's last has `length` tokens. The host knows the segments of B sequences of T tokens. Of
packed ones it knows the numbers of sequences N and of tokens T alone: there are at most N + T // length segments, and
their boundaries are computed on the device. Sequence n, of the rows c_n to c_{n+1}, is cut into m_n segments, of which
f_n is the first, and segment i begins at row

    max over n with f_n <= i of  min(c_n + (i - f_n) length, c_{n+1})
    m_n = ceil((c_{n+1} - c_n) / length)        f_n = m_0 + .. + m_{n-1}

N sequences   BI segments a program   BN sequences at a time
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from gla_triton_kernels.runtime.launch import Launch, launch


@dataclass(frozen=True, slots=True)
class Segments:
    """Segments in order, sequence by sequence.

    Attributes:
        length: tokens of a segment; the last one of a sequence may have fewer.
        count: how many there are; of packed sequences an upper bound.
        per_sequence: how many a sequence has; 0 of packed sequences.
        bounds: of packed sequences, [count+1] int32: segment i is rows bounds[i] to bounds[i+1], empty where i is
            beyond the last that is used.
        first: of packed sequences, [N+1] int32: sequence n has the segments first[n] to first[n+1].
        launches: which compute bounds and first.
    """

    length: int
    count: int
    per_sequence: int
    bounds: Tensor | None = None
    first: Tensor | None = None
    launches: tuple[Launch, ...] = ()


def cut(B: int, T: int, length: int, cu_seqlens: Tensor | None) -> Segments:
    """Cut sequences into segments of `length` tokens."""
    if cu_seqlens is None:
        per_sequence = -(-T // length)
        return Segments(length, B * per_sequence, per_sequence)
    N = len(cu_seqlens) - 1
    count = N + T // length
    bounds = torch.empty(count + 1, dtype=torch.int32, device=cu_seqlens.device)
    first = torch.empty(N + 1, dtype=torch.int32, device=cu_seqlens.device)
    BI, BN = 16, 256
    grid, integers = (-(-(count + 1) // BI), 1, 1), (N, count, length, BI, BN)
    launched = launch(_bounds_kernel, grid, (cu_seqlens, bounds, first), (), integers)
    return Segments(length, count, 0, bounds, first, (launched,))


@triton.jit(do_not_specialize=["N", "count", "length"])
def _bounds_kernel(
    cu_seqlens_ptr,  # [N+1]
    bounds_ptr,  # [count+1]
    first_ptr,  # [N+1]
    N,
    count,
    length,
    BI: tl.constexpr,
    BN: tl.constexpr,
):
    """Program: BI of the bounds. The first program writes `first` as well."""
    i = tl.program_id(0) * BI + tl.arange(0, BI)  # [BI]
    bound = tl.zeros([BI], tl.int32)
    used = 0  # segments of the sequences before
    for n0 in range(0, N, BN):
        n = n0 + tl.arange(0, BN)  # [BN]
        start = tl.load(cu_seqlens_ptr + n, mask=n < N, other=0).to(tl.int32)  # [BN]
        end = tl.load(cu_seqlens_ptr + n + 1, mask=n < N, other=0).to(tl.int32)  # [BN]
        segments = (end - start + length - 1) // length  # [BN]
        upto = used + tl.cumsum(segments, 0)  # [BN]
        first = upto - segments  # [BN]
        before = tl.minimum(i[:, None] - first[None, :], segments[None, :])  # [BI, BN], segments of n before i
        begin = tl.minimum(start[None, :] + before * length, end[None, :])  # [BI, BN]
        bound = tl.maximum(bound, tl.max(tl.where(first[None, :] <= i[:, None], begin, 0), 1))
        if tl.program_id(0) == 0:
            tl.store(first_ptr + n + 1, upto, mask=n < N)
        used += tl.sum(segments, 0)
    tl.store(bounds_ptr + i, bound, mask=i <= count)
    if tl.program_id(0) == 0:
        tl.store(first_ptr, 0)
