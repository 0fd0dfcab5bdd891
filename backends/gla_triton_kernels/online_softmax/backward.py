"""Computes the gradient of a softmax along one dimension: in one pass on chip, in two sweeps, or with rows in splits.

    p = exp(x - max x)        z = sum p        w = sum p * dy        dx = p / z * (dy - w / z)        for each row

The softmax is computed again from x. A sweep keeps m, z and w for every G adjacent columns of a tile, as sweep.py does
for m and z:

    m' = max(m, max_j x_j)        (z', w') = exp(m - m') (z, w) + sum_j exp(x_j - m') (1, dy_j)

A second sweep then writes dx, the last tile first, because its columns are still in the cache. If rows are in splits,
the sweeps are two kernels: one writes m, z and w of each split, and the other merges those of its rows.

N columns, the dimension that sums to one   R rows, the last of the other dimensions   D0, D1 the dimensions before R
P splits of a row   BP the number P, rounded up to a power of two   W programs that write a row
BR, BN rows and columns of a tile   G columns that a thread loads at once

Source: Milakov and Gimelshein, "Online normalizer calculation for softmax" (arXiv 1805.02867).
"""

# pyright: reportGeneralTypeIssues=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gla_core.dispatch.tensors import ceil_div
from gla_triton_kernels.online_softmax.one_pass import EDGE
from gla_triton_kernels.online_softmax.plan import Kernel, plan_gradient_one_pass, plan_splits
from gla_triton_kernels.online_softmax.rows import Rows, rows_of
from gla_triton_kernels.online_softmax.sweep import LOWEST, rows_of_tile
from gla_triton_runtime.architecture import Gpu
from gla_triton_runtime.launch import Launch
from gla_triton_runtime.sizes import power_of_two


