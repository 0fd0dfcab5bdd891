"""Computes the pairs of tokens of all chunks in parallel: what the delta rule needs of a chunk without its state.

For tokens t, s of a chunk, let D_ts be the product of the gates after s through t, one number for each key, and
B = diag(beta). A and G are lower triangular matrices:

    A_ts = sum over d of q_td k_sd D_tsd   for s <= t            M_ts = sum over d of k_td k_sd D_tsd   for s < t
    G = (I + M B)^-1 M

**Halving.** For every pair s < t there is exactly one m among 1, 2, 4 .. C/2 such that s and t lie in the two halves of
one block of 2m tokens. Then D_ts is the decay of token t, from the start of the right half, times the decay of token s,
to the end of the left half. So one masked product of decayed keys computes the pairs of all blocks of 2m tokens. All
decays are exponentials of sums of gates, so a gate of any strength is exact, down to -inf.

**Doubling.** The same level solves for G. If G_1 and G_2 are those of two halves and M_21 are the pairs between them,

    G_21 = (I - G_2 B_2) M_21 (I - B_1 G_1)

and a single token has G = 0. No step divides by beta, so beta may be 0.

If the keys of a head share a gate, D_ts is one number, and q k^T and k k^T are multiplied by it.

B batch   T tokens   I chunks   H heads of q and k   Hv heads of values, gates and beta   R = Hv / H value heads of a key head
K key width   C tokens of a chunk   LEVELS = log2 C   BK keys of a tile   TILES tiles of a head

Source: Yang et al., "Gated Delta Networks" (arXiv 2412.06464) and "Parallelizing Linear Transformers with the Delta
Rule" (arXiv 2406.06484), for T = B (I + M B)^-1; here the solve has no factor beta.
"""

# pyright: reportGeneralTypeIssues=false
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from gla_core.dispatch.backend import CHUNK
from gla_core.dispatch.tensors import ceil_div
from gla_triton_kernels.chunks.segments import Segments
from gla_triton_kernels.delta.general.common import chunk_at, load_log2_gates, load_numbers, units_of_rows
from gla_triton_kernels.delta.plan import PairParameters
from gla_triton_kernels.delta.tensors import Tokens
from gla_triton_kernels.gla.general.backward import operands_of_halves, product
from gla_triton_kernels.gla.shared.common import gate_arguments, load_tile
from gla_triton_runtime.launch import Launch, strides_of


class Pairs(NamedTuple):
    """The pairs of all chunks.

    Attributes:
        matrices: A and G [I, Hv, 2, C, C], float32, or float16 in units.
        units: the units of the rows of A and of G [I, Hv, 2, C]; None if `matrices` is float32.
    """

    matrices: Tensor
    units: Tensor | None


def launch_pairs(
    kernel: PairParameters, x: Tokens, chunks: Segments, normalizer: int | None
) -> tuple[Pairs, list[Launch]]:
    """Returns the pairs of all chunks, and the launch that fills them. Those of empty chunks are undefined.

    Args:
        chunks: the chunks, as segments of `CHUNK` tokens.
        normalizer: the number by which log sigma is divided if x.g holds logits; None if it holds log gates.
    """
    K, Hv = x.k.shape[3], x.v.shape[2]
    shape, in_units = (chunks.count, Hv, 2, CHUNK), kernel.precision == "bf16"
    matrices = x.v.new_empty(*shape, CHUNK, dtype=torch.float16 if in_units else torch.float32)
    pairs = Pairs(matrices, x.v.new_empty(shape, dtype=torch.float32) if in_units else None)
    arguments = {
        "q_ptr": x.q,
        "k_ptr": x.k,
        "g_ptr": x.g,
        "beta_ptr": x.beta,
        "order_ptr": chunks.order,
        "matrices_ptr": pairs.matrices,
        "units_ptr": pairs.units,
        "T": x.k.shape[1],
        "chunks": chunks.per_sequence,
        "Hv": Hv,
        **strides_of("q", x.q),
        **strides_of("k", x.k),
        **gate_arguments(x.g, normalizer),
        **strides_of("n", x.beta),
        "K": K,
        "C": CHUNK,
        "LEVELS": CHUNK.bit_length() - 1,
        "BK": kernel.BK,
        "TILES": ceil_div(K, kernel.BK),
        "R": Hv // x.k.shape[2],
        "PRECISION": kernel.precision,
        "SUMS": kernel.sums,
    }
    return pairs, [Launch(_pairs_kernel, (chunks.count * Hv, 1, 1), arguments, {"num_warps": kernel.warps})]


