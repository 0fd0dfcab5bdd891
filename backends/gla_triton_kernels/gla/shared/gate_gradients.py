"""Computes the gradients of gates of heads, of factors of v and of a skip, from the sums of products of each token.

backward_head.py gives the mathematics. With f = 1 where v has no factors, for a chunk and a value head,

    dg_u = sum of through + sum over t >= u of (q_t + (pairs_s - f pairs_t)_t) + sum over s < u of f_s k_s
    df_s = k_s + (pairs_t)_s + e_s

`dots` [n, Hv, blocks, X, C] holds, for each block of keys, X = 4 + 3 PARTS vectors of a chunk and head:

    pairs_s, pairs_t           sums of A_ts (do_t v_s) for s < t: over s, with factors, and over t, without them
    d, e                       v_t do_t, and A_tt (v_t do_t)
    q, k, through              for each part: sums of q_t dq^S_t, and of k_s dk^S_s / f_s, over keys; and for each key
                               the sum of exp(b_C) S * P over values

B batch   T tokens   Hv value heads   C tokens of a chunk   n chunks   PARTS parts of the keys of a block
"""

# pyright: reportGeneralTypeIssues=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gla_core.dispatch.backend import CHUNK
from gla_core.dispatch.tensors import ceil_div
from gla_triton_kernels.chunks import partials
from gla_triton_kernels.chunks.segments import Segments, segment_at
from gla_triton_kernels.gla.shared.limits import LEAST_GATE
from gla_triton_kernels.gla.tensors import BackwardTensors
from gla_triton_runtime.launch import Launch

BH = 8
"""Value heads of a program."""


def rows_of_dots(parts: int) -> int:
    """Returns X, the number of vectors of `dots` of a chunk, head and block."""
    return 4 + 3 * parts


def launch_gate_gradients(x: BackwardTensors, dots: Tensor, chunks: Segments, normalizer: int | None) -> list[Launch]:
    """Returns the launches that fill x.dg, x.dfactor and x.dskip.

    Args:
        chunks: the chunks, as segments.
        normalizer: see `launch_gradients` of general/backward.py.
    """
    assert x.g is not None
    n, Hv, blocks, X, _ = dots.shape
    constant = x.g.ndim == 1
    dg = x.g.new_empty(n, Hv, dtype=torch.float32) if constant else x.dg
    arguments = {
        "dots_ptr": dots,
        "g_ptr": x.g,
        "f_ptr": x.v_factor,
        "dg_ptr": dg,
        "df_ptr": x.dfactor,
        "dskip_ptr": x.dskip,
        "order": chunks.order,
        **dict(zip(("g_b", "g_t", "g_h"), (0, 0, *x.g.stride())[-3:], strict=True)),
        "T": x.k.shape[1],
        "Hv": Hv,
        "BLOCKS": blocks,
        "X": X,
        "CONSTANT": constant,
        "NORMALIZER": normalizer,
        "C": CHUNK,
        "BH": BH,
    }
    launches = [Launch(_gate_gradients_kernel, (n * ceil_div(Hv, BH), 1, 1), arguments, {"num_warps": 4})]
    if constant:
        assert dg is not None
        assert x.dg is not None
        launches.append(partials.launch_sum_of_rows(dg, x.dg))
    return launches


@triton.jit
def _then(before, last, more, new_last):
    """Combines two runs of numbers. A run is a pair: the sum of all its numbers but the last, and the last number."""
    return before + last + more, new_last


