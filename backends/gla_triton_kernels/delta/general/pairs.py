"""Computes, for all chunks in parallel, what the delta rule needs of a chunk beside its state.

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

**Operands.** With D_t0 the decay from the start of the chunk through token t, and D_Cs the decay after token s to its
end,

    kin_t = k_t D_t0        qin_t = q_t D_t0        kout_s = k_s D_Cs        decay = D_C0

If the keys of a head share a gate, D_ts is one number: q k^T and k k^T are multiplied by it, kin and kout are k and qin
is q, and their decays are factors of their rows. With bfloat16 inputs, kin, qin and kout are float16, each row divided
by the unit of the row of k or q, and these units are factors as well.

B batch   T tokens   I chunks   H heads of q and k   Hv heads of values, gates and beta
R = Hv / H value heads of a key head   K key width   C tokens of a chunk   LEVELS = log2 C
BK keys of a tile   TILES tiles of a head

Source: Yang et al., "Gated Delta Networks" (arXiv 2412.06464) and "Parallelizing Linear Transformers with the Delta
Rule" (arXiv 2406.06484), for T = B (I + M B)^-1; here the solve has no factor beta.
"""

# pyright: reportGeneralTypeIssues=false
from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from gla_core.dispatch.backend import CHUNK
from gla_core.dispatch.tensors import ceil_div
from gla_triton_kernels.chunks.segments import Segments, cut
from gla_triton_kernels.delta.general.common import (
    chunk_at,
    decays_of_tokens,
    load_log2_gates,
    load_numbers,
    pair_decays,
    units_of_rows,
)
from gla_triton_kernels.delta.plan import ChunkParameters
from gla_triton_kernels.delta.tensors import Tokens
from gla_triton_kernels.gla.general.backward import operands_of_halves, product
from gla_triton_kernels.gla.shared.common import gate_arguments, load_tile, store_tile
from gla_triton_runtime.launch import Launch, strides_of


class Chunks(NamedTuple):
    """The tensors of chunks that other kernels read. kout is kin unless each key has a gate.

    Attributes:
        segments: the chunks, as segments of `CHUNK` tokens.
        matrices: A and G [I, Hv, 2, C, C], float32, or float16 in units; common.py explains units.
        numbers: for each token the units of its rows of A and of G, and the factors of its rows of kin, qin and kout
            [I, Hv, 5, C]. Units are undefined if `matrices` is float32, and factors if there are none.
        kin, qin, kout: [B, T, Hv, K] or [B, T, H, K].
        decay: [I, Hv, K], or [I, Hv, 1] if the keys of a head share a gate; None without gates.
        shared: whether the keys of a head share a gate.
    """

    segments: Segments
    matrices: Tensor
    numbers: Tensor
    kin: Tensor
    qin: Tensor
    kout: Tensor
    decay: Tensor | None
    shared: bool

    @property
    def has_factors(self) -> bool:
        """Returns whether the rows of kin, qin and kout have factors."""
        return self.shared or self.matrices.dtype == torch.float16


def launch_chunks(
    kernel: ChunkParameters, x: Tokens, cu_seqlens: Tensor | None, normalizer: int | None
) -> tuple[Chunks, list[Launch]]:
    """Returns what other kernels read of chunks, and the launches that fill it. It is undefined for empty chunks.

    Args:
        normalizer: the number by which log sigma is divided if x.g holds logits; None if it holds log gates.
    """
    (B, T, H, K), Hv = x.k.shape, x.v.shape[2]
    segments = cut(B, T, CHUNK, CHUNK, cu_seqlens, longest_first=False)
    in_units, gates = kernel.precision == "units", gate_arguments(x.g, normalizer)
    by_key = gates["GATE"] == "key"
    places = (segments.count, Hv)
    new = functools.partial(x.v.new_empty, dtype=torch.float32)
    matrices = new(*places, 2, CHUNK, CHUNK, dtype=torch.float16 if in_units else torch.float32)
    kin, qin, kout = x.k, x.q, x.k
    if by_key or in_units:
        heads, dtype = Hv if by_key else H, torch.float16 if in_units else torch.float32
        kin, qin = (new(B, T, heads, K, dtype=dtype) for _ in range(2))
        kout = torch.empty_like(kin) if by_key else kin
    decay = None if x.g is None else new(*places, K if by_key else 1)
    shared = x.g is not None and not by_key
    chunks = Chunks(segments, matrices, new(*places, 5, CHUNK), kin, qin, kout, decay, shared)
    arguments = {
        "q_ptr": x.q,
        "k_ptr": x.k,
        "g_ptr": x.g,
        "beta_ptr": x.beta,
        "order_ptr": segments.order,
        "matrices_ptr": matrices,
        "numbers_ptr": chunks.numbers,
        "kin_ptr": None if kin is x.k else kin,
        "qin_ptr": None if kin is x.k else qin,
        "kout_ptr": kout if by_key else None,
        "decay_ptr": decay,
        "T": T,
        "chunks": segments.per_sequence,
        "Hv": Hv,
        **strides_of("q", x.q),
        **strides_of("k", x.k),
        **gates,
        **strides_of("n", x.beta),
        "K": K,
        "C": CHUNK,
        "LEVELS": CHUNK.bit_length() - 1,
        "BK": kernel.BK,
        "TILES": ceil_div(K, kernel.BK),
        "R": Hv // H,
        "UNITS": in_units,
        "PRECISION": kernel.precision,
        "SOLVE": kernel.solve,
        "SUMS": kernel.sums,
    }
    launch = Launch(_pairs_kernel, (segments.count * Hv, 1, 1), arguments, {"num_warps": kernel.warps})
    return chunks, [*segments.launches, launch]


