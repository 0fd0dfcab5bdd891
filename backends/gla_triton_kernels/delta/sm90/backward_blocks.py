"""Adds the gradients of pairs of tokens within blocks of 16 tokens, in chunks whose gates are strong.

gradients.py leaves these pairs out, because its factors of rows and of columns would overflow. Here the decay of each
pair is an exponential of its own, in float32. With dA, dM and the other names of gradients.py, for the tokens of a
block,

    dq_t += sum over s <= t of D_ts dA_ts beta_s k_s        dr_t += sum over s < t of D_ts dM_ts beta_s k_s
    dc_s += sum over t >= s of D_ts dA_ts q_t + sum over t > s of D_ts dM_ts k_t
    dg_u += sum over s < u <= t of D_ts (dA_ts q_t + dM_ts k_t) beta_s k_s

A gate whose exp is 0 has the gradient 0.

B batch   T tokens   J chunks   H heads of q and k   Hv heads of values   R = Hv / H   K key width   C tokens of a chunk
"""

# pyright: reportGeneralTypeIssues=false
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from gla_core.dispatch.backend import CHUNK
from gla_triton_kernels.delta.general.common import chunk_at
from gla_triton_kernels.delta.sm90.backward_pairs import STRONG_PROGRAMS, Chunks
from gla_triton_kernels.delta.sm90.common_backward import MOST
from gla_triton_kernels.delta.tensors import BackwardTensors
from gla_triton_kernels.gla.shared.limits import LEAST_GATE
from gla_triton_runtime.arithmetic import LOG2E
from gla_triton_runtime.launch import Launch, strides_of


def launch_blocks(x: BackwardTensors, chunks: Chunks, blocks: Tensor, dq: Tensor, dk: Tensor) -> Launch:
    """Returns the launch that adds to dq, dk, x.dg and x.dbeta.

    Args:
        blocks: dA and dM within the blocks of strong chunks, [J Hv, 2, C, 16].
        dq, dk: [B, T, Hv, K], contiguous.
    """
    (_, T, H, K), Hv = x.k.shape, x.v.shape[2]
    arguments = {
        "q_ptr": x.q,
        "k_ptr": x.k,
        "g_ptr": x.g,
        "beta_ptr": x.beta,
        "strong_ptr": chunks.strong,
        "blocks_ptr": blocks,
        "dq_ptr": dq,
        "dk_ptr": dk,
        "dg_ptr": x.dg,
        "dbeta_ptr": x.dbeta,
        "order_ptr": chunks.segments.order,
        "T": T,
        "chunks": chunks.segments.per_sequence,
        "Hv": Hv,
        "places": len(blocks),
        "R": Hv // H,
        **strides_of("q", x.q),
        **strides_of("k", x.k),
        **strides_of("g", x.g),
        **strides_of("n", x.beta),
        "K": K,
        "BK": MOST,
        "C": CHUNK,
    }
    return Launch(_blocks_kernel, (min(STRONG_PROGRAMS, len(blocks)), 1, 1), arguments, {"num_warps": 4})