@triton.jit(do_not_specialize=["g_b", "g_t", "g_h", "T"])
def _gate_gradients_kernel(
    dots_ptr,  # [n, Hv, BLOCKS, X, C]
    g_ptr,  # [B, T, Hv], or [Hv] with g_b = g_t = 0
    f_ptr,  # factors of v, [B, T, Hv], contiguous, or None
    dg_ptr,  # [B, T, Hv], contiguous; [n, Hv] with CONSTANT
    df_ptr,  # [B, T, Hv], contiguous, or None
    dskip_ptr,  # [B, T, Hv], contiguous, or None
    order,  # [n, 5], the chunks as segments, or None for a batch
    g_b,  # strides of g
    g_t,
    g_h,
    T,
    Hv,
    BLOCKS: tl.constexpr,
    X: tl.constexpr,
    CONSTANT: tl.constexpr,
    NORMALIZER: tl.constexpr,
    C: tl.constexpr,
    BH: tl.constexpr,
):
    """Computes the gradients of a chunk of BH heads."""
    blocks_h = tl.cdiv(Hv, BH)
    row = tl.program_id(0) // blocks_h
    h = tl.program_id(0) % blocks_h * BH + tl.arange(0, BH)[None, :]  # [1, BH]
    u = tl.arange(0, C)[:, None]  # [C, 1]
    if order is None:
        chunks = tl.cdiv(T, C)
        b, start = row // chunks, row % chunks * C
        rows = tl.minimum(T - start, C)
    else:
        row, start, end, _, _ = segment_at(order, row)
        b, rows = 0, end - start
    inside = (u < rows) & (h < Hv)  # [C, BH]
    zero = tl.zeros([C, BH], tl.float32)
    pairs_s, pairs_t, d, e, q, k, through = zero, zero, zero, zero, zero, zero, zero  # [C, BH] each
    for y in tl.static_range(BLOCKS):
        at = dots_ptr + (tl.cast(row, tl.int64) * Hv + h) * (BLOCKS * X * C) + (y * X * C + u)  # [C, BH]
        pairs_s += tl.load(at, mask=inside, other=0.0)
        pairs_t += tl.load(at + C, mask=inside, other=0.0)
        if dskip_ptr is not None and y == 0:  # every block has all values
            d += tl.load(at + 2 * C, mask=inside, other=0.0)
        if df_ptr is not None:
            e += tl.load(at + 3 * C, mask=inside, other=0.0)
        for p in tl.static_range((X - 4) // 3):
            q += tl.load(at + (4 + 3 * p) * C, mask=inside, other=0.0)
            k += tl.load(at + (5 + 3 * p) * C, mask=inside, other=0.0)
            through += tl.load(at + (6 + 3 * p) * C, mask=(h < Hv) & (rows > 0), other=0.0)
    token = (tl.cast(b, tl.int64) * T + start + u) * Hv + h  # [C, BH], in tensors [B, T, Hv]
    if df_ptr is not None:
        tl.store(df_ptr + token, k + pairs_t + e, mask=inside)
    if dskip_ptr is not None:
        tl.store(dskip_ptr + token, d, mask=inside)
    if f_ptr is not None:
        f = tl.load(f_ptr + token, mask=inside, other=0.0)  # [C, BH]
        pairs_t *= f
        k *= f
    across = (pairs_s - pairs_t).to(tl.float64)  # [C, BH]; pairs of tokens on one side of u cancel
    across = tl.where(u > 0, tl.cumsum(across, 0, reverse=True), 0.0)
    later = tl.cumsum(q.to(tl.float64), 0, reverse=True)  # [C, BH], from tokens u on
    k = k.to(tl.float64)
    earlier, _ = tl.associative_scan((tl.zeros_like(k), k), 0, _then)  # [C, BH], from tokens before u
    dg = tl.sum(through.to(tl.float64), 0)[None, :] + later + earlier + across  # [C, BH]
    x = tl.load(g_ptr + tl.cast(b, tl.int64) * g_b + (start + u) * g_t + h * g_h, mask=inside, other=0.0)
    g = x.to(tl.float32)  # [C, BH]
    if NORMALIZER is not None:
        small = tl.exp(-tl.abs(g))  # [C, BH]
        dg *= tl.where(g > 0, small, 1.0) / (NORMALIZER * (1.0 + small))  # the derivative of log sigma(x) / NORMALIZER
        g = (tl.minimum(g, 0.0) - tl.log(1.0 + small)) / NORMALIZER
    dg = tl.where(inside & (g > LEAST_GATE), dg, 0.0)  # if exp(g) is 0, so is the gradient
    if CONSTANT:
        head = tl.arange(0, BH) + tl.program_id(0) % blocks_h * BH  # [BH]
        tl.store(dg_ptr + row * Hv + head, tl.sum(dg, 0).to(tl.float32), mask=head < Hv)
    else:
        tl.store(dg_ptr + token, dg.to(dg_ptr.dtype.element_ty), mask=inside)
