"""Adds to gradients of gated linear attention what pairs of tokens of one chunk give, where gates decay a lot in it.

backward_sm90.py leaves these pairs out where a chunk of C tokens is not mild, and marks the chunk. With D_ts = D_st =
scale * do_t . v_s for s <= t, and for each channel of K the decay e_ts = exp(g_{s+1} + .. + g_t),

    dq_t += sum over s <= t of D_ts e_ts k_s        dv_s += scale * sum over t >= s of (sum_K q_t e_ts k_s) do_t
    dk_s += sum over t >= s of D_ts e_ts q_t        dg_u += sum over s < u <= t of q_t D_ts e_ts k_s

The chunk is halved again and again: every pair s < t lies in the two halves of one block of 2m tokens, for one m of 1,
2, 4 .. C/2. With b_t = g_1 + .. + g_t and b* that of the last token of the block's left half,

    z_t = q_t exp(b_t - b*) in the right half        z_s = k_s exp(b* - b_s) in the left half        dz = D z

with D masked to pairs of the two halves. dz times its row's exponential is what these give to dq in right halves and
to dk in left ones; z z^T, masked likewise, replaces the sum over K in dv. No exponent is above 0, so that any gate down
to -inf is exact. Gate u decays each pair of which one token is before it and one is not:

    dg_u += sum over t >= u of w_t        w = z * dz in right halves, -z * dz in left ones

A pair that is at or after u whole adds the same products of rounded numbers twice, with both signs. dg is set to
exactly 0 where exp(g) is 0 in float32. Pairs s = t have no gate and are multiplied element by element.

No matrix product stands in a branch at run time, which Triton gets wrong on Hopper.

B batch   T tokens   H heads   N sequences   K, V key and value width   C tokens of a chunk   BK, BV columns of a tile
i rows of marks, one a chunk, numbered as checkpoints are   blocks_k blocks of `KEYS` keys

Source: Yang et al., "Gated Linear Attention Transformers with Hardware-Efficient Training" (arXiv 2312.06635), sec. 4.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from gla_triton_kernels.chunk_gla.backward import product
from gla_triton_kernels.chunk_gla.call import BackwardTensors
from gla_triton_kernels.chunk_gla.common import load_tile, store_tile
from gla_triton_kernels.chunk_gla.limits import LEAST_GATE, LOG2E
from gla_triton_kernels.chunk_gla.plan_backward import CHUNK
from gla_triton_kernels.runtime.architecture import interpreted
from gla_triton_kernels.runtime.launch import Launch, launch
from gla_triton_kernels.runtime.sizes import power_of_two

KEYS = 128
"""Keys of a block that is marked."""
MARKS = 64
"""The most chunks of heads that a program looks at, at once: to start a program takes longer."""
PROGRAMS = 1024
"""Where there are no more chunks of heads, each has a program of its own: some for every multiprocessor."""


def run(x: BackwardTensors, marks: Tensor, scale: float) -> list[Launch]:
    """Complete the gradients of marked chunks, and return what was launched.

    Args:
        x: has gates, as many query heads as others, and contiguous gradients, which lack pairs in marked chunks.
        marks: [rows, H, blocks_k] int32, contiguous: not 0 where a chunk is marked. Rows are numbered as those of
            checkpoints every `CHUNK` tokens; what stands in rows without a chunk is not looked at.
    """
    assert x.g is not None
    T, H, K = x.k.shape[1:]
    V = x.v.shape[3]
    N = 0 if x.cu_seqlens is None else len(x.cu_seqlens) - 1
    given = (x.q, x.k, x.v, x.g, x.do)
    strides = [stride for y in given for stride in y.stride()[:3]]
    BK, BV = (min(64, power_of_two(width, 16)) for width in (K, V))
    precision = "ieee" if interpreted() else "bf16"
    count = len(marks) * H
    integers = (T, N, H, count, *strides, K, V, CHUNK, CHUNK.bit_length() - 1, KEYS, MARKS, BK, BV, precision)
    tensors = (*given, x.cu_seqlens, marks, x.dq, x.dk, x.dv, x.dg)
    grid = (max(min(count, PROGRAMS), -(-count // MARKS)), 1, 1)
    return [launch(_pairs_kernel, grid, tensors, (scale,), integers, num_warps=16)]


@triton.jit(do_not_specialize=["scale", "T", "N", "H", "count"])
def _pairs_kernel(
    q_ptr,  # [B, T, H, K]
    k_ptr,  # [B, T, H, K]
    v_ptr,  # [B, T, H, V]
    g_ptr,  # [B, T, H, K]
    do_ptr,  # [B, T, H, V]
    cu_seqlens_ptr,  # [N+1] or None
    marks_ptr,  # [rows, H, blocks_k]
    dq_ptr,  # [B, T, H, K]
    dk_ptr,  # [B, T, H, K]
    dv_ptr,  # [B, T, H, V]
    dg_ptr,  # [B, T, H, K]
    scale,
    T,
    N,
    H,
    count,
    stride_qb,
    stride_qt,
    stride_qh,
    stride_kb,
    stride_kt,
    stride_kh,
    stride_vb,
    stride_vt,
    stride_vh,
    stride_gb,
    stride_gt,
    stride_gh,
    stride_ob,
    stride_ot,
    stride_oh,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    LEVELS: tl.constexpr,
    KEYS: tl.constexpr,
    MARKS: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Program: those chunks of heads that are marked, mostly none, of some that are far apart."""
    pid, programs = tl.program_id(0), tl.num_programs(0)
    blocks_k: tl.constexpr = (K + KEYS - 1) // KEYS
    row, column = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    own = pid + programs * tl.arange(0, MARKS)  # [MARKS]
    marks = tl.zeros([MARKS], tl.int32)
    for block in range(blocks_k):
        marks |= tl.load(marks_ptr + own.to(tl.int64) * blocks_k + block, mask=own < count, other=0)
    marked = tl.cumsum((marks != 0).to(tl.int32), 0)  # [MARKS], how many there are up to each
    for j in tl.range(0, tl.max(marked), num_stages=1):
        ih = pid + programs * tl.sum((marked <= j).to(tl.int32))
        i, h = ih // H, ih % H
        if cu_seqlens_ptr is None:
            chunks = tl.cdiv(T, C)
            b, t, end = i // chunks, i % chunks * C, T
        else:
            n = _sequence_of(i, cu_seqlens_ptr, N, C)
            start = tl.load(cu_seqlens_ptr + n).to(tl.int32)
            b, t = 0, start + (i - n - start // C) * C
            end = tl.load(cu_seqlens_ptr + n + 1).to(tl.int32)
            end = tl.where(t < start, t, end)  # rows before the first sequence's have no chunk
        b64 = tl.cast(b, tl.int64)
        q_b = q_ptr + b64 * stride_qb
        k_b = k_ptr + b64 * stride_kb
        v_b = v_ptr + b64 * stride_vb
        g_b = g_ptr + b64 * stride_gb
        do_b = do_ptr + b64 * stride_ob
        dq_b = dq_ptr + b64 * T * (H * K)
        dk_b = dk_ptr + b64 * T * (H * K)
        dv_b = dv_ptr + b64 * T * (H * V)
        dg_b = dg_ptr + b64 * T * (H * K)

        dA = tl.zeros([C, C], tl.float32)
        dAT = tl.zeros([C, C], tl.float32)
        for v0 in tl.range(0, V, BV, num_stages=1):
            v = load_tile(None, v_b, stride_vt, stride_vh, b, t, h, v0, end, V, C, BV)  # [C, BV]
            do = load_tile(None, do_b, stride_ot, stride_oh, b, t, h, v0, end, V, C, BV)  # [C, BV]
            dA = product(do, tl.trans(v), dA, PRECISION)
            dAT = product(v, tl.trans(do), dAT, PRECISION)
        D = scale * tl.where(row >= column, dA, dAT)  # [C, C]
        D_tt = tl.sum(tl.where(row == column, D, 0.0), 1)[:, None]  # [C, 1]

        A = tl.zeros([C, C], tl.float32)  # sum_K q_t e_ts k_s, symmetric as D is
        for k0 in tl.range(0, K, BK, num_stages=1):
            mark = tl.load(marks_ptr + ih.to(tl.int64) * blocks_k + k0 // KEYS)
            stop = tl.where(mark == 0, t, end)  # where keys are not marked, nothing is read or written
            levels = tl.where(t < stop, LEVELS, 0)
            q = load_tile(None, q_b, stride_qt, stride_qh, b, t, h, k0, stop, K, C, BK)  # [C, BK]
            k = load_tile(None, k_b, stride_kt, stride_kh, b, t, h, k0, stop, K, C, BK)  # [C, BK]
            g = load_tile(None, g_b, stride_gt, stride_gh, b, t, h, k0, stop, K, C, BK)  # [C, BK]
            A, dq, dk, dg = _pairs_of_halves(A, q, k, g, D, levels, C, BK, PRECISION)
            A += tl.where(row == column, tl.sum(q.to(tl.float32) * k, 1)[:, None], 0.0)
            _add(dq_b, H, b, t, h, k0, stop, dq + D_tt * k, K, C, BK)
            _add(dk_b, H, b, t, h, k0, stop, dk + D_tt * q, K, C, BK)
            dg += load_tile(None, dg_b, H * K, K, b, t, h, k0, stop, K, C, BK)
            dg = tl.where(g > LEAST_GATE, dg, 0.0)
            store_tile(None, dg_b, H * K, K, b, t, h, k0, stop, dg, K, C, BK)

        AT = tl.where(row <= column, scale * A, 0.0)  # [C, C]
        for v0 in tl.range(0, V, BV, num_stages=1):
            do = load_tile(None, do_b, stride_ot, stride_oh, b, t, h, v0, end, V, C, BV)  # [C, BV]
            _add(dv_b, H, b, t, h, v0, end, product(AT, do, None, PRECISION), V, C, BV)


@triton.jit
def _sequence_of(i, cu_seqlens_ptr, N, C: tl.constexpr):
    """The last of N sequences whose chunks begin in row i or before; 0 if there is none."""
    n, above = 0, N
    while above - n > 1:
        middle = (n + above) // 2
        first = middle + tl.load(cu_seqlens_ptr + middle).to(tl.int32) // C  # the row of its first chunk
        n = tl.where(first <= i, middle, n)
        above = tl.where(first <= i, above, middle)
    return n


@triton.jit
def _pairs_of_halves(A, q, k, g, D, levels, C: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr):
    """Add to A [C, C], and make dq, dk, dg [C, BK] of, pairs in the two halves of blocks of 2, 4 .. 2^levels tokens."""
    OPERAND: tl.constexpr = tl.bfloat16 if PRECISION == "bf16" else tl.float32  # pyright: ignore
    row, column = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    g = tl.maximum(g.to(tl.float32), LEAST_GATE) * LOG2E  # [C, BK]
    b = _sums_of_rows(row >= column, g, C, BK, PRECISION)  # [C, BK]
    dq = tl.zeros([C, BK], tl.float32)
    dk = tl.zeros([C, BK], tl.float32)
    w = tl.zeros([C, BK], tl.float32)
    for level in tl.range(0, levels, num_stages=1):  # pyright: ignore
        m = 1 << level
        right = (row & m) != 0  # [C, 1]
        to_q = tl.where(right, 1.0, 0.0)  # [C, 1]
        to_k = 1.0 - to_q  # [C, 1]
        pair = ((row ^ column) & -m) == m  # [C, C], whether two tokens are in different halves of a block
        last = ((row | m) & -m) - 1  # [C, 1], of the left half
        decay = tl.exp2(-1.0 * tl.abs(b - tl.gather(b, tl.broadcast_to(last, C, BK), 0)))  # [C, BK]
        z = tl.where(right, q * decay, k * decay).to(OPERAND)  # [C, BK]
        A += tl.where(pair, product(z, tl.trans(z), None, PRECISION), 0.0)
        dz = product(tl.where(pair, D, 0.0), z, None, PRECISION)  # [C, BK]
        dq += to_q * (dz * decay)
        dk += to_k * (dz * decay)
        w += (to_q - to_k) * z * dz
    at_or_after = (row <= column) & (row > 0)  # no token comes before the first, and its dg is to be exactly 0
    return A, dq, dk, _sums_of_rows(at_or_after, w, C, BK, PRECISION)


@triton.jit
def _sums_of_rows(chosen, x, C: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr):
    """For each row the sum of the rows of x [C, BK] that `chosen` [C, C] picks: a product with x in bfloat16 parts."""
    total = tl.zeros([C, BK], tl.float32)
    for _ in tl.range(0, 3, num_stages=1):  # three parts are all 24 bits of float32
        part = x.to(tl.bfloat16)  # [C, BK]
        total = product(tl.where(chosen, 1.0, 0.0), part, total, PRECISION)
        x -= part.to(tl.float32)
    return total


@triton.jit
def _add(ptr, H, b, t, head, column, end, x, D: tl.constexpr, C: tl.constexpr, BD: tl.constexpr):
    """Add x [C, BD] to a tile of a gradient [T, H, D]."""
    x += load_tile(None, ptr, H * D, D, b, t, head, column, end, D, C, BD)
    store_tile(None, ptr, H * D, D, b, t, head, column, end, x, D, C, BD)
