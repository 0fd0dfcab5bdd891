"""Softmax attention over blocks of keys, with a running maximum m, sum z and unnormalised output o on chip.

    s = scale * q k_j^T        m' = max(m, rowmax s)
    z' = exp(m - m') z + rowsum exp(s - m')        o' = exp(m - m') o + exp(s - m') v_j
    o = o / z        lse = m + log z

Exponentials are to base 2: the kernel's scale holds log2 e, and m is a maximum of log2 e * s.

The keys may be cut into pieces, which are attended to at once; each piece has an o and an lse of its own.

B batch   Tq, Tk queries and keys   H key/value heads   G query heads per key/value head   K, V key and value width
R = Tq * G rows of queries that share a key/value head: row r is query r // G of the group's head r % G
BR rows per program   BT keys per block   BK, BV the widths rounded up to a power of two

Source: Dao et al., "FlashAttention" (arXiv 2205.14135).
"""

# pyright: reportGeneralTypeIssues=false
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from gla_triton_kernels.runtime.architecture import Architecture, gpu_of, tf32_allowed
from gla_triton_kernels.runtime.launch import launch
from gla_triton_kernels.runtime.sizes import power_of_two
from gla_triton_kernels.runtime.tf32 import nearest_tf32
from gla_triton_kernels.runtime.tma import addressable, tiles

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)

# By width: rows and keys of a block, and warps. Halves fill the tensor cores; float32 products at full precision are
# computed without them, fully unrolled, so their blocks are small.
HALF = {64: (64, 128, 4), 128: (128, 64, 4), 256: (128, 64, 8), 512: (64, 32, 8)}
TF32 = {64: (64, 64, 4), 128: (64, 32, 4), 256: (16, 16, 8), 512: (16, 16, 8)}
FLOAT32 = {64: (32, 32, 4), 128: (32, 16, 8), 256: (16, 16, 8), 512: (16, 16, 8)}


class Blocks(NamedTuple):
    """How a call is cut: rows per program, keys per block, and what a program is compiled with."""

    BR: int
    BT: int
    num_warps: int
    num_stages: int = 2


