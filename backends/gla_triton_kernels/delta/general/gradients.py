"""Computes the gradients of the delta rule for all chunks in parallel.

For a chunk, S is the state that enters it and dS' the gradient of the state that leaves it; Y and Z = B Y come from
backward.py, and D_ts, D_t0, D_Cs, G, kin and kout from pairs.py, or Y and G from their counterparts in sm90/. Two
kernels compute the gradients of a chunk. The first one, for all values,

    E = X - G (B X) with X = V - kin S        U = B E        dV = Z        dbeta_t = Y_t . E_t
    dA = scale tril(dO E^T) B                 dM = - B stril(Y E^T) B

The second one, for a block of BK keys,

    dq_t = D_t0 (scale dO_t S^T) + sum over s <= t of dA_ts k_s D_ts
    dk_t = D_t0 (- Z_t S^T)      + sum over s < t of dM_ts k_s D_ts                                    k as a row
         + D_Ct (U_t dS'^T)      + sum over s >= t of dA_st q_s D_st + sum over s > t of dM_st k_s D_st   as a column

**Gates.** Gate u decays what comes from before token u to a token from u on. So dg_u adds, without a subtraction, what
these contribute: each product of a row t >= u with S, of a column s < u with dS', and of a pair s < u <= t, and
diag(decay) S with dS'. If exp(g_u) is 0 in float32, each of them is 0, and so is dg_u.

With a gate for each key, the pairs are halved as in pairs.py: at each level, gate u decays the tokens of its half that
it separates from the middle, and dg_u adds the products of these tokens with their gradients. If the keys of a head
share a gate, the first kernel multiplies dA and dM by D, and computes the part of dg that pairs contribute; each block
of keys computes a part that states contribute, and another launch sums the parts.

**Precision.** Inputs, states and Y of bfloat16 are operands as they are, so kin S is k S with a factor for each row if
the keys of a head share a gate. E is a sum of two numbers of bfloat16. Other operands are in units (common.py).

Each value head writes its own dq and dk. If value heads share a head of q and k, another launch sums their gradients.

B batch   T tokens   I chunks   H heads of q and k   Hv heads of values, states, gates and beta   R = Hv / H
K, V key and value width   C tokens of a chunk   LEVELS = log2 C   BK, BV keys and values of a block
PARTS parts of dg: one of pairs, and one for each block of keys
"""

# pyright: reportGeneralTypeIssues=false
from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from gla_core.dispatch.backend import CHUNK
from gla_core.dispatch.tensors import ceil_div
from gla_triton_kernels.chunks import partials
from gla_triton_kernels.chunks.segments import Segments
from gla_triton_kernels.delta.general.common import (
    as_operand,
    chunk_at,
    decays_of_tokens,
    load_log2_gates,
    load_numbers,
    pair_decays,
)
from gla_triton_kernels.delta.plan import ChunkParameters, GradientParameters
from gla_triton_kernels.delta.tensors import BackwardTensors
from gla_triton_kernels.gla.general.backward import operands_of_halves, product, sums
from gla_triton_kernels.gla.shared.common import gate_arguments, load_given_gates, load_tile, store_tile
from gla_triton_runtime.gates import slope_of_gates
from gla_triton_runtime.launch import Launch, strides_of


