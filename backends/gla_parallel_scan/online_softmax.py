"""Softmax along one dimension with the rows in pieces: one kernel sums, a second writes.

The first kernel spills a maximum m and a sum z of exponentials for each piece of a row, all pieces at once; the second
merges those of its rows, which is associative, and writes a piece:

    M = max_p m_p        Z = sum_p exp(m_p - M) z_p        y = exp(x - M) / Z

Its blocks go over x from the end, where the first kernel left it in the cache.

N columns, the dimension that sums to one   R rows, the last of the other dimensions   D0, D1 what is left of those
P pieces of a row   BR, BN rows and columns of a tile   BP the pieces rounded up to a power of two

Source: Milakov and Gimelshein, "Online normalizer calculation for softmax" (arXiv 1805.02867).
"""

# pyright: reportGeneralTypeIssues=false
from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from gla_triton_shared.launch import device_of, launch, multiprocessors, power_of_two
from gla_triton_shared.online_softmax import LOWEST, as_rows, maximum_and_sum, merged, place, write_softmax

PROGRAMS = 8
"""Programs per multiprocessor: four waves of two."""


def online_softmax(x: Tensor, dim: int) -> Tensor:
    """See gla_core/ops/online_softmax.py."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        with device_of(x):
            _launch(x, y, dim)
    return y


def _launch(x: Tensor, y: Tensor, dim: int) -> None:
    x, (D0, D1, R, N, strides) = as_rows(x, y, dim)
    BR, BN, options = _tile(R, N, strides[6] == 1)
    tiles = D0 * D1 * -(-R // BR)
    # A program of the second kernel reads all sums of its rows, which has to be little beside its piece.
    columns = max(tiles * N // (PROGRAMS * multiprocessors(x.device)), 4 * math.isqrt(N))
    piece = BN * -(-columns // BN)
    P = -(-N // piece)
    m, z = torch.empty((2, D0 * D1 * R, P), dtype=torch.float32, device=x.device)
    arguments = (m, z, D1, R, N, P, piece, *strides)
    launch(_sum_pieces, (tiles * P,), x, *arguments, BR, BN, **options)
    launch(_write_pieces, (tiles * P,), x, y, *arguments, BR, BN, power_of_two(P), **options)


def _tile(R: int, N: int, contiguous: bool) -> tuple[int, int, dict[str, int]]:
    """BR, BN and options of compilation. `contiguous`: whether neighbours in memory are columns."""
    if not contiguous:
        return min(power_of_two(R), 32), min(power_of_two(N), 256), {"num_warps": 8}
    BN = min(power_of_two(N), 8192)
    BR = min(power_of_two(R), max(1, 2048 // BN))
    # 32 registers let a multiprocessor be filled.
    return BR, BN, {"num_warps": 32, "maxnreg": 32} if BN == 8192 else {"num_warps": max(4, BN // 512)}


@triton.jit(do_not_specialize=["D1", "P", "piece"])
def _sum_pieces(
    x_ptr,  # [D0, D1, R, N], of any strides
    m_ptr,  # [D0, D1, R, P]
    z_ptr,  # [D0, D1, R, P]
    D1,
    R,
    N,
    P,
    piece,  # columns of a piece
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
    """Program: a piece of BR rows."""
    p = tl.program_id(0) % P
    d0, d1, r = place(tl.program_id(0) // P, D1, R, BR)
    x_rows = x_ptr + d0 * stride_x0 + d1 * stride_x1 + r * stride_xr  # [BR, 1]
    m, z = maximum_and_sum(x_rows, r < R, p * piece, tl.minimum((p + 1) * piece, N), stride_xn, BR, BN)
    at = ((d0 * D1 + d1) * R + r) * P + p  # [BR, 1]
    tl.store(m_ptr + at, m, mask=r < R)
    tl.store(z_ptr + at, z, mask=r < R)


@triton.jit(do_not_specialize=["D1", "P", "piece"])
def _write_pieces(
    x_ptr,  # [D0, D1, R, N], of any strides
    y_ptr,  # [D0, D1, R, N]
    m_ptr,  # [D0, D1, R, P]
    z_ptr,  # [D0, D1, R, P]
    D1,
    R,
    N,
    P,
    piece,  # columns of a piece
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
    """Program: a piece of BR rows, the last piece of the last rows first."""
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    p = program % P
    d0, d1, r = place(program // P, D1, R, BR)
    parts = tl.arange(0, BP)[None, :]
    at = ((d0 * D1 + d1) * R + r) * P + parts  # [BR, BP]
    there = (r < R) & (parts < P)
    m, z = merged(
        tl.load(m_ptr + at, mask=there, other=LOWEST),
        tl.load(z_ptr + at, mask=there, other=0.0),
    )  # [BR, 1]
    x_rows = x_ptr + d0 * stride_x0 + d1 * stride_x1 + r * stride_xr  # [BR, 1]
    y_rows = y_ptr + d0 * stride_y0 + d1 * stride_y1 + r * stride_yr
    end = tl.minimum((p + 1) * piece, N)
    write_softmax(x_rows, y_rows, r < R, m, z, p * piece, end, stride_xn, stride_yn, BR, BN)
