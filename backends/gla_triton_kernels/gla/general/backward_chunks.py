"""Computes gradients of gated linear attention for all chunks in parallel.

Let S be the state that enters a chunk, dS the gradient of the state that leaves it, b_t the sum of the log gates of the
chunk through token t, and r the offset of backward.py. Then, as in backward.py,

    qg = scale * q exp(b - r)              kg = k exp(b_C - r - b)
    dq = scale * exp(b - r) ((do S^T) exp(r)) + terms of pairs of tokens
    dk = exp(b_C - r - b) (v (exp(r) dS)^T) + terms of pairs of tokens
    dv = kg (exp(r) dS) + A^T do

backward.py also gives A, dg and the terms of pairs. Its programs carry dS through a sequence and need many tiles at
once, too many for the registers of a GPU that cannot multiply from shared memory. Here, memory holds S and dS of each
chunk. Two kernels then compute the gradients of a chunk:

    dq, dk, dg    for a block of BK keys; products with v and do are summed over all blocks of values
    dv            for a block of BV values; products with q and k are summed over all blocks of keys

So no program holds the tiles of both kernels, and no gradient has partial results, except dg if the keys of a head
share a gate. Each block of keys of a chunk is mild or not, independently of the others. If a sequence has no gradient
of its final state, its last chunk takes dS = 0.

B batch   T tokens   N sequences   H key heads   Hq query heads   Hv heads of values, states and gates
Ho = max(Hq, Hv) heads of do   G = Ho / Hv query heads of a state   R = Hv / H value heads of a key head
K, V key and value width   C tokens of a chunk   n chunks, numbered like checkpoints   BK, BV keys and values of a block
I segments of one chunk each, some of which are empty if sequences are packed   blocks_k blocks of keys of a head

Source: Yang et al., "Gated Linear Attention Transformers with Hardware-Efficient Training" (arXiv 2312.06635), sec. 4.
"""

# pyright: reportGeneralTypeIssues=false
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from gla_core.dispatch.tensors import ceil_div
from gla_triton_kernels.chunks.kernel import GradientParameters
from gla_triton_kernels.chunks.segments import Segments, segment_at
from gla_triton_kernels.gla.general.backward import (
    decays_of_chunk,
    gate_gradients,
    gradient_arguments,
    operands_of_halves,
    product,
    running_sum,
    sums,
)
from gla_triton_kernels.gla.shared.common import load_gates, load_given_gates, load_tile, store_tile
from gla_triton_kernels.gla.shared.limits import LEAST_GATE, MILD_DECAY
from gla_triton_kernels.gla.tensors import BackwardTensors
from gla_triton_runtime.architecture import interpreted
from gla_triton_runtime.arithmetic import LOG2E
from gla_triton_runtime.gates import slope_of_gates
from gla_triton_runtime.launch import Launch


def launch_gradients(
    kernel: GradientParameters,
    x: BackwardTensors,
    entering: Tensor,
    leaving: Tensor,
    segments: Segments,
    scale: float,
    normalizer: int | None = None,
) -> list[Launch]:
    """Returns the launches that fill dq, dk, dv and dg; see backward.py for the other arguments.

    Args:
        leaving: the gradients of the states that leave chunks, [I, Hv, K, V], contiguous.
        segments: segments of `CHUNK` tokens.
    """
    blocks_k, blocks_v = ceil_div(x.q.shape[3], kernel.BK), ceil_div(x.v.shape[3], kernel.BV)
    dg, sum_gates = gate_gradients(x.dg, segments.count, blocks_k, 1)
    arguments = {
        **gradient_arguments(kernel, x, leaving, segments, scale, normalizer),
        "SUMS": "ieee" if interpreted() else "three parts" if kernel.precision == "bf16x6" else "two parts",
    }
    key_arguments = {"entering_ptr": entering, "dq_ptr": x.dq, "dk_ptr": x.dk, "dg_ptr": dg}
    key_arguments["FROM_ZERO"] = x.initial_state is None
    options, chunks = {"num_warps": kernel.warps}, segments.count * x.v.shape[2]
    return [
        Launch(_keys_kernel, (blocks_k * chunks, 1, 1), {**arguments, **key_arguments}, options),
        Launch(_values_kernel, (blocks_v * chunks, 1, 1), {**arguments, "dv_ptr": x.dv}, options),
        *sum_gates,
    ]


