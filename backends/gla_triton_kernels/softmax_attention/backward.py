"""Computes the gradients of softmax attention, with the weights p computed again from the log-sum-exp of the forward.

    p = exp(s - lse)        s = scale * q k^T        delta = rowsum(do * o) - dlse        ds = p * (do v^T - delta)
    dv = p^T do             dk = scale * ds^T q      dq = scale * ds k

Exponentials have base 2: the kernels multiply the scale by log2 e, and the first one does so with lse.

A first kernel writes lse and delta of each row. A second one computes dk and dv of a block of keys, and goes through
the rows of queries that attend to it. A third one computes dq of a tile of rows, and goes through the keys. No two
programs write the same number, and sums have a fixed order: results always have the same bits.

B batch   Tq, Tk queries and keys   H key/value heads   G query heads of a group   K, V key and value width
R = Tq * G rows of queries that share a key/value head: row r is query r // G of head r % G of the group
BR rows of a tile   BT keys of a block   BK, BV key and value width, rounded up to a power of two

Source: Dao et al., "FlashAttention" (arXiv 2205.14135); Dao, "FlashAttention-2" (arXiv 2307.08691).
"""

# pyright: reportGeneralTypeIssues=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gla_core.dispatch.tensors import ceil_div
from gla_triton_kernels.softmax_attention.forward import LOG2_E
from gla_triton_kernels.softmax_attention.kernel import GradientPlan
from gla_triton_runtime.arithmetic import nearest_tf32
from gla_triton_runtime.launch import Launch, strides_of

ROWS = 64
"""The rows of a tile of the first kernel."""


