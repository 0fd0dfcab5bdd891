"""Computes softmax attention over blocks of keys, with a running maximum m, sum z and unnormalised output o on chip.

    s = scale * q k_j^T        m' = max(m, rowmax s)
    z' = exp(m - m') z + rowsum exp(s - m')        o' = exp(m - m') o + exp(s - m') v_j
    o = o / z        lse = m + log z

Exponentials have base 2: the kernel multiplies the scale by log2 e, and m is a maximum of log2 e * s.

Keys may be divided into splits, which are computed independently. Each split has its own o and lse (see merge.py).

B batch   Tq, Tk queries and keys   H key/value heads   G query heads of a group   K, V key and value width
R = Tq * G rows of queries that share a key/value head: row r is query r // G of head r % G of the group
P splits of the keys
BR rows of a program   BT keys of a block   BK, BV key and value width, rounded up to a power of two

Source: Dao et al., "FlashAttention" (arXiv 2205.14135).
"""

# pyright: reportGeneralTypeIssues=false
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from gla_core.dispatch.tensors import ceil_div
from gla_triton_kernels.softmax_attention.kernel import Plan
from gla_triton_runtime.arithmetic import nearest_tf32
from gla_triton_runtime.launch import Launch, strides_of
from gla_triton_runtime.tma import tiles

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


