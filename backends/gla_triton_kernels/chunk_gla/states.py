"""States of all segments from zero, in a block [BK, BV] of a state a program; any width, dtype and gate.

With g_t the log gates of a segment of tokens 1 to L, its decay and its state from zero are

    D = exp(sum over t of g_t)        S = sum over s of (k_s * exp(sum over t > s of g_t))^T v_s

A program goes through its segment backwards in chunks of C tokens, so that S is never scaled: with W the sum of the
gates of the chunks after this one, and x_s that of the gates in the chunk after s,

    S += (k * exp(x + W))^T v        W += sum of the chunk's gates

No exponent is above 0, so any gate is exact; one below `LEAST_GATE`, whose exp is 0 in float32, counts as that one.
float32 inputs go token by token, unless TF32 is allowed.

B batch   T tokens   H key/value heads   I segments   K, V key and value width   C tokens a chunk
BK, BV keys and values of a block of a state

Source: Yang et al., "Gated Linear Attention Transformers with Hardware-Efficient Training" (arXiv 2312.06635), sec. 4.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents

from gla_triton_kernels.chunk_gla.call import Tensors
from gla_triton_kernels.chunk_gla.common import OPERANDS, load_row, load_tile, operand
from gla_triton_kernels.chunk_gla.limits import LEAST_GATE, LOG2E
from gla_triton_kernels.chunk_gla.plan import SegmentPlan
from gla_triton_kernels.chunk_gla.segments import Segments
from gla_triton_kernels.runtime.launch import Launch, launch
from gla_triton_kernels.runtime.tma import tiles


def run(plan: SegmentPlan, x: Tensors, segments: Segments, S: Tensor, D: Tensor | None) -> list[Launch]:
    """Fill S [I, H, K, V] and D [I, H, K], and return what was launched; D is None without gates.

    Where no final state is asked for, those of a sequence's last segment may be left as they are.
    """
    kernel = plan.states
    H, K, V = S.shape[1:]
    moved = ((x.k, kernel.BK), (x.v, kernel.BV), (x.g, kernel.BK))
    maps = [tiles(y, kernel.C, width) if kernel.tma and y is not None else None for y, width in moved]
    strides = [stride for y in (x.k, x.v, x.g) for stride in ((0, 0, 0) if y is None else y.stride()[:3])]
    grid = (-(-K // kernel.BK) * -(-V // kernel.BV) * segments.count * H, 1, 1)
    sizes = (K, V, kernel.C, kernel.BK, kernel.BV, OPERANDS[kernel.operand], kernel.tokenwise)
    constants = (*sizes, x.final_state is None, kernel.stages, plan.overlap)
    integers = (x.k.shape[1], segments.length, segments.per_sequence, H, *strides, *constants)
    tensors = (x.k, x.v, x.g, segments.bounds, S, D, *maps)
    return [launch(_states_kernel, grid, tensors, (), integers, num_warps=kernel.warps)]


@triton.jit(do_not_specialize=["T", "segment", "segments", "H"])
def _states_kernel(
    k_ptr,  # [B, T, H, K]
    v_ptr,  # [B, T, H, V]
    g_ptr,  # [B, T, H, K] or None
    bounds_ptr,  # [I+1] or None
    S_ptr,  # [I, H, K, V]
    D_ptr,  # [I, H, K] or None
    k_tiles,  # the same tensors as tiles [C, BK or BV], or None
    v_tiles,
    g_tiles,
    T,
    segment,
    segments,
    H,
    stride_kb,
    stride_kt,
    stride_kh,
    stride_vb,
    stride_vt,
    stride_vh,
    stride_gb,
    stride_gt,
    stride_gh,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    OPERAND: tl.constexpr,
    TOKENWISE: tl.constexpr,
    SKIP_LAST: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Program: block [BK, BV] of the state of one head of one segment."""
    if OVERLAPS:  # the scan may be launched, and then waits
        gdc_launch_dependents()
    blocks_v: tl.constexpr = (V + BV - 1) // BV
    blocks_k: tl.constexpr = (K + BK - 1) // BK
    pid = tl.program_id(0)  # neighbours share k and g
    v0 = pid % blocks_v * BV
    k0 = pid // blocks_v % blocks_k * BK
    ih = pid // (blocks_v * blocks_k)
    i, h = ih // H, ih % H
    if bounds_ptr is None:
        b, start = i // segments, i % segments * segment
        end = tl.minimum(start + segment, T)
        last = i % segments == segments - 1
    else:
        b = 0
        start = tl.load(bounds_ptr + i)
        end = tl.load(bounds_ptr + i + 1)
        last = end - start < segment  # a sequence's last one that is not cut short is built for nothing
    if SKIP_LAST and last:
        return

    b64 = tl.cast(b, tl.int64)
    k_ptr += b64 * stride_kb
    v_ptr += b64 * stride_vb
    if g_ptr is not None:
        g_ptr += b64 * stride_gb

    i_c = tl.arange(0, C)  # [C]
    later = (i_c[:, None] < i_c[None, :]).to(tl.float16)  # [C, C]
    S = tl.zeros([BV, BK], tl.float32)
    W = tl.zeros([BK], tl.float32)
    if TOKENWISE:
        for s in tl.range(0, end - start, num_stages=STAGES):
            t = end - 1 - s
            k = load_row(k_ptr, stride_kt, stride_kh, t, h, k0, K, BK)  # [BK]
            v = load_row(v_ptr, stride_vt, stride_vh, t, h, v0, V, BV)  # [BV]
            if g_ptr is not None:
                g = load_row(g_ptr, stride_gt, stride_gh, t, h, k0, K, BK)  # [BK]
                k *= tl.exp2(W)
                W += tl.maximum(g, LEAST_GATE) * LOG2E
            S += v[:, None] * k[None, :]
    else:
        chunks = tl.cdiv(end - start, C)
        for c in tl.range(0, chunks, num_stages=STAGES):
            t = start + (chunks - 1 - c) * C
            k = load_tile(k_tiles, k_ptr, stride_kt, stride_kh, b, t, h, k0, end, K, C, BK)  # [C, BK]
            v = load_tile(v_tiles, v_ptr, stride_vt, stride_vh, b, t, h, v0, end, V, C, BV)  # [C, BV]
            v = operand(v, OPERAND)
            if g_ptr is not None:
                g = load_tile(g_tiles, g_ptr, stride_gt, stride_gh, b, t, h, k0, end, K, C, BK)  # [C, BK]
                g = tl.maximum(g.to(tl.float32), LEAST_GATE) * LOG2E
                k = k * tl.exp2(_sum_of_later(g, later) + W[None, :])
                W += tl.sum(g, 0)
            S = tl.dot(tl.trans(v), operand(k, OPERAND), S, input_precision="tf32")

    i_k = k0 + tl.arange(0, BK)  # [BK]
    i_v = v0 + tl.arange(0, BV)  # [BV]
    S_block = S_ptr + ih.to(tl.int64) * K * V + i_k[None, :] * V + i_v[:, None]  # [BV, BK]
    tl.store(S_block, S, mask=(i_k < K)[None, :] & (i_v < V)[:, None])
    if D_ptr is not None and v0 == 0:
        tl.store(D_ptr + ih.to(tl.int64) * K + i_k, tl.exp2(W), mask=i_k < K)


@triton.jit
def _sum_of_later(g, later):
    """For each row of g [C, K] the sum of those after it; `later` [C, C] is 1 for those, else 0.

    A product, with g split into two float16 parts: 22 bits of it, or all to 2^-25.
    """
    high = g.to(tl.float16)
    low = (g - high.to(tl.float32)).to(tl.float16)
    return tl.dot(later, low, tl.dot(later, high))
