"""Carries gradients of states of the delta rule backwards through sequences, or segments of them: the forward's mirror.

One program computes a block of BV values of one value head of one segment. It goes through the segment in chunks of C
tokens, the last chunk first, and carries the gradient dS of a state in float32. For a chunk, dS' is the gradient of the
state that leaves it. With A, G, kin, qin, kout and decay of pairs.py and B = diag(beta),

    dU = scale A^T dO + kout dS'        Y = dU - G^T (B dU)        Z = B Y
    dS = diag(decay) dS' + scale qin^T dO - kin^T Z

Y is the gradient of E, before beta, and Z is dV. The kernel writes Y, and dS' of each chunk; gradients.py computes the
rest from them. This needs neither the states nor v.

All of it is computed transposed, as in forward.py, and the rows of kin, qin and kout may have factors, as there.

B batch   T tokens   N sequences   I segments, by default the N sequences   J chunks
H heads of q and k   Hv heads of values, states, gates and beta   R = Hv / H value heads of a key head
K, V key and value width   C tokens of a chunk   BK K padded to a power of two   BV values of a block
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
    product_of_rows,
    product_with_units,
    store_transposed,
)
from gla_triton_kernels.delta.general.pairs import Chunks
from gla_triton_kernels.delta.plan import StateParameters
from gla_triton_kernels.delta.tensors import BackwardTensors
from gla_triton_kernels.gla.shared.common import load_tile
from gla_triton_runtime.launch import Launch, strides_of


def launch_states(
    kernel: StateParameters,
    x: BackwardTensors,
    chunks: Chunks,
    behind: Tensor | None,
    segments: Segments,
    scale: float,
    y: Tensor,
    leaving: Tensor,
) -> list[Launch]:
    """Returns the launch that fills y, leaving and x.dinitial_state unless it is None.

    Args:
        chunks: what pairs.py computes.
        behind: the gradients of the states that leave followed segments, [I, Hv, K, V]; None if sequences are whole.
        segments: the segments, of a multiple of `CHUNK` tokens; a sequence that stays whole is one segment.
        y: receives Y, [B, T, Hv, V], contiguous.
        leaving: receives the gradients of the states that leave chunks, [J, Hv, K, V].
    """
    results = {"y_ptr": y, "leaving_ptr": leaving, "behind_ptr": behind}
    arguments = _arguments(kernel, x, x.do, chunks, segments, scale) | results
    grid = (ceil_div(x.do.shape[3], kernel.BV) * segments.count * x.do.shape[2], 1, 1)
    return [Launch(_state_gradients_kernel, grid, arguments, {"num_warps": kernel.warps})]


def launch_summaries(
    kernel: StateParameters, x: BackwardTensors, chunks: Chunks, segments: Segments, scale: float
) -> tuple[Tensor, Tensor, list[Launch]]:
    """Returns gradients of the states that enter segments, the transposes of their transitions, and the launches.

    They are [I, Hv, K, V], for gradients of 0 of the states that leave segments, and [I, Hv, K, K]. Those of empty
    segments and of the first segment of a sequence are undefined; see `launch_summaries` of forward.py.
    """
    Hv, V = x.v.shape[2:]
    K = x.k.shape[3]
    places = segments.count if segments.order is None else segments.most
    states, transitions = (x.v.new_empty(segments.count, Hv, K, n, dtype=torch.float32) for n in (V, K))
    launches = []
    for do, reached in ((x.do, states), (None, transitions)):
        arguments = _arguments(kernel, x, do, chunks, segments, scale)
        arguments |= dict.fromkeys(("last_ptr", "dinitial_ptr")) | {
            "reached_ptr": reached,
            "counts_ptr": segments.counts,
        }
        grid = (ceil_div(reached.shape[3], kernel.BV) * places * Hv, 1, 1)
        launches.append(Launch(_state_gradients_kernel, grid, arguments, {"num_warps": kernel.warps}))
    return states, transitions, launches if places > 0 else []


def _arguments(
    kernel: StateParameters, x: BackwardTensors, do: Tensor | None, chunks: Chunks, segments: Segments, scale: float
) -> dict[str, Any]:
    """Returns the arguments of the kernel; do is None for a transition."""
    T, _, K = x.k.shape[1:]
    Hv = x.v.shape[2]
    V = K if do is None else do.shape[3]
    return {
        "kin_ptr": chunks.kin,
        "qin_ptr": chunks.qin,
        "kout_ptr": None if chunks.kout is chunks.kin else chunks.kout,
        "do_ptr": do,
        "beta_ptr": x.beta,
        "matrices_ptr": chunks.matrices,
        "numbers_ptr": chunks.numbers,
        "decay_ptr": chunks.decay,
        "last_ptr": x.dstate,
        "behind_ptr": None,
        "order_ptr": segments.order,
        "counts_ptr": None,
        "y_ptr": None,
        "leaving_ptr": None,
        "reached_ptr": None,
        "dinitial_ptr": x.dinitial_state,
        "scale": scale,
        **lengths_of(T, segments),
        "Hv": Hv,
        **strides_of("q", chunks.qin),
        **strides_of("k", chunks.kin),
        **strides_of("o", do),
        **strides_of("n", x.beta),
        **state_strides("stride_s", x.dstate),
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


@triton.jit(do_not_specialize=["scale", "T", "segment", "segments", "Hv"])
def _state_gradients_kernel(
    kin_ptr,  # [B, T, Hv / R, K]
    qin_ptr,  # [B, T, Hv / R, K]
    kout_ptr,  # [B, T, Hv / R, K], with the strides of kin, or None if it is kin
    do_ptr,  # [B, T, Hv, V], or None for a transition, whose V is K
    beta_ptr,  # [B, T, Hv]
    matrices_ptr,  # A and G, [J, Hv, 2, C, C]
    numbers_ptr,  # [J, Hv, 5, C]
    decay_ptr,  # [J, Hv, K], [J, Hv, 1] with SHARED, or None
    last_ptr,  # [N, Hv, K, V] or None
    behind_ptr,  # [I, Hv, K, V], or None if sequences are whole
    order_ptr,  # [I, 5], or None for a batch
    counts_ptr,  # [2] or None; see `Segments`
    y_ptr,  # [B, T, Hv, V], contiguous, or None
    leaving_ptr,  # [J, Hv, K, V] or None
    reached_ptr,  # [I, Hv, K, V] for the gradients of segments that follow another, else None
    dinitial_ptr,  # [N, Hv, K, V] or None
    scale,
    T,
    segment,  # tokens of a segment
    segments,  # segments of a sequence of a batch
    Hv,
    stride_qb,
    stride_qt,
    stride_qh,
    stride_kb,
    stride_kt,
    stride_kh,
    stride_ob,
    stride_ot,
    stride_oh,
    stride_nb,  # strides of beta
    stride_nt,
    stride_nh,
    stride_sn,  # strides of last_ptr; see `in_state`
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
    """Computes a block of BV values of the gradients of states of one value head of one segment, backwards."""
    blocks: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)  # blocks of values come first, so that neighbouring programs read the same rows
    v0 = pid % blocks * BV
    ih = pid // blocks
    i, h = ih // Hv, ih % Hv
    if order_ptr is None:
        b, start = i // segments, i % segments * segment
        end = tl.minimum(start + segment, T)
        sequence, origin, last = b, 0, T  # the sequence of the segment, and its first row and end
        if reached_ptr is not None and i % segments == 0:
            return
        chunk = b * tl.cdiv(T, C) + start // C  # the number of the first chunk
    else:
        b = 0
        if reached_ptr is not None:  # noqa: SIM102 -- known when this is compiled
            if i >= tl.load(counts_ptr):
                return
        i, start, end, origin, last = segment_at(order_ptr, i)
        if reached_ptr is not None:  # a segment that comes after a followed segment
            i, start, end = i + 1, end, end + tl.minimum(segment, last - end)
        sequence = i - start // segment
        chunk = sequence + start // C
        ih = i * Hv + h
        if behind_ptr is not None and start == end:
            return

    b64 = tl.cast(b, tl.int64)
    kin_ptr += b64 * stride_kb
    if kout_ptr is not None:
        kout_ptr += b64 * stride_kb
    qin_ptr += b64 * stride_qb
    if do_ptr is not None:
        do_ptr += b64 * stride_ob
    beta_ptr += b64 * stride_nb
    if y_ptr is not None:
        y_ptr += b64 * T * Hv * V

    i_k = tl.arange(0, BK)[None, :]  # [1, BK]
    i_v = v0 + tl.arange(0, BV)[:, None]  # [BV, 1]
    m_s = (i_k < K) & (i_v < V)  # [BV, BK]
    dS = tl.zeros([BV, BK], tl.float32)  # transposed
    if do_ptr is None:
        dS = tl.where(i_k == i_v, 1.0, dS)
    if behind_ptr is not None and end < last:
        dS = tl.load(behind_ptr + tl.cast(ih, tl.int64) * (K * V) + i_k * V + i_v, mask=m_s, other=0.0)
    if last_ptr is not None and end == last:
        last_ptr += sequence.to(tl.int64) * stride_sn + h.to(tl.int64) * stride_sh
        dS = tl.load(last_ptr + in_state(i_k, i_v, stride_sk, stride_sv), mask=m_s, other=0.0).to(tl.float32)

    i_c = tl.arange(0, C)  # [C]
    i_s = i_c[:, None] * C + i_c[None, :]  # [C, C]
    chunks = tl.cdiv(end - start, C)
    place = tl.cast(chunk + chunks - 1, tl.int64) * Hv + h  # of the last chunk
    matrices_ptr += place * (2 * C * C)
    numbers_ptr += place * (5 * C)
    if decay_ptr is not None:
        decay_ptr += place * (1 if SHARED else K)
    if leaving_ptr is not None:
        leaving_ptr += place * (K * V)
    for j in tl.range(0, chunks, num_stages=STAGES):  # pyright: ignore
        t = start + (chunks - 1 - j) * C
        if leaving_ptr is not None:
            tl.store(leaving_ptr + i_k * V + i_v, dS.to(leaving_ptr.dtype.element_ty), mask=m_s)
            leaving_ptr -= Hv * (K * V)
        kin = load_tile(None, kin_ptr, stride_kt, stride_kh, b, t, h // R, 0, end, K, C, BK)  # [C, BK]
        kout = kin  # [C, BK]
        if kout_ptr is not None:
            kout = load_tile(None, kout_ptr, stride_kt, stride_kh, b, t, h // R, 0, end, K, C, BK)
        if do_ptr is not None:
            do = load_transposed(do_ptr, stride_ot, stride_oh, t, h, i_v, end, V, C).to(tl.float32) * scale  # [BV, C]
        beta = load_numbers(beta_ptr, stride_nt, stride_nh, t, h, end, C)[None, :]  # [1, C]
        A_units, G_units = load_units(numbers_ptr, C, PRECISION)  # [C]
        k_factors, q_factors, out_factors = load_factors(numbers_ptr, C, FACTORS)  # [1, C]
        A, G = tl.load(matrices_ptr + i_s), tl.load(matrices_ptr + C * C + i_s)  # [C, C]
        left, unit = as_operand(dS, PRECISION)  # [BV, BK]
        dU = product_of_rows(left, unit, kout, out_factors, PRECISION)  # [BV, C]
        if do_ptr is not None:
            dU += product_with_units(do, A, A_units, PRECISION)
        Y = dU - product_with_units(beta * dU, G, G_units, PRECISION)  # [BV, C]
        if y_ptr is not None:
            store_transposed(y_ptr, Hv * V, V, t, h, i_v, end, Y, V, C)
        Z = beta * Y  # [BV, C]
        if FACTORS:
            Z *= k_factors
        if SHARED:
            dS *= tl.load(decay_ptr)
            decay_ptr -= Hv
        elif decay_ptr is not None:
            dS *= tl.load(decay_ptr + i_k, mask=i_k < K, other=0.0)
            decay_ptr -= Hv * K
        left, unit = as_operand(-Z, PRECISION)  # [BV, C]
        dS = add_product(dS, left, unit, kin, PRECISION)
        if do_ptr is not None:
            if FACTORS:
                do *= q_factors
            qin = load_tile(None, qin_ptr, stride_qt, stride_qh, b, t, h // R, 0, end, K, C, BK)  # [C, BK]
            left, unit = as_operand(do, PRECISION)  # [BV, C]
            dS = add_product(dS, left, unit, qin, PRECISION)
        matrices_ptr -= Hv * (2 * C * C)
        numbers_ptr -= Hv * (5 * C)

    if reached_ptr is not None:
        tl.store(reached_ptr + (tl.cast(i, tl.int64) * Hv + h) * (K * V) + i_k * V + i_v, dS, mask=m_s)
    if dinitial_ptr is not None:
        dinitial_ptr += (sequence.to(tl.int64) * Hv + h) * (K * V)
        tl.store(dinitial_ptr + i_k * V + i_v, dS, mask=m_s & (start == origin))
