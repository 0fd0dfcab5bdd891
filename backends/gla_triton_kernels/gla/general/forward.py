"""Computes gated linear attention in one pass over sequences, or over segments of them, with the state on chip.

One program computes a block of BV values of one value head of one segment. It goes through the segment in chunks of
C tokens and carries the state S [K, BV] in float32. For a chunk, let b_t be the sum of the log gates g of the chunk
through token t, and r = b_C / 2. Both are per channel of K, or one number if the keys of a head share a gate. Then

    qg = q exp(b - r)              kg = k exp(r - b)
    o  = scale * (qg (exp(r) S) + tril(qg kg^T) v)
    S' = exp(r) (exp(r) S + kg^T v)

S' is the state that leaves the chunk. Two exponentials per element serve scores, state and output. The outer exp(r) of
S' waits for the inner exp(r) of the next chunk (`waiting`), so the state is scaled once per chunk. b - r is computed
either by a scan, or by one product of g with a matrix that is +1/2 on and below the diagonal and -1/2 above it. If the
keys of a head share a gate, exp(b - r) is one number for each token, and multiplies rows of products instead of q.

All exponents lie in [b_C / 2, -b_C / 2]. If some channel decays by more than `MILD_DECAY` in a chunk (see limits.py),
the chunk is not mild. The products then leave the state unchanged (kg is 0 and exp(r) is 1), and the chunk is computed
token by token in float32:

    S_t = diag(exp g_t) S_{t-1} + k_t^T v_t        o_t = scale * q_t S_t

This path is accurate for any gate down to -inf, because it neither divides nor subtracts; a chunk with a gate of -inf
always takes it. float32 inputs are computed token by token throughout, unless TF32 is allowed: without matrix units,
chunks only add work.

Triton 3.6 imposes two rules. First, no matrix product stands in a branch: if a branch still reads v, Triton overwrites
v with the v of the next chunk. Second, the state is updated as S^T += v^T kg, because the product kg^T v is wrong on
Hopper in blocks of fewer than 64 values. With K = 256 the kernel uses kg^T v, which is faster there.

The mask of scores selects and does not multiply, so it removes even an infinite score. The largest number of float16 is
65504, so float16 inputs become float32 operands. These are multiplied as TF32, which has the precision of float16.

A checkpoint is the state that enters a chunk whose first token comes a multiple of `every` tokens after the start of
its sequence. If packed sequences have segments of L tokens, and sequence n begins at row c_n, its segment m begins at
row c_n + m L and has the number i = n + c_n // L + m (segments.py). So segment i belongs to sequence
n = i - (c_n + m L) // L.

If states are in a pool, slots.py gives the slots that a sequence reads and writes.

B batch   T tokens   N sequences   I segments, by default the N sequences   P slots of a pool
H key heads   Hq query heads   Hv heads of values, states and gates   Ho = max(Hq, Hv) heads of o
G = Ho / Hv query heads of a state   R = Hv / H value heads of a key head   n rows of checkpoints
K, V key and value width   C tokens of a chunk   BK K padded to a power of two   BV values of a block

Source: Yang et al., "Gated Linear Attention Transformers with Hardware-Efficient Training" (arXiv 2312.06635), sec. 4.
"""

# pyright: reportGeneralTypeIssues=false
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from gla_core.dispatch.tensors import ceil_div
from gla_triton_kernels.chunks.kernel import ForwardPlan
from gla_triton_kernels.chunks.segments import Segments, in_state, lengths_of, segment_at, state_strides
from gla_triton_kernels.gla.shared.common import (
    OPERANDS,
    gate_arguments,
    load_gate,
    load_gates,
    load_row,
    load_tile,
    operand,
    store_tile,
    sums_of_gates,
)
from gla_triton_kernels.gla.shared.limits import MILD_DECAY
from gla_triton_kernels.gla.tensors import Tensors
from gla_triton_runtime.arithmetic import LOG2E
from gla_triton_runtime.launch import Launch, strides_of
from gla_triton_runtime.tma import tiles