def launch_one_pass(x: Tensor, dy: Tensor, dx: Tensor, dim: int, gpu: Gpu) -> list[Launch]:
    """Returns the launch that writes the gradient dx of x, with one block for each row; dy has the strides of dx."""
    rows = rows_of(x, dx, dim)
    kernel, BR, BN, warps, registers = plan_gradient_one_pass(rows)
    tiled = {**_described(rows, x, dy), "dx_ptr": dx, "BR": BR, "BN": BN}
    unaligned = {"x_ptr": x, "dy_ptr": dy, "dx_ptr": dx, "N": rows.N, "BN": BN, "G": 16 // rows.itemsize}
    function, arguments = {
        Kernel.ON_CHIP: (_gradient_on_chip, tiled),
        Kernel.TWO_SWEEPS: (_gradient_in_two_sweeps, {**tiled, "G": rows.vector}),
        Kernel.TWO_SWEEPS_UNALIGNED: (_gradient_in_two_sweeps_unaligned, unaligned),
    }[kernel]
    options = {"num_warps": max(1, warps * 32 // gpu.facts.lanes)}
    if registers is not None and gpu.facts.limits_registers:
        options["maxnreg"] = registers
    return [Launch(function, (_programs(rows, BR), 1, 1), arguments, options)]


def launch_splits(x: Tensor, dy: Tensor, dx: Tensor, dim: int, gpu: Gpu) -> list[Launch]:
    """Returns the launches that write the gradient dx of x, with rows in splits; dy has the strides of dx."""
    rows = rows_of(x, dx, dim)
    sums, writes = plan_splits(rows, gpu)
    P = sums.programs
    parts = torch.empty(rows.D0 * rows.D1 * rows.R, 3, P, dtype=torch.float32, device=x.device)
    shared = {**_described(rows, x, dy), "parts_ptr": parts, "P": P}
    sizes = {"tiles": sums.tiles, "BR": sums.BR, "BN": sums.BN, "G": rows.vector}
    summed = Launch(_sum_splits, (_programs(rows, sums.BR) * P, 1, 1), {**shared, **sizes}, {"num_warps": sums.warps})
    sizes = {"W": writes.programs, "tiles": writes.tiles, "BR": writes.BR, "BN": writes.BN, "BP": power_of_two(P)}
    grid = (_programs(rows, writes.BR) * writes.programs, 1, 1)
    written = Launch(_write_splits, grid, {**shared, "dx_ptr": dx, **sizes}, {"num_warps": writes.warps})
    return [summed, written]


def _described(rows: Rows, x: Tensor, dy: Tensor) -> dict[str, object]:
    """Returns the arguments that all kernels have."""
    return {"x_ptr": x, "dy_ptr": dy, "D1": rows.D1, "R": rows.R, "N": rows.N, **rows.named_strides}


def _programs(rows: Rows, BR: int) -> int:
    """Returns the number of tiles of BR rows."""
    return ceil_div(rows.R, BR) * rows.D1 * rows.D0


@triton.jit(do_not_specialize=["D1"])
def _gradient_on_chip(
    x_ptr,  # [D0, D1, R, N], of any strides
    dy_ptr,  # [D0, D1, R, N], with the strides of dx
    dx_ptr,  # [D0, D1, R, N]
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
    y_rows = d0 * stride_y0 + d1 * stride_y1 + r * stride_yr  # [BR, 1]
    at = y_rows + c.to(tl.int64) * stride_yn  # [BR, BN]
    x = tl.load(x_rows + c.to(tl.int64) * stride_xn, mask=here, other=-float("inf")).to(tl.float32)  # [BR, BN]
    dy = tl.load(dy_ptr + at, mask=here, other=0.0).to(tl.float32)  # [BR, BN]
    # If all elements of a row are -inf, -inf + inf = NaN, which is the correct result.
    p = tl.exp(x - tl.max(x, 1, keep_dims=True))  # [BR, BN]
    p = p * (1 / tl.sum(p, 1, keep_dims=True))
    dx = p * (dy - tl.sum(p * dy, 1, keep_dims=True))
    tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=here)


@triton.jit(do_not_specialize=["D1"])
def _gradient_in_two_sweeps(
    x_ptr,  # [D0, D1, R, N], of any strides
    dy_ptr,  # [D0, D1, R, N], with the strides of dx
    dx_ptr,  # [D0, D1, R, N]
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
    y_rows = d0 * stride_y0 + d1 * stride_y1 + r * stride_yr  # [BR, 1]
    m, z, w = _sums(x_rows, dy_ptr + y_rows, r < R, 0, N, stride_xn, stride_yn, BR, BN, G)
    tiles = tl.cdiv(N, BN)
    _write(x_rows, dy_ptr + y_rows, dx_ptr + y_rows, r < R, m, z, w, 0, tiles, N, stride_xn, stride_yn, BN)


@triton.jit
def _gradient_in_two_sweeps_unaligned(
    x_ptr,  # [R, N], contiguous
    dy_ptr,  # [R, N], contiguous
    dx_ptr,  # [R, N], contiguous
    N,
    BN: tl.constexpr,
    G: tl.constexpr,
):
    """Computes a row that begins at any address, in two sweeps. Tiles begin at the first multiple of G elements."""
    start = tl.program_id(0).to(tl.int64) * N
    head = ((G - start % G) % G).to(tl.int32)  # columns before the first tile
    tail = (N - head) // BN * BN  # columns of whole tiles
    row = start + tl.zeros((1, 1), tl.int64)  # [1, 1]
    tiles = tl.multiple_of(start + head, G) + tl.zeros((1, 1), tl.int64)  # [1, 1]
    there = tl.full((1, 1), True, tl.int1)
    m0, z0, w0 = _sums(x_ptr + row, dy_ptr + row, there, 0, head, 1, 1, 1, G, 1)  # [1, 1]
    m1, z1, w1 = _sums(x_ptr + tiles, dy_ptr + tiles, there, 0, tail, 1, 1, 1, BN, G)  # [1, 1]
    m2, z2, w2 = _sums(x_ptr + row, dy_ptr + row, there, head + tail, N, 1, 1, 1, EDGE, 1)  # [1, 1]
    m = tl.maximum(tl.maximum(m0, m1), m2)
    f0, f1, f2 = tl.exp(m0 - m), tl.exp(m1 - m), tl.exp(m2 - m)
    z = z0 * f0 + z1 * f1 + z2 * f2
    w = w0 * f0 + w1 * f1 + w2 * f2
    edges = tl.cdiv(N - head - tail, EDGE)
    _write(x_ptr + row, dy_ptr + row, dx_ptr + row, there, m, z, w, head + tail, edges, N, 1, 1, EDGE)
    _write(x_ptr + tiles, dy_ptr + tiles, dx_ptr + tiles, there, m, z, w, 0, tail // BN, tail, 1, 1, BN)
    _write(x_ptr + row, dy_ptr + row, dx_ptr + row, there, m, z, w, 0, 1, head, 1, 1, G)


@triton.jit(do_not_specialize=["D1", "P", "tiles"])
def _sum_splits(
    x_ptr,  # [D0, D1, R, N], of any strides
    dy_ptr,  # [D0, D1, R, N], with the strides of dx
    parts_ptr,  # [D0, D1, R, 3, P], m, z and w
    D1,
    R,
    N,
    P,
    tiles,  # tiles of a split
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
    """Computes m, z and w of one split of BR rows."""
    p = tl.program_id(0) % P
    d0, d1, r = rows_of_tile(tl.program_id(0) // P, D1, R, BR)
    x_rows = x_ptr + d0 * stride_x0 + d1 * stride_x1 + r * stride_xr  # [BR, 1]
    dy_rows = dy_ptr + d0 * stride_y0 + d1 * stride_y1 + r * stride_yr  # [BR, 1]
    start = p * tiles * BN
    end = tl.minimum(start + tiles * BN, N)
    m, z, w = _sums(x_rows, dy_rows, r < R, start, end, stride_xn, stride_yn, BR, BN, G)
    at = parts_ptr + ((d0 * D1 + d1) * R + r) * 3 * P + p  # [BR, 1]
    tl.store(at, m, mask=r < R)
    tl.store(at + P, z, mask=r < R)
    tl.store(at + 2 * P, w, mask=r < R)


@triton.jit(do_not_specialize=["D1", "P", "W", "tiles"])
def _write_splits(
    x_ptr,  # [D0, D1, R, N], of any strides
    dy_ptr,  # [D0, D1, R, N], with the strides of dx
    dx_ptr,  # [D0, D1, R, N]
    parts_ptr,  # [D0, D1, R, 3, P], m, z and w
    D1,
    R,
    N,
    P,
    W,  # programs of a row
    tiles,  # tiles of a program
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
    BP: tl.constexpr,
):
    """Writes some tiles of BR rows. The first programs write the last tiles of the last rows."""
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    d0, d1, r = rows_of_tile(program // W, D1, R, BR)
    there = r < R
    split = tl.arange(0, BP)[None, :]  # [1, BP]
    at = parts_ptr + ((d0 * D1 + d1) * R + r) * 3 * P + split  # [BR, BP]
    here = there & (split < P)  # [BR, BP]
    m, z, w = _merge(
        tl.load(at, mask=here, other=LOWEST),
        tl.load(at + P, mask=here, other=0.0),
        tl.load(at + 2 * P, mask=here, other=0.0),
    )  # [BR, 1]
    x_rows = x_ptr + d0 * stride_x0 + d1 * stride_x1 + r * stride_xr  # [BR, 1]
    y_rows = d0 * stride_y0 + d1 * stride_y1 + r * stride_yr  # [BR, 1]
    start = program % W * tiles * BN
    _write(x_rows, dy_ptr + y_rows, dx_ptr + y_rows, there, m, z, w, start, tiles, N, stride_xn, stride_yn, BN)


@triton.jit
def _sums(
    x_rows,  # [BR, 1]
    dy_rows,  # [BR, 1]
    there,  # [BR, 1]
    start,
    end,
    stride_xn,
    stride_yn,
    BR: tl.constexpr,
    BN: tl.constexpr,
    G: tl.constexpr,
):
    """Returns m, z and w [BR, 1] of the columns from start to end."""
    # m starts at a finite number, so an element of -inf adds exp(-inf) = 0, and not exp(-inf + inf) = NaN.
    m = tl.full((BR, BN // G), LOWEST, tl.float32)
    z = tl.zeros((BR, BN // G), tl.float32)
    w = tl.zeros((BR, BN // G), tl.float32)
    for first in range(start, end, BN):
        c = first + tl.arange(0, BN)[None, :]  # [1, BN]
        here = there & (c < end)  # [BR, BN]
        at_x, at_dy = x_rows + c.to(tl.int64) * stride_xn, dy_rows + c.to(tl.int64) * stride_yn  # [BR, BN]
        x = tl.load(at_x, mask=here, other=-float("inf"), eviction_policy="evict_last").to(tl.float32)
        dy = tl.load(at_dy, mask=here, other=0.0, eviction_policy="evict_last").to(tl.float32)
        x, dy = tl.reshape(x, (BR, BN // G, G)), tl.reshape(dy, (BR, BN // G, G))  # [BR, BN // G, G]
        greater = tl.maximum(m, tl.max(x, 2))  # [BR, BN // G]
        p = tl.exp(x - greater[:, :, None])  # [BR, BN // G, G]
        rescale = tl.exp(m - greater)  # [BR, BN // G]
        z = z * rescale + tl.sum(p, 2)
        w = w * rescale + tl.sum(p * dy, 2)
        m = greater
    return _merge(m, z, w)


@triton.jit
def _merge(m, z, w):
    """Merges m, z and w of parts of a row, [BR, parts], into those of the row, [BR, 1]."""
    row_m = tl.max(m, 1, keep_dims=True)
    rescale = tl.exp(m - row_m)  # [BR, parts]
    return row_m, tl.sum(z * rescale, 1, keep_dims=True), tl.sum(w * rescale, 1, keep_dims=True)


@triton.jit
def _write(
    x_rows,  # [BR, 1]
    dy_rows,  # [BR, 1]
    dx_rows,  # [BR, 1]
    there,  # [BR, 1]
    m,  # [BR, 1]
    z,  # [BR, 1]
    w,  # [BR, 1]
    start,
    tiles,
    end,
    stride_xn,
    stride_yn,
    BN: tl.constexpr,
):
    """Writes dx for some tiles of columns from start on, up to end, the last tile first."""
    factor = 1 / z  # [BR, 1]; if all elements of a row are -inf, 0 * inf = NaN below
    mean = w * factor  # [BR, 1]
    c = start + (tiles - 1) * BN + tl.arange(0, BN)[None, :]  # [1, BN]
    for _ in range(tiles):
        here = there & (c < end)  # [BR, BN]
        at_x, at_y = x_rows + c.to(tl.int64) * stride_xn, c.to(tl.int64) * stride_yn
        x = tl.load(at_x, mask=here, other=-float("inf"), eviction_policy="evict_first").to(tl.float32)
        dy = tl.load(dy_rows + at_y, mask=here, other=0.0, eviction_policy="evict_first").to(tl.float32)
        dx = tl.exp(x - m) * factor * (dy - mean)  # [BR, BN]
        tl.store(dx_rows + at_y, dx.to(dx_rows.dtype.element_ty), mask=here, eviction_policy="evict_first")
        c -= BN
