"""Softmax along one dimension: rows that fit on chip in one pass, longer ones in two sweeps over tiles of columns.

Columns are loaded 16 bytes at a time where the compiler sees that they are aligned. Long rows that begin anywhere are
swept in tiles that are aligned, and their ends column by column.

The sweeps are those of ../gla_triton_kernels/online_softmax.py.

N columns, the dimension that sums to one   R rows, the last of the other dimensions   D0, D1 what is left of those
BR, BN rows and columns of a tile   G columns of a lane

Source: Milakov and Gimelshein, "Online normalizer calculation for softmax" (arXiv 1805.02867).
"""

# pyright: reportGeneralTypeIssues=false
from __future__ import annotations

from collections.abc import Hashable

import torch
import triton
import triton.language as tl
from torch import Tensor

from gla_triton_kernels.online_softmax.rows import as_rows, maximum_and_sum, place
from gla_triton_kernels.runtime.launch import launch, on_device_of
from gla_triton_kernels.runtime.replay import record, replay
from gla_triton_kernels.runtime.sizes import power_of_two

MOST_ON_CHIP = 2**14
"""Columns of a row that are held on chip: with more, one block fills a multiprocessor, and loads wait for stores."""
MOST_ODD_ON_CHIP = 2**13
"""The same of rows that are not aligned, whose columns are loaded one at a time."""
EDGE = tl.constexpr(2048)
"""Columns of a tile at the end of such a row, where the rest of it is taken in aligned tiles."""


def online_softmax(x: Tensor, dim: int) -> Tensor:
    """See gla_core/ops/online_softmax.py."""
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    key = ("online_softmax", x.device, x.dtype, x.shape, x.stride(), dim)
    if not replay(key, (x, y)) and x.numel():
        with on_device_of(x):
            _launch(x, y, dim, key)
    return y


