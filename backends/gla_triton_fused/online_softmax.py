"""Softmax along one dimension: rows that fit on chip in one pass, longer ones in two sweeps over tiles of columns.

The first sweep keeps a running maximum m and sum z of exponentials for each lane of a tile, so that no lane waits for
another; with d = exp(-|x - m|), one of the two exponentials of the running softmax is d and the other is 1:

    x > m:  z' = d z + 1,  m' = x        x <= m:  z' = z + d,  m' = m

The lanes are merged at the end, M = max m and Z = sum exp(m - M) z; the second sweep writes y = exp(x - M) / Z.

N columns, the dimension that sums to one   R rows, the last of the other dimensions   D0, D1 what is left of those
BR, BN rows and columns of a tile

Source: Milakov and Gimelshein, "Online normalizer calculation for softmax" (arXiv 1805.02867).
"""

# pyright: reportGeneralTypeIssues=false
from __future__ import annotations

from collections.abc import Hashable

import torch
import triton
import triton.language as tl
from torch import Tensor

from gla_triton_shared.launch import device_of, launch, launch_again, power_of_two, remember

LOWEST = tl.constexpr(torch.finfo(torch.float32).min)

MOST_ON_CHIP = 2**14
"""Columns of a row that are held on chip: with more, one block fills a multiprocessor, and loads wait for stores."""


def online_softmax(x: Tensor, dim: int) -> Tensor:
    """See gla_core/ops/online_softmax.py."""
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    if not x.numel():
        return y
    with device_of(x):
        key = ("online_softmax", x.device, x.dtype, x.shape, x.stride(), dim)
        if not launch_again(key, (x, y)):
            _launch(x, y, dim, key)
    return y


def _launch(x: Tensor, y: Tensor, dim: int, key: Hashable) -> None:
    """Write the softmax of x to y, and remember how under `key`."""
    dims = _other_dimensions(x, y, dim)
    if len(dims) > 3:
        x, key = x.contiguous(), None
        dims = _other_dimensions(x, y, dim)
    (D0, *x0y0), (D1, *x1y1), (R, *xryr) = [(1, 0, 0)] * (3 - len(dims)) + dims
    N = x.shape[dim]
    contiguous = x.stride(dim) == 1
    BR, BN, num_warps = _tile(R, N, contiguous)
    on_chip = BN >= N
    kernel = _softmax_on_chip if on_chip else _softmax_in_two_sweeps
    # 32 registers let a multiprocessor be filled: while one row is read, another is written.
    options = {} if on_chip or not contiguous else {"maxnreg": 32}
    strides = (*x0y0, *x1y1, *xryr, x.stride(dim) if N > 1 else 1, y.stride(dim) if N > 1 else 1)
    grid, integers = (-(-R // BR) * D1 * D0, 1, 1), (D1, R, N, *strides, BR, BN)
    compiled = launch(kernel, grid, x, y, *integers, num_warps=num_warps, **options)
    if key is not None:
        remember(key, compiled, grid, (x, y), integers)


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


def _tile(R: int, N: int, contiguous: bool) -> tuple[int, int, int]:
    """BR, BN and warps; BN >= N says that rows fit on chip. `contiguous`: whether neighbours in memory are columns."""
    BN = power_of_two(N)
    if contiguous:
        if BN > 2 * MOST_ON_CHIP:
            return 1, 8192, 32
        if BN > MOST_ON_CHIP:
            return 1, 4096, 16
        BR = min(power_of_two(R), max(1, 2048 // BN))
        return BR, BN, max(4, BN // 1024)
    if BN > 1024:
        return min(power_of_two(R), 32), 256, 16
    return min(power_of_two(R), 128, max(16, 8192 // BN)), BN, 8


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
    d0, d1, r = _place(D1, R, BR)
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
):
    d0, d1, r = _place(D1, R, BR)
    x_rows = x_ptr + d0 * stride_x0 + d1 * stride_x1 + r * stride_xr  # [BR, 1]
    # A finite start: an entry of -inf adds exp(-inf) = 0 to it, where it would add exp(-inf + inf) = NaN to -inf.
    m = tl.full((BR, BN), LOWEST, tl.float32)
    z = tl.zeros((BR, BN), tl.float32)
    for start in range(0, N, BN):
        c = start + tl.arange(0, BN)[None, :]
        here = (r < R) & (c < N)
        x = tl.load(
            x_rows + c.to(tl.int64) * stride_xn, mask=here, other=-float("inf"), eviction_policy="evict_last"
        )  # [BR, BN]
        x = x.to(tl.float32)
        d = tl.exp(-tl.abs(x - m))
        z = tl.where(x > m, z * d + 1, z + d)
        m = tl.maximum(m, x)
    row_m = tl.max(m, 1, keep_dims=True)  # [BR, 1]
    factor = 1 / tl.sum(z * tl.exp(m - row_m), 1, keep_dims=True)  # a row that is all -inf: 0 * inf = NaN below
    y_rows = y_ptr + d0 * stride_y0 + d1 * stride_y1 + r * stride_yr
    # Backwards: the columns read last are still in the cache.
    for back in range(0, N, BN):
        c = (N - 1) // BN * BN - back + tl.arange(0, BN)[None, :]
        here = (r < R) & (c < N)
        x = tl.load(x_rows + c.to(tl.int64) * stride_xn, mask=here, other=-float("inf"), eviction_policy="evict_first")
        y = tl.exp(x.to(tl.float32) - row_m) * factor
        tl.store(
            y_rows + c.to(tl.int64) * stride_yn, y.to(y_ptr.dtype.element_ty), mask=here, eviction_policy="evict_first"
        )


@triton.jit
def _place(D1, R, BR: tl.constexpr):
    """Indices of the program's tile in D0 and D1, and its rows [BR, 1]; as int64, for tensors of any size."""
    tiles = tl.cdiv(R, BR)
    outer = tl.program_id(0) // tiles
    r = (tl.program_id(0) % tiles).to(tl.int64) * BR + tl.arange(0, BR)[:, None]
    return (outer // D1).to(tl.int64), (outer % D1).to(tl.int64), r