def launch_gradients(
    plan: GradientPlan,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    scale: float,
    causal: bool,
    do: Tensor,
    dlse: Tensor | None,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
) -> list[Launch]:
    """Returns the launches that write dq, dk and dv, which are contiguous."""
    (B, Tq, Hq, K), (_, Tk, H, V) = q.shape, v.shape
    R = Tq * (Hq // H)
    lse2, delta = (torch.empty(B, H, R, dtype=torch.float32, device=q.device) for _ in range(2))
    sizes = {"Tq": Tq, "H": H, "G": Hq // H, "V": V, "BV": plan.BV}
    arguments = {
        "o_ptr": o,
        "do_ptr": do,
        "lse_ptr": lse,
        "dlse_ptr": dlse,
        "lse2_ptr": lse2,
        "delta_ptr": delta,
        **strides_of("o", o),
        **strides_of("d", do),
        **strides_of("l", lse),
        **strides_of("dl", dlse),
        **sizes,
        "BR": ROWS,
    }
    prepared = Launch(_prepare_rows, (B * H * ceil_div(R, ROWS), 1, 1), arguments, {"num_warps": 4})
    shared = {
        "q_ptr": q,
        "k_ptr": k,
        "v_ptr": v,
        "do_ptr": do,
        "lse2_ptr": lse2,
        "delta_ptr": delta,
        "scale": scale,
        **strides_of("q", q),
        **strides_of("k", k),
        **strides_of("v", v),
        **strides_of("d", do),
        **sizes,
        "Tk": Tk,
        "K": K,
        "BK": plan.BK,
        "CAUSAL": causal,
        "PRECISION": "ieee" if plan.exact else "tf32",
    }
    options = {"num_warps": plan.warps, "num_stages": plan.stages}
    tiles = {"BT": plan.held, "BR": plan.passed}
    grid = (B * H * ceil_div(Tk, plan.held), 1, 1)
    key_launch = Launch(_gradients_of_keys, grid, {**shared, "dk_ptr": dk, "dv_ptr": dv, **tiles}, options)
    tiles = {"BR": plan.held, "BT": plan.passed}
    grid = (B * H * ceil_div(R, plan.held), 1, 1)
    query_launch = Launch(_gradients_of_queries, grid, {**shared, "dq_ptr": dq, **tiles}, options)
    return [prepared, key_launch, query_launch]


@triton.jit(do_not_specialize=["Tq", "H"])
def _prepare_rows(
    o_ptr,  # [B, Tq, H * G, V]
    do_ptr,  # [B, Tq, H * G, V]
    lse_ptr,  # [B, Tq, H * G]
    dlse_ptr,  # [B, Tq, H * G], or None
    lse2_ptr,  # [B, H, R]
    delta_ptr,  # [B, H, R]
    stride_ob,
    stride_ot,
    stride_oh,
    stride_db,
    stride_dt,
    stride_dh,
    stride_lb,
    stride_lt,
    stride_lh,
    stride_dlb,
    stride_dlt,
    stride_dlh,
    Tq,
    H,
    G,
    V: tl.constexpr,
    BV: tl.constexpr,
    BR: tl.constexpr,
):
    """Writes log2 e * lse and delta of BR rows; inf and 0 for a row without keys, whose weights are then exp(-inf)."""
    R = Tq * G
    tiles = tl.cdiv(R, BR)
    b, h = (tl.program_id(0) // tiles // H).to(tl.int64), (tl.program_id(0) // tiles % H).to(tl.int64)
    r = tl.program_id(0) % tiles * BR + tl.arange(0, BR)  # [BR]
    there = r < R  # [BR]
    t, head = (r // G).to(tl.int64), h * G + r % G  # [BR]
    lse = tl.load(lse_ptr + b * stride_lb + t * stride_lt + head * stride_lh, mask=there, other=0.0)  # [BR]
    empty = lse == -float("inf")  # [BR]; o is NaN there
    i = tl.arange(0, BV)  # [BV]
    here = there[:, None] & (i < V)  # [BR, BV]
    o_rows = o_ptr + b * stride_ob + t * stride_ot + head * stride_oh  # [BR]
    do_rows = do_ptr + b * stride_db + t * stride_dt + head * stride_dh  # [BR]
    o = tl.load(o_rows[:, None] + i, mask=here & (empty == 0)[:, None], other=0.0).to(tl.float32)  # [BR, BV]
    do = tl.load(do_rows[:, None] + i, mask=here, other=0.0).to(tl.float32)  # [BR, BV]
    delta = tl.sum(o * do, 1)  # [BR]
    if dlse_ptr is not None:
        delta -= tl.load(dlse_ptr + b * stride_dlb + t * stride_dlt + head * stride_dlh, mask=there, other=0.0)
    at = (b * H + h) * R + r  # [BR]
    tl.store(lse2_ptr + at, tl.where(empty, float("inf"), lse * LOG2_E), mask=there)
    tl.store(delta_ptr + at, delta, mask=there)


@triton.jit(do_not_specialize=["scale", "Tq", "Tk", "H"])
def _gradients_of_keys(
    q_ptr,  # [B, Tq, H * G, K]
    k_ptr,  # [B, Tk, H, K]
    v_ptr,  # [B, Tk, H, V]
    do_ptr,  # [B, Tq, H * G, V]
    lse2_ptr,  # [B, H, R]
    delta_ptr,  # [B, H, R]
    dk_ptr,  # [B, Tk, H, K]
    dv_ptr,  # [B, Tk, H, V]
    scale,
    stride_qb,
    stride_qt,
    stride_qh,
    stride_kb,
    stride_kt,
    stride_kh,
    stride_vb,
    stride_vt,
    stride_vh,
    stride_db,
    stride_dt,
    stride_dh,
    Tq,
    Tk,
    H,
    G,
    K: tl.constexpr,
    V: tl.constexpr,
    CAUSAL: tl.constexpr,
    BR: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Computes dk and dv of BT keys. The blocks of a head start together; those with the most rows start first."""
    blocks, R = tl.cdiv(Tk, BT), Tq * G
    b, h = (tl.program_id(0) // blocks // H).to(tl.int64), (tl.program_id(0) // blocks % H).to(tl.int64)
    first = tl.program_id(0) % blocks * BT  # the first key
    j = first + tl.arange(0, BT)  # [BT]
    k_ptr += b * stride_kb + h * stride_kh
    v_ptr += b * stride_vb + h * stride_vh
    k = _load_rows(k_ptr + j.to(tl.int64) * stride_kt, j < Tk, K, BK, PRECISION)  # [BT, BK]
    v = _load_rows(v_ptr + j.to(tl.int64) * stride_vt, j < Tk, V, BV, PRECISION)  # [BT, BV]
    q_ptr += b * stride_qb + h * G * stride_qh
    do_ptr += b * stride_db + h * G * stride_dh
    lse2_ptr += (b * H + h) * R
    delta_ptr += (b * H + h) * R

    start, full = 0, 0  # the first row that attends to a key of the block, and to all keys of the block
    if CAUSAL:
        start = tl.maximum(first - (Tk - Tq), 0) * G // BR * BR
        full = tl.minimum(tl.cdiv(tl.maximum(first + BT - 1 - (Tk - Tq), 0) * G, BR) * BR, tl.cdiv(R, BR) * BR)
    dk = tl.zeros((BT, BK), tl.float32)
    dv = tl.zeros((BT, BV), tl.float32)
    dk, dv = _add_rows(
        start, full, q_ptr, do_ptr, lse2_ptr, delta_ptr, k, v, dk, dv, j - (Tk - Tq), scale, R, G,
        stride_qt, stride_qh, stride_dt, stride_dh, K, V, BR, BK, BV, PRECISION, MASKED=True,
    )  # fmt: skip
    dk, dv = _add_rows(
        full, R, q_ptr, do_ptr, lse2_ptr, delta_ptr, k, v, dk, dv, j - (Tk - Tq), scale, R, G,
        stride_qt, stride_qh, stride_dt, stride_dh, K, V, BR, BK, BV, PRECISION, MASKED=False,
    )  # fmt: skip
    rows = (b * Tk + j) * H + h  # [BT]
    _store_rows(dk_ptr + rows * K, dk * scale, j < Tk, K, BK)
    _store_rows(dv_ptr + rows * V, dv, j < Tk, V, BV)


@triton.jit
def _add_rows(
    start,
    end,
    q_ptr,
    do_ptr,
    lse2_ptr,
    delta_ptr,
    k,  # [BT, BK]
    v,  # [BT, BV]
    dk,  # [BT, BK]
    dv,  # [BT, BV]
    first_query,  # [BT], the first query that attends to each key
    scale,
    R,
    G,
    stride_qt,
    stride_qh,
    stride_dt,
    stride_dh,
    K: tl.constexpr,
    V: tl.constexpr,
    BR: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    PRECISION: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Adds the rows from start to end to dk / scale and dv, and returns both.

    MASKED is True if some row may not attend to all keys of the block.
    """
    for i in tl.range(start, end, BR):
        r = i + tl.arange(0, BR)  # [BR]
        t, g, there = (r // G).to(tl.int64), r % G, r < R  # [BR]
        q = _load_rows(q_ptr + t * stride_qt + g * stride_qh, there, K, BK, PRECISION)  # [BR, BK]
        do = _load_rows(do_ptr + t * stride_dt + g * stride_dh, there, V, BV, PRECISION)  # [BR, BV]
        lse2 = tl.load(lse2_ptr + r, mask=there, other=float("inf"))  # [BR]
        delta = tl.load(delta_ptr + r, mask=there, other=0.0)  # [BR]
        s = tl.dot(k, q.T, input_precision=PRECISION)  # [BT, BR]
        p = tl.exp2(s * (scale * LOG2_E) - lse2[None, :])  # [BT, BR]
        if MASKED:
            p = tl.where(t[None, :] >= first_query[:, None], p, 0.0)
        dv = tl.dot(_operand(p, do, PRECISION), do, dv, input_precision=PRECISION)
        ds = p * (tl.dot(v, do.T, input_precision=PRECISION) - delta[None, :])  # [BT, BR]
        dk = tl.dot(_operand(ds, q, PRECISION), q, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=["scale", "Tq", "Tk", "H"])
def _gradients_of_queries(
    q_ptr,  # [B, Tq, H * G, K]
    k_ptr,  # [B, Tk, H, K]
    v_ptr,  # [B, Tk, H, V]
    do_ptr,  # [B, Tq, H * G, V]
    lse2_ptr,  # [B, H, R]
    delta_ptr,  # [B, H, R]
    dq_ptr,  # [B, Tq, H * G, K]
    scale,
    stride_qb,
    stride_qt,
    stride_qh,
    stride_kb,
    stride_kt,
    stride_kh,
    stride_vb,
    stride_vt,
    stride_vh,
    stride_db,
    stride_dt,
    stride_dh,
    Tq,
    Tk,
    H,
    G,
    K: tl.constexpr,
    V: tl.constexpr,
    CAUSAL: tl.constexpr,
    BR: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Computes dq of BR rows. The tiles of a head start together; those with the most keys start first."""
    R = Tq * G
    tiles = tl.cdiv(R, BR)
    tile = tiles - 1 - tl.program_id(0) % tiles
    b, h = (tl.program_id(0) // tiles // H).to(tl.int64), (tl.program_id(0) // tiles % H).to(tl.int64)
    r = tile * BR + tl.arange(0, BR)  # [BR]
    t, head, there = (r // G).to(tl.int64), h * G + r % G, r < R  # [BR]
    q = _load_rows(q_ptr + b * stride_qb + t * stride_qt + head * stride_qh, there, K, BK, PRECISION)  # [BR, BK]
    do = _load_rows(do_ptr + b * stride_db + t * stride_dt + head * stride_dh, there, V, BV, PRECISION)  # [BR, BV]
    lse2 = tl.load(lse2_ptr + (b * H + h) * R + r, mask=there, other=float("inf"))  # [BR]
    delta = tl.load(delta_ptr + (b * H + h) * R + r, mask=there, other=0.0)  # [BR]
    k_ptr += b * stride_kb + h * stride_kh
    v_ptr += b * stride_vb + h * stride_vh

    all_see, some_see = Tk, Tk  # numbers of keys to which every row attends, and some row
    last_key = tl.zeros_like(t) + Tk - 1  # [BR]
    if CAUSAL:
        all_see = tl.maximum(tile * BR // G + 1 + Tk - Tq, 0)
        some_see = tl.maximum(tl.minimum((tile * BR + BR - 1) // G + 1 + Tk - Tq, Tk), 0)
        last_key = tl.minimum(t + Tk - Tq, Tk - 1)
    full = all_see // BT * BT
    dq = tl.zeros((BR, BK), tl.float32)
    dq = _add_keys(
        0, full, k_ptr, v_ptr, q, do, lse2, delta, dq, last_key, scale, Tk, stride_kt, stride_vt,
        K, V, BT, BK, BV, PRECISION, MASKED=False,
    )  # fmt: skip
    dq = _add_keys(
        full, some_see, k_ptr, v_ptr, q, do, lse2, delta, dq, last_key, scale, Tk, stride_kt, stride_vt,
        K, V, BT, BK, BV, PRECISION, MASKED=True,
    )  # fmt: skip
    _store_rows(dq_ptr + ((b * Tq + t) * (H * G) + head) * K, dq * scale, there, K, BK)


@triton.jit
def _add_keys(
    start,
    end,
    k_ptr,
    v_ptr,
    q,  # [BR, BK]
    do,  # [BR, BV]
    lse2,  # [BR]
    delta,  # [BR]
    dq,  # [BR, BK]
    last_key,  # [BR]
    scale,
    Tk,
    stride_kt,
    stride_vt,
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    PRECISION: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Adds the keys from start to end to dq / scale, and returns it.

    MASKED is True if some row may not attend to all keys of a block.
    """
    for first in tl.range(start, end, BT):
        j = first + tl.arange(0, BT)  # [BT]
        k = _load_rows(k_ptr + j.to(tl.int64) * stride_kt, j < Tk, K, BK, PRECISION)  # [BT, BK]
        v = _load_rows(v_ptr + j.to(tl.int64) * stride_vt, j < Tk, V, BV, PRECISION)  # [BT, BV]
        s = tl.dot(q, k.T, input_precision=PRECISION)  # [BR, BT]
        p = tl.exp2(s * (scale * LOG2_E) - lse2[:, None])  # [BR, BT]
        if MASKED:
            p = tl.where(j[None, :] <= last_key[:, None], p, 0.0)
        ds = p * (tl.dot(do, v.T, input_precision=PRECISION) - delta[:, None])  # [BR, BT]
        dq = tl.dot(_operand(ds, k, PRECISION), k, dq, input_precision=PRECISION)
    return dq


@triton.jit
def _operand(x, other, PRECISION: tl.constexpr):
    """Returns x as a factor of a product with `other`."""
    if PRECISION == "tf32" and other.dtype == tl.float32:
        x = nearest_tf32(x)
    return x.to(other.dtype)


@triton.jit
def _load_rows(rows, there, WIDTH: tl.constexpr, BW: tl.constexpr, PRECISION: tl.constexpr):
    """Loads rows [n] of WIDTH numbers as a block [n, BW], with zeros beyond WIDTH and in rows that are not there."""
    i = tl.arange(0, BW)[None, :]  # [1, BW]
    mask = there[:, None] if WIDTH == BW else there[:, None] & (i < WIDTH)
    x = tl.load(rows[:, None] + i, mask=mask, other=0.0)
    if PRECISION == "tf32" and x.dtype == tl.float32:
        x = nearest_tf32(x)
    return x


@triton.jit
def _store_rows(rows, x, there, WIDTH: tl.constexpr, BW: tl.constexpr):
    """Stores a block x [n, BW] to rows [n] of WIDTH numbers."""
    i = tl.arange(0, BW)[None, :]  # [1, BW]
    tl.store(rows[:, None] + i, x.to(rows.dtype.element_ty), mask=there[:, None] & (i < WIDTH))
