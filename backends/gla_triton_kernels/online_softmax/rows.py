"""Softmax along one dimension: where rows lie, and the first of two sweeps over tiles of columns.

It keeps a running maximum m and sum z of exponentials for each lane of a tile, so that no lane waits for another. A
lane takes G neighbouring columns of each tile, those that a thread loads at once:

    m' = max(m, max_j x_j)        z' = exp(m - m') z + sum_j exp(x_j - m')

Of one column, with d = exp(-|x - m|), one of the two exponentials is d and the other is 1:

    x > m:  z' = d z + 1,  m' = x        x <= m:  z' = z + d,  m' = m

The lanes are merged at the end, M = max m and Z = sum exp(m - M) z; a second sweep can then write exp(x - M) / Z.

N columns, the dimension that sums to one   R rows, the last of the other dimensions   D0, D1 what is left of those
BR, BN rows and columns of a tile   G columns of a lane

Source: Milakov and Gimelshein, "Online normalizer calculation for softmax" (arXiv 1805.02867).
"""

# pyright: reportGeneralTypeIssues=false
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

LOWEST = tl.constexpr(torch.finfo(torch.float32).min)


class Rows(NamedTuple):
    """A tensor x, and y of its shape, as [D0, D1, R, N]."""

    D0: int
    D1: int
    R: int
    N: int
    strides: tuple[int, ...]
    """In x and y by turns: of D0, D1, R, N."""

    @property
    def contiguous(self) -> bool:
        """Whether the columns of x are neighbours in memory."""
        return self.strides[6] == 1

    def lane(self, itemsize: int) -> int:
        """G: how many columns of x, of `itemsize` bytes each, a thread loads at once; 1 where rows are not aligned."""
        aligned = self.contiguous and all(n % 16 == 0 for n in (self.N, *self.strides[:5:2]))
        return 16 // itemsize if aligned else 1


def as_rows(x: Tensor, y: Tensor, dim: int) -> tuple[Tensor, Rows]:
    """x, copied where its dimensions but dim are more than three that cannot be merged, and how to address it and y."""
    dims = _other_dimensions(x, y, dim)
    if len(dims) > 3:
        x = x.contiguous()
        dims = _other_dimensions(x, y, dim)
    (D0, *x0y0), (D1, *x1y1), (R, *xryr) = [(1, 0, 0)] * (3 - len(dims)) + dims
    N = x.shape[dim]
    return x, Rows(D0, D1, R, N, (*x0y0, *x1y1, *xryr, x.stride(dim) if N > 1 else 1, y.stride(dim) if N > 1 else 1))


def _other_dimensions(x: Tensor, y: Tensor, dim: int) -> list[tuple[int, int, int]]:
    """Size, stride in x and stride in y of the dimensions but dim; neighbours that are one in memory are merged."""
    dims: list[tuple[int, int, int]] = []
    for d, size in enumerate(x.shape):
        if d == dim or size == 1:
            continue
        stride_x, stride_y = x.stride(d), y.stride(d)
        if dims and dims[-1][1:] == (size * stride_x, size * stride_y):
            size *= dims.pop()[0]
        dims.append((size, stride_x, stride_y))
    return dims


@triton.jit
def place(tile, D1, R, BR: tl.constexpr):
    """Indices of a tile of rows in D0 and D1, and its rows [BR, 1]; as int64, for tensors of any size."""
    tiles = tl.cdiv(R, BR)
    outer = tile // tiles
    r = (tile % tiles).to(tl.int64) * BR + tl.arange(0, BR)[:, None]
    return (outer // D1).to(tl.int64), (outer % D1).to(tl.int64), r


@triton.jit
def maximum_and_sum(x_rows, there, start, end, stride_n, BR: tl.constexpr, BN: tl.constexpr, G: tl.constexpr):
    """Of the columns from start to end of the rows at x_rows [BR, 1] that are there: m and z, [BR, 1].

    Where all is -inf, m is the lowest finite number and z is 0.
    """
    # A finite start: an entry of -inf adds exp(-inf) = 0 to it, where it would add exp(-inf + inf) = NaN to -inf.
    m = tl.full((BR, BN // G), LOWEST, tl.float32)
    z = tl.zeros((BR, BN // G), tl.float32)
    for first in range(start, end, BN):
        c = first + tl.arange(0, BN)[None, :]
        x = tl.load(
            x_rows + c.to(tl.int64) * stride_n,
            mask=there & (c < end),
            other=-float("inf"),
            eviction_policy="evict_last",
        )  # [BR, BN]
        x = x.to(tl.float32)
        if G == 1:
            d = tl.exp(-tl.abs(x - m))
            z = tl.where(x > m, z * d + 1, z + d)
            m = tl.maximum(m, x)
        else:
            x = tl.reshape(x, (BR, BN // G, G))
            greater = tl.maximum(m, tl.max(x, 2))  # [BR, BN // G]
            z = z * tl.exp(m - greater) + tl.sum(tl.exp(x - greater[:, :, None]), 2)
            m = greater
    return merged(m, z)


@triton.jit
def merged(m, z):
    """The maxima m and sums z of parts of a row, [BR, parts], as one: [BR, 1]."""
    row_m = tl.max(m, 1, keep_dims=True)
    return row_m, tl.sum(z * tl.exp(m - row_m), 1, keep_dims=True)
