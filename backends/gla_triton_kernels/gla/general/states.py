"""Computes the state of each segment from a zero initial state, or backwards its gradient, for any width and any gate.

Let a segment have the tokens 1 to L, and b_t = g_1 + .. + g_t. Its decay D and its state S from a zero initial state
are

    D = exp(b_L)        S = sum over t of (k_t * exp(b_L - b_t))^T v_t                forwards
                        S = scale * sum over t of (q_t * exp(b_t))^T do_t             backwards (see `Recurrence`)

A program computes a block [BK, BV] of S. It goes through the segment in chunks of C tokens, in the order opposite to
the recurrence, so that S itself never decays. Let W be the sum of the gates of the chunks so far. Let x_t be the sum of
the gates of the chunk that decay the product of token t: the gates after t forwards, the gates through t backwards. For
each chunk the program computes

    S += (left * exp(x + W))^T right        W += sum of the gates of the chunk

If the keys of a head share a gate, x and W are one number for all keys.

No exponent is above 0, so one path handles gates of any strength. A gate below `LEAST_GATE`, whose exp is 0 in float32,
counts as `LEAST_GATE`. float32 inputs are computed token by token, unless TF32 is allowed.

B batch   T tokens   N sequences   Hl heads of left   Hr heads of right   Hv heads of states and gates
G = Hr / Hv heads of right of a state, 1 forwards   R = Hr / Hl heads of right of a head of left
K, V key and value width   C tokens of a chunk   BK, BV keys and values of a block of a state   I segments

Source: Yang et al., "Gated Linear Attention Transformers with Hardware-Efficient Training" (arXiv 2312.06635), sec. 4.
"""

# pyright: reportGeneralTypeIssues=false
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from gla_core.dispatch.tensors import ceil_div
from gla_triton_kernels.chunks.kernel import SegmentPlan
from gla_triton_kernels.chunks.segments import Recurrence, Segments, lengths_of, segment_at
from gla_triton_kernels.gla.shared.common import (
    OPERANDS,
    gate_arguments,
    load_gate,
    load_gates,
    load_row,
    load_tile,
    operand,
    sums_of_gates,
)
from gla_triton_kernels.gla.shared.limits import LEAST_GATE
from gla_triton_runtime.arithmetic import LOG2E
from gla_triton_runtime.launch import Launch, overlapping, strides_of
from gla_triton_runtime.tma import tiles


def launch_states(plan: SegmentPlan, x: Recurrence, segments: Segments, S: Tensor, D: Tensor | None) -> list[Launch]:
    """Returns the launch that fills S [I, Hv, K, V] and D [I, Hv, K]; D is None without gates.

    For an empty segment, S is 0 and D is 1. If x.after is None, S and D are undefined for empty segments and for the
    last segment of a sequence.
    """
    kernel = plan.parameters
    Hv, K, V = S.shape[1:]
    heads, gates = x.right.shape[2], gate_arguments(x.g, x.normalizer)
    places = segments.most if x.after is None and segments.order is not None else segments.count
    if places == 0:
        return []

    def tiles_of(y: Tensor | None, width: int) -> TensorDescriptor | None:
        return tiles(y, kernel.C, width) if kernel.tma and y is not None else None

    arguments = {
        "left_ptr": x.left,
        "right_ptr": x.right,
        "g_ptr": x.g,
        "order_ptr": segments.order,
        "counts_ptr": segments.counts,
        "S_ptr": S,
        "D_ptr": D,
        "left_tiles": tiles_of(x.left, kernel.BK),
        "right_tiles": tiles_of(x.right, kernel.BV),
        "g_tiles": tiles_of(x.g, kernel.BK) if gates["GATE"] == "key" else None,
        "scale": x.scale,
        **lengths_of(x.left.shape[1], segments),
        "Hv": Hv,
        "G": heads // Hv,
        **strides_of("l", x.left),
        **strides_of("r", x.right),
        **gates,
        "K": K,
        "V": V,
        "C": kernel.C,
        "BK": kernel.BK,
        "BV": kernel.BV,
        "R": heads // x.left.shape[2],
        "OPERAND": OPERANDS[kernel.operand],
        "TOKENWISE": kernel.tokenwise,
        "BACKWARDS": x.backwards,
        "SKIP_LAST": x.after is None,
        "STAGES": kernel.stages,
        "PRECISION": kernel.precision,
        "OVERLAPS": plan.overlap,
    }
    grid = (ceil_div(K, kernel.BK) * ceil_div(V, kernel.BV) * places * Hv, 1, 1)
    options = {"num_warps": kernel.warps, **overlapping(plan.overlap and segments.order is not None)}
    return [Launch(_states_kernel, grid, arguments, options)]