def _launch(x: Tensor, y: Tensor, dim: int, key: Hashable) -> None:
    """Write the softmax of x to y, and remember how under `key`."""
    source, rows = as_rows(x, y, dim)
    D0, D1, R, N, strides = rows
    G = rows.lane(x.itemsize)
    if G == 1 and N > MOST_ODD_ON_CHIP and dim == x.ndim - 1 and x.is_contiguous():
        BN, options = (4096, {"num_warps": 8}) if N <= 2 * MOST_ON_CHIP else (16384, {"num_warps": 16, "maxnreg": 64})
        kernel, grid, integers = _softmax_of_odd_rows, (R, 1, 1), (N, BN, 16 // x.itemsize)
    else:
        BR, BN, options = _tile(R, N, rows.contiguous, G)
        on_chip = BN >= N
        kernel = _softmax_on_chip if on_chip else _softmax_in_two_sweeps
        grid, integers = (-(-R // BR) * D1 * D0, 1, 1), (D1, R, N, *strides, BR, BN, *(() if on_chip else (G,)))
    launched = launch(kernel, grid, (source, y), (), integers, **options)
    if source is x:
        record(key, (x, y), [launched])


def _tile(R: int, N: int, contiguous: bool, G: int) -> tuple[int, int, dict[str, int]]:
    """BR, BN and options of compilation; BN >= N says that rows fit on chip.

    Args:
        contiguous: whether neighbours in memory are columns.
    """
    BN = power_of_two(N)
    if contiguous and BN > MOST_ON_CHIP:
        # Few registers let a multiprocessor be filled: while one row is read, another is written.
        long = BN > 2 * MOST_ON_CHIP
        if G == 1:
            return 1, 8192 if long else 4096, {"num_warps": 32 if long else 16, "maxnreg": 32}
        return (1, 16384, {"num_warps": 16, "maxnreg": 64}) if long else (1, 8192, {"num_warps": 16})
    if contiguous and BN == 1024 and G == 1:
        return 1, BN, {"num_warps": 2}
    if contiguous:
        BR = min(power_of_two(R), max(1, 2048 // BN))
        # One warp merges its lanes without waiting for others: best where there are many, and each loads much at once.
        alone = G > 1 and 256 <= BN <= 1024 and R >= 2048
        return BR, BN, {"num_warps": 1 if alone else max(4, BN // 1024)}
    if BN > 1024:
        return min(power_of_two(R), 32), 256, {"num_warps": 16}
    return min(power_of_two(R), 128, max(16, 8192 // BN)), BN, {"num_warps": 8}


@triton.jit(do_not_specialize=["D1"])
def _softmax_on_chip(
    x_ptr,  # [D0, D1, R, N], of any strides
    y_ptr,  # [D0, D1, R, N]
    D1,
    R,
    N,
    stride_x0,
    stride_y0,
    stride_x1,
    stride_y1,
    stride_xr,
    stride_yr,
    stride_xn,
    stride_yn,
    BR: tl.constexpr,
    BN: tl.constexpr,
):
    d0, d1, r = place(tl.program_id(0), D1, R, BR)
    c = tl.arange(0, BN)[None, :]
    here = (r < R) & (c < N)  # [BR, BN]
    x_rows = x_ptr + d0 * stride_x0 + d1 * stride_x1 + r * stride_xr  # [BR, 1]
    x = tl.load(x_rows + c.to(tl.int64) * stride_xn, mask=here, other=-float("inf")).to(tl.float32)  # [BR, BN]
    # A row that is all -inf: -inf + inf = NaN, as it has to be.
    e = tl.exp(x - tl.max(x, 1, keep_dims=True))
    y = e * (1 / tl.sum(e, 1, keep_dims=True))
    y_rows = y_ptr + d0 * stride_y0 + d1 * stride_y1 + r * stride_yr
    tl.store(y_rows + c.to(tl.int64) * stride_yn, y.to(y_ptr.dtype.element_ty), mask=here)


@triton.jit(do_not_specialize=["D1"])
def _softmax_in_two_sweeps(
    x_ptr,  # [D0, D1, R, N], of any strides
    y_ptr,  # [D0, D1, R, N]
    D1,
    R,
    N,
    stride_x0,
    stride_y0,
    stride_x1,
    stride_y1,
    stride_xr,
    stride_yr,
    stride_xn,
    stride_yn,
    BR: tl.constexpr,
    BN: tl.constexpr,
    G: tl.constexpr,
):
    d0, d1, r = place(tl.program_id(0), D1, R, BR)
    x_rows = x_ptr + d0 * stride_x0 + d1 * stride_x1 + r * stride_xr  # [BR, 1]
    y_rows = y_ptr + d0 * stride_y0 + d1 * stride_y1 + r * stride_yr
    m, z = maximum_and_sum(x_rows, r < R, 0, N, stride_xn, BR, BN, G)
    _write(x_rows, y_rows, r < R, m, z, 0, N, stride_xn, stride_yn, BR, BN)


@triton.jit
def _softmax_of_odd_rows(
    x_ptr,  # [R, N], contiguous
    y_ptr,  # [R, N], contiguous
    N,
    BN: tl.constexpr,
    G: tl.constexpr,
):
    """Two sweeps over rows that begin anywhere: from the first multiple of G elements on, tiles are aligned."""
    row = tl.program_id(0).to(tl.int64) * N
    head = ((G - row % G) % G).to(tl.int32)  # columns before the first tile
    tail = (N - head) // BN * BN  # columns of whole tiles
    x_row, y_row = x_ptr + row + tl.zeros((1, 1), tl.int64), y_ptr + row + tl.zeros((1, 1), tl.int64)  # [1, 1]
    aligned = tl.multiple_of(row + head, G) + tl.zeros((1, 1), tl.int64)
    x_tiles, y_tiles = x_ptr + aligned, y_ptr + aligned  # [1, 1]
    there = tl.full((1, 1), True, tl.int1)
    m0, z0 = maximum_and_sum(x_row, there, 0, head, 1, 1, G, 1)  # [1, 1]
    m1, z1 = maximum_and_sum(x_tiles, there, 0, tail, 1, 1, BN, G)  # [1, 1]
    m2, z2 = maximum_and_sum(x_row, there, head + tail, N, 1, 1, EDGE, 1)  # [1, 1]
    m = tl.maximum(tl.maximum(m0, m1), m2)
    z = z0 * tl.exp(m0 - m) + z1 * tl.exp(m1 - m) + z2 * tl.exp(m2 - m)
    _write(x_row, y_row, there, m, z, head + tail, N, 1, 1, 1, EDGE)
    _write(x_tiles, y_tiles, there, m, z, 0, tail, 1, 1, 1, BN)
    _write(x_row, y_row, there, m, z, 0, head, 1, 1, 1, G)


@triton.jit
def _write(
    x_rows,  # [BR, 1]
    y_rows,  # [BR, 1]
    there,  # [BR, 1]
    m,  # [BR, 1]
    z,  # [BR, 1]
    start,
    end,
    stride_xn,
    stride_yn,
    BR: tl.constexpr,
    BN: tl.constexpr,
):
    """Write the columns from start to end, the last first: those that have been read last are still in the cache."""
    factor = 1 / z  # a row that is all -inf: 0 * inf = NaN below
    for back in range(0, end - start, BN):
        c = start + (end - start - 1) // BN * BN - back + tl.arange(0, BN)[None, :]
        here = there & (c < end)
        x = tl.load(x_rows + c.to(tl.int64) * stride_xn, mask=here, other=-float("inf"), eviction_policy="evict_first")
        y = tl.exp(x.to(tl.float32) - m) * factor
        tl.store(
            y_rows + c.to(tl.int64) * stride_yn, y.to(y_rows.dtype.element_ty), mask=here, eviction_policy="evict_first"
        )