def launch_attention(
    plan: Plan, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, o: Tensor, lse: Tensor
) -> list[Launch]:
    """Returns the launch that writes o and lse of each of P splits of the keys.

    If a row attends to no key of a split, its results for that split are o = NaN and lse = -inf.

    Args:
        scale: at least 0, because the kernel assumes that the largest product gives the largest score.
        o: [P, B, Tq, H * G, V], or [B, Tq, H * G, V] if keys are not split.
        lse: [P, B, Tq, H * G], or [B, Tq, H * G] if keys are not split.
    """
    (_, Tq, Hq, K), (B, Tk, H, V) = q.shape, v.shape
    BR, BT, BK, BV = plan.BR, plan.BT, plan.BK, plan.BV
    arguments = {
        "q_ptr": q,
        "k_ptr": tiles(k, BT, BK) if plan.tma else k,
        "v_ptr": tiles(v, BT, BV) if plan.tma else v,
        "o_ptr": o,
        "lse_ptr": lse,
        "scale": scale,
        "B": B,
        "Tq": Tq,
        "Tk": Tk,
        "H": H,
        "G": Hq // H,
        "split": plan.split,
        **strides_of("q", q),
        **strides_of("k", k),
        **strides_of("v", v),
        "K": K,
        "V": V,
        "CAUSAL": causal,
        "BR": BR,
        "BT": BT,
        "BK": BK,
        "BV": BV,
        "TMA": plan.tma,
        "PRECISION": "ieee" if plan.exact else "tf32",
    }
    grid = (plan.splits(Tk) * B * H * ceil_div(Tq * (Hq // H), BR), 1, 1)
    options = {"num_warps": plan.warps, "num_stages": plan.stages}
    return [Launch(_attention, grid, arguments, options)]


@triton.jit(do_not_specialize=["scale", "B", "Tq", "Tk", "H", "split"])
def _attention(
    q_ptr,  # [B, Tq, H * G, K]
    k_ptr,  # [B, Tk, H, K], or a descriptor
    v_ptr,  # [B, Tk, H, V], or a descriptor
    o_ptr,  # [P, B, Tq, H * G, V]
    lse_ptr,  # [P, B, Tq, H * G]
    scale,
    B,
    Tq,
    Tk,
    H,
    G,
    split,  # keys of a split, or None if keys are not split
    stride_qb,
    stride_qt,
    stride_qh,
    stride_kb,
    stride_kt,
    stride_kh,
    stride_vb,
    stride_vt,
    stride_vh,
    K: tl.constexpr,
    V: tl.constexpr,
    CAUSAL: tl.constexpr,
    BR: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Computes attention of BR rows to all keys, or to one split of the keys."""
    # The tiles of a head start together, so that its keys stay in the cache. Tiles with most keys start first.
    tiles = tl.cdiv(Tq * G, BR)
    tile = tiles - 1 - tl.program_id(0) % tiles
    b = tl.program_id(0) // tiles // H
    h = (tl.program_id(0) // tiles % H).to(tl.int64)
    if split is not None:
        p = b // B
        b %= B
    b = b.to(tl.int64)

    r = tile * BR + tl.arange(0, BR)  # [BR]
    t = r // G  # [BR], the query of each row
    row = (b * Tq + t) * (H * G) + h * G + r % G  # [BR], the index of each row in o and lse
    if split is not None:
        row += p.to(tl.int64) * B * Tq * (H * G)
    there = r < Tq * G  # [BR]
    i = tl.arange(0, BK)  # [BK]
    q_rows = q_ptr + b * stride_qb + t.to(tl.int64) * stride_qt + (h * G + r % G) * stride_qh  # [BR]
    q = tl.load(q_rows[:, None] + i, mask=there[:, None] & (i < K), other=0.0)  # [BR, BK]
    if PRECISION == "tf32" and q.dtype == tl.float32:
        q = nearest_tf32(q)
    scale *= LOG2_E

    last_key = t + Tk - Tq if CAUSAL else tl.zeros_like(t) + Tk - 1  # [BR]
    if CAUSAL:
        all_see = tl.maximum(tile * BR // G + 1 + Tk - Tq, 0)  # number of keys to which every row attends
        some_see = tl.maximum(tl.minimum((tile * BR + BR - 1) // G + 1 + Tk - Tq, Tk), 0)
    else:
        all_see = Tk
        some_see = Tk
    start = 0
    end = some_see
    full = all_see // BT * BT
    if split is not None:
        start = p * split
        end = tl.minimum(start + split, some_see)
        full = tl.maximum(start, tl.minimum(end, full))

    if not TMA:
        k_ptr += b * stride_kb + h * stride_kh
        v_ptr += b * stride_vb + h * stride_vh
    m = tl.full((BR,), -float("inf"), tl.float32)
    z = tl.zeros((BR,), tl.float32)
    o = tl.zeros((BR, BV), tl.float32)
    m, z, o = _attend(
        start, full, q, k_ptr, v_ptr, m, z, o, last_key, scale, Tk, b, h, stride_kt, stride_vt,
        K, V, BT, BK, BV, TMA, PRECISION, MASKED=False,
    )  # fmt: skip
    m, z, o = _attend(
        full, end, q, k_ptr, v_ptr, m, z, o, last_key, scale, Tk, b, h, stride_kt, stride_vt,
        K, V, BT, BK, BV, TMA, PRECISION, MASKED=True,
    )  # fmt: skip

    # If a row attends to no key, o = 0 / 0 = NaN and lse = -inf + log 0 = -inf.
    j = tl.arange(0, BV)  # [BV]
    o = o / z[:, None]
    tl.store(o_ptr + row[:, None] * V + j, o.to(o_ptr.dtype.element_ty), mask=there[:, None] & (j < V))
    tl.store(lse_ptr + row, (m + tl.log2(z)) * LN_2, mask=there)


@triton.jit
def _attend(
    start,
    end,
    q,  # [BR, BK]
    k_ptr,
    v_ptr,
    m,  # [BR]
    z,  # [BR]
    o,  # [BR, BV]
    last_key,  # [BR]
    scale,
    Tk,
    b,
    h,
    stride_kt,
    stride_vt,
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Attends to the keys from start to end, and returns m, z and o.

    MASKED is True if some row may not attend to all keys of a block.
    """
    for j in tl.range(start, end, BT):
        k = _load_block(k_ptr, j, Tk, b, h, stride_kt, K, BT, BK, TMA, PRECISION, MASKED)  # [BT, BK]
        s = tl.dot(q, k.T, input_precision=PRECISION)  # [BR, BT]
        if MASKED:
            seen = j + tl.arange(0, BT) <= tl.minimum(last_key, Tk - 1)[:, None]  # [BR, BT]
            s = tl.where(seen, s * scale, -float("inf"))
            m_new = tl.maximum(m, tl.max(s, 1))
        else:
            m_new = tl.maximum(m, tl.max(s, 1) * scale)
        # If a row has seen no key yet, the exponential is exp(-inf - 0) = 0, and not exp(-inf + inf) = NaN.
        base = tl.where(m_new == -float("inf"), 0.0, m_new)
        p = tl.exp2(s - base[:, None]) if MASKED else tl.exp2(s * scale - base[:, None])  # [BR, BT]
        rescale = tl.exp2(m - base)  # [BR]
        z = z * rescale + tl.sum(p, 1)
        o = o * rescale[:, None]
        v = _load_block(v_ptr, j, Tk, b, h, stride_vt, V, BT, BV, TMA, PRECISION, MASKED)  # [BT, BV]
        if PRECISION == "tf32" and q.dtype == tl.float32:
            p = nearest_tf32(p)
        o = tl.dot(p.to(v.dtype), v, o, input_precision=PRECISION)
        m = m_new
    return m, z, o


@triton.jit
def _load_block(
    x_ptr,
    j,
    T,
    b,
    h,
    stride_t,
    WIDTH: tl.constexpr,
    BT: tl.constexpr,
    BW: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Loads rows j to j + BT of head h as a block [BT, BW], with zeros beyond T and beyond WIDTH."""
    if TMA:
        x = x_ptr.load([b.to(tl.int32), h.to(tl.int32), j, 0]).reshape(BT, BW)
    else:
        t = j + tl.arange(0, BT)[:, None]  # [BT, 1]
        i = tl.arange(0, BW)[None, :]  # [1, BW]
        rows = x_ptr + t.to(tl.int64) * stride_t + i
        if MASKED:
            x = tl.load(rows, mask=(t < T) & (i < WIDTH), other=0.0)
        elif WIDTH < BW:
            x = tl.load(rows, mask=i < WIDTH, other=0.0)
        else:
            x = tl.load(rows)
    if PRECISION == "tf32" and x.dtype == tl.float32:
        x = nearest_tf32(x)
    return x
