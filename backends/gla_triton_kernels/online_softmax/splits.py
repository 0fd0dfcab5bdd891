"""Computes softmax along one dimension with rows in splits: one kernel sums, and a second kernel writes.

The first kernel computes all splits in parallel, and writes a maximum m and a sum z of exponentials for each split of a
row. Each program of the second kernel merges m and z of its rows, and writes some tiles:

    M = max_p m_p        Z = sum_p exp(m_p - M) z_p        y = exp(x - M) / Z

The second kernel goes through x from the end, which is still in the cache after the first kernel. It starts while the
first kernel ends, so that each program has loaded a tile before the sums are complete. Splits consist of whole tiles,
and the kernels compute offsets from tiles. The compiler can then prove that columns are aligned, and loads 16 bytes at
a time.

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
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from gla_core.dispatch.tensors import ceil_div
from gla_triton_kernels.online_softmax.plan import plan_splits
from gla_triton_kernels.online_softmax.rows import rows_of
from gla_triton_kernels.online_softmax.sweep import LOWEST, maximum_and_sum, merge, rows_of_tile
from gla_triton_runtime.architecture import Gpu
from gla_triton_runtime.launch import Launch, overlapping
from gla_triton_runtime.sizes import power_of_two


def launch_softmax(x: Tensor, y: Tensor, dim: int, gpu: Gpu) -> list[Launch]:
    """Returns the launches that write the softmax of x to y."""
    rows = rows_of(x, y, dim)
    sums, writes = plan_splits(rows, gpu)
    D0, D1, R, N, *_ = rows
    P, overlaps = sums.programs, gpu.facts.overlaps_kernels
    m, z = (torch.empty(D0 * D1 * R, P, dtype=torch.float32, device=x.device) for _ in range(2))

    grid = (D0 * D1 * ceil_div(R, sums.BR) * P, 1, 1)
    arguments = {
        "x_ptr": x,
        "m_ptr": m,
        "z_ptr": z,
        "D1": D1,
        "R": R,
        "N": N,
        "P": P,
        "tiles": sums.tiles,
        **rows.named_strides,
        "BR": sums.BR,
        "BN": sums.BN,
        "G": rows.vector,
        "OVERLAPS": overlaps,
    }
    summed = Launch(_sum_splits, grid, arguments, {"num_warps": sums.warps})

    grid = (D0 * D1 * ceil_div(R, writes.BR) * writes.programs, 1, 1)
    arguments = {
        "x_ptr": x,
        "y_ptr": y,
        "m_ptr": m,
        "z_ptr": z,
        "D1": D1,
        "R": R,
        "N": N,
        "P": P,
        "W": writes.programs,
        "tiles": writes.tiles,
        **rows.named_strides,
        "BR": writes.BR,
        "BN": writes.BN,
        "BP": power_of_two(P),
        "OVERLAPS": overlaps,
    }
    options = {"num_warps": writes.warps, **overlapping(overlaps)}
    written = Launch(_write, grid, arguments, options)
    return [summed, written]


@triton.jit(do_not_specialize=["D1", "P", "tiles"])
def _sum_splits(
    x_ptr,  # [D0, D1, R, N], of any strides
    m_ptr,  # [D0, D1, R, P]
    z_ptr,  # [D0, D1, R, P]
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
    OVERLAPS: tl.constexpr,
):
    """Computes m and z of one split of BR rows."""
    if OVERLAPS:  # the second kernel may start now; it waits for this one
        gdc_launch_dependents()
    p = tl.program_id(0) % P
    d0, d1, r = rows_of_tile(tl.program_id(0) // P, D1, R, BR)
    x_rows = x_ptr + d0 * stride_x0 + d1 * stride_x1 + r * stride_xr  # [BR, 1]
    start = p * tiles * BN
    m, z = maximum_and_sum(x_rows, r < R, start, tl.minimum(start + tiles * BN, N), stride_xn, BR, BN, G)
    at = ((d0 * D1 + d1) * R + r) * P + p  # [BR, 1]
    tl.store(m_ptr + at, m, mask=r < R)
    tl.store(z_ptr + at, z, mask=r < R)


@triton.jit(do_not_specialize=["D1", "P", "W", "tiles"])
def _write(
    x_ptr,  # [D0, D1, R, N], of any strides
    y_ptr,  # [D0, D1, R, N]
    m_ptr,  # [D0, D1, R, P]
    z_ptr,  # [D0, D1, R, P]
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
    OVERLAPS: tl.constexpr,
):
    """Writes some tiles of BR rows. The first programs write the last tiles of the last rows."""
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    d0, d1, r = rows_of_tile(program // W, D1, R, BR)
    there = r < R
    x_rows = x_ptr + d0 * stride_x0 + d1 * stride_x1 + r * stride_xr  # [BR, 1]
    y_rows = y_ptr + d0 * stride_y0 + d1 * stride_y1 + r * stride_yr
    start = program % W * tiles * BN
    c = start + (tiles - 1) * BN + tl.arange(0, BN)[None, :]  # [1, BN]
    x = tl.load(x_rows + c.to(tl.int64) * stride_xn, mask=there & (c < N), other=0.0)  # [BR, BN]
    if OVERLAPS:  # the first kernel writes the sums
        gdc_wait()
    split = tl.arange(0, BP)[None, :]  # [1, BP]
    at = ((d0 * D1 + d1) * R + r) * P + split  # [BR, BP]
    m, z = merge(
        tl.load(m_ptr + at, mask=there & (split < P), other=LOWEST),
        tl.load(z_ptr + at, mask=there & (split < P), other=0.0),
    )  # [BR, 1]
    factor = 1 / z  # [BR, 1]; if all elements of a row are -inf, 0 * inf = NaN below
    for _ in range(tiles):
        y = (tl.exp(x.to(tl.float32) - m) * factor).to(y_ptr.dtype.element_ty)
        here = there & (c < N)
        c -= BN
        x = tl.load(x_rows + c.to(tl.int64) * stride_xn, mask=there & (c >= start) & (c < N), other=0.0)
        tl.store(y_rows + (c + BN).to(tl.int64) * stride_yn, y, mask=here, eviction_policy="evict_first")
