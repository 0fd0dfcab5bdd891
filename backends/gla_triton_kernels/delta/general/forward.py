"""Computes the delta rule over sequences, or over segments of them, from what pairs.py computes of each chunk.

    u_t = beta_t (v_t - k_t diag(alpha_t) S_{t-1})
    S_t = diag(alpha_t) S_{t-1} + k_t^T u_t
    o_t = scale q_t S_t

One program computes a block of BV values of one value head of one segment. It goes through the segment in chunks of C
tokens and carries the state S in float32. For a chunk, with A, G, kin, qin, kout and decay of pairs.py, and with
B = diag(beta),

    X = V - kin S        E = X - G (B X)        U = B E
    o = scale (qin S + A U)                     S' = diag(decay) S + kout^T U

X is what the entering state leaves to be explained, and E what the tokens before, too, leave. S' leaves the chunk.

**Layout.** All of it is computed transposed: S^T [BV, BK], X^T, E^T, U^T and o^T [BV, C] are results of products and
left operands of others, which stay in registers. Right operands do not depend on the state.

The rows of kin, qin and kout may have factors, which multiply columns of products; common.py explains units.

If states are in a pool, chunks/slots.py gives the slots that a sequence reads and writes; sequences are then whole.

A checkpoint is the state that enters a chunk whose first token comes a multiple of `every` tokens after the start of
its sequence. Segments are numbered as in segments.py, and chunks are segments of C tokens.

B batch   T tokens   N sequences   I segments, by default the N sequences   J chunks   n rows of checkpoints
P slots of a pool
H heads of q and k   Hv heads of values, states, gates and beta   R = Hv / H value heads of a key head
K, V key and value width   C tokens of a chunk   BK K padded to a power of two   BV values of a block

Source: Yang et al., "Gated Delta Networks" (arXiv 2412.06464); Kimi Team, "Kimi Linear" (arXiv 2510.26692).
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
from gla_triton_kernels.chunks.segments import Segments, in_state, lengths_of, segment_at, state_strides
from gla_triton_kernels.delta.general.common import (
    add_product,
    as_operand,
    load_factors,
    load_numbers,
    load_transposed,
    load_units,
    product_in_units,
    product_of_rows,
    store_transposed,
)
from gla_triton_kernels.delta.general.pairs import Chunks
from gla_triton_kernels.delta.plan import StateParameters
from gla_triton_kernels.delta.tensors import Tensors
from gla_triton_kernels.gla.shared.common import load_tile
from gla_triton_runtime.launch import Launch, strides_of


def launch_outputs(
    kernel: StateParameters,
    x: Tensors,
    chunks: Chunks,
    segments: Segments,
    scale: float,
    every: int | None,
) -> list[Launch]:
    """Returns the launch that fills o, final_state and checkpoints, each unless it is None.

    Args:
        chunks: what pairs.py computes.
        segments: the segments, of a multiple of `CHUNK` tokens; a sequence that stays whole is one segment.
        every: tokens between checkpoints.
    """
    arguments = _arguments(kernel, x, x.v, chunks, segments, scale, every)
    grid = (ceil_div(x.v.shape[3], kernel.BV) * segments.count * x.v.shape[2], 1, 1)
    return [Launch(_chunk_delta_fwd_kernel, grid, arguments, {"num_warps": kernel.warps})]


def launch_summaries(
    kernel: StateParameters, x: Tensors, chunks: Chunks, segments: Segments
) -> tuple[Tensor, Tensor, list[Launch]]:
    """Returns the states that segments reach from 0, [I, Hv, K, V], their transitions [I, Hv, K, K], and the launches.

    Those of empty segments and of the last segment of a sequence are undefined. The columns of a state do not depend on
    each other, so the transition is the state that a segment with values of 0 reaches from the identity.
    """
    Hv, V = x.v.shape[2:]
    K = x.k.shape[3]
    places = segments.count if segments.order is None else segments.most
    states, transitions = (x.v.new_empty(segments.count, Hv, K, n, dtype=torch.float32) for n in (V, K))
    launches = []
    for v, reached in ((x.v, states), (None, transitions)):
        arguments = _arguments(kernel, x, v, chunks, segments, 1.0, None)
        nothing = dict.fromkeys(("o_ptr", "initial_ptr", "final_ptr", "checkpoints_ptr", "entering_ptr"))
        arguments |= nothing | {"reached_ptr": reached, "counts_ptr": segments.counts}
        grid = (ceil_div(reached.shape[3], kernel.BV) * places * Hv, 1, 1)
        launches.append(Launch(_chunk_delta_fwd_kernel, grid, arguments, {"num_warps": kernel.warps}))
    return states, transitions, launches if places > 0 else []


def _arguments(
    kernel: StateParameters,
    x: Tensors,
    v: Tensor | None,
    chunks: Chunks,
    segments: Segments,
    scale: float,
    every: int | None,
) -> dict[str, Any]:
    """Returns the arguments of the kernel; v is None for a transition."""
    T, _, K = x.k.shape[1:]
    Hv = x.v.shape[2]
    V = K if v is None else v.shape[3]
    return {
        "kin_ptr": chunks.kin,
        "qin_ptr": chunks.qin,
        "kout_ptr": None if chunks.kout is chunks.kin else chunks.kout,
        "v_ptr": v,
        "beta_ptr": x.beta,
        "matrices_ptr": chunks.matrices,
        "numbers_ptr": chunks.numbers,
        "decay_ptr": chunks.decay,
        "initial_ptr": x.initial_state,
        "pool_ptr": x.pool,
        "slots_ptr": segments.slots,
        "order_ptr": segments.order,
        "o_ptr": x.o,
        "final_ptr": x.final_state,
        "checkpoints_ptr": x.checkpoints,
        "entering_ptr": x.entering,
        "reached_ptr": None,
        "counts_ptr": None,
        "scale": scale,
        **lengths_of(T, segments),
        "every": every or 0,
        "Hv": Hv,
        **strides_of("q", chunks.qin),
        **strides_of("k", chunks.kin),
        **strides_of("v", v),
        **strides_of("n", x.beta),
        **state_strides("stride_s", x.initial_state if x.pool is None else x.pool),
        "K": K,
        "V": V,
        "C": CHUNK,
        "BK": kernel.BK,
        "BV": kernel.BV,
        "R": Hv // chunks.kin.shape[2],
        "STAGES": kernel.stages,
        "SHARED": chunks.shared,
        "FACTORS": chunks.has_factors,
        "PRECISION": kernel.precision,
    }


@triton.jit(do_not_specialize=["scale", "T", "segment", "segments", "every", "Hv"])
def _chunk_delta_fwd_kernel(
    kin_ptr,  # [B, T, Hv / R, K]
    qin_ptr,  # [B, T, Hv / R, K]
    kout_ptr,  # [B, T, Hv / R, K], with the strides of kin, or None if it is kin
    v_ptr,  # [B, T, Hv, V], or None for a transition, whose V is K
    beta_ptr,  # [B, T, Hv]
    matrices_ptr,  # A and G, [J, Hv, 2, C, C]
    numbers_ptr,  # [J, Hv, 5, C]
    decay_ptr,  # [J, Hv, K], [J, Hv, 1] with SHARED, or None
    initial_ptr,  # [N, Hv, K, V] or None
    pool_ptr,  # [P, Hv, K, V] or None
    slots_ptr,  # [N, 4], or None without a pool
    order_ptr,  # [I, 5], or None for a batch
    o_ptr,  # [B, T, Hv, V], contiguous, or None
    final_ptr,  # [N, Hv, K, V], or None
    checkpoints_ptr,  # [B, n, Hv, K, V], or the pool, or None
    entering_ptr,  # [I, Hv, K, V], or None if sequences are whole
    reached_ptr,  # [I, Hv, K, V] for the states of segments that are followed, else None
    counts_ptr,  # [2] or None; see `Segments`
    scale,
    T,
    segment,  # tokens of a segment
    segments,  # segments of a sequence of a batch
    every,  # tokens between checkpoints
    Hv,
    stride_qb,
    stride_qt,
    stride_qh,
    stride_kb,
    stride_kt,
    stride_kh,
    stride_vb,
    stride_vt,
    stride_vh,
    stride_nb,  # strides of beta
    stride_nt,
    stride_nh,
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
    STAGES: tl.constexpr,
    SHARED: tl.constexpr,  # whether the keys of a head share a gate
    FACTORS: tl.constexpr,  # whether the rows of kin, qin and kout have factors
    PRECISION: tl.constexpr,
):
    """Computes a block of BV values of the outputs of one value head of one segment."""
    blocks: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)  # blocks of values come first, so that neighbouring programs read the same rows
    v0 = pid % blocks * BV
    ih = pid // blocks
    i, h = ih // Hv, ih % Hv
    if order_ptr is None:
        b, start = i // segments, i % segments * segment
        end = tl.minimum(start + segment, T)
        sequence, origin, last = b, 0, T  # the sequence of the segment, and its first row and end
        if reached_ptr is not None and i % segments == segments - 1:
            return
        chunk = b * tl.cdiv(T, C) + start // C  # the number of the first chunk
    else:
        b = 0
        if reached_ptr is not None:  # noqa: SIM102 -- known when this is compiled
            if i >= tl.load(counts_ptr):
                return
        i, start, end, origin, last = segment_at(order_ptr, i)
        sequence = i - start // segment
        chunk = sequence + start // C
        ih = i * Hv + h
        if entering_ptr is not None and start == end:
            return

    b64 = tl.cast(b, tl.int64)
    kin_ptr += b64 * stride_kb
    if kout_ptr is not None:
        kout_ptr += b64 * stride_kb
    qin_ptr += b64 * stride_qb
    if v_ptr is not None:
        v_ptr += b64 * stride_vb
    beta_ptr += b64 * stride_nb
    if o_ptr is not None:
        o_ptr += b64 * T * Hv * V

    i_k = tl.arange(0, BK)[None, :]  # [1, BK]
    i_v = v0 + tl.arange(0, BV)[:, None]  # [BV, 1]
    m_s = (i_k < K) & (i_v < V)  # [BV, BK]
    S = tl.zeros([BV, BK], tl.float32)  # transposed
    if v_ptr is None:
        S = tl.where(i_k == i_v, 1.0, S)
    if entering_ptr is not None and start > origin:
        S = tl.load(entering_ptr + tl.cast(ih, tl.int64) * (K * V) + i_k * V + i_v, mask=m_s, other=0.0)
    if initial_ptr is not None and start == origin:
        initial_ptr += sequence.to(tl.int64) * stride_sn + h.to(tl.int64) * stride_sh
        S = tl.load(initial_ptr + in_state(i_k, i_v, stride_sk, stride_sv), mask=m_s, other=0.0)
    if pool_ptr is not None:
        slots_ptr += sequence * 4
        pool_ptr += h.to(tl.int64) * stride_sh + in_state(i_k, i_v, stride_sk, stride_sv)  # [BV, BK], of slot 0
        slot = tl.load(slots_ptr).to(tl.int64)
        S = tl.load(pool_ptr + slot * stride_sn, mask=m_s & (slot >= 0), other=0.0).to(tl.float32)
    kept, kept_after = tl.cast(0, tl.int64), 0  # slot of a checkpoint in the pool, and tokens before it
    if checkpoints_ptr is not None and pool_ptr is not None:
        kept, kept_after = tl.load(slots_ptr + 2).to(tl.int64), tl.load(slots_ptr + 3)
    elif checkpoints_ptr is not None:
        row = b * tl.cdiv(T, every) if order_ptr is None else sequence + origin // every
        checkpoints_ptr += (tl.cast(row, tl.int64) * Hv + h) * (K * V)  # the first checkpoint of the sequence

    i_c = tl.arange(0, C)  # [C]
    i_s = i_c[:, None] + i_c[None, :] * C  # [C, C], the offsets of the transpose of a matrix
    place = tl.cast(chunk, tl.int64) * Hv + h  # of the first chunk
    matrices_ptr += place * (2 * C * C)
    numbers_ptr += place * (5 * C)
    if decay_ptr is not None:
        decay_ptr += place * (1 if SHARED else K)
    for t in tl.range(start, end, C, num_stages=STAGES):  # pyright: ignore
        if checkpoints_ptr is not None:
            passed = t - origin
            if passed % every == 0 if pool_ptr is None else passed == kept_after:
                if pool_ptr is None:
                    checkpoint = checkpoints_ptr + tl.cast(passed // every, tl.int64) * Hv * (K * V) + i_k * V + i_v
                else:
                    checkpoint = pool_ptr + kept * stride_sn
                tl.store(checkpoint, S.to(checkpoints_ptr.dtype.element_ty), mask=m_s)
        kin = load_tile(None, kin_ptr, stride_kt, stride_kh, b, t, h // R, 0, end, K, C, BK)  # [C, BK]
        v = tl.zeros([BV, C], tl.float32)
        if v_ptr is not None:
            v = load_transposed(v_ptr, stride_vt, stride_vh, t, h, i_v, end, V, C).to(tl.float32)
        beta = load_numbers(beta_ptr, stride_nt, stride_nh, t, h, end, C)[None, :]  # [1, C]
        A_units, G_units = load_units(numbers_ptr, C, PRECISION)  # [C]
        k_factors, q_factors, out_factors = load_factors(numbers_ptr, C, FACTORS)  # [1, C]
        G = tl.load(matrices_ptr + C * C + i_s)  # [C, C], transposed
        left, unit = as_operand(S, PRECISION)  # [BV, BK]
        U = beta * _errors(left, unit, kin, k_factors, v, beta, G, G_units, PRECISION)  # [BV, C]
        if o_ptr is not None:
            qin = load_tile(None, qin_ptr, stride_qt, stride_qh, b, t, h // R, 0, end, K, C, BK)  # [C, BK]
            A = tl.load(matrices_ptr + i_s)  # [C, C], transposed
            o = product_of_rows(left, unit, qin, q_factors, PRECISION)  # [BV, C]
            o += product_in_units(U, A, A_units, PRECISION)
            store_transposed(o_ptr, Hv * V, V, t, h, i_v, end, o * scale, V, C)
        if FACTORS:
            U *= out_factors
        if SHARED:
            S *= tl.load(decay_ptr)
            decay_ptr += Hv
        elif decay_ptr is not None:
            S *= tl.load(decay_ptr + i_k, mask=i_k < K, other=0.0)
            decay_ptr += Hv * K
        kout = kin  # [C, BK]
        if kout_ptr is not None:
            kout = load_tile(None, kout_ptr, stride_kt, stride_kh, b, t, h // R, 0, end, K, C, BK)
        left, unit = as_operand(U, PRECISION)  # [BV, C]
        S = add_product(S, left, unit, kout, PRECISION)
        matrices_ptr += Hv * (2 * C * C)
        numbers_ptr += Hv * (5 * C)

    if reached_ptr is not None:
        tl.store(reached_ptr + tl.cast(ih, tl.int64) * (K * V) + i_k * V + i_v, S, mask=m_s)
    if final_ptr is not None:
        final_ptr += (sequence.to(tl.int64) * Hv + h) * (K * V)
        tl.store(final_ptr + i_k * V + i_v, S, mask=m_s & (end == last))
    if pool_ptr is not None:
        slot = tl.load(slots_ptr + 1).to(tl.int64)
        tl.store(pool_ptr + slot * stride_sn, S.to(pool_ptr.dtype.element_ty), mask=m_s & (slot >= 0))


@triton.jit
def _errors(S, S_unit, kin, k_factors, v, beta, G, G_units, PRECISION: tl.constexpr):
    """Returns E^T [BV, C], what the entering state and the tokens before leave to be explained of each token.

    Args:
        S, S_unit: the transpose of the entering state [BV, BK], as `as_operand` returns it.
        kin, k_factors: [C, BK], and the factors of its rows [1, C] or 1.
        v: the transpose of values [BV, C].
        beta: [1, C].
        G, G_units: the transpose of G [C, C], and the units of its rows [C] or 1.
    """
    X = v.to(tl.float32) - product_of_rows(S, S_unit, kin, k_factors, PRECISION)  # [BV, C]
    return X - product_in_units(beta * X, G, G_units, PRECISION)
