"""Computes softmax along one dimension: short rows in one pass on chip, long rows in two sweeps over tiles of columns.

    y = exp(x - max x) / sum exp(x - max x)        for each row

The kernels load 16 bytes of columns at a time if the compiler can prove that they are aligned. Long rows that begin at
any address are computed in aligned tiles, and their two ends column by column. sweep.py has the first sweep.

N columns, the dimension that sums to one   R rows, the last of the other dimensions   D0, D1 the dimensions before R
BR, BN rows and columns of a tile   G columns that a thread loads at once

Source: Milakov and Gimelshein, "Online normalizer calculation for softmax" (arXiv 1805.02867).
"""

# pyright: reportGeneralTypeIssues=false
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from gla_core.dispatch.tensors import ceil_div
from gla_triton_kernels.online_softmax.plan import Kernel, plan_one_pass
from gla_triton_kernels.online_softmax.rows import rows_of
from gla_triton_kernels.online_softmax.sweep import maximum_and_sum, rows_of_tile
from gla_triton_runtime.architecture import Gpu
from gla_triton_runtime.launch import Launch

EDGE = tl.constexpr(2048)
"""The number of columns of a tile at the end of a row whose other tiles are aligned."""


def launch_softmax(x: Tensor, y: Tensor, dim: int, gpu: Gpu) -> list[Launch]:
    """Returns the launch that writes the softmax of x to y."""
    rows = rows_of(x, y, dim)
    D0, D1, R, N, _, itemsize = rows
    kernel, BR, BN, warps, registers = plan_one_pass(rows)
    tensors = {"x_ptr": x, "y_ptr": y}
    tiled = {**tensors, "D1": D1, "R": R, "N": N, **rows.named_strides, "BR": BR, "BN": BN}
    function, arguments = {
        Kernel.ON_CHIP: (_softmax_on_chip, tiled),
        Kernel.TWO_SWEEPS: (_softmax_in_two_sweeps, {**tiled, "G": rows.vector}),
        Kernel.TWO_SWEEPS_UNALIGNED: (
            _softmax_in_two_sweeps_unaligned,
            {**tensors, "N": N, "BN": BN, "G": 16 // itemsize},
        ),
    }[kernel]
    grid = (ceil_div(R, BR) * D1 * D0, 1, 1)
    options = {"num_warps": max(1, warps * 32 // gpu.facts.lanes)}  # a block has the same number of threads everywhere
    if registers is not None and gpu.facts.limits_registers:
        options["maxnreg"] = registers
    return [Launch(function, grid, arguments, options)]


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
    """Computes BR rows in one pass; BN is at least N."""
    d0, d1, r = rows_of_tile(tl.program_id(0), D1, R, BR)
    c = tl.arange(0, BN)[None, :]  # [1, BN]
    here = (r < R) & (c < N)  # [BR, BN]
    x_rows = x_ptr + d0 * stride_x0 + d1 * stride_x1 + r * stride_xr  # [BR, 1]
    x = tl.load(x_rows + c.to(tl.int64) * stride_xn, mask=here, other=-float("inf")).to(tl.float32)  # [BR, BN]
    # If all elements of a row are -inf, -inf + inf = NaN, which is the correct result.
    e = tl.exp(x - tl.max(x, 1, keep_dims=True))  # [BR, BN]
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
    """Computes BR rows in two sweeps over tiles of BN columns."""
    d0, d1, r = rows_of_tile(tl.program_id(0), D1, R, BR)
    x_rows = x_ptr + d0 * stride_x0 + d1 * stride_x1 + r * stride_xr  # [BR, 1]
    y_rows = y_ptr + d0 * stride_y0 + d1 * stride_y1 + r * stride_yr
    m, z = maximum_and_sum(x_rows, r < R, 0, N, stride_xn, BR, BN, G)
    _write(x_rows, y_rows, r < R, m, z, 0, N, stride_xn, stride_yn, BR, BN)


@triton.jit
def _softmax_in_two_sweeps_unaligned(
    x_ptr,  # [R, N], contiguous
    y_ptr,  # [R, N], contiguous
    N,
    BN: tl.constexpr,
    G: tl.constexpr,
):
    """Computes a row that begins at any address, in two sweeps. Tiles begin at the first multiple of G elements."""
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
    """Writes the columns from start to end, the last tile first, because its columns are still in the cache."""
    factor = 1 / z  # [BR, 1]; if all elements of a row are -inf, 0 * inf = NaN below
    for back in range(0, end - start, BN):
        c = start + (end - start - 1) // BN * BN - back + tl.arange(0, BN)[None, :]
        here = there & (c < end)
        x = tl.load(x_rows + c.to(tl.int64) * stride_xn, mask=here, other=-float("inf"), eviction_policy="evict_first")
        y = tl.exp(x.to(tl.float32) - m) * factor
        tl.store(
            y_rows + c.to(tl.int64) * stride_yn, y.to(y_rows.dtype.element_ty), mask=here, eviction_policy="evict_first"
        )