class Chunks(NamedTuple):
    """Tensors of chunks that these kernels read.

    Attributes:
        segments: the chunks, as segments of `CHUNK` tokens.
        matrices: G, the last of 1 or 2 matrices of each chunk and head, [I, Hv, 1 or 2, C, C].
        numbers: the units by which the rows of G were divided, [I, Hv, C]; or the numbers of pairs.py, [I, Hv, 5, C].
        kin: None if k is an operand as it is.
        has_factors: whether the rows of kin have factors, which are among the numbers.
    """

    segments: Segments
    matrices: Tensor
    numbers: Tensor
    kin: Tensor | None
    has_factors: bool


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
        entering, leaving: the states that enter chunks, and the gradients of those that leave them, [I, Hv, K, V].
        y: Y of backward.py, [B, T, Hv, V], contiguous.
        normalizer: see `launch_chunks`.
    """
    (B, T, H, K), (Hv, V), segments = x.k.shape, x.v.shape[2:], chunks.segments
    gates, R = gate_arguments(x.g, normalizer), Hv // H
    dA = x.v.new_empty(segments.count, Hv, 2, CHUNK, CHUNK, dtype=y.dtype)
    u = torch.empty_like(y)
    dq, dk = (z if R == 1 else z.new_empty(B, T, Hv, K, dtype=torch.float32) for z in (x.dq, x.dk))
    blocks, dg = ceil_div(K, kernel.keys.BK), x.dg
    if shared_gates := gates["GATE"] in ("head", "constant"):
        shape = (segments.count, 1 + blocks, Hv) if gates["GATE"] == "constant" else (B, T, Hv, 1 + blocks)
        dg = x.v.new_empty(shape, dtype=torch.float32)
    shared: dict[str, Any] = {
        "k_ptr": x.k,
        "g_ptr": x.g,
        "do_ptr": x.do,
        "beta_ptr": x.beta,
        "order_ptr": segments.order,
        "entering_ptr": entering,
        "y_ptr": y,
        "u_ptr": u,
        "dA_ptr": dA,
        "dg_ptr": dg,
        "PARTS": 1 + blocks,
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
        "v_ptr": x.v,
        "matrices_ptr": chunks.matrices,
        "numbers_ptr": chunks.numbers,
        "dv_ptr": x.dv,
        "dbeta_ptr": x.dbeta,
        **strides_of("i", chunks.kin),
        **strides_of("v", x.v),
        "MATRICES": chunks.matrices.numel() // (segments.count * Hv * CHUNK * CHUNK),
        "NUMBERS": chunks.numbers.numel() // (segments.count * Hv * CHUNK),
        "R_KIN": 1 if chunks.kin is None else Hv // chunks.kin.shape[2],
        "FACTORS": chunks.has_factors,
        **_parameters(kernel.values),
    }
    keys = {"q_ptr": x.q, "leaving_ptr": leaving, "dq_ptr": dq, "dk_ptr": dk, **_parameters(kernel.keys)}
    options = [{"num_warps": each.warps} for each in (kernel.values, kernel.keys)]
    launches = [
        Launch(_values_kernel, (segments.count * Hv, 1, 1), {**shared, **values}, options[0]),
        Launch(_keys_kernel, (blocks * segments.count * Hv, 1, 1), {**shared, **keys}, options[1]),
    ]
    if shared_gates:
        assert dg is not None
        assert x.dg is not None
        constant = x.dg.ndim == 1
        launches += [partials.launch_sum_of_rows(dg, x.dg)] if constant else partials.launch_sum(dg, x.dg, B * T * Hv)
    for each, total in ((dq, x.dq), (dk, x.dk)):
        if each is not total:
            launches += partials.launch_sum(each, total, B * T * H)
    return launches


def _parameters(kernel: ChunkParameters) -> dict[str, Any]:
    """Returns the launch parameters of a kernel as its arguments."""
    names = {"BK": kernel.BK, "BV": kernel.BV, "STAGES": kernel.stages}
    return names | {"PRECISION": kernel.precision, "SUMS": kernel.sums}


@triton.jit(do_not_specialize=["scale", "T", "chunks", "Hv"])
def _values_kernel(
    q_ptr,  # [B, T, H, K]
    k_ptr,  # [B, T, H, K]
    kin_ptr,  # [B, T, Hv / R_KIN, K], or None if k and S are operands as they are
    v_ptr,  # [B, T, Hv, V]
    g_ptr,  # [B, T, Hv, K], [B, T, Hv] or [Hv] by GATE, or None
    beta_ptr,  # [B, T, Hv]
    do_ptr,  # [B, T, Hv, V]
    order_ptr,  # [I, 5], or None for a batch
    matrices_ptr,  # [I, Hv, MATRICES, C, C], of which the last is G
    numbers_ptr,  # [I, Hv, NUMBERS, C]
    entering_ptr,  # [I, Hv, K, V]
    y_ptr,  # [B, T, Hv, V], contiguous, as the next two
    u_ptr,  # receives U
    dv_ptr,
    dbeta_ptr,  # [B, T, Hv], contiguous
    dA_ptr,  # receives dA and dM, [I, Hv, 2, C, C]
    dg_ptr,  # receives parts [B, T, Hv, PARTS] or [I, PARTS, Hv] by GATE if the keys of a head share a gate
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
    PARTS: tl.constexpr,
    MATRICES: tl.constexpr,
    NUMBERS: tl.constexpr,  # 1, the units of G; or 5, of which these are the second, and the factors of kin the third
    R: tl.constexpr,
    R_KIN: tl.constexpr,
    FACTORS: tl.constexpr,  # whether the rows of kin have factors
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    SUMS: tl.constexpr,
):
    """Computes U, dv, dbeta, dA and dM of a chunk of one value head, and what pairs of tokens contribute to dg."""
    SHARED: tl.constexpr = GATE == "head" or GATE == "constant"
    place, h = tl.program_id(0) // Hv, tl.program_id(0) % Hv
    b, t, end, _opening, _last, i = chunk_at(order_ptr, place, T, chunks, C)
    if t >= end:
        if GATE == "constant":
            _store_constant(dg_ptr, 0.0, i, h, Hv, 0, PARTS)
        return
    b64 = tl.cast(b, tl.int64)
    q_ptr += b64 * stride_qb
    k_ptr += b64 * stride_kb
    v_ptr += b64 * stride_vb
    do_ptr += b64 * stride_ob
    beta_ptr += b64 * stride_nb
    y_ptr += b64 * T * Hv * V
    u_ptr += b64 * T * Hv * V
    dv_ptr += b64 * T * Hv * V
    dbeta_ptr += b64 * T * Hv
    place = tl.cast(i, tl.int64) * Hv + h
    dA_ptr += place * (2 * C * C)
    entering_ptr += place * (K * V)

    i_c = tl.arange(0, C)  # [C]
    row, column = i_c[:, None], i_c[None, :]  # [C, 1], [1, C]
    i_k = tl.arange(0, BK)[:, None]  # [BK, 1]
    beta = load_numbers(beta_ptr, stride_nt, stride_nh, t, h, end, C)[:, None]  # [C, 1]
    G = tl.load(matrices_ptr + (place * MATRICES + MATRICES - 1) * (C * C) + row * C + column)  # [C, C]
    numbers_ptr += place * (NUMBERS * C) + (C if NUMBERS > 1 else 0)
    if SHARED:
        g_ptr += b64 * stride_gb
        g = load_log2_gates(g_ptr, stride_gt, stride_gh, t, h, 0, end, GATE, NORMALIZER, K, C, 1)  # [C, 1]
        through = sums(column <= row, g, SUMS)  # [C, 1]
    if kin_ptr is None:
        kin = load_tile(None, k_ptr, stride_kt, stride_kh, b, t, h // R, 0, end, K, C, BK)  # [C, BK]
    else:
        kin_ptr += b64 * stride_ib
        kin = load_tile(None, kin_ptr, stride_it, stride_ih, b, t, h // R_KIN, 0, end, K, C, BK)  # [C, BK]
    dA, dM = tl.zeros([C, C], tl.float32), tl.zeros([C, C], tl.float32)
    dbeta = tl.zeros([C], tl.float32)
    for v0 in tl.range(0, V, BV, num_stages=STAGES):
        i_v = v0 + tl.arange(0, BV)[None, :]  # [1, BV]
        S = tl.load(entering_ptr + i_k * V + i_v, mask=(i_k < K) & (i_v < V), other=0.0)  # [BK, BV]
        X = load_tile(None, v_ptr, stride_vt, stride_vh, b, t, h, v0, end, V, C, BV).to(tl.float32)  # [C, BV]
        if kin_ptr is None:
            past = tl.dot(kin, S)  # [C, BV]
            if SHARED:
                past *= tl.exp2(through)
        else:
            past = _product_of_columns(kin, S, PRECISION)  # [C, BV]
            if FACTORS:
                past *= tl.load(numbers_ptr + C + row)
        X -= past
        explained = _product_of_columns(G, beta * X, PRECISION)  # [C, BV]
        if PRECISION == "units":
            explained *= tl.load(numbers_ptr + row)
        E = X - explained  # [C, BV]
        store_tile(None, u_ptr, Hv * V, V, b, t, h, v0, end, beta * E, V, C, BV)
        y = load_tile(None, y_ptr, Hv * V, V, b, t, h, v0, end, V, C, BV)  # [C, BV]
        dbeta += tl.sum(y.to(tl.float32) * E, 1)
        store_tile(None, dv_ptr, Hv * V, V, b, t, h, v0, end, beta * y.to(tl.float32), V, C, BV)
        do = load_tile(None, do_ptr, stride_ot, stride_oh, b, t, h, v0, end, V, C, BV)  # [C, BV]
        dA = _add_product_over_values(dA, do, E, PRECISION)
        dM = _add_product_over_values(dM, y, E, PRECISION)
    dA = tl.where(column <= row, scale * dA * tl.trans(beta), 0.0)
    dM = tl.where(column < row, -beta * dM * tl.trans(beta), 0.0)
    store_tile(None, dbeta_ptr, Hv, 1, b, t, h, 0, end, dbeta[:, None], 1, C, 1)

    if SHARED:
        if kin_ptr is None:
            D = tl.exp2(tl.minimum(through - tl.trans(through), 0.0))  # [C, C]; exact enough for bfloat16
        else:
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
        dg = tl.sum(tl.where(column < row, from_u, 0.0), 1)[:, None]  # [C, 1], pairs across gate u
        at = (b, t, h, end, i, T, Hv)
        _store_part(dg_ptr, dg, 0, at, g_ptr, stride_gt, stride_gh, GATE, NORMALIZER, PARTS)
    tl.store(dA_ptr + row * C + column, dA.to(dA_ptr.dtype.element_ty))
    tl.store(dA_ptr + C * C + row * C + column, dM.to(dA_ptr.dtype.element_ty))


@triton.jit
def _product_of_columns(x, y, PRECISION: tl.constexpr):
    """Returns the product [C, columns] of x [C, rows], float16 or float32, and y [rows, columns]."""
    if PRECISION == "units":
        right, unit = as_operand(tl.trans(y), PRECISION)  # [columns, rows], [columns, 1]
        return tl.dot(x, tl.trans(right)) * tl.trans(unit)
    else:  # noqa: RET505 -- one branch is compiled
        # A left operand of 64 rows would be in tensor memory, which has no room for its parts.
        return tl.trans(product(tl.trans(y), tl.trans(x), None, PRECISION))


@triton.jit
def _add_product_over_values(acc, x, E, PRECISION: tl.constexpr):
    """Returns acc [C, C] plus the product of x and the transpose of E, both [C, BV]."""
    if PRECISION == "units" and x.dtype == tl.bfloat16:
        high = E.to(tl.bfloat16)
        acc = tl.dot(x, tl.trans(high), acc)
        return tl.dot(x, tl.trans((E - high.to(tl.float32)).to(tl.bfloat16)), acc)
    elif PRECISION == "units":  # noqa: RET505 -- one branch is compiled
        left, unit = as_operand(x, PRECISION)  # [C, BV], [C, 1]
        right, right_unit = as_operand(E, PRECISION)
        return acc + tl.dot(left, tl.trans(right)) * unit * tl.trans(right_unit)
    else:
        return product(x, tl.trans(E), acc, PRECISION)


@triton.jit
def _store_part(
    dg_ptr, dg, part, at, g_ptr, stride_t, stride_h, GATE: tl.constexpr, NORMALIZER: tl.constexpr, PARTS: tl.constexpr
):
    """Writes a part dg [C, 1] of the gradient of gates that the keys of a head share.

    Args:
        at: batch, first token, value head, end and number of the chunk, T and Hv.
    """
    b, t, h, end, i, T, Hv = at
    C: tl.constexpr = dg.shape[0]  # pyright: ignore
    if NORMALIZER is not None:
        logits = load_given_gates(None, g_ptr, stride_t, stride_h, b, t, h, 0, end, GATE, 1, C, 1)  # [C, 1]
        dg *= slope_of_gates(logits, NORMALIZER)
    if GATE == "constant":
        inside = (t + tl.arange(0, C) < end)[:, None]  # [C, 1]
        _store_constant(dg_ptr, tl.sum(tl.where(inside, dg, 0.0)), i, h, Hv, part, PARTS)
    else:
        dg_ptr += tl.cast(b, tl.int64) * T * Hv * PARTS + part
        store_tile(None, dg_ptr, Hv * PARTS, PARTS, b, t, h, 0, end, dg, 1, C, 1)


@triton.jit
def _store_constant(dg_ptr, dg, i, h, Hv, part, PARTS: tl.constexpr):
    """Writes what chunk i contributes to a part of the gradient of a constant gate."""
    tl.store(dg_ptr + (i.to(tl.int64) * PARTS + part) * Hv + h, dg)


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
    dg_ptr,  # [B, T, Hv, K] if each key has a gate, else as in _values_kernel
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
    PARTS: tl.constexpr,
    R: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    SUMS: tl.constexpr,
):
    """Computes dq and dk of a chunk of one value head for a block of BK keys, and dg or a part of it."""
    blocks: tl.constexpr = (K + BK - 1) // BK
    OPERAND: tl.constexpr = tl.bfloat16 if PRECISION == "bf16" else tl.float32  # pyright: ignore
    BY_KEY: tl.constexpr = GATE == "key"
    SHARED: tl.constexpr = GATE == "head" or GATE == "constant"
    pid = tl.program_id(0)  # neighbouring programs read the same rows
    k0 = pid % blocks * BK
    place, h = pid // blocks // Hv, pid // blocks % Hv
    b, t, end, _opening, _last, i = chunk_at(order_ptr, place, T, chunks, C)
    if t >= end:
        if GATE == "constant":
            _store_constant(dg_ptr, 0.0, i, h, Hv, 1 + k0 // BK, PARTS)
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
    for v0 in tl.range(0, V, BV, num_stages=STAGES):
        i_v = v0 + tl.arange(0, BV)[None, :]  # [1, BV]
        m_s = (i_k < K) & (i_v < V)  # [BK, BV]
        S = tl.load(entering_ptr + i_k * V + i_v, mask=m_s, other=0.0)  # [BK, BV]
        dS = tl.load(leaving_ptr + i_k * V + i_v, mask=m_s, other=0.0)  # [BK, BV]
        do = load_tile(None, do_ptr, stride_ot, stride_oh, b, t, h, v0, end, V, C, BV)  # [C, BV]
        y = load_tile(None, y_ptr, Hv * V, V, b, t, h, v0, end, V, C, BV)  # [C, BV]
        u = load_tile(None, u_ptr, Hv * V, V, b, t, h, v0, end, V, C, BV)  # [C, BV]
        dq = product(do, tl.trans(S.to(OPERAND)), dq, PRECISION)
        dk_row = product(y, tl.trans(S.to(OPERAND)), dk_row, PRECISION)
        dk = product(u, tl.trans(dS.to(OPERAND)), dk, PRECISION)
        if g_ptr is not None:
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
    dk_row *= -beta
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
        if SHARED:
            rows = tl.sum(q * dq + k * dk_row, 1)[None, :]  # [1, C]
            dg = tl.sum(tl.where(column >= row, rows, 0.0), 1)[:, None]  # [C, 1]
            dg += tl.sum(tl.where(column < row, tl.sum(k * dk, 1)[None, :], 0.0), 1)[:, None]
            dg += tl.sum(crossing) * tl.exp2(tl.sum(g))
            at = (b, t, h, end, i, T, Hv)
            _store_part(dg_ptr, dg, 1 + k0 // BK, at, g_ptr, stride_gt, stride_gh, GATE, NORMALIZER, PARTS)
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
