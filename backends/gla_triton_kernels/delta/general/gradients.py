"""Computes the gradients of the delta rule for all chunks in parallel.

For a chunk, S is the state that enters it and dS' the gradient of the state that leaves it; Y and Z = B Y come from
backward.py, and D_ts, D_t0, D_Cs, A, G, kin and kout from pairs.py. Two kernels compute the gradients of a chunk. The
first one, for all values,

    E = X - G (B X) with X = V - kin S        U = B E        dV = Z        dbeta_t = Y_t . E_t
    dA = scale tril(dO U^T)                   dM = - stril(Z U^T)

The second one, for a block of BK keys,

    dq_t = D_t0 (scale dO_t S^T) + sum over s <= t of dA_ts k_s D_ts
    dk_t = D_t0 (- Z_t S^T)      + sum over s < t of dM_ts k_s D_ts                                    k as a row
         + D_Ct (U_t dS'^T)      + sum over s >= t of dA_st q_s D_st + sum over s > t of dM_st k_s D_st   as a column

**Gates.** Gate u decays what comes from before token u to a token from u on. So dg_u adds, without a subtraction, what
these contribute: each product of a row t >= u with S, of a column s < u with dS', and of a pair s < u <= t, and
diag(decay) S with dS'. If exp(g_u) is 0 in float32, each of them is 0, and so is dg_u.

With a gate for each key, the pairs are halved as in pairs.py: at each level, gate u decays the tokens of its half that
it separates from the middle, and dg_u adds the products of these tokens with their gradients. If the keys of a head
share a gate, the first kernel computes dg from products over values, and multiplies dA and dM by D.

Each value head writes its own dq and dk. If value heads share a head of q and k, another launch sums their gradients.

B batch   T tokens   I chunks   H heads of q and k   Hv heads of values, states, gates and beta   R = Hv / H
K, V key and value width   C tokens of a chunk   LEVELS = log2 C   BK, BV keys and values of a block
"""

# pyright: reportGeneralTypeIssues=false
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gla_core.dispatch.backend import CHUNK
from gla_core.dispatch.tensors import ceil_div
from gla_triton_kernels.chunks import partials
from gla_triton_kernels.delta.general.common import (
    as_operand,
    chunk_at,
    decays_of_tokens,
    errors,
    load_factors,
    load_log2_gates,
    load_numbers,
    load_transposed,
    load_units,
    pair_decays,
    product_of_rows,
    store_transposed,
)
from gla_triton_kernels.delta.general.pairs import Chunks
from gla_triton_kernels.delta.plan import ChunkParameters, GradientParameters
from gla_triton_kernels.delta.tensors import BackwardTensors
from gla_triton_kernels.gla.general.backward import operands_of_halves, product, sums
from gla_triton_kernels.gla.shared.common import gate_arguments, load_given_gates, load_tile, store_tile
from gla_triton_runtime.gates import slope_of_gates
from gla_triton_runtime.launch import Launch, strides_of