def blocks(q: Tensor, v: Tensor) -> Blocks:
    """The blocks for these queries [B, Tq, H * G, K] and values [B, Tk, H, V]."""
    rows = q.shape[1] * (q.shape[2] // v.shape[2])
    width = power_of_two(max(q.shape[3], v.shape[3]), 64)
    table = HALF if q.dtype != torch.float32 else FLOAT32 if not tf32_allowed() else TF32
    BR, BT, num_warps = table[width]
    if width > 128 and gpu_of(q.device).architecture < Architecture.SM90:  # less shared memory
        BT = max(16, BT // 2)
    if rows < BR:
        return Blocks(power_of_two(rows, 16), BT, min(num_warps, 4))
    return Blocks(BR, BT, num_warps)


def run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    causal: bool,
    o: Tensor,
    lse: Tensor,
    cut: Blocks,
    piece: int | None = None,
) -> None:
    """Write o [pieces, B, Tq, H * G, V] and lse [pieces, B, Tq, H * G] of every `piece` keys, or of all keys at once.

    A row that sees no key of a piece has o = NaN and lse = -inf there.

    Args:
        scale: not below 0: the greatest product is taken for the greatest score.
        cut: from `blocks`.
        piece: a multiple of cut.BT.
    """
    (_, Tq, Hq, K), (B, Tk, H, V) = q.shape, v.shape
    BR, BT, num_warps, num_stages = cut
    precision = "ieee" if q.dtype == torch.float32 and not tf32_allowed() else "tf32"
    tma = gpu_of(q.device).architecture.has_tma and q.dtype != torch.float32 and addressable(k) and addressable(v)
    width = power_of_two(max(K, V), 64)
    # Triton 3.6 on Hopper miscompiles blocks of pointers with V up to 32 and K above it, so both are as wide there.
    BK, BV = (power_of_two(K, 16), power_of_two(V, 16)) if tma else (width, width)
    keys, values = (tiles(k, BT, BK), tiles(v, BT, BV)) if tma else (k, v)
    pieces = 1 if piece is None else -(-Tk // piece)
    strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3])
    constants = (K, V, causal, BR, BT, BK, BV, tma, precision)
    integers = (B, Tq, Tk, H, Hq // H, piece, *strides, *constants)
    grid, tensors = (pieces * B * H * -(-Tq * (Hq // H) // BR), 1, 1), (q, keys, values, o, lse)
    launch(_attention, grid, tensors, (scale,), integers, num_warps=num_warps, num_stages=num_stages)


@triton.jit(do_not_specialize=["scale", "B", "Tq", "Tk", "H", "piece"])
def _attention(
    q_ptr,  # [B, Tq, H * G, K]
    k_ptr,  # [B, Tk, H, K], or a descriptor
    v_ptr,  # [B, Tk, H, V], or a descriptor
    o_ptr,  # [pieces, B, Tq, H * G, V]
    lse_ptr,  # [pieces, B, Tq, H * G]
    scale,
    B,
    Tq,
    Tk,
    H,
    G,
    piece,  # keys of a piece, or None: all keys at once
    stride_qb,
    stride_qt,
    stride_qh,
    stride_kb,
    stride_kt,
    stride_kh,
    stride_vb,
    stride_vt,
    stride_vh,
    K: tl.constexpr,
    V: tl.constexpr,
    CAUSAL: tl.constexpr,
    BR: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
):
    # The tiles of a head start together, so that its keys stay in the cache; those that see most keys start first.
    tiles = tl.cdiv(Tq * G, BR)
    tile = tiles - 1 - tl.program_id(0) % tiles
    b = tl.program_id(0) // tiles // H
    h = (tl.program_id(0) // tiles % H).to(tl.int64)
    if piece is not None:
        p = b // B
        b %= B
    b = b.to(tl.int64)

    r = tile * BR + tl.arange(0, BR)  # [BR]
    t = r // G  # [BR], the row's query
    row = (b * Tq + t) * (H * G) + h * G + r % G  # [BR], the row's place in o and lse
    if piece is not None:
        row += p.to(tl.int64) * B * Tq * (H * G)
    there = r < Tq * G  # [BR]
    i = tl.arange(0, BK)
    q_rows = q_ptr + b * stride_qb + t.to(tl.int64) * stride_qt + (h * G + r % G) * stride_qh  # [BR]
    q = tl.load(q_rows[:, None] + i, mask=there[:, None] & (i < K), other=0.0)  # [BR, BK]
    if PRECISION == "tf32" and q.dtype == tl.float32:
        q = nearest_tf32(q)
    scale *= LOG2_E

    last_key = t + Tk - Tq if CAUSAL else tl.zeros_like(t) + Tk - 1  # [BR]
    if CAUSAL:
        all_see = tl.maximum(tile * BR // G + 1 + Tk - Tq, 0)  # keys that every row sees
        some_see = tl.maximum(tl.minimum((tile * BR + BR - 1) // G + 1 + Tk - Tq, Tk), 0)
    else:
        all_see = Tk
        some_see = Tk
    start = 0
    end = some_see
    full = all_see // BT * BT
    if piece is not None:
        start = p * piece
        end = tl.minimum(start + piece, some_see)
        full = tl.maximum(start, tl.minimum(end, full))

    if not TMA:
        k_ptr += b * stride_kb + h * stride_kh
        v_ptr += b * stride_vb + h * stride_vh
    m = tl.full((BR,), -float("inf"), tl.float32)
    z = tl.zeros((BR,), tl.float32)
    o = tl.zeros((BR, BV), tl.float32)
    m, z, o = _attend(
        start, full, q, k_ptr, v_ptr, m, z, o, last_key, scale, Tk, b, h, stride_kt, stride_vt,
        K, V, BT, BK, BV, TMA, PRECISION, MASKED=False,
    )  # fmt: skip
    m, z, o = _attend(
        full, end, q, k_ptr, v_ptr, m, z, o, last_key, scale, Tk, b, h, stride_kt, stride_vt,
        K, V, BT, BK, BV, TMA, PRECISION, MASKED=True,
    )  # fmt: skip

    # A row that sees no key: o = 0 / 0 = NaN and lse = -inf + log 0 = -inf.
    j = tl.arange(0, BV)
    o = o / z[:, None]
    tl.store(o_ptr + row[:, None] * V + j, o.to(o_ptr.dtype.element_ty), mask=there[:, None] & (j < V))
    tl.store(lse_ptr + row, (m + tl.log2(z)) * LN_2, mask=there)


@triton.jit
def _attend(
    start,
    end,
    q,  # [BR, BK]
    k_ptr,
    v_ptr,
    m,  # [BR]
    z,  # [BR]
    o,  # [BR, BV]
    last_key,  # [BR]
    scale,
    Tk,
    b,
    h,
    stride_kt,
    stride_vt,
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Go over the keys from start to end; MASKED: where a row may not see all of a block."""
    for j in tl.range(start, end, BT):
        k = _load_block(k_ptr, j, Tk, b, h, stride_kt, K, BT, BK, TMA, PRECISION, MASKED)  # [BT, BK]
        s = tl.dot(q, k.T, input_precision=PRECISION)  # [BR, BT]
        if MASKED:
            seen = j + tl.arange(0, BT) <= tl.minimum(last_key, Tk - 1)[:, None]
            s = tl.where(seen, s * scale, -float("inf"))
            m_new = tl.maximum(m, tl.max(s, 1))
        else:
            m_new = tl.maximum(m, tl.max(s, 1) * scale)
        # While a row has seen nothing, exp(-inf - 0) = 0 where exp(-inf + inf) would be NaN.
        base = tl.where(m_new == -float("inf"), 0.0, m_new)
        p = tl.exp2(s - base[:, None]) if MASKED else tl.exp2(s * scale - base[:, None])  # [BR, BT]
        rescale = tl.exp2(m - base)
        z = z * rescale + tl.sum(p, 1)
        o = o * rescale[:, None]
        v = _load_block(v_ptr, j, Tk, b, h, stride_vt, V, BT, BV, TMA, PRECISION, MASKED)  # [BT, BV]
        if PRECISION == "tf32" and q.dtype == tl.float32:
            p = nearest_tf32(p)
        o = tl.dot(p.to(v.dtype), v, o, input_precision=PRECISION)
        m = m_new
    return m, z, o


@triton.jit
def _load_block(
    x_ptr,
    j,
    T,
    b,
    h,
    stride_t,
    WIDTH: tl.constexpr,
    BT: tl.constexpr,
    BW: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Rows j to j + BT of head h, zeros beyond T and beyond WIDTH: [BT, BW]."""
    if TMA:
        x = x_ptr.load([b.to(tl.int32), h.to(tl.int32), j, 0]).reshape(BT, BW)
    else:
        t = j + tl.arange(0, BT)[:, None]
        i = tl.arange(0, BW)[None, :]
        rows = x_ptr + t.to(tl.int64) * stride_t + i
        if MASKED:
            x = tl.load(rows, mask=(t < T) & (i < WIDTH), other=0.0)
        elif WIDTH < BW:
            x = tl.load(rows, mask=i < WIDTH, other=0.0)
        else:
            x = tl.load(rows)
    if PRECISION == "tf32" and x.dtype == tl.float32:
        x = nearest_tf32(x)
    return x
