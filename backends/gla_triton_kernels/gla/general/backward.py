"""Computes gradients of gated linear attention, backwards through sequences or segments, with dS on chip.

One program computes a block [BK, BV] of the states of one value head of one segment. It goes through the segment in
chunks of C tokens, the last chunk first, and carries the gradient dS [BK, BV] of the state that leaves a chunk, in
float32. The state S that enters each chunk is given. For a chunk, let b_t be the sum of the log gates g of the chunk
through token t, r an offset that is chosen below (both per channel of K), and dA = tril(do v^T). Then

    qg = scale * q exp(b - r)              kg = k exp(b_C - r - b)
    dq = scale * exp(b - r) ((do S^T) exp(r)) + terms of pairs of tokens
    dk = exp(b_C - r - b) (v (exp(r) dS)^T) + terms of pairs of tokens
    dv = kg (exp(r) dS) + A^T do           A_ts = scale * sum_d q_td k_sd exp(b_td - b_sd) for s <= t, else 0
    dS' = exp(r) (exp(b_C - r) dS + qg^T do)

dS' is the gradient of S. If the keys of a head share a gate, b, r and all sums and exponentials of gates have one
column, and dg is summed over the keys of a block before any sum over tokens. If all tokens share a gate, each block
writes one number, the sum of dg over its tokens.

A chunk is mild if no channel decays by more than `MILD_DECAY` in it (see limits.py). Then r = b_C / 2, and the terms of
its pairs s < t are

    A = qg kg^T        dq += scale * exp(b - r) (dA kg)        dk += exp(b_C - r - b) (dA^T qg)

In any other chunk r = 0, so that no exponent is above 0, and the chunk is halved repeatedly. For every pair s < t there
is exactly one m among 1, 2, 4 .. C/2 such that s and t lie in the two halves of one block of 2m tokens, and

    b_t - b_s  =  sum of the gates from the start of the right half through t
                  + sum of the gates after s to the end of the left half

One product of a mask with g gives both sums. One masked product computes the pairs of all blocks of 2m tokens. It is
accurate for any gate down to -inf, because no sum is subtracted. Pairs s = t have no gate and are multiplied element by
element.

Gate u decays every contribution of a token before u to a token from u on. With x_t = qg_t * dqg_t and
y_s = kg_s * dkg_s,

    dg_u = exp(b_C) sum_V(S * dS) + sum over t >= u of x_t + sum over s < u of y_s        by states
           + sum over t >= u of (x_t - y_t)                                               by pairs s < t, mild
           + sum over the tokens that u decays in its half of (x_t + y_t), for each m     by pairs s < t, other

In a mild chunk, the pairs on one side of u cancel, because x and y are computed from the same rounded qg and kg. In any
other chunk, the terms of pairs are only added. If exp(g_u) is 0 in float32, all terms of dg_u are 0, and so is dg_u. At
the first token of a sequence without an initial state, dg_u is set to 0.

Each block of keys and values is computed as a separate gated linear attention. dq, dk and dg are sums over blocks of
values, and dv is a sum over blocks of keys. If there are several such blocks, each writes a partial result
(partials.py). If keys share a gate, dg also has a partial result for each block of keys. dq and dk are computed for
each value head. If several value heads share a head of q and k, another launch sums their gradients.

On Hopper, Triton miscompiles matrix products in a branch at run time, and products whose left operand is a transposed
product. So no matrix product stands in a branch, and a separate product computes dA^T.

B batch   T tokens   N sequences   H key heads   Hq query heads   Hv heads of values, states and gates
Ho = max(Hq, Hv) heads of do   G = Ho / Hv query heads of a state   R = Hv / H value heads of a key head
K, V key and value width   C tokens of a chunk   n chunks, numbered like checkpoints   BK, BV keys and values of a block
I segments, by default the N sequences   LEVELS = log2 C   blocks_k, blocks_v blocks of keys and of values of a head

Source: Yang et al., "Gated Linear Attention Transformers with Hardware-Efficient Training" (arXiv 2312.06635), sec. 4.
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
from gla_triton_kernels.chunks.kernel import GradientParameters
from gla_triton_kernels.chunks.segments import Segments, in_state, lengths_of, segment_at, state_strides
from gla_triton_kernels.gla.shared.common import (
    gate_arguments,
    load_gates,
    load_given_gates,
    load_tile,
    store_tile,
    sums_of_gates,
)
from gla_triton_kernels.gla.shared.limits import LEAST_GATE, MILD_DECAY
from gla_triton_kernels.gla.tensors import BackwardTensors
from gla_triton_runtime.architecture import interpreted
from gla_triton_runtime.arithmetic import LOG2E
from gla_triton_runtime.gates import slope_of_gates
from gla_triton_runtime.launch import Launch, strides_of


def launch_gradients(
    kernel: GradientParameters,
    x: BackwardTensors,
    entering: Tensor,
    leaving: Tensor | None,
    segments: Segments,
    scale: float,
    normalizer: int | None = None,
) -> list[Launch]:
    """Returns the launches that fill the gradients.

    The launches do not write rows that belong to no sequence.

    Args:
        x: tensors of the call; x.dinitial_state is None unless segments are whole sequences, and x.dq and x.dk have
            the heads of the output.
        entering: the states that enter chunks, [B, n, Hv, K, V], contiguous.
        leaving: the gradients of the states that leave segments, [I, Hv, K, V]; None stands for 0. If x.dstate is None,
            the gradient for the last segment of a packed sequence counts as 0, and its memory is not read.
        normalizer: see `launch_outputs` of forward.py.
    """
    (K, Hv, V) = (x.q.shape[3], *x.v.shape[2:])
    blocks_k, blocks_v = ceil_div(K, kernel.BK), ceil_div(V, kernel.BV)
    dq, dk = (partials.parts_of(y, blocks_v) for y in (x.dq, x.dk))
    dg, sum_gates = gate_gradients(x.dg, segments.count, blocks_k, blocks_v)
    dv = partials.parts_of(x.dv, blocks_k)
    precision = "ieee" if interpreted() else kernel.precision
    arguments = {
        **gradient_arguments(kernel, x, leaving, segments, scale, normalizer),
        "entering_ptr": entering,
        "dq_ptr": dq,
        "dk_ptr": dk,
        "dg_ptr": dg,
        "dv_ptr": dv,
        "dinitial_ptr": x.dinitial_state,
        **state_strides("stride_s", leaving),
        "FROM_ZERO": x.initial_state is None,
        "SUMS": "bf16x3" if precision == "bf16" else precision,
    }
    grid = (blocks_v * blocks_k * segments.count * Hv, 1, 1)
    computed = Launch(_gla_backward_kernel, grid, arguments, {"num_warps": kernel.warps})
    return [computed, *partials.launch_partial_sums((dq, dk, dv), (x.dq, x.dk, x.dv)), *sum_gates]


def gradient_arguments(
    kernel: GradientParameters,
    x: BackwardTensors,
    leaving: Tensor | None,
    segments: Segments,
    scale: float,
    normalizer: int | None,
) -> dict[str, Any]:
    """Returns the arguments that all kernels for gradients have, here and in backward_chunks.py."""
    B, T, Hq, K = x.q.shape
    Hv, V = x.v.shape[2:]
    return {
        "q_ptr": x.q,
        "k_ptr": x.k,
        "v_ptr": x.v,
        "g_ptr": x.g,
        "do_ptr": x.do,
        "order_ptr": segments.order,
        "leaving_ptr": leaving,
        "scale": scale,
        "B": B,
        **lengths_of(T, segments),
        "Hv": Hv,
        "G": max(Hq // Hv, 1),
        **strides_of("q", x.q),
        **strides_of("k", x.k),
        **strides_of("v", x.v),
        **gate_arguments(x.g, normalizer),
        **strides_of("o", x.do),
        "K": K,
        "V": V,
        "C": CHUNK,
        "LEVELS": CHUNK.bit_length() - 1,
        "BK": kernel.BK,
        "BV": kernel.BV,
        "R": Hv // x.k.shape[2],
        "TO_ZERO": x.last_leave_none,
        "EXACT": kernel.precision == "bf16x6" and x.g is not None,
        "PRECISION": "ieee" if interpreted() else kernel.precision,  # the interpreter does not split operands
    }


def gate_gradients(
    dg: Tensor | None, segments: int, blocks_k: int, blocks_v: int
) -> tuple[Tensor | None, list[Launch]]:
    """Returns memory that the kernel fills for the gradient of gates, and the launches that sum it to dg."""
    if dg is None:
        return None, []
    if dg.ndim == 1:  # all tokens share a gate
        parts = torch.empty(blocks_k * blocks_v * segments, len(dg), dtype=torch.float32, device=dg.device)
        return parts, [partials.launch_sum_of_rows(parts, dg)]
    parts = partials.parts_of(dg, blocks_v if dg.ndim == 4 else blocks_k * blocks_v)
    return parts, partials.launch_partial_sums((parts,), (dg,))


@triton.jit(do_not_specialize=["scale", "B", "T", "segment", "segments", "Hv", "G"])
def _gla_backward_kernel(
    q_ptr,  # [B, T, Hq, K]
    k_ptr,  # [B, T, H, K]
    v_ptr,  # [B, T, Hv, V]
    g_ptr,  # [B, T, Hv, K], [B, T, Hv] or [Hv] by GATE, or None
    do_ptr,  # [B, T, Ho, V]
    order_ptr,  # [I, 5] or None
    entering_ptr,  # [B, n, Hv, K, V]
    leaving_ptr,  # [I, Hv, K, V] or None
    dq_ptr,  # [B, T, Ho, K], or [blocks_v, B, T, Ho, K]
    dk_ptr,  # [B, T, Hv, K], or [blocks_v, B, T, Hv, K]
    dg_ptr,  # by GATE [blocks_v, B, T, Hv, K], [blocks_k*blocks_v, B, T, Hv] or [I*blocks_k*blocks_v, Hv], or None
    dv_ptr,  # [B, T, Hv, V], or [blocks_k, B, T, Hv, V]
    dinitial_ptr,  # [N, Hv, K, V] or None
    scale,
    B,
    T,
    segment,  # tokens of a segment
    segments,  # segments of a sequence of a batch
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
    stride_sn,  # strides of leaving_ptr; see `in_state`
    stride_sh,
    stride_sk,
    stride_sv,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    LEVELS: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    R: tl.constexpr,
    FROM_ZERO: tl.constexpr,  # whether sequences have no initial state
    TO_ZERO: tl.constexpr,  # whether the last segment of each sequence has no gradient of its leaving state
    EXACT: tl.constexpr,  # whether every chunk is computed by halves
    PRECISION: tl.constexpr,
    SUMS: tl.constexpr,  # the precision of sums of gates and of dg
):
    """Computes the gradients of a block [BK, BV] of one value head of one segment, backwards."""
    blocks_v: tl.constexpr = (V + BV - 1) // BV
    blocks_k: tl.constexpr = (K + BK - 1) // BK
    OPERAND: tl.constexpr = tl.bfloat16 if PRECISION == "bf16" else tl.float32  # pyright: ignore
    pid = tl.program_id(0)  # neighbouring programs read the same q, k and g
    block_v, block_k = pid % blocks_v, pid // blocks_v % blocks_k
    v0, k0 = block_v * BV, block_k * BK
    ih = pid // (blocks_v * blocks_k)
    i, h = ih // Hv, ih % Hv
    if order_ptr is None:
        b, start = i // segments, i % segments * segment
        end = tl.minimum(start + segment, T)
        opening = 0  # the first token of the sequence
        row = b * tl.cdiv(T, C) + start // C  # checkpoint row of the state that enters the first chunk
    else:
        b = 0
        i, start, end, opening, last = segment_at(order_ptr, i)
        ih = i * Hv + h
        row = i - start // segment + start // C

    b64 = tl.cast(b, tl.int64)
    q_ptr += b64 * stride_qb
    k_ptr += b64 * stride_kb
    v_ptr += b64 * stride_vb
    do_ptr += b64 * stride_ob
    t_v = (block_v.to(tl.int64) * B + b64) * T  # row of token 0 of batch b in partial results of blocks of values
    t_k = (block_k.to(tl.int64) * B + b64) * T  # the same row in partial results of blocks of keys
    dq_ptr += t_v * (Hv * G * K)
    dk_ptr += t_v * (Hv * K)
    dv_ptr += t_k * (Hv * V)
    if g_ptr is not None:
        g_ptr += b64 * stride_gb
        if GATE == "key":
            dg_ptr += t_v * (Hv * K)
        elif GATE == "head":
            dg_ptr += ((block_k * blocks_v + block_v).to(tl.int64) * B + b64) * T * Hv
        else:
            dg_ptr += ((i * blocks_k + block_k) * blocks_v + block_v).to(tl.int64) * Hv + h
            dg_sums = tl.zeros([C, 1], tl.float32)  # of dg, over the chunks

    i_k = k0 + tl.arange(0, BK).to(tl.int64)[None, :]  # [1, BK]
    i_v = v0 + tl.arange(0, BV)[:, None]  # [BV, 1]
    m_s = (i_k < K) & (i_v < V)  # [BV, BK]
    if leaving_ptr is None:
        dS = tl.zeros([BV, BK], tl.float32)  # transposed, and so is S
    else:
        leaving_ptr += i.to(tl.int64) * stride_sn + h.to(tl.int64) * stride_sh
        m_l = m_s  # [BV, BK]
        if TO_ZERO:
            m_l &= end < last
        dS = tl.load(leaving_ptr + in_state(i_k, i_v, stride_sk, stride_sv), mask=m_l, other=0.0).to(tl.float32)

    i_c = tl.arange(0, C)  # [C]
    before = i_c[:, None] < i_c[None, :]  # [C, C], whether the token of the row comes before the token of the column
    after = i_c[:, None] > i_c[None, :]  # [C, C]
    chunks = tl.cdiv(end - start, C)
    for j in tl.range(0, chunks, num_stages=1):
        chunk = chunks - 1 - j
        t = start + chunk * C
        k = load_tile(None, k_ptr, stride_kt, stride_kh, b, t, h // R, k0, end, K, C, BK).to(tl.float32)  # [C, BK]
        v = load_tile(None, v_ptr, stride_vt, stride_vh, b, t, h, v0, end, V, C, BV).to(OPERAND)  # [C, BV]
        entering = entering_ptr + (tl.cast(row + chunk, tl.int64) * Hv + h) * (K * V)
        S = tl.load(entering + i_k * V + i_v, mask=m_s, other=0.0)  # [BV, BK]
        if g_ptr is None:
            mild: tl.constexpr = True  # pyright: ignore
            q_decay, k_decay, r_decay, rest_decay = 1.0, 1.0, 1.0, 1.0  # the compiler drops these factors
        else:
            g = load_gates(None, g_ptr, stride_gt, stride_gh, b, t, h, k0, end, GATE, NORMALIZER, K, C, BK)
            g = tl.maximum(g, LEAST_GATE) * LOG2E  # [C, BK] or [C, 1]
            if EXACT:
                mild: tl.constexpr = False  # pyright: ignore
            else:
                mild = tl.min(tl.sum(g, 0)) > -LOG2E * MILD_DECAY
            q_decay, k_decay, r_decay, rest_decay = decays_of_chunk(g, mild, before, EXACT, SUMS)
        kg = (k * k_decay).to(OPERAND)  # [C, BK]
        P = (dS * r_decay).to(OPERAND)  # [BV, BK]
        dk = product(v, P, None, PRECISION)  # [C, BK]
        dv = product(kg, tl.trans(P), None, PRECISION)  # [C, BV]
        if g_ptr is not None:
            crossing = r_decay * rest_decay * tl.sum(S * dS, 0)[None, :]  # [1, BK], exp(b_C) sum_V(S * dS)
            dg = for_gates(crossing, g) + sums(after, for_gates(kg * dk, g), SUMS)  # [C, BK] or [C, 1]
        dk *= k_decay
        dS *= rest_decay
        S = S.to(OPERAND)  # [BV, BK]

        for i_g in tl.range(0, G, num_stages=1):
            i_q = h * G + i_g
            q = load_tile(None, q_ptr, stride_qt, stride_qh, b, t, i_q // R, k0, end, K, C, BK)  # [C, BK]
            q = q.to(tl.float32)
            do = load_tile(None, do_ptr, stride_ot, stride_oh, b, t, i_q, v0, end, V, C, BV).to(OPERAND)  # [C, BV]
            qg = (q * scale * q_decay).to(OPERAND)  # [C, BK]
            dA = product(do, tl.trans(v), None, PRECISION)  # [C, C]
            dAT = product(v, tl.trans(do), None, PRECISION)  # [C, C]
            dq = product(do, S, None, PRECISION) * r_decay  # [C, BK]
            if EXACT:
                AT = tl.zeros([C, C], tl.float32)
                x = qg * dq  # [C, BK]
            else:
                pairs, pairs_T = tl.where(mild, after, False), tl.where(mild, before, False)  # [C, C]
                AT = tl.where(pairs_T, product(kg, tl.trans(qg), None, PRECISION), 0.0)  # [C, C]
                dq = product(tl.where(pairs, dA, 0.0), kg, dq, PRECISION)
                dk_near = product(tl.where(pairs_T, dAT, 0.0), qg, None, PRECISION)  # [C, BK]
                dk += dk_near * k_decay
                x = qg * dq - kg * dk_near  # [C, BK]
            if g_ptr is not None:
                dg += running_sum(for_gates(x, g), True)  # [C, BK] or [C, 1]
                levels = tl.where(mild, 0, LEVELS)
                AT, dq, dk, dg = _add_pairs_of_halves(
                    AT, dq * q_decay, dk, dg, q * scale, k, g, dA, dAT, levels, C, PRECISION, SUMS
                )
            dA_tt = scale * tl.sum(do.to(tl.float32) * v, 1)[:, None]  # [C, 1]
            A_tt = scale * tl.sum(q * k, 1)[:, None]  # [C, 1]
            dq = scale * dq + dA_tt * k
            dk += dA_tt * q
            dv = product(AT, do, dv, PRECISION) + A_tt * do
            dS = product(tl.trans(do), qg, dS, PRECISION)
            store_tile(None, dq_ptr, Hv * G * K, K, b, t, i_q, k0, end, dq, K, C, BK)

        dS *= r_decay
        store_tile(None, dk_ptr, Hv * K, K, b, t, h, k0, end, dk, K, C, BK)
        store_tile(None, dv_ptr, Hv * V, V, b, t, h, v0, end, dv, V, C, BV)
        if g_ptr is not None:
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
                dg_sums += tl.where((t + i_c < end)[:, None], dg, 0.0)

    if GATE == "constant":
        tl.store(dg_ptr, tl.sum(dg_sums))
    if dinitial_ptr is not None:
        dinitial_ptr += ih.to(tl.int64) * (K * V)
        tl.store(dinitial_ptr + i_k * V + i_v, dS, mask=m_s)


@triton.jit
def product(a, b, acc, PRECISION: tl.constexpr):
    """Returns the matrix product a b, plus acc unless it is None, in bfloat16 or in float32 as `PRECISION` says."""
    if PRECISION == "bf16":
        return tl.dot(a.to(tl.bfloat16), b.to(tl.bfloat16), acc)
    else:  # noqa: RET505 -- one branch is compiled
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision=PRECISION)


@triton.jit
def for_gates(x, g):
    """Returns a part x [.., BK] of the gradient of gates; if g is [C, 1], returns its sum over keys, [.., 1]."""
    if g.shape[1] == 1:
        return tl.sum(x, 1)[:, None]
    else:  # noqa: RET505 -- one branch is compiled
        return x


@triton.jit
def sums(chosen, x, SUMS: tl.constexpr):
    """Returns, for each row of `chosen` [C, C], the sum of the rows of x, [C, BK] or [C, 1], that it selects.

    `SUMS` is a precision of products, or the number of bfloat16 parts into which x is split: two parts hold 16 bits of
    x, and three hold 24. `chosen` is 0 or 1, which bfloat16 holds exactly.
    """
    if x.shape[1] == 1:
        return sums_of_gates(chosen, x)
    elif SUMS == "two parts" or SUMS == "three parts":  # noqa: RET505 -- one branch is compiled
        chosen = chosen.to(tl.bfloat16)
        total = tl.dot(chosen, x.to(tl.bfloat16))
        x -= x.to(tl.bfloat16).to(tl.float32)
        total = tl.dot(chosen, x.to(tl.bfloat16), total)
        if SUMS == "three parts":
            total = tl.dot(chosen, (x - x.to(tl.bfloat16).to(tl.float32)).to(tl.bfloat16), total)
        return total
    else:
        return product(chosen, x, None, SUMS)


@triton.jit
def running_sum(x, reverse: tl.constexpr):
    """Returns the inclusive prefix sums over the rows of x, [C, BK] or [C, 1]; the suffix sums if `reverse`."""
    if x.shape[1] == 1:
        row, column = tl.arange(0, x.shape[0])[:, None], tl.arange(0, x.shape[0])[None, :]
        return sums_of_gates(column >= row if reverse else column <= row, x)
    else:  # noqa: RET505 -- one branch is compiled
        return tl.cumsum(x, 0, reverse=reverse)


@triton.jit
def decays_of_chunk(g, mild, before, EXACT: tl.constexpr, SUMS: tl.constexpr):
    """Returns exp(b - r) and exp(b_C - r - b) [C, BK], and exp(r) and exp(b_C - r) [1, BK], for gates g [C, BK].

    Gates are in units of log 2. If g is [C, 1], all results have one column.

    Args:
        before: [C, C], whether the token of the row comes before the token of the column.
    """
    b = running_sum(g, False)  # [C, BK]
    total = tl.sum(g, 0)[None, :]  # [1, BK]
    r = tl.where(mild, 0.5 * total, 0.0)  # [1, BK]
    # `before` selects the gates after a token. Without EXACT, the difference of two large sums is precise enough.
    later = sums(before, g, SUMS) if EXACT else total - r - b  # [C, BK]
    return tl.exp2(b - r), tl.exp2(later), tl.exp2(r), tl.exp2(total - r)


@triton.jit
def _add_pairs_of_halves(
    AT, dq, dk, dg, q, k, g, dA, dAT, levels, C: tl.constexpr, PRECISION: tl.constexpr, SUMS: tl.constexpr
):
    """Adds the terms of pairs s < t in the two halves of blocks of 2, 4 .. 2^levels tokens, and returns the sums.

    Args:
        AT, dq, dk, dg: the sums so far, A^T [C, C] and dq, dk, dg [C, BK]; dg is [C, 1] if g is. dq lacks the scale.
        q, k, g: [C, BK]; q is already scaled. g may be [C, 1].
        dA, dAT: dA [C, C] and its transpose; for s >= t they may hold any finite numbers.
    """
    row, column = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]  # [C, 1], [1, C]
    apart = row ^ column  # [C, C]
    for level in tl.range(0, levels, num_stages=1):  # pyright: ignore
        qg, kg, decay, pair, decayed = operands_of_halves(q, k, g, row, column, apart, level, SUMS)
        AT += tl.where(pair, product(kg, tl.trans(qg), None, PRECISION), 0.0)
        dqg = product(tl.where(pair, dA, 0.0), kg, None, PRECISION)  # [C, BK]
        dkg = product(tl.where(pair, dAT, 0.0), qg, None, PRECISION)  # [C, BK]
        dq += dqg * decay
        dk += dkg * decay
        dg += sums(decayed, for_gates(qg * dqg + kg * dkg, g), SUMS)
    return AT, dq, dk, dg


@triton.jit
def operands_of_halves(q, k, g, row, column, apart, level, SUMS: tl.constexpr):
    """Computes the operands of pairs s < t in the two halves of blocks of 2m tokens, where m = 2^level.

    The results are qg and kg [C, BK]; the decays of tokens, [C, BK] or [C, 1]; the mask [C, C] of the pairs; and a mask
    [C, C] whose entry [u, t] is whether gate u decays token t. q is already scaled.

    Args:
        row, column: the numbers of tokens, [C, 1] and [1, C].
        apart: row ^ column [C, C], which is m to 2m - 1 if row and column lie in different halves.
    """
    m = 1 << level
    in_right, column_in_right = (row & m) != 0, (column & m) != 0  # [C, 1], [1, C]
    pair = (apart >= m) & (apart < 2 * m)  # [C, C]
    decays = (apart < m) & tl.where(in_right, column <= row, column > row)  # [C, C], gate `column` decays `row`
    decayed = (apart < m) & tl.where(column_in_right, row <= column, row > column)  # [C, C], its transpose
    decay = tl.exp2(sums(decays, g, SUMS))  # [C, BK] or [C, 1]
    qg = tl.where(in_right, q * decay, 0.0)  # [C, BK]
    kg = tl.where(in_right, 0.0, k * decay)  # [C, BK]
    return qg, kg, decay, pair, decayed