def launch_outputs(
    plan: ForwardPlan, x: Tensors, segments: Segments, scale: float, every: int | None, normalizer: int | None = None
) -> list[Launch]:
    """Returns the launch that fills o, and final_state and checkpoints if x has them.

    If states are in a pool, the kernel reads and writes the slots of `segments`. It writes checkpoints into the pool if
    x.checkpoints is the pool, and final states if sequences are whole.

    Args:
        segments: the segments; a sequence that stays whole is one segment.
        every: tokens between checkpoints.
        normalizer: the number by which log sigma is divided if x.g holds logits; None if it holds log gates.
    """
    T, Hq, K = x.q.shape[1:]
    Hv, V = x.v.shape[2:]
    kernel, gates = plan.parameters, gate_arguments(x.g, normalizer)

    def tiles_of(y: Tensor | None, width: int) -> TensorDescriptor | None:
        return tiles(y, kernel.C, width) if kernel.tma and y is not None else None

    arguments = {
        "q_ptr": x.q,
        "k_ptr": x.k,
        "v_ptr": x.v,
        "g_ptr": x.g,
        "initial_ptr": x.initial_state,
        "cu_seqlens_ptr": x.cu_seqlens,
        "o_ptr": x.o,
        "final_ptr": x.final_state,
        "checkpoints_ptr": x.checkpoints,
        "entering_ptr": x.entering,
        "order_ptr": segments.order,
        "pool_ptr": x.pool,
        "slots_ptr": segments.slots,
        "q_tiles": tiles_of(x.q, kernel.BK),
        "k_tiles": tiles_of(x.k, kernel.BK),
        "v_tiles": tiles_of(x.v, kernel.BV),
        "g_tiles": tiles_of(x.g, kernel.BK) if gates["GATE"] == "key" else None,
        "o_tiles": tiles_of(x.o, kernel.BV),
        "scale": scale,
        **lengths_of(T, segments),
        "every": every or 0,
        "Hv": Hv,
        "G": max(Hq // Hv, 1),
        **strides_of("q", x.q),
        **strides_of("k", x.k),
        **strides_of("v", x.v),
        **gates,
        **state_strides("stride_s", x.initial_state if x.pool is None else x.pool),
        "K": K,
        "V": V,
        "C": kernel.C,
        "BK": kernel.BK,
        "BV": kernel.BV,
        "R": Hv // x.k.shape[2],
        "GROUPED": Hq > Hv,
        "OPERAND": OPERANDS[kernel.operand],
        "TOKENWISE": kernel.tokenwise,
        "TRIANGLE": kernel.triangle,
        "KEYS_FIRST": kernel.keys_first,
        "STAGES": kernel.stages,
        "PRECISION": kernel.precision,
    }
    grid = (ceil_div(V, kernel.BV) * segments.count * Hv, 1, 1)
    return [Launch(_gla_forward_kernel, grid, arguments, {"num_warps": kernel.warps})]


@triton.jit(
    do_not_specialize=["scale", "T", "segment", "segments", "every", "Hv", "G"],
    do_not_specialize_on_alignment=["cu_seqlens_ptr"],
)
def _gla_forward_kernel(
    q_ptr,  # [B, T, Hq, K]
    k_ptr,  # [B, T, H, K]
    v_ptr,  # [B, T, Hv, V]
    g_ptr,  # [B, T, Hv, K], [B, T, Hv] or [Hv] by GATE, or None
    initial_ptr,  # [N, Hv, K, V] or None
    cu_seqlens_ptr,  # [N+1] or None
    o_ptr,  # [B, T, Ho, V], contiguous
    final_ptr,  # [N, Hv, K, V], or None if sequences are cut
    checkpoints_ptr,  # [B, n, Hv, K, V], or the pool, or None
    entering_ptr,  # [I, Hv, K, V], or None if sequences are whole
    order_ptr,  # [I, 5], or None if cu_seqlens is None
    pool_ptr,  # [P, Hv, K, V] or None
    slots_ptr,  # [N, 4], or None without a pool
    q_tiles,  # q as tiles [C, BK], or None if pointers load it, and so are the next four
    k_tiles,  # tiles [C, BK]
    v_tiles,  # tiles [C, BV]
    g_tiles,  # tiles [C, BK]
    o_tiles,  # tiles [C, BV]
    scale,
    T,
    segment,  # tokens of a segment
    segments,  # segments of a sequence of a batch
    every,  # tokens between checkpoints
    Hv,
    G,
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
    GATE: tl.constexpr,
    NORMALIZER: tl.constexpr,
    stride_sn,  # strides of initial_ptr or of the pool; see `in_state`
    stride_sh,
    stride_sk,
    stride_sv,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    R: tl.constexpr,
    GROUPED: tl.constexpr,  # whether several query heads share a state
    OPERAND: tl.constexpr,  # dtype of the operands of products
    TOKENWISE: tl.constexpr,  # whether all chunks are computed token by token
    TRIANGLE: tl.constexpr,  # whether a product sums the gates
    KEYS_FIRST: tl.constexpr,  # whether S is [BK, BV] and not [BV, BK]
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Computes a block of BV values of the outputs of one value head of one segment, and of its query heads."""
    blocks: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)  # blocks of values come first, so that neighbouring programs read the same q, k and g
    v0 = pid % blocks * BV
    nh = pid // blocks
    n, h = nh // Hv, nh % Hv
    if cu_seqlens_ptr is None:
        b, start = n // segments, n % segments * segment
        sequence, origin = b, 0  # the sequence of the segment, and the first row of that sequence
        end = tl.minimum(start + segment, T)
    else:
        b = 0
        n, start, end, origin, _ = segment_at(order_ptr, n)
        sequence = n - start // segment
        nh = n * Hv + h
        if entering_ptr is not None and start == end:
            return

    b64 = tl.cast(b, tl.int64)
    stride_ot = Hv * G * V
    q_ptr += b64 * stride_qb
    k_ptr += b64 * stride_kb
    v_ptr += b64 * stride_vb
    o_ptr += b64 * T * stride_ot
    if g_ptr is not None:
        g_ptr += b64 * stride_gb

    i_k = tl.arange(0, BK)  # [BK]
    i_v = v0 + tl.arange(0, BV)  # [BV]
    # S is [BK, BV] with KEYS_FIRST, else [BV, BK]. The first axis is the row axis of the matrix instruction.
    KEYS: tl.constexpr = 1 - KEYS_FIRST
    VALUES: tl.constexpr = 1 - KEYS
    # With KEYS_FIRST [BK, 1] and [1, BV], else [1, BK] and [BV, 1].
    s_k, s_v = tl.expand_dims(i_k, VALUES).to(tl.int64), tl.expand_dims(i_v, KEYS)
    m_s = (s_k < K) & (s_v < V)  # the shape of S
    S = tl.zeros([BK, BV] if KEYS_FIRST else [BV, BK], tl.float32)
    if pool_ptr is not None:
        slots_ptr += sequence * 4
        pool_ptr += h.to(tl.int64) * stride_sh
        if entering_ptr is None:
            slot = tl.load(slots_ptr).to(tl.int64)
            source = pool_ptr + slot * stride_sn + in_state(s_k, s_v, stride_sk, stride_sv)
            S = tl.load(source, mask=m_s & (slot >= 0), other=0.0).to(tl.float32)
    # Without a pool, first segments do not load `entering`: the load would cost short sequences 2 %.
    if entering_ptr is not None and (pool_ptr is not None or start > origin):
        S = tl.load(entering_ptr + tl.cast(nh, tl.int64) * K * V + s_k * V + s_v, mask=m_s, other=0.0)
        # This product adds 0. It makes Triton convert S to the layout of products here, once, instead of after every
        # later branch.
        S = tl.dot(tl.zeros([S.shape[0], 16], OPERAND), tl.zeros([16, S.shape[1]], OPERAND), S)
    if initial_ptr is not None and start == origin:
        initial_ptr += sequence.to(tl.int64) * stride_sn + h.to(tl.int64) * stride_sh
        S = tl.load(initial_ptr + in_state(s_k, s_v, stride_sk, stride_sv), mask=m_s, other=0.0)

    kept, kept_after = tl.cast(0, tl.int64), 0  # slot of a checkpoint in the pool, and tokens before it
    if checkpoints_ptr is not None:
        if pool_ptr is not None:
            kept, kept_after = tl.load(slots_ptr + 2).to(tl.int64), tl.load(slots_ptr + 3)
        else:
            row = b * tl.cdiv(T, every) if cu_seqlens_ptr is None else sequence + origin // every
            checkpoints_ptr += (tl.cast(row, tl.int64) * Hv + h) * K * V  # first checkpoint of the sequence

    i_c = tl.arange(0, C)  # [C]
    causal = i_c[:, None] >= i_c[None, :]  # [C, C]
    SHARED: tl.constexpr = GATE == "head" or GATE == "constant"  # the keys of a token share a gate
    ones = tl.expand_dims(tl.full([1 if SHARED else BK], 1.0, tl.float32), VALUES)  # [1, BK] or [BK, 1], or [1, 1]
    waiting = ones  # the outer exp(r) of the previous chunk
    for t in tl.range(start, end, C, num_stages=STAGES):  # pyright: ignore
        if checkpoints_ptr is not None:
            passed = t - origin
            is_kept = passed % every == 0 if pool_ptr is None else passed == kept_after
            if is_kept:
                if pool_ptr is None:
                    checkpoint = checkpoints_ptr + tl.cast(passed // every, tl.int64) * Hv * K * V + s_k * V + s_v
                else:
                    checkpoint = pool_ptr + kept * stride_sn + in_state(s_k, s_v, stride_sk, stride_sv)
                S *= waiting  # in place, because two copies of S would spill registers
                waiting = ones
                tl.store(checkpoint, S.to(checkpoints_ptr.dtype.element_ty), mask=m_s)
        if TOKENWISE:
            mild: tl.constexpr = False  # pyright: ignore
        else:
            if not GROUPED:
                q = load_tile(q_tiles, q_ptr, stride_qt, stride_qh, b, t, h // R, 0, end, K, C, BK)  # [C, BK]
            k = load_tile(k_tiles, k_ptr, stride_kt, stride_kh, b, t, h // R, 0, end, K, C, BK)  # [C, BK]
            v = load_tile(v_tiles, v_ptr, stride_vt, stride_vh, b, t, h, v0, end, V, C, BV)  # [C, BV]
            v = operand(v, OPERAND)
            if g_ptr is None:
                mild: tl.constexpr = True  # pyright: ignore
                q_decay: tl.constexpr = None  # pyright: ignore
                kg = operand(k, OPERAND)  # [C, BK]
            else:
                g = load_gates(g_tiles, g_ptr, stride_gt, stride_gh, b, t, h, 0, end, GATE, NORMALIZER, K, C, BK)
                g *= LOG2E  # [C, BK] or [C, 1]
                r = 0.5 * tl.sum(g, 0)  # [BK] or [1]
                mild = tl.min(r, 0) > -0.5 * LOG2E * MILD_DECAY
                x = _prefix_sum(g, r, causal, TRIANGLE)  # [C, BK] or [C, 1]
                q_decay = tl.exp2(x)  # [C, BK] or [C, 1]
                kg = operand(tl.where(mild, k * tl.exp2(-x), 0.0), OPERAND)  # [C, BK]
                exp_r = tl.expand_dims(tl.where(mild, tl.exp2(r), 1.0), VALUES)  # the shape of `ones`
                S *= exp_r * waiting
                waiting = exp_r
            state = S if KEYS_FIRST else tl.trans(S)  # [BK, BV]
            if GROUPED:
                for i in range(G):
                    i_q = h * G + i
                    q_i = load_tile(q_tiles, q_ptr, stride_qt, stride_qh, b, t, i_q, 0, end, K, C, BK)  # [C, BK]
                    o = _output(q_i, q_decay, kg, v, state, causal, scale, PRECISION)  # [C, BV]
                    if mild:
                        store_tile(o_tiles, o_ptr, stride_ot, V, b, t, i_q, v0, end, o, V, C, BV)
            else:
                o = _output(q, q_decay, kg, v, state, causal, scale, PRECISION)  # [C, BV]
                if mild:
                    store_tile(o_tiles, o_ptr, stride_ot, V, b, t, h, v0, end, o, V, C, BV)
            if KEYS_FIRST:
                S = tl.dot(tl.trans(kg), v, S, input_precision=PRECISION)
            else:
                S = tl.dot(tl.trans(v), kg, S, input_precision=PRECISION)
        if not mild:
            for s in range(t, min(t + C, end)):
                k_s = load_row(k_ptr, stride_kt, stride_kh, s, h // R, 0, K, BK)  # [BK]
                v_s = load_row(v_ptr, stride_vt, stride_vh, s, h, v0, V, BV)  # [BV]
                if g_ptr is not None:
                    g_s = load_gate(g_ptr, stride_gt, stride_gh, s, h, 0, GATE, NORMALIZER, K, BK)  # [BK] or [1]
                    S *= tl.expand_dims(tl.exp2(g_s * LOG2E), VALUES)
                S += tl.expand_dims(k_s, VALUES) * tl.expand_dims(v_s, KEYS)
                for i in range(G):
                    i_q = h * G + i
                    q_s = load_row(q_ptr, stride_qt, stride_qh, s, i_q // R, 0, K, BK)  # [BK]
                    o_s = tl.sum(tl.expand_dims(q_s, VALUES) * S, KEYS) * scale  # [BV]
                    o_row = o_ptr + tl.cast(s, tl.int64) * stride_ot + i_q * V
                    tl.store(o_row + i_v, o_s.to(o_ptr.dtype.element_ty), mask=i_v < V)

    if g_ptr is not None:
        S *= waiting
    if final_ptr is not None:
        final_ptr += nh.to(tl.int64) * K * V
        tl.store(final_ptr + s_k * V + s_v, S, mask=m_s)
    if pool_ptr is not None and entering_ptr is None:
        slot = tl.load(slots_ptr + 1).to(tl.int64)
        to = pool_ptr + slot * stride_sn + in_state(s_k, s_v, stride_sk, stride_sv)
        tl.store(to, S.to(pool_ptr.dtype.element_ty), mask=m_s & (slot >= 0))


@triton.jit
def _output(q, q_decay, kg, v, S, causal, scale, PRECISION: tl.constexpr):
    """Returns outputs [C, BV] of queries q [C, BK], from keys kg [C, BK], values v [C, BV] and the state S [BK, BV].

    Args:
        q_decay: exp(b - r), [C, BK] or [C, 1]; None without gates.
        causal: [C, C], the mask of scores.
    """
    # Whether products are multiplied by the decays, and not q.
    AFTER: tl.constexpr = q_decay is not None and q_decay.shape[1] == 1  # pyright: ignore
    qg = operand(q if q_decay is None or AFTER else q * q_decay, kg.dtype)  # [C, BK]
    A = tl.dot(qg, tl.trans(kg), input_precision=PRECISION)  # [C, C]
    if AFTER:
        A *= q_decay
    A = operand(tl.where(causal, A, 0.0), kg.dtype)
    o = tl.dot(qg, operand(S, kg.dtype), input_precision=PRECISION)  # [C, BV]
    if AFTER:
        o *= q_decay
    return tl.dot(A, v, o, input_precision=PRECISION) * scale


@triton.jit
def _prefix_sum(g, r, causal, TRIANGLE: tl.constexpr):
    """Returns the exponents b - r [C, BK] from g [C, BK], where b_t sums the rows of g through t.

    Args:
        g: log gates, in units of log 2, [C, BK]; or [C, 1], and then the exponents are [C, 1].
        r: b_C / 2 [BK].
        causal: [C, C], whether the token of the column is not after the token of the row.
        TRIANGLE: whether a matrix product computes the sums. It splits g into two bfloat16 parts, which together keep
            16 bits of g.
    """
    if g.shape[1] == 1:
        return sums_of_gates(causal, g) - r[None, :]
    elif not TRIANGLE:  # noqa: RET505 -- one branch is compiled
        return tl.cumsum(g, 0) - r[None, :]
    else:
        signed = tl.where(causal, 0.5, -0.5).to(tl.bfloat16)  # [C, C]
        high = g.to(tl.bfloat16)  # [C, BK]
        low = (g - high.to(tl.float32)).to(tl.bfloat16)  # [C, BK]
        return tl.dot(signed, low, tl.dot(signed, high))