def launch_gradients(
    kernel: GradientParameters,
    x: BackwardTensors,
    chunks: Chunks,
    entering: Tensor,
    leaving: Tensor,
    y: Tensor,
    scale: float,
    normalizer: int | None,
) -> list[Launch]:
    """Returns the launches that fill dq, dk, dv, dg and dbeta.

    Args:
        chunks: what pairs.py computes.
        entering, leaving: the states that enter chunks, and the gradients of those that leave them, [I, Hv, K, V].
        y: Y of backward.py, [B, T, Hv, V], contiguous.
        normalizer: see `launch_chunks`.
    """
    (B, T, H, K), (Hv, V), segments = x.k.shape, x.v.shape[2:], chunks.segments
    gates, R = gate_arguments(x.g, normalizer), Hv // H
    dA = x.v.new_empty(segments.count, Hv, 2, CHUNK, CHUNK, dtype=y.dtype)
    u = torch.empty_like(y)
    dq, dk = (z if R == 1 else z.new_empty(B, T, Hv, K, dtype=torch.float32) for z in (x.dq, x.dk))
    constant = gates["GATE"] == "constant"
    dg = x.v.new_empty(segments.count, Hv, dtype=torch.float32) if constant else x.dg
    shared: dict[str, Any] = {
        "k_ptr": x.k,
        "g_ptr": x.g,
        "do_ptr": x.do,
        "beta_ptr": x.beta,
        "order_ptr": segments.order,
        "entering_ptr": entering,
        "leaving_ptr": leaving,
        "y_ptr": y,
        "u_ptr": u,
        "dA_ptr": dA,
        "dg_ptr": dg,
        "scale": scale,
        "T": T,
        "chunks": segments.per_sequence,
        "Hv": Hv,
        **strides_of("q", x.q),
        **strides_of("k", x.k),
        **gates,
        **strides_of("o", x.do),
        **strides_of("n", x.beta),
        "K": K,
        "V": V,
        "C": CHUNK,
        "LEVELS": CHUNK.bit_length() - 1,
        "R": R,
    }
    values = {
        "q_ptr": x.q,
        "kin_ptr": chunks.kin,
        "qin_ptr": chunks.qin,
        "v_ptr": x.v,
        "matrices_ptr": chunks.matrices,
        "numbers_ptr": chunks.numbers,
        "dv_ptr": x.dv,
        "dbeta_ptr": x.dbeta,
        **strides_of("i", chunks.kin),
        **strides_of("j", chunks.qin),
        **strides_of("v", x.v),
        "R_KIN": Hv // chunks.kin.shape[2],
        "FACTORS": chunks.has_factors,
        **_parameters(kernel.values),
    }
    keys = {"q_ptr": x.q, "dq_ptr": dq, "dk_ptr": dk, **_parameters(kernel.keys)}
    blocks = ceil_div(K, kernel.keys.BK)
    options = [{"num_warps": each.warps} for each in (kernel.values, kernel.keys)]
    launches = [
        Launch(_values_kernel, (segments.count * Hv, 1, 1), {**shared, **values}, options[0]),
        Launch(_keys_kernel, (blocks * segments.count * Hv, 1, 1), {**shared, **keys}, options[1]),
    ]
    if constant:
        assert dg is not None
        assert x.dg is not None
        launches.append(partials.launch_sum_of_rows(dg, x.dg))
    for each, total in ((dq, x.dq), (dk, x.dk)):
        if each is not total:
            launches += partials.launch_sum(each, total, B * T * H)
    return launches


def _parameters(kernel: ChunkParameters) -> dict[str, Any]:
    """Returns the launch parameters of a kernel as its arguments."""
    return {"BK": kernel.BK, "BV": kernel.BV, "PRECISION": kernel.precision, "SUMS": kernel.sums}