@triton.jit(do_not_specialize=["T", "chunks", "Hv"])
def _pairs_kernel(
    q_ptr,  # [B, T, H, K]
    k_ptr,  # [B, T, H, K]
    g_ptr,  # [B, T, Hv, K], [B, T, Hv] or [Hv] by GATE, or None
    beta_ptr,  # [B, T, Hv]
    order_ptr,  # [I, 5], or None for a batch
    matrices_ptr,  # [I, Hv, 2, C, C]
    units_ptr,  # [I, Hv, 2, C] or None
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
    stride_nb,  # strides of beta
    stride_nt,
    stride_nh,
    K: tl.constexpr,
    C: tl.constexpr,
    LEVELS: tl.constexpr,
    BK: tl.constexpr,
    TILES: tl.constexpr,
    R: tl.constexpr,
    PRECISION: tl.constexpr,
    SUMS: tl.constexpr,
):
    """Computes A and G of a chunk of one value head."""
    place, h = tl.program_id(0) // Hv, tl.program_id(0) % Hv  # neighbouring programs read the same rows
    b, t, end, _, _, i = chunk_at(order_ptr, place, T, chunks, C)
    if t >= end:
        return
    b64 = tl.cast(b, tl.int64)
    q_ptr += b64 * stride_qb
    k_ptr += b64 * stride_kb
    beta_ptr += b64 * stride_nb
    if g_ptr is not None:
        g_ptr += b64 * stride_gb
    beta = load_numbers(beta_ptr, stride_nt, stride_nh, t, h, end, C)  # [C]

    row, column = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]  # [C, 1], [1, C]
    apart = row ^ column  # [C, C]
    BY_KEY: tl.constexpr = GATE == "key"
    A = tl.zeros([C, C], tl.float32)
    M = tl.zeros([C, C], tl.float32)  # k k^T, unless each key has a gate
    for i_k in tl.static_range(TILES):
        q = load_tile(None, q_ptr, stride_qt, stride_qh, b, t, h // R, i_k * BK, end, K, C, BK)  # [C, BK]
        k = load_tile(None, k_ptr, stride_kt, stride_kh, b, t, h // R, i_k * BK, end, K, C, BK)  # [C, BK]
        if BY_KEY:
            A += tl.sum(q.to(tl.float32) * k.to(tl.float32), 1)[:, None]
        else:
            A = product(q, tl.trans(k), A, PRECISION)
            M = product(k, tl.trans(k), M, PRECISION)
    if BY_KEY and TILES == 1:
        g = load_log2_gates(g_ptr, stride_gt, stride_gh, t, h, 0, end, GATE, NORMALIZER, K, C, BK)  # [C, BK]
        q, k = q.to(tl.float32), k.to(tl.float32)
    elif GATE == "head" or GATE == "constant":
        g = load_log2_gates(g_ptr, stride_gt, stride_gh, t, h, 0, end, GATE, NORMALIZER, K, C, BK)  # [C, 1]

    QK = A  # q k^T, unless each key has a gate
    A = tl.where(apart == 0, A, 0.0)
    G = tl.zeros([C, C], tl.float32)
    for level in tl.range(0, LEVELS, num_stages=1):
        m = 1 << level
        pair = (apart >= m) & (apart < 2 * m) & (column < row)  # [C, C]
        if g_ptr is None:
            A_pair, M_pair = QK, M
        elif not BY_KEY:
            decay = _decay_of_half(g, row, column, apart, m)  # [C, 1]
            D = decay * tl.trans(decay)  # [C, C]
            A_pair, M_pair = QK * D, M * D
        else:
            A_pair, M_pair = tl.zeros([C, C], tl.float32), tl.zeros([C, C], tl.float32)
            for i_k in tl.static_range(TILES):
                if TILES > 1:
                    k0 = i_k * BK
                    q = load_tile(None, q_ptr, stride_qt, stride_qh, b, t, h // R, k0, end, K, C, BK)  # [C, BK]
                    k = load_tile(None, k_ptr, stride_kt, stride_kh, b, t, h // R, k0, end, K, C, BK)  # [C, BK]
                    g = load_log2_gates(g_ptr, stride_gt, stride_gh, t, h, k0, end, GATE, NORMALIZER, K, C, BK)
                    q, k = q.to(tl.float32), k.to(tl.float32)
                qg, kg, decay, _, _ = operands_of_halves(q, k, g, row, column, apart, level, SUMS)  # [C, BK]
                A_pair = product(qg, tl.trans(kg), A_pair, PRECISION)
                M_pair = product(k * decay, tl.trans(kg), M_pair, PRECISION)
        A = tl.where(pair, A_pair, A)
        M_pair = tl.where(pair, M_pair, 0.0)
        M_pair -= product(G * beta[None, :], M_pair, None, PRECISION)
        G += M_pair - product(M_pair, beta[:, None] * G, None, PRECISION)

    at = (tl.cast(i, tl.int64) * Hv + h) * 2
    _store(matrices_ptr, units_ptr, at, A, C)
    _store(matrices_ptr, units_ptr, at + 1, G, C)


@triton.jit
def _decay_of_half(g, row, column, apart, m):
    """Returns the decays [C, 1] of tokens in the halves of blocks of 2m tokens, from gates g [C, 1]."""
    chosen = (apart < m) & tl.where((row & m) != 0, column <= row, column > row)  # [C, C], gate `column` decays `row`
    return tl.exp2(tl.sum(tl.where(chosen, tl.trans(g), 0.0), 1))[:, None]


@triton.jit
def _store(matrices_ptr, units_ptr, at, x, C: tl.constexpr):
    """Writes x [C, C] to a place among the matrices, and its units if there are any."""
    i_c = tl.arange(0, C)  # [C]
    if units_ptr is not None:
        unit = units_of_rows(x)  # [C]
        tl.store(units_ptr + at * C + i_c, unit)
        x /= unit[:, None]
    tl.store(matrices_ptr + at * (C * C) + i_c[:, None] * C + i_c[None, :], x.to(matrices_ptr.dtype.element_ty))