@triton.jit(do_not_specialize=["scale", "T", "segment", "segments", "Hv"])
def _states_kernel(
    left_ptr,  # [B, T, Hl, K]
    right_ptr,  # [B, T, Hr, V]
    g_ptr,  # [B, T, Hv, K], [B, T, Hv] or [Hv] by GATE, or None
    order_ptr,  # [I, 5], or None for a batch
    counts_ptr,  # [2] or None; see `Segments`
    S_ptr,  # [I, Hv, K, V]
    D_ptr,  # [I, Hv, K] or None
    left_tiles,  # left as tiles [C, BK], or None if pointers load it, and so are the next two
    right_tiles,  # tiles [C, BV]
    g_tiles,  # tiles [C, BK]
    scale,
    T,
    segment,  # tokens of a segment
    segments,  # segments of a sequence of a batch
    Hv,
    G,
    stride_lb,
    stride_lt,
    stride_lh,
    stride_rb,
    stride_rt,
    stride_rh,
    stride_gb,
    stride_gt,
    stride_gh,
    GATE: tl.constexpr,
    NORMALIZER: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    R: tl.constexpr,
    OPERAND: tl.constexpr,
    TOKENWISE: tl.constexpr,
    BACKWARDS: tl.constexpr,
    SKIP_LAST: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Computes a block [BK, BV] of the state of one value head of one segment."""
    if OVERLAPS:
        if order_ptr is not None:
            gdc_wait()  # dependent kernels read the order without waiting, so none may start before it is written
        gdc_launch_dependents()  # the scan may start now; it waits for the results of this kernel
    blocks_v: tl.constexpr = (V + BV - 1) // BV
    blocks_k: tl.constexpr = (K + BK - 1) // BK
    pid = tl.program_id(0)  # neighbouring programs read the same left and g
    v0 = pid % blocks_v * BV
    k0 = pid // blocks_v % blocks_k * BK
    ih = pid // (blocks_v * blocks_k)
    i, h = ih // Hv, ih % Hv
    if order_ptr is None:
        b, start = i // segments, i % segments * segment
        end = tl.minimum(start + segment, T)
        if SKIP_LAST and i % segments == (0 if BACKWARDS else segments - 1):
            return
    else:
        if SKIP_LAST:  # noqa: SIM102 -- known when this is compiled
            if i >= tl.load(counts_ptr):
                return
        b = 0
        i, start, end, _, last = segment_at(order_ptr, i)
        if SKIP_LAST and BACKWARDS:  # backwards, the segments to compute are those that come after a followed segment
            i, start, end = i + 1, end, end + tl.minimum(segment, last - end)
        ih = i * Hv + h

    b64 = tl.cast(b, tl.int64)
    left_ptr += b64 * stride_lb
    right_ptr += b64 * stride_rb
    if g_ptr is not None:
        g_ptr += b64 * stride_gb

    i_c = tl.arange(0, C)  # [C]
    # Entry [t, u] is whether gate u decays the product of token t.
    decaying = i_c[:, None] >= i_c[None, :] if BACKWARDS else i_c[:, None] < i_c[None, :]  # [C, C]
    SHARED: tl.constexpr = GATE == "head" or GATE == "constant"  # the keys of a token share a gate
    if not SHARED:
        decaying = decaying.to(tl.float16)
    S = tl.zeros([BV, BK], tl.float32)  # transposed
    W = tl.zeros([1 if SHARED else BK], tl.float32)  # [BK] or [1], in units of log 2
    if TOKENWISE:
        for j in tl.range(0, (end - start) * G, num_stages=STAGES):
            s, head = j // G, h * G + j % G
            t = start + s if BACKWARDS else end - 1 - s
            left = load_row(left_ptr, stride_lt, stride_lh, t, head // R, k0, K, BK)  # [BK]
            right = load_row(right_ptr, stride_rt, stride_rh, t, head, v0, V, BV)  # [BV]
            if g_ptr is not None:
                g = load_gate(g_ptr, stride_gt, stride_gh, t, h, k0, GATE, NORMALIZER, K, BK)  # [BK] or [1]
                g = tl.maximum(g, LEAST_GATE) * LOG2E
                left *= tl.exp2(W + g if BACKWARDS else W)
                W += tl.where(j % G == G - 1, g, 0.0)  # after all query heads of the group have used W
            S += right[:, None] * left[None, :]
    else:
        chunks = tl.cdiv(end - start, C)
        for j in tl.range(0, chunks * G, num_stages=STAGES):
            c, head = j // G, h * G + j % G
            t = start + (c if BACKWARDS else chunks - 1 - c) * C
            left = load_tile(left_tiles, left_ptr, stride_lt, stride_lh, b, t, head // R, k0, end, K, C, BK)  # [C, BK]
            right = load_tile(right_tiles, right_ptr, stride_rt, stride_rh, b, t, head, v0, end, V, C, BV)  # [C, BV]
            right = operand(right, OPERAND)
            if g_ptr is not None:
                g = load_gates(g_tiles, g_ptr, stride_gt, stride_gh, b, t, h, k0, end, GATE, NORMALIZER, K, C, BK)
                g = tl.maximum(g, LEAST_GATE) * LOG2E  # [C, BK] or [C, 1]
                left = left * tl.exp2(_sum_of_rows(g, decaying) + W[None, :])
                W += tl.where(j % G == G - 1, tl.sum(g, 0), 0.0)  # after all query heads of the group have used W
            S = tl.dot(tl.trans(right), operand(left, OPERAND), S, input_precision=PRECISION)

    if BACKWARDS:
        S *= scale
    i_k = k0 + tl.arange(0, BK)  # [BK]
    i_v = v0 + tl.arange(0, BV)  # [BV]
    S_block = S_ptr + ih.to(tl.int64) * K * V + i_k[None, :] * V + i_v[:, None]  # [BV, BK]
    tl.store(S_block, S, mask=(i_k < K)[None, :] & (i_v < V)[:, None])
    if D_ptr is not None and v0 == 0:
        tl.store(D_ptr + ih.to(tl.int64) * K + i_k, tl.broadcast_to(tl.exp2(W), [BK]), mask=i_k < K)


@triton.jit
def _sum_of_rows(g, chosen):
    """Returns, for each row of `chosen` [C, C], the sum of the rows of g [C, BK] that it selects: [C, BK].

    If g is [C, BK], `chosen` is 0 or 1 in float16, and a matrix product computes the sums. It splits g into two float16
    parts, which together keep 22 bits of g, or everything down to 2^-25. If g is [C, 1], `chosen` is bool, and the sums
    are [C, 1].
    """
    if g.shape[1] == 1:
        return sums_of_gates(chosen, g)
    else:  # noqa: RET505 -- one branch is compiled
        high = g.to(tl.float16)  # [C, BK]
        low = (g - high.to(tl.float32)).to(tl.float16)  # [C, BK]
        return tl.dot(chosen, low, tl.dot(chosen, high))