@triton.jit(do_not_specialize=["T", "chunks", "Hv", "places", "R"])
def _blocks_kernel(
    q_ptr,  # [B, T, H, K]
    k_ptr,  # [B, T, H, K]
    g_ptr,  # [B, T, Hv, K]
    beta_ptr,  # [B, T, Hv]
    strong_ptr,  # [J, Hv]
    blocks_ptr,  # [J, Hv, 2, C, 16]
    dq_ptr,  # [B, T, Hv, K], contiguous, as the next two
    dk_ptr,
    dg_ptr,
    dbeta_ptr,  # [B, T, Hv], contiguous
    order_ptr,  # [J, 5], or None for a batch
    T,
    chunks,  # chunks of a sequence of a batch
    Hv,
    places,  # J Hv
    R,
    stride_qb,
    stride_qt,
    stride_qh,
    stride_kb,
    stride_kt,
    stride_kh,
    stride_gb,
    stride_gt,
    stride_gh,
    stride_nb,  # strides of beta
    stride_nt,
    stride_nh,
    K: tl.constexpr,
    BK: tl.constexpr,
    C: tl.constexpr,
):
    """Computes the strong chunks of all value heads."""
    i_t, i_k = tl.arange(0, 16), tl.arange(0, BK)[None, :]  # [16], [1, BK]
    row, column = i_t[:, None], i_t[None, :]  # [16, 1], [1, 16]
    for place in range(tl.program_id(0), places, tl.num_programs(0)):
        b, t0, end, _opening, _last, j = chunk_at(order_ptr, place // Hv, T, chunks, C)
        h, b = place % Hv, tl.cast(b, tl.int64)
        place = tl.cast(j, tl.int64) * Hv + h
        strong = 0
        if t0 < end:
            strong = tl.load(strong_ptr + place)
        if strong != 0:
            for t in range(t0, end, 16):
                valid = t + row < end  # [16, 1]
                inside = valid & (i_k < K)  # [16, BK]
                t64 = (t + row).to(tl.int64)  # [16, 1]
                q_at = q_ptr + b * stride_qb + t64 * stride_qt + h // R * stride_qh + i_k
                k_at = k_ptr + b * stride_kb + t64 * stride_kt + h // R * stride_kh + i_k
                g_at = g_ptr + b * stride_gb + t64 * stride_gt + h * stride_gh + i_k
                q = tl.load(q_at, mask=inside, other=0.0).to(tl.float32)  # [16, BK]
                k = tl.load(k_at, mask=inside, other=0.0).to(tl.float32)
                log_gates = tl.load(g_at, mask=inside, other=0.0).to(tl.float32)
                sums = tl.cumsum(tl.maximum(log_gates, LEAST_GATE) * LOG2E, 0)
                beta = tl.load(beta_ptr + b * stride_nb + t64 * stride_nt + h * stride_nh, mask=valid, other=0.0)
                beta = beta.to(tl.float32)  # [16, 1]
                pairs_at = blocks_ptr + place * (2 * C * 16) + (t - t0 + row) * 16 + column
                dA = tl.where(column <= row, tl.load(pairs_at), 0.0)  # [16, 16]
                dM = tl.where(column < row, tl.load(pairs_at + C * 16), 0.0)
                zeros = tl.zeros([16, BK], tl.float32)
                dq, dr, dc, dg = zeros, zeros, zeros, zeros
                for s in tl.range(0, 16, num_stages=1):
                    D = tl.where(row >= s, tl.exp2(tl.minimum(sums - _row_of(sums, s, row), 0.0)), 0.0)  # [16, BK]
                    a_column = D * tl.sum(tl.where(column == s, dA, 0.0), 1)[:, None]
                    m_column = D * tl.sum(tl.where(column == s, dM, 0.0), 1)[:, None]
                    column_s = _row_of(k * beta, s, row)  # [1, BK]
                    dq += a_column * column_s
                    dr += m_column * column_s
                    x = a_column * q + m_column * k  # [16, BK]
                    dc += tl.where(row == s, tl.sum(x, 0)[None, :], 0.0)
                    dg += tl.where(row > s, tl.cumsum(x * column_s, 0, reverse=True), 0.0)
                at = ((b * T + t64) * Hv + h) * K + i_k
                tl.store(dq_ptr + at, tl.load(dq_ptr + at, mask=inside) + dq, mask=inside)
                tl.store(dk_ptr + at, tl.load(dk_ptr + at, mask=inside) + dr + beta * dc, mask=inside)
                dg = tl.where(log_gates > LEAST_GATE, tl.load(dg_ptr + at, mask=inside) + dg, 0.0)
                tl.store(dg_ptr + at, dg, mask=inside)
                at = dbeta_ptr + (b * T + t64) * Hv + h
                tl.store(at, tl.load(at, mask=valid) + tl.sum(k * dc, 1)[:, None], mask=valid & (beta == 0.0))


@triton.jit
def _row_of(x, s, row):
    """Returns row s of x [16, BK] as [1, BK]."""
    return tl.sum(tl.where(row == s, x, 0.0), 0)[None, :]