@triton.jit
def _chunk_at(order_ptr, i, T, segments, C: tl.constexpr):
    """Returns (batch, first token, end, first token of its sequence, end of its sequence, number) of a chunk."""
    if order_ptr is None:
        start = i % segments * C
        return i // segments, start, tl.minimum(start + C, T), 0, T, i
    else:  # noqa: RET505 -- one branch is compiled
        number, start, end, opening, last = segment_at(order_ptr, i)
        return 0, start, end, opening, last, number


@triton.jit
def _leaving(leaving_ptr, i_k, i_v, is_followed, K: tl.constexpr, V: tl.constexpr, TO_ZERO: tl.constexpr):
    """Loads a block [BV, BK] of the gradient of the state that leaves a chunk.

    Args:
        i_k, i_v: the keys [1, BK] and the values [BV, 1].
        is_followed: whether another chunk of the sequence follows.
    """
    mask = (i_k < K) & (i_v < V)  # [BV, BK]
    if TO_ZERO:
        mask &= is_followed
    return tl.load(leaving_ptr + i_k * V + i_v, mask=mask, other=0.0)


@triton.jit
def _gates(
    ptr,
    stride_t,
    stride_h,
    b,
    t,
    head,
    column,
    end,
    GATE: tl.constexpr,
    NORMALIZER: tl.constexpr,
    K: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
):
    """Loads the log gates of a chunk [C, BK], in units of log 2. If keys share a gate, all columns are equal."""
    g = load_gates(None, ptr, stride_t, stride_h, b, t, head, column, end, GATE, NORMALIZER, K, C, BK)
    return tl.broadcast_to(tl.maximum(g, LEAST_GATE) * LOG2E, [C, BK])


@triton.jit
def _is_mild(g, EXACT: tl.constexpr):
    """Returns whether a chunk with gates g is mild; with EXACT, no chunk is."""
    if EXACT:
        return False
    else:  # noqa: RET505 -- one branch is compiled
        return tl.min(tl.sum(g, 0)) > -LOG2E * MILD_DECAY