@triton.jit(do_not_specialize=["scale", "T", "chunks", "Hv"])
def _values_kernel(
    q_ptr,  # [B, T, H, K]
    k_ptr,  # [B, T, H, K]
    kin_ptr,  # [B, T, Hv / R_KIN, K]
    qin_ptr,  # as kin_ptr, with its own strides
    v_ptr,  # [B, T, Hv, V]
    g_ptr,  # [B, T, Hv, K], [B, T, Hv] or [Hv] by GATE, or None
    beta_ptr,  # [B, T, Hv]
    do_ptr,  # [B, T, Hv, V]
    order_ptr,  # [I, 5], or None for a batch
    matrices_ptr,  # A and G, [I, Hv, 2, C, C]
    numbers_ptr,  # [I, Hv, 5, C]
    entering_ptr,  # [I, Hv, K, V]
    leaving_ptr,  # [I, Hv, K, V]
    y_ptr,  # [B, T, Hv, V], contiguous, as the next two
    u_ptr,  # receives U
    dv_ptr,
    dbeta_ptr,  # [B, T, Hv], contiguous
    dA_ptr,  # receives dA and dM, [I, Hv, 2, C, C]
    dg_ptr,  # by GATE [B, T, Hv, K], [B, T, Hv] or [I, Hv], or None
    scale,
    T,
    chunks,  # chunks of a sequence of a batch
    Hv,
    stride_qb,
    stride_qt,
    stride_qh,
    stride_kb,
    stride_kt,
    stride_kh,
    stride_ib,  # strides of kin
    stride_it,
    stride_ih,
    stride_jb,  # strides of qin
    stride_jt,
    stride_jh,
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
    stride_nb,  # strides of beta
    stride_nt,
    stride_nh,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    LEVELS: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    R: tl.constexpr,
    R_KIN: tl.constexpr,
    FACTORS: tl.constexpr,  # whether the rows of kin and qin have factors
    PRECISION: tl.constexpr,
    SUMS: tl.constexpr,
):
    """Computes U, dv, dbeta, dA and dM of a chunk of one value head, and dg if the keys of a head share a gate."""
    SHARED: tl.constexpr = GATE == "head" or GATE == "constant"
    place, h = tl.program_id(0) // Hv, tl.program_id(0) % Hv
    b, t, end, _opening, _last, i = chunk_at(order_ptr, place, T, chunks, C)
    if t >= end:
        if GATE == "constant":
            tl.store(dg_ptr + i.to(tl.int64) * Hv + h, 0.0)
        return
    b64 = tl.cast(b, tl.int64)
    q_ptr += b64 * stride_qb
    k_ptr += b64 * stride_kb
    kin_ptr += b64 * stride_ib
    qin_ptr += b64 * stride_jb
    v_ptr += b64 * stride_vb
    do_ptr += b64 * stride_ob
    beta_ptr += b64 * stride_nb
    y_ptr += b64 * T * Hv * V
    u_ptr += b64 * T * Hv * V
    dv_ptr += b64 * T * Hv * V
    dbeta_ptr += b64 * T * Hv
    place = tl.cast(i, tl.int64) * Hv + h
    matrices_ptr += place * (2 * C * C)
    numbers_ptr += place * (5 * C)
    dA_ptr += place * (2 * C * C)
    entering_ptr += place * (K * V)
    leaving_ptr += place * (K * V)

    i_c = tl.arange(0, C)  # [C]
    row, column = i_c[:, None], i_c[None, :]  # [C, 1], [1, C]
    i_k = tl.arange(0, BK)[None, :]  # [1, BK]
    beta = load_numbers(beta_ptr, stride_nt, stride_nh, t, h, end, C)  # [C]
    kin = load_tile(None, kin_ptr, stride_it, stride_ih, b, t, h // R_KIN, 0, end, K, C, BK)  # [C, BK]
    _A_units, G_units = load_units(numbers_ptr, C, PRECISION)  # [C]
    k_factors, q_factors, out_factors = load_factors(numbers_ptr, C, FACTORS)  # [1, C]
    G = tl.load(matrices_ptr + C * C + column * C + row)  # [C, C], transposed
    dA, dM = tl.zeros([C, C], tl.float32), tl.zeros([C, C], tl.float32)
    dbeta = tl.zeros([C], tl.float32)
    if SHARED:
        rows, columns, crossing = tl.zeros([C], tl.float32), tl.zeros([C], tl.float32), 0.0
        qin = load_tile(None, qin_ptr, stride_jt, stride_jh, b, t, h // R_KIN, 0, end, K, C, BK)  # [C, BK]
    for v0 in tl.range(0, V, BV, num_stages=1):
        i_v = v0 + tl.arange(0, BV)[:, None]  # [BV, 1]
        m_s = (i_k < K) & (i_v < V)  # [BV, BK]
        S = tl.load(entering_ptr + i_k * V + i_v, mask=m_s, other=0.0)  # [BV, BK], transposed
        v = load_transposed(v_ptr, stride_vt, stride_vh, t, h, i_v, end, V, C)  # [BV, C]
        left, unit = as_operand(S, PRECISION)  # [BV, BK]
        E = errors(left, unit, kin, k_factors, v, beta[None, :], G, G_units, PRECISION)  # [BV, C]
        U = beta[None, :] * E  # [BV, C]
        store_transposed(u_ptr, Hv * V, V, t, h, i_v, end, U, V, C)
        y = load_transposed(y_ptr, Hv * V, V, t, h, i_v, end, V, C).to(tl.float32)  # [BV, C]
        dbeta += tl.sum(y * E, 0)
        z = beta[:, None] * load_tile(None, y_ptr, Hv * V, V, b, t, h, v0, end, V, C, BV).to(tl.float32)  # [C, BV]
        store_tile(None, dv_ptr, Hv * V, V, b, t, h, v0, end, z, V, C, BV)
        do = load_tile(None, do_ptr, stride_ot, stride_oh, b, t, h, v0, end, V, C, BV)  # [C, BV]
        right, right_unit = as_operand(U, PRECISION)  # [BV, C]
        dA += _product_over_values(do, right, right_unit, PRECISION)
        dM += _product_over_values(z, right, right_unit, PRECISION)
        if SHARED:
            dS = tl.load(leaving_ptr + i_k * V + i_v, mask=m_s, other=0.0)  # [BV, BK], transposed
            crossing += tl.sum(S.to(tl.float32) * dS.to(tl.float32))
            qS = product_of_rows(left, unit, qin, q_factors, PRECISION)  # [BV, C]
            kS = product_of_rows(left, unit, kin, k_factors, PRECISION)  # [BV, C]
            left, unit = as_operand(dS, PRECISION)  # [BV, BK]
            kdS = product_of_rows(left, unit, kin, out_factors, PRECISION)  # [BV, C]
            do_t = load_transposed(do_ptr, stride_ot, stride_oh, t, h, i_v, end, V, C).to(tl.float32)  # [BV, C]
            rows += tl.sum(scale * do_t * qS - beta[None, :] * y * kS, 0)
            columns += tl.sum(U * kdS, 0)
    dA = tl.where(column <= row, scale * dA, 0.0)
    dM = tl.where(column < row, -dM, 0.0)
    store_tile(None, dbeta_ptr, Hv, 1, b, t, h, 0, end, dbeta[:, None], 1, C, 1)

    if SHARED:
        g_ptr += b64 * stride_gb
        g = load_log2_gates(g_ptr, stride_gt, stride_gh, t, h, 0, end, GATE, NORMALIZER, K, C, 1)  # [C, 1]
        D = pair_decays(g, row, column, LEVELS)  # [C, C]
        dA *= D
        dM *= D
        q = load_tile(None, q_ptr, stride_qt, stride_qh, b, t, h // R, 0, end, K, C, BK)  # [C, BK]
        k = load_tile(None, k_ptr, stride_kt, stride_kh, b, t, h // R, 0, end, K, C, BK)  # [C, BK]
        if PRECISION == "units":  # the inputs are operands as they are
            QK, KK = tl.dot(q, tl.trans(k)), tl.dot(k, tl.trans(k))  # [C, C]
        else:
            QK, KK = product(q, tl.trans(k), None, PRECISION), product(k, tl.trans(k), None, PRECISION)  # [C, C]
        pairs = tl.where(column < row, dA * QK + dM * KK, 0.0)  # [C, C]
        # Row u of the product sums the pairs of tokens from u on.
        from_u = sums(column >= row, pairs, SUMS)  # [C, C]
        dg = tl.sum(tl.where(column < row, from_u, 0.0), 1)  # [C], pairs across gate u
        dg += tl.sum(tl.where(column >= row, rows[None, :], 0.0) + tl.where(column < row, columns[None, :], 0.0), 1)
        dg += crossing * tl.exp2(tl.sum(g))
        if NORMALIZER is not None:
            logits = load_given_gates(None, g_ptr, stride_gt, stride_gh, b, t, h, 0, end, GATE, K, C, 1)  # [C, 1]
            dg *= tl.reshape(slope_of_gates(logits, NORMALIZER), [C])
        if GATE == "constant":
            tl.store(dg_ptr + place, tl.sum(tl.where(t + i_c < end, dg, 0.0)))
        else:
            store_tile(None, dg_ptr + b64 * T * Hv, Hv, 1, b, t, h, 0, end, dg[:, None], 1, C, 1)
    tl.store(dA_ptr + row * C + column, dA.to(dA_ptr.dtype.element_ty))
    tl.store(dA_ptr + C * C + row * C + column, dM.to(dA_ptr.dtype.element_ty))


@triton.jit
def _product_over_values(x, y, y_unit, PRECISION: tl.constexpr):
    """Returns the product [C, C] of x [C, BV] and y [BV, C]; y and y_unit are what `as_operand` returns."""
    if PRECISION == "units":
        x, unit = as_operand(x.to(tl.float32) * tl.trans(y_unit), PRECISION)
        return tl.dot(x, y) * unit
    else:  # noqa: RET505 -- one branch is compiled
        return product(x, y, None, PRECISION)


@triton.jit(do_not_specialize=["scale", "T", "chunks", "Hv"])
def _keys_kernel(
    q_ptr,  # [B, T, H, K]
    k_ptr,  # [B, T, H, K]
    g_ptr,  # [B, T, Hv, K], [B, T, Hv] or [Hv] by GATE, or None
    beta_ptr,  # [B, T, Hv]
    do_ptr,  # [B, T, Hv, V]
    order_ptr,  # [I, 5], or None for a batch
    entering_ptr,  # [I, Hv, K, V]
    leaving_ptr,  # [I, Hv, K, V]
    y_ptr,  # [B, T, Hv, V], contiguous
    u_ptr,  # [B, T, Hv, V], contiguous
    dA_ptr,  # dA and dM, [I, Hv, 2, C, C]
    dq_ptr,  # [B, T, Hv, K], contiguous, as the next one
    dk_ptr,
    dg_ptr,  # [B, T, Hv, K] if each key has a gate
    scale,
    T,
    chunks,  # chunks of a sequence of a batch
    Hv,
    stride_qb,
    stride_qt,
    stride_qh,
    stride_kb,
    stride_kt,
    stride_kh,
    stride_gb,
    stride_gt,
    stride_gh,
    GATE: tl.constexpr,
    NORMALIZER: tl.constexpr,
    stride_ob,
    stride_ot,
    stride_oh,
    stride_nb,  # strides of beta
    stride_nt,
    stride_nh,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    LEVELS: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    R: tl.constexpr,
    PRECISION: tl.constexpr,
    SUMS: tl.constexpr,
):
    """Computes dq and dk of a chunk of one value head for a block of BK keys, and dg if each key has a gate."""
    blocks: tl.constexpr = (K + BK - 1) // BK
    OPERAND: tl.constexpr = tl.bfloat16 if PRECISION == "bf16" else tl.float32  # pyright: ignore
    BY_KEY: tl.constexpr = GATE == "key"
    pid = tl.program_id(0)  # neighbouring programs read the same rows
    k0 = pid % blocks * BK
    place, h = pid // blocks // Hv, pid // blocks % Hv
    b, t, end, _opening, _last, i = chunk_at(order_ptr, place, T, chunks, C)
    if t >= end:
        return
    b64 = tl.cast(b, tl.int64)
    q_ptr += b64 * stride_qb
    k_ptr += b64 * stride_kb
    do_ptr += b64 * stride_ob
    beta_ptr += b64 * stride_nb
    y_ptr += b64 * T * Hv * V
    u_ptr += b64 * T * Hv * V
    dq_ptr += b64 * T * Hv * K
    dk_ptr += b64 * T * Hv * K
    place = tl.cast(i, tl.int64) * Hv + h
    dA_ptr += place * (2 * C * C)
    entering_ptr += place * (K * V)
    leaving_ptr += place * (K * V)

    i_c = tl.arange(0, C)  # [C]
    row, column = i_c[:, None], i_c[None, :]  # [C, 1], [1, C]
    i_k = k0 + tl.arange(0, BK)[:, None]  # [BK, 1]
    beta = load_numbers(beta_ptr, stride_nt, stride_nh, t, h, end, C)[:, None]  # [C, 1]
    dq, dk_row, dk = (tl.zeros([C, BK], tl.float32), tl.zeros([C, BK], tl.float32), tl.zeros([C, BK], tl.float32))
    crossing = tl.zeros([BK], tl.float32)  # the sum of S * dS' over values
    for v0 in tl.range(0, V, BV, num_stages=1):
        i_v = v0 + tl.arange(0, BV)[None, :]  # [1, BV]
        m_s = (i_k < K) & (i_v < V)  # [BK, BV]
        S = tl.load(entering_ptr + i_k * V + i_v, mask=m_s, other=0.0)  # [BK, BV]
        dS = tl.load(leaving_ptr + i_k * V + i_v, mask=m_s, other=0.0)  # [BK, BV]
        do = load_tile(None, do_ptr, stride_ot, stride_oh, b, t, h, v0, end, V, C, BV)  # [C, BV]
        z = beta * load_tile(None, y_ptr, Hv * V, V, b, t, h, v0, end, V, C, BV).to(tl.float32)  # [C, BV]
        u = load_tile(None, u_ptr, Hv * V, V, b, t, h, v0, end, V, C, BV)  # [C, BV]
        dq = product(do, tl.trans(S.to(OPERAND)), dq, PRECISION)
        dk_row = product(z.to(OPERAND), tl.trans(S.to(OPERAND)), dk_row, PRECISION)
        dk = product(u, tl.trans(dS.to(OPERAND)), dk, PRECISION)
        if BY_KEY:
            crossing += tl.sum(S.to(tl.float32) * dS.to(tl.float32), 1)

    q = load_tile(None, q_ptr, stride_qt, stride_qh, b, t, h // R, k0, end, K, C, BK)  # [C, BK]
    k = load_tile(None, k_ptr, stride_kt, stride_kh, b, t, h // R, k0, end, K, C, BK)  # [C, BK]
    if BY_KEY:
        g_ptr += b64 * stride_gb
        g = load_log2_gates(g_ptr, stride_gt, stride_gh, t, h, k0, end, GATE, NORMALIZER, K, C, BK)  # [C, BK]
        q, k = q.to(tl.float32), k.to(tl.float32)
    elif g_ptr is not None:
        g_ptr += b64 * stride_gb
        g = load_log2_gates(g_ptr, stride_gt, stride_gh, t, h, 0, end, GATE, NORMALIZER, K, C, BK)  # [C, 1]
    dq *= scale
    dk_row *= -1.0
    if g_ptr is not None:
        through, after = decays_of_tokens(g, SUMS)  # [C, BK] or [C, 1]
        dq *= through
        dk_row *= through
        dk *= after
    if BY_KEY:
        dg = sums(column >= row, q * dq + k * dk_row, SUMS) + sums(column < row, k * dk, SUMS)  # [C, BK]
        dg += crossing[None, :] * tl.exp2(tl.sum(g, 0))[None, :]
        dA_tt = tl.load(dA_ptr + i_c * (C + 1)).to(tl.float32)[:, None]  # [C, 1]
        dq += dA_tt * k
        dk += dk_row + dA_tt * q
        dq, dk, dg = _add_gradients_of_halves(dq, dk, dg, q, k, g, dA_ptr, row, column, LEVELS, PRECISION, SUMS)
        if NORMALIZER is not None:
            logits = load_given_gates(None, g_ptr, stride_gt, stride_gh, b, t, h, k0, end, GATE, K, C, BK)  # [C, BK]
            dg *= slope_of_gates(logits, NORMALIZER)
        store_tile(None, dg_ptr + b64 * T * Hv * K, Hv * K, K, b, t, h, k0, end, dg, K, C, BK)
    else:
        dA, dM = tl.load(dA_ptr + row * C + column), tl.load(dA_ptr + C * C + row * C + column)  # [C, C]
        dq = product(dA, k, dq, PRECISION)
        dk = product(dM, k, dk + dk_row, PRECISION)
        dk = product(tl.trans(dA), q, dk, PRECISION)
        dk = product(tl.trans(dM), k, dk, PRECISION)
    store_tile(None, dq_ptr, Hv * K, K, b, t, h, k0, end, dq, K, C, BK)
    store_tile(None, dk_ptr, Hv * K, K, b, t, h, k0, end, dk, K, C, BK)


@triton.jit
def _add_gradients_of_halves(
    dq, dk, dg, q, k, g, dA_ptr, row, column, LEVELS: tl.constexpr, PRECISION: tl.constexpr, SUMS: tl.constexpr
):
    """Adds the terms of pairs s < t of a chunk to dq, dk and dg [C, BK], from q, k and g [C, BK]."""
    C: tl.constexpr = row.shape[0]  # pyright: ignore
    apart = row ^ column  # [C, C]
    for level in tl.range(0, LEVELS, num_stages=1):
        qg, kg, decay, pair, decayed = operands_of_halves(q, k, g, row, column, apart, level, SUMS)
        kr = tl.where((row >> level) % 2 == 1, k * decay, 0.0)  # [C, BK], k as a row
        pair &= column < row
        dA = tl.load(dA_ptr + row * C + column, mask=pair, other=0.0)  # [C, C]
        dM = tl.load(dA_ptr + C * C + row * C + column, mask=pair, other=0.0)  # [C, C]
        dqg = product(dA, kg, None, PRECISION)  # [C, BK]
        dkr = product(dM, kg, None, PRECISION)  # [C, BK]
        dkg = product(tl.trans(dM), kr, product(tl.trans(dA), qg, None, PRECISION), PRECISION)  # [C, BK]
        dq += dqg * decay
        dk += (dkr + dkg) * decay
        dg += sums(decayed, qg * dqg + kr * dkr + kg * dkg, SUMS)
    return dq, dk, dg
