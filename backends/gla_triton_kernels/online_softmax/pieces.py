"""Softmax along one dimension with the rows in pieces: one kernel sums, a second writes.

The first kernel spills a maximum m and a sum z of exponentials for each piece of a row, all pieces at once; the second
merges those of its rows, which is associative, and writes some tiles:

    M = max_p m_p        Z = sum_p exp(m_p - M) z_p        y = exp(x - M) / Z

It goes over x from the end, where the first kernel left it in the cache, and is launched early: a program has loaded a
tile by the time the sums are there. Pieces are whole tiles, and the kernels know it: columns are loaded 16 bytes at a
time only where the compiler sees that they are aligned.

N columns, the dimension that sums to one   R rows, the last of the other dimensions   D0, D1 what is left of those
P pieces of a row   BR, BN rows and columns of a tile   G columns of a lane   BP the pieces rounded up to a power of two

Source: Milakov and Gimelshein, "Online normalizer calculation for softmax" (arXiv 1805.02867).
"""

# pyright: reportGeneralTypeIssues=false
from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from gla_triton_kernels.online_softmax.rows import LOWEST, Rows, as_rows, maximum_and_sum, merged, place
from gla_triton_kernels.runtime.architecture import gpu_of
from gla_triton_kernels.runtime.launch import Launch, launch, on_device_of
from gla_triton_kernels.runtime.replay import record, replay
from gla_triton_kernels.runtime.sizes import power_of_two

PROGRAMS = 16
"""Programs of the first kernel per multiprocessor: two waves of eight."""


def online_softmax(x: Tensor, dim: int) -> Tensor:
    """See gla_core/ops/online_softmax.py."""
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    key = ("online_softmax in pieces", x.device, x.dtype, x.shape, x.stride(), dim)
    if not replay(key, (x, y)) and x.numel():
        with on_device_of(x):
            source, rows = as_rows(x, y, dim)
            launches = _launch(source, y, rows)
            if source is x:
                record(key, (x, y), launches)
    return y


def _launch(x: Tensor, y: Tensor, rows: Rows) -> list[Launch]:
    D0, D1, R, N, strides = rows
    BR, BN, num_warps = _tile(R, N, rows.contiguous, 4096)
    blocks = D0 * D1 * -(-R // BR)
    columns = max(blocks * N // (PROGRAMS * gpu_of(x.device).multiprocessors), 4 * math.isqrt(N))
    tiles = -(-columns // BN)
    P = -(-N // (tiles * BN))
    m, z = (torch.empty(D0 * D1 * R, P, dtype=torch.float32, device=x.device) for _ in range(2))
    overlaps = gpu_of(x.device).architecture.overlaps_kernels
    integers = (D1, R, N, P, tiles, *strides, BR, BN, rows.lane(x.itemsize), overlaps)
    summed = launch(_sum_pieces, (blocks * P, 1, 1), (x, m, z), (), integers, num_warps=num_warps)

    BR, BN, num_warps = _tile(R, N, rows.contiguous, 8192)
    tiles = -(-4 * P // BN)  # a program reads all sums of its rows, which has to be little beside what it writes
    W = -(-N // (tiles * BN))
    integers = (D1, R, N, P, W, tiles, *strides, BR, BN, power_of_two(P), overlaps)
    options = {"launch_pdl": True} if overlaps else {}
    written = launch(_write, (blocks * W, 1, 1), (x, y, m, z), (), integers, num_warps=num_warps, **options)
    return [summed, written]


def _tile(R: int, N: int, contiguous: bool, most: int) -> tuple[int, int, int]:
    """BR, BN and warps. `contiguous`: whether neighbours in memory are columns, then up to `most` a tile."""
    if not contiguous:
        return min(power_of_two(R), 32), min(power_of_two(N), 256), 8
    BN = min(power_of_two(N), most)
    return min(power_of_two(R), max(1, 2048 // BN)), BN, 8 if BN > 2048 else 4


@triton.jit(do_not_specialize=["D1", "P", "tiles"])
def _sum_pieces(
    x_ptr,  # [D0, D1, R, N], of any strides
    m_ptr,  # [D0, D1, R, P]
    z_ptr,  # [D0, D1, R, P]
    D1,
    R,
    N,
    P,
    tiles,  # of a piece
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
    """Program: a piece of BR rows."""
    if OVERLAPS:  # the second kernel may be launched, and then waits
        gdc_launch_dependents()
    p = tl.program_id(0) % P
    d0, d1, r = place(tl.program_id(0) // P, D1, R, BR)
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
    tiles,  # of a program
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
    """Program: some tiles of BR rows, the last of the last rows first."""
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    d0, d1, r = place(program // W, D1, R, BR)
    there = r < R
    x_rows = x_ptr + d0 * stride_x0 + d1 * stride_x1 + r * stride_xr  # [BR, 1]
    y_rows = y_ptr + d0 * stride_y0 + d1 * stride_y1 + r * stride_yr
    start = program % W * tiles * BN
    c = start + (tiles - 1) * BN + tl.arange(0, BN)[None, :]
    x = tl.load(x_rows + c.to(tl.int64) * stride_xn, mask=there & (c < N), other=0.0)  # [BR, BN]
    if OVERLAPS:  # for the sums
        gdc_wait()
    parts = tl.arange(0, BP)[None, :]
    at = ((d0 * D1 + d1) * R + r) * P + parts  # [BR, BP]
    m, z = merged(
        tl.load(m_ptr + at, mask=there & (parts < P), other=LOWEST),
        tl.load(z_ptr + at, mask=there & (parts < P), other=0.0),
    )  # [BR, 1]
    factor = 1 / z  # a row that is all -inf: 0 * inf = NaN below
    for _ in range(tiles):
        y = (tl.exp(x.to(tl.float32) - m) * factor).to(y_ptr.dtype.element_ty)
        here = there & (c < N)
        c -= BN
        x = tl.load(x_rows + c.to(tl.int64) * stride_xn, mask=there & (c >= start) & (c < N), other=0.0)
        tl.store(y_rows + (c + BN).to(tl.int64) * stride_yn, y, mask=here, eviction_policy="evict_first")
