"""Computes the maximum and the sum of each row for softmax: the first of two sweeps over tiles of columns.

The sweep keeps a running maximum m and a running sum z of exponentials for every G adjacent columns of a tile. A thread
loads these G columns at once, so no thread waits for another:

    m' = max(m, max_j x_j)        z' = exp(m - m') z + sum_j exp(x_j - m')

For G = 1, with d = exp(-|x - m|), one of the two exponentials is d and the other is 1:

    x > m:  z' = d z + 1,  m' = x        x <= m:  z' = z + d,  m' = m

At the end, all m and z of a row are merged: M = max m and Z = sum exp(m - M) z. A second sweep can then write
exp(x - M) / Z.

N columns, the dimension that sums to one   R rows, the last of the other dimensions   D0, D1 the dimensions before R
BR, BN rows and columns of a tile   G columns that a thread loads at once

Source: Milakov and Gimelshein, "Online normalizer calculation for softmax" (arXiv 1805.02867).
"""

# pyright: reportGeneralTypeIssues=false
from __future__ import annotations

import torch
import triton
import triton.language as tl

LOWEST = tl.constexpr(torch.finfo(torch.float32).min)


@triton.jit
def rows_of_tile(tile, D1, R, BR: tl.constexpr):
    """Returns the indices of a tile of rows in D0 and D1, and its rows [BR, 1]; int64, for tensors of any size."""
    tiles = tl.cdiv(R, BR)
    outer = tile // tiles
    r = (tile % tiles).to(tl.int64) * BR + tl.arange(0, BR)[:, None]
    return (outer // D1).to(tl.int64), (outer % D1).to(tl.int64), r


@triton.jit
def maximum_and_sum(x_rows, there, start, end, stride_n, BR: tl.constexpr, BN: tl.constexpr, G: tl.constexpr):
    """Returns m and z [BR, 1] of the columns from start to end.

    If all elements of a row are -inf, m is the lowest finite number and z is 0.

    Args:
        x_rows: pointers to the rows, [BR, 1].
        there: mask of the rows that exist, [BR, 1].
        start: first column.
        end: column after the last one.
        stride_n: stride of columns.
    """
    # m starts at a finite number, so an element of -inf adds exp(-inf) = 0. If m started at -inf, the element would
    # add exp(-inf + inf) = NaN.
    m = tl.full((BR, BN // G), LOWEST, tl.float32)
    z = tl.zeros((BR, BN // G), tl.float32)
    for first in range(start, end, BN):
        c = first + tl.arange(0, BN)[None, :]  # [1, BN]
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
            x = tl.reshape(x, (BR, BN // G, G))  # [BR, BN // G, G]
            greater = tl.maximum(m, tl.max(x, 2))  # [BR, BN // G]
            z = z * tl.exp(m - greater) + tl.sum(tl.exp(x - greater[:, :, None]), 2)
            m = greater
    return merge(m, z)


@triton.jit
def merge(m, z):
    """Merges the maxima m and sums z of parts of a row, [BR, parts], into one maximum and one sum, [BR, 1]."""
    row_m = tl.max(m, 1, keep_dims=True)
    return row_m, tl.sum(z * tl.exp(m - row_m), 1, keep_dims=True)