@triton.jit(do_not_specialize=["T", "chunks", "Hv"])
def _pairs_kernel(
    q_ptr,  # [B, T, H, K]
    k_ptr,  # [B, T, H, K]
    g_ptr,  # [B, T, Hv, K], [B, T, Hv] or [Hv] by GATE, or None
    beta_ptr,  # [B, T, Hv]
    order_ptr,  # [I, 5], or None for a batch
    matrices_ptr,  # [I, Hv, 2, C, C]
    numbers_ptr,  # [I, Hv, 5, C]
    kin_ptr,  # [B, T, Hv, K] if each key has a gate, else [B, T, H, K], contiguous; None if it is k
    qin_ptr,  # as kin_ptr
    kout_ptr,  # [B, T, Hv, K], contiguous; None if it is kin
    decay_ptr,  # [I, Hv, K], or [I, Hv, 1] if the keys of a head share a gate, or None
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
    UNITS: tl.constexpr,  # whether matrices are in units
    PRECISION: tl.constexpr,
    SOLVE: tl.constexpr,
    SUMS: tl.constexpr,
):
    """Computes A and G of a chunk of one value head."""
    place, h = tl.program_id(0) // Hv, tl.program_id(0) % Hv  # neighbouring programs read the same rows
    b, t, end, _opening, _last, i = chunk_at(order_ptr, place, T, chunks, C)
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
    place = tl.cast(i, tl.int64) * Hv + h
    numbers_ptr += place * (5 * C)
    HEADS = Hv if BY_KEY else Hv // R  # of kin and qin
    head = h if BY_KEY else h // R
    if kin_ptr is not None:
        kin_ptr += b64 * T * HEADS * K
        qin_ptr += b64 * T * HEADS * K
    if BY_KEY:
        kout_ptr += b64 * T * Hv * K
    k_unit, q_unit = tl.full([C], 1.0, tl.float32), tl.full([C], 1.0, tl.float32)
    if UNITS:
        k_unit = _units(k_ptr, stride_kt, stride_kh, b, t, h // R, end, K, C, BK, TILES)  # [C]
        q_unit = _units(q_ptr, stride_qt, stride_qh, b, t, h // R, end, K, C, BK, TILES)  # [C]
    A, M = tl.zeros([C, C], tl.float32), tl.zeros([C, C], tl.float32)
    for i_k in tl.range(0, TILES, num_stages=1):
        k0 = i_k * BK
        q = load_tile(None, q_ptr, stride_qt, stride_qh, b, t, h // R, k0, end, K, C, BK)  # [C, BK]
        k = load_tile(None, k_ptr, stride_kt, stride_kh, b, t, h // R, k0, end, K, C, BK)  # [C, BK]
        if UNITS:
            q = (q * (1.0 / q_unit)[:, None]).to(tl.float16)
            k = (k * (1.0 / k_unit)[:, None]).to(tl.float16)
        kin, qin = k, q  # [C, BK]
        if BY_KEY:
            g = load_log2_gates(g_ptr, stride_gt, stride_gh, t, h, k0, end, GATE, NORMALIZER, K, C, BK)  # [C, BK]
            A, M = _add_pairs_of_halves(A, M, q, k, g, row, column, LEVELS, PRECISION, SUMS)
            through, after = decays_of_tokens(g, SUMS)  # [C, BK]
            store_tile(None, kout_ptr, Hv * K, K, b, t, h, k0, end, k * after, K, C, BK)
            kin, qin = k * through, q * through
            i_d = k0 + tl.arange(0, BK)  # [BK]
            tl.store(decay_ptr + place * K + i_d, tl.exp2(tl.sum(g, 0)), mask=i_d < K)
        else:
            A, M = _dot(q, k, A, PRECISION), _dot(k, k, M, PRECISION)
        if kin_ptr is not None:
            stop = tl.where(
                BY_KEY or h % R == 0, end, t
            )  # the first value head of a group writes those of its key head
            store_tile(None, kin_ptr, HEADS * K, K, b, t, head, k0, stop, kin, K, C, BK)
            store_tile(None, qin_ptr, HEADS * K, K, b, t, head, k0, stop, qin, K, C, BK)
    A *= q_unit[:, None] * k_unit[None, :]
    M *= k_unit[:, None] * k_unit[None, :]
    k_factor, q_factor, out_factor = k_unit[:, None], q_unit[:, None], k_unit[:, None]  # [C, 1]
    if GATE == "head" or GATE == "constant":
        g = load_log2_gates(g_ptr, stride_gt, stride_gh, t, h, 0, end, GATE, NORMALIZER, K, C, BK)  # [C, 1]
        D = pair_decays(g, row, column, LEVELS)  # [C, C]
        A *= D
        M *= D
        through, after = decays_of_tokens(g, SUMS)  # [C, 1]
        k_factor *= through
        q_factor *= through
        out_factor *= after
        tl.store(decay_ptr + place, tl.exp2(tl.sum(g)))
    tl.store(numbers_ptr + 2 * C + row, k_factor)
    tl.store(numbers_ptr + 3 * C + row, q_factor)
    tl.store(numbers_ptr + 4 * C + row, out_factor)

    # Rounding G to bfloat16 here would double the error of outputs with correlated keys.
    G = tl.where((apart == 1) & (column < row), M, 0.0)
    for level in tl.range(1, LEVELS, num_stages=1):
        pair = (apart >> level == 1) & (column < row)  # [C, C], those of blocks of 2^(level + 1) tokens
        M_pair = tl.where(pair, M, 0.0)
        M_pair -= product(G * beta[None, :], M_pair, None, SOLVE)
        G += M_pair - product(M_pair, beta[:, None] * G, None, SOLVE)
    matrices_ptr += place * (2 * C * C)
    _store(matrices_ptr, numbers_ptr, tl.where(column <= row, A, 0.0), C, UNITS)
    _store(matrices_ptr + C * C, numbers_ptr + C, G, C, UNITS)


@triton.jit
def _add_pairs_of_halves(A, M, q, k, g, row, column, LEVELS: tl.constexpr, PRECISION: tl.constexpr, SUMS: tl.constexpr):
    """Adds the terms of BK keys to A and M [C, C], from q, k and g [C, BK]."""
    OPERAND: tl.constexpr = tl.float16 if PRECISION == "units" else tl.float32  # pyright: ignore
    apart = row ^ column  # [C, C]
    q, k = q.to(tl.float32), k.to(tl.float32)
    A += tl.where(apart == 0, tl.sum(q * k, 1)[:, None], 0.0)
    for level in tl.range(0, LEVELS, num_stages=1):
        qg, kg, decay, pair, _decayed = operands_of_halves(q, k, g, row, column, apart, level, SUMS)
        pair &= column < row
        kg = kg.to(OPERAND)
        A += tl.where(pair, _dot(qg.to(OPERAND), kg, None, PRECISION), 0.0)
        M += tl.where(pair, _dot((k * decay).to(OPERAND), kg, None, PRECISION), 0.0)
    return A, M


@triton.jit
def _dot(x, y, acc, PRECISION: tl.constexpr):
    """Returns the product of x and the transpose of y, plus acc unless it is None; rows in units are float16."""
    if PRECISION == "units":
        return tl.dot(x, tl.trans(y), acc)
    else:  # noqa: RET505 -- one branch is compiled
        return product(x, tl.trans(y), acc, PRECISION)


@triton.jit
def _units(
    ptr, stride_t, stride_h, b, t, head, end, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, TILES: tl.constexpr
):
    """Returns the units [C] of C rows of one head from row t on."""
    largest = tl.zeros([C, BK], tl.float32)
    for i_k in tl.range(0, TILES, num_stages=1):
        x = load_tile(None, ptr, stride_t, stride_h, b, t, head, i_k * BK, end, K, C, BK)  # [C, BK]
        largest = tl.maximum(largest, tl.abs(x.to(tl.float32)))
    return units_of_rows(largest)


@triton.jit
def _store(matrix_ptr, units_ptr, x, C: tl.constexpr, UNITS: tl.constexpr):
    """Writes a matrix x [C, C], divided by the units of its rows with UNITS, and the units [C]."""
    i_c = tl.arange(0, C)  # [C]
    if UNITS:
        unit = units_of_rows(x)  # [C]
        tl.store(units_ptr + i_c, unit)
        x *= (1.0 / unit)[:, None]
    tl.store(matrix_ptr + i_c[:, None] * C + i_c[None, :], x.to(matrix_ptr.dtype.element_ty))