@triton.jit(do_not_specialize=["scale", "B", "T", "segment", "segments", "Hv", "G"])
def _keys_kernel(
    q_ptr,  # [B, T, Hq, K]
    k_ptr,  # [B, T, H, K]
    v_ptr,  # [B, T, Hv, V]
    g_ptr,  # [B, T, Hv, K], [B, T, Hv] or [Hv] by GATE, or None
    do_ptr,  # [B, T, Ho, V]
    order_ptr,  # [I, 5] or None
    entering_ptr,  # [B, n, Hv, K, V]
    leaving_ptr,  # [I, Hv, K, V]
    dq_ptr,  # [B, T, Ho, K]
    dk_ptr,  # [B, T, Hv, K]
    dg_ptr,  # by GATE [B, T, Hv, K], [blocks_k, B, T, Hv] or [I*blocks_k, Hv], or None
    scale,
    B,
    T,
    segment,  # C
    segments,  # chunks of a sequence of a batch
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
    stride_ob,
    stride_ot,
    stride_oh,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    LEVELS: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    R: tl.constexpr,
    FROM_ZERO: tl.constexpr,
    TO_ZERO: tl.constexpr,
    EXACT: tl.constexpr,
    PRECISION: tl.constexpr,
    SUMS: tl.constexpr,
):
    """Computes dq, dk and dg of a chunk of one value head, for a block of BK keys."""
    blocks_k: tl.constexpr = (K + BK - 1) // BK
    OPERAND: tl.constexpr = tl.bfloat16 if PRECISION == "bf16" else tl.float32  # pyright: ignore
    pid = tl.program_id(0)  # neighbouring programs read the same v and do
    block_k = pid % blocks_k
    k0 = block_k * BK
    place, h = pid // blocks_k // Hv, pid // blocks_k % Hv
    b, t, end, opening, last, i = _chunk_at(order_ptr, place, T, segments, C)
    if g_ptr is not None and GATE == "constant":
        dg_ptr += (i * blocks_k + block_k).to(tl.int64) * Hv + h
    if t >= end:
        if GATE == "constant":
            tl.store(dg_ptr, 0.0)
        return

    b64 = tl.cast(b, tl.int64)
    q_ptr += b64 * stride_qb
    k_ptr += b64 * stride_kb
    v_ptr += b64 * stride_vb
    do_ptr += b64 * stride_ob
    dq_ptr += b64 * T * (Hv * G * K)
    dk_ptr += b64 * T * (Hv * K)
    if g_ptr is not None:
        g_ptr += b64 * stride_gb
        if GATE == "key":
            dg_ptr += b64 * T * (Hv * K)
        elif GATE == "head":
            dg_ptr += (block_k.to(tl.int64) * B + b64) * T * Hv
    state = (tl.cast(i, tl.int64) * Hv + h) * (K * V)
    entering_ptr += state
    leaving_ptr += state

    i_k = k0 + tl.arange(0, BK)[None, :]  # [1, BK]
    i_c = tl.arange(0, C)  # [C]
    before = i_c[:, None] < i_c[None, :]  # [C, C], whether the token of the row comes before the token of the column
    after = i_c[:, None] > i_c[None, :]  # [C, C]
    dk = tl.zeros([C, BK], tl.float32)
    crossing = tl.zeros([1, BK], tl.float32)  # the sum of S * dS over values
    for v0 in tl.range(0, V, BV, num_stages=1):
        i_v = v0 + tl.arange(0, BV)[:, None]  # [BV, 1]
        dS = _leaving(leaving_ptr, i_k, i_v, end < last, K, V, TO_ZERO)  # [BV, BK]
        v = load_tile(None, v_ptr, stride_vt, stride_vh, b, t, h, v0, end, V, C, BV).to(OPERAND)  # [C, BV]
        dk = product(v, dS.to(OPERAND), dk, PRECISION)
        if g_ptr is not None:
            S = tl.load(entering_ptr + i_k * V + i_v, mask=(i_k < K) & (i_v < V), other=0.0)  # [BV, BK]
            crossing += tl.sum(S * dS, 0)[None, :]
    if g_ptr is not None:
        dk, dg = _from_states(
            dk,
            crossing,
            load_tile(None, k_ptr, stride_kt, stride_kh, b, t, h // R, k0, end, K, C, BK),
            _gates(g_ptr, stride_gt, stride_gh, b, t, h, k0, end, GATE, NORMALIZER, K, C, BK),
            before,
            after,
            EXACT,
            SUMS,
        )

    for i_g in tl.range(0, G, num_stages=1):
        i_q = h * G + i_g
        dA = tl.zeros([C, C], tl.float32)
        dq = tl.zeros([C, BK], tl.float32)
        for v0 in tl.range(0, V, BV, num_stages=1):
            i_v = v0 + tl.arange(0, BV)[:, None]  # [BV, 1]
            S = tl.load(entering_ptr + i_k * V + i_v, mask=(i_k < K) & (i_v < V), other=0.0)  # [BV, BK]
            v = load_tile(None, v_ptr, stride_vt, stride_vh, b, t, h, v0, end, V, C, BV).to(OPERAND)  # [C, BV]
            do = load_tile(None, do_ptr, stride_ot, stride_oh, b, t, i_q, v0, end, V, C, BV).to(OPERAND)  # [C, BV]
            dA = product(do, tl.trans(v), dA, PRECISION)
            dq = product(do, S.to(OPERAND), dq, PRECISION)
        dA_tt = tl.sum(tl.where(before | after, 0.0, dA), 1)[:, None]  # [C, 1]
        dA = dA.to(OPERAND)
        q = load_tile(None, q_ptr, stride_qt, stride_qh, b, t, i_q // R, k0, end, K, C, BK)  # [C, BK]
        q = q.to(tl.float32) * scale
        k = load_tile(None, k_ptr, stride_kt, stride_kh, b, t, h // R, k0, end, K, C, BK).to(tl.float32)  # [C, BK]
        if g_ptr is None:
            near = tl.where(after, dA, 0.0)  # [C, C]
            dq = product(near, k.to(OPERAND), dq, PRECISION) + dA_tt * k
            dk = product(tl.trans(near), q.to(OPERAND), dk, PRECISION) + dA_tt * q
        else:
            # Gates are loaded again, because the registers do not suffice for them during the loop over values.
            g = _gates(g_ptr, stride_gt, stride_gh, b, t, h, k0, end, GATE, NORMALIZER, K, C, BK)
            mild = _is_mild(g, EXACT)
            q_decay, k_decay, r_decay, _ = decays_of_chunk(g, mild, before, EXACT, SUMS)
            dq *= r_decay
            qg, kg = (q * q_decay).to(OPERAND), (k * k_decay).to(OPERAND)  # [C, BK]
            if EXACT:
                x = qg * dq  # [C, BK]
            else:
                near = tl.where(tl.where(mild, after, False), dA, 0.0)  # [C, C]
                dq = product(near, kg, dq, PRECISION)
                dk_near = product(tl.trans(near), qg, None, PRECISION)  # [C, BK]
                dk += dk_near * k_decay
                x = qg * dq - kg * dk_near  # [C, BK]
            dg += running_sum(x, True)  # [C, BK]
            dq = dq * q_decay + dA_tt * k
            dk += dA_tt * q
            levels = tl.where(mild, 0, LEVELS)
            dq, dk, dg = _add_gradients_of_halves(dq, dk, dg, q, k, g, dA, levels, C, PRECISION, SUMS)
        store_tile(None, dq_ptr, Hv * G * K, K, b, t, i_q, k0, end, scale * dq, K, C, BK)

    store_tile(None, dk_ptr, Hv * K, K, b, t, h, k0, end, dk, K, C, BK)
    if g_ptr is not None:
        if GATE != "key":
            dg = tl.sum(dg, 1)[:, None]  # [C, 1]
        if FROM_ZERO:
            dg = tl.where((t + i_c == opening)[:, None], 0.0, dg)
        if NORMALIZER is not None:
            logits = load_given_gates(None, g_ptr, stride_gt, stride_gh, b, t, h, k0, end, GATE, K, C, BK)
            dg *= slope_of_gates(logits, NORMALIZER)
        if GATE == "key":
            store_tile(None, dg_ptr, Hv * K, K, b, t, h, k0, end, dg, K, C, BK)
        elif GATE == "head":
            store_tile(None, dg_ptr, Hv, 1, b, t, h, 0, end, dg, 1, C, 1)
        else:
            tl.store(dg_ptr, tl.sum(tl.where((t + i_c < end)[:, None], dg, 0.0)))


@triton.jit(do_not_specialize=["scale", "B", "T", "segment", "segments", "Hv", "G"])
def _values_kernel(
    dv_ptr,  # [B, T, Hv, V]
    q_ptr,  # [B, T, Hq, K]
    k_ptr,  # [B, T, H, K]
    v_ptr,  # [B, T, Hv, V]
    g_ptr,  # [B, T, Hv, K], [B, T, Hv] or [Hv] by GATE, or None
    do_ptr,  # [B, T, Ho, V]
    order_ptr,  # [I, 5] or None
    leaving_ptr,  # [I, Hv, K, V]
    scale,
    B,
    T,
    segment,  # C
    segments,  # chunks of a sequence of a batch
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
    stride_ob,
    stride_ot,
    stride_oh,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    LEVELS: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    R: tl.constexpr,
    TO_ZERO: tl.constexpr,
    EXACT: tl.constexpr,
    PRECISION: tl.constexpr,
    SUMS: tl.constexpr,
):
    """Computes dv of a chunk of one value head, for a block of BV values."""
    blocks_v: tl.constexpr = (V + BV - 1) // BV
    OPERAND: tl.constexpr = tl.bfloat16 if PRECISION == "bf16" else tl.float32  # pyright: ignore
    pid = tl.program_id(0)  # neighbouring programs read the same q, k and g
    v0 = pid % blocks_v * BV
    place, h = pid // blocks_v // Hv, pid // blocks_v % Hv
    b, t, end, _opening, last, i = _chunk_at(order_ptr, place, T, segments, C)
    if t >= end:
        return

    b64 = tl.cast(b, tl.int64)
    q_ptr += b64 * stride_qb
    k_ptr += b64 * stride_kb
    do_ptr += b64 * stride_ob
    dv_ptr += b64 * T * (Hv * V)
    if g_ptr is not None:
        g_ptr += b64 * stride_gb
    leaving_ptr += (tl.cast(i, tl.int64) * Hv + h) * (K * V)

    i_v = v0 + tl.arange(0, BV)[:, None]  # [BV, 1]
    i_c = tl.arange(0, C)  # [C]
    before = i_c[:, None] < i_c[None, :]  # [C, C], whether the token of the row comes before the token of the column
    dv = tl.zeros([C, BV], tl.float32)
    for k0 in tl.range(0, K, BK, num_stages=1):
        i_k = k0 + tl.arange(0, BK)[None, :]  # [1, BK]
        k = load_tile(None, k_ptr, stride_kt, stride_kh, b, t, h // R, k0, end, K, C, BK).to(tl.float32)  # [C, BK]
        if g_ptr is None:
            mild: tl.constexpr = True  # pyright: ignore
            q_decay, k_decay, r_decay = 1.0, 1.0, 1.0  # the compiler drops these factors
        else:
            g = _gates(g_ptr, stride_gt, stride_gh, b, t, h, k0, end, GATE, NORMALIZER, K, C, BK)
            mild = _is_mild(g, EXACT)
            q_decay, k_decay, r_decay, _rest_decay = decays_of_chunk(g, mild, before, EXACT, SUMS)
        kg = (k * k_decay).to(OPERAND)  # [C, BK]
        P = (_leaving(leaving_ptr, i_k, i_v, end < last, K, V, TO_ZERO) * r_decay).to(OPERAND)  # [BV, BK]
        dv = product(kg, tl.trans(P), dv, PRECISION)
        for i_g in tl.range(0, G, num_stages=1):
            i_q = h * G + i_g
            q = load_tile(None, q_ptr, stride_qt, stride_qh, b, t, i_q // R, k0, end, K, C, BK)  # [C, BK]
            q = q.to(tl.float32) * scale
            if EXACT:
                AT = tl.zeros([C, C], tl.float32)
            else:
                qg = (q * q_decay).to(OPERAND)  # [C, BK]
                AT = tl.where(tl.where(mild, before, False), product(kg, tl.trans(qg), None, PRECISION), 0.0)  # [C, C]
            if g_ptr is not None:
                AT = _add_scores_of_halves(AT, q, k, g, tl.where(mild, 0, LEVELS), C, PRECISION, SUMS)
            do = load_tile(None, do_ptr, stride_ot, stride_oh, b, t, i_q, v0, end, V, C, BV).to(OPERAND)  # [C, BV]
            dv = product(AT, do, dv, PRECISION) + tl.sum(q * k, 1)[:, None] * do
    store_tile(None, dv_ptr, Hv * V, V, b, t, h, v0, end, dv, V, C, BV)


@triton.jit
def _from_states(dk, crossing, k, g, before, after, EXACT: tl.constexpr, SUMS: tl.constexpr):
    """Returns the terms of dk and dg [C, BK] that come from the states S and dS of a chunk.

    Args:
        dk: v dS^T [C, BK].
        crossing: the sum of S * dS over values [1, BK].
        k, g: [C, BK].
    """
    _q_decay, k_decay, r_decay, rest_decay = decays_of_chunk(g, _is_mild(g, EXACT), before, EXACT, SUMS)
    dk *= r_decay * k_decay
    crossing *= r_decay * rest_decay
    return dk, crossing + sums(after, k * dk, SUMS)


@triton.jit
def _add_gradients_of_halves(
    dq, dk, dg, q, k, g, dA, levels, C: tl.constexpr, PRECISION: tl.constexpr, SUMS: tl.constexpr
):
    """Adds the terms of pairs s < t of a chunk to dq, dk and dg [C, BK]; q is already scaled, dq is not.

    Args:
        levels: the number of levels of the halving; 0 if the chunk is mild.
    """
    row, column = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]  # [C, 1], [1, C]
    for level in tl.range(0, levels, num_stages=1):  # pyright: ignore
        qg, kg, decay, pair, decayed = operands_of_halves(q, k, g, row, column, row ^ column, level, SUMS)
        dA_pairs = tl.where(pair, dA, 0.0)  # [C, C]
        dqg = product(dA_pairs, kg, None, PRECISION)  # [C, BK]
        dkg = product(tl.trans(dA_pairs), qg, None, PRECISION)  # [C, BK]
        dq += dqg * decay
        dk += dkg * decay
        dg += sums(decayed, qg * dqg + kg * dkg, SUMS)
    return dq, dk, dg


@triton.jit
def _add_scores_of_halves(AT, q, k, g, levels, C: tl.constexpr, PRECISION: tl.constexpr, SUMS: tl.constexpr):
    """Adds the scores of pairs s < t of a chunk to A^T [C, C]; q is already scaled.

    Args:
        levels: the number of levels of the halving; 0 if the chunk is mild.
    """
    row, column = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]  # [C, 1], [1, C]
    for level in tl.range(0, levels, num_stages=1):  # pyright: ignore
        qg, kg, _decay, pair, _decayed = operands_of_halves(q, k, g, row, column, row ^ column, level, SUMS)
        AT += tl.where(pair, product(kg, tl.trans(qg), None, PRECISION), 0.0)
    return AT
