"""Computes the time steps and the log gates of Mamba-2's scan, and the gradients of what they are computed from.

    delta = clamp(softplus(dt + bias), dt_min, dt_max)        g = delta A        without softplus if it is not asked for

With f the softplus, or the identity, and sums over all tokens,

    ddt_t = f'(dt_t + bias) (ddelta_t + A dg_t)   where f lies within the limits, else 0
    dA = sum delta_t dg_t        dbias = sum ddt_t        dD = sum of the terms of the skip

B batch   T tokens   N sequences   Hv value heads   BD numbers of a program   BT tokens and BH heads of a program
"""

# pyright: reportGeneralTypeIssues=false
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from gla_core.dispatch.tensors import ceil_div
from gla_triton_kernels.chunks.partials import launch_sum_of_rows
from gla_triton_runtime.launch import Launch


def launch_time_steps(
    dt: Tensor, A: Tensor, bias: Tensor | None, delta: Tensor, g: Tensor, dt_min: float, dt_max: float, softplus: bool
) -> list[Launch]:
    """Returns the launch that fills delta and g.

    Args:
        dt: [B, T, Hv].
        A, bias: [Hv]; bias may be None.
        delta, g: [B, T, Hv], float32 and contiguous.
    """
    T, Hv = dt.shape[1:]
    BD = 1024
    arguments = {
        "dt_ptr": dt,
        "A_ptr": A,
        "bias_ptr": bias,
        "delta_ptr": delta,
        "g_ptr": g,
        "dt_min": dt_min,
        "dt_max": dt_max,
        "dt_b": dt.stride(0),
        "dt_t": dt.stride(1),
        "dt_h": dt.stride(2),
        "A_h": A.stride(0),
        "bias_h": 0 if bias is None else bias.stride(0),
        "numbers": delta.numel(),
        "T": T,
        "Hv": Hv,
        "SOFTPLUS": softplus,
        "BD": BD,
    }
    return [Launch(_time_steps_kernel, (ceil_div(delta.numel(), BD), 1, 1), arguments, {"num_warps": 4})]


@triton.jit(
    do_not_specialize=["dt_min", "dt_max", "dt_b", "dt_t", "dt_h", "A_h", "bias_h", "numbers", "T"],
    do_not_specialize_on_alignment=["dt_ptr", "A_ptr", "bias_ptr"],
)
def _time_steps_kernel(
    dt_ptr,  # [B, T, Hv]
    A_ptr,  # [Hv]
    bias_ptr,  # [Hv] or None
    delta_ptr,  # [B, T, Hv], contiguous
    g_ptr,  # [B, T, Hv], contiguous
    dt_min,
    dt_max,
    dt_b,
    dt_t,
    dt_h,
    A_h,
    bias_h,
    numbers,  # B * T * Hv
    T,
    Hv: tl.constexpr,
    SOFTPLUS: tl.constexpr,
    BD: tl.constexpr,
):
    """Computes BD time steps and gates."""
    i = tl.program_id(0).to(tl.int64) * BD + tl.arange(0, BD)  # [BD]
    h, token = i % Hv, i // Hv  # [BD]
    at = dt_ptr + token // T * dt_b + token % T * dt_t + h * dt_h  # [BD]
    x = tl.load(at, mask=i < numbers, other=0.0).to(tl.float32)  # [BD]
    if bias_ptr is not None:
        x += tl.load(bias_ptr + h * bias_h, mask=i < numbers, other=0.0).to(tl.float32)
    if SOFTPLUS:
        x = _softplus(x)
    x = tl.minimum(tl.maximum(x, dt_min), dt_max)
    tl.store(delta_ptr + i, x, mask=i < numbers)
    tl.store(g_ptr + i, x * tl.load(A_ptr + h * A_h, mask=i < numbers, other=0.0).to(tl.float32), mask=i < numbers)


@triton.jit
def _softplus(x):
    """Returns log(1 + exp(x))."""
    u = tl.exp(-tl.abs(x))
    w = 1.0 + u  # rounded; log(w) u / (w - 1) is log(1 + u) without the error of this rounding
    return tl.maximum(x, 0.0) + tl.where(w == 1.0, u, tl.log(w) * u / tl.where(w == 1.0, 1.0, w - 1.0))


def launch_time_step_gradients(
    dt: Tensor,
    A: Tensor,
    bias: Tensor | None,
    cu_seqlens: Tensor | None,
    ddelta: Tensor,
    dg: Tensor,
    dskip: Tensor | None,
    ddt: Tensor,
    dA: Tensor,
    dbias: Tensor | None,
    dD: Tensor | None,
    dt_min: float,
    dt_max: float,
    softplus: bool,
) -> list[Launch]:
    """Returns the launches that fill ddt [B, T, Hv], dA, dbias and dD [Hv], all contiguous.

    Args:
        dt, A, bias, dt_min, dt_max, softplus: as in `launch_time_steps`.
        cu_seqlens: offsets of packed sequences [N+1], or None. Tokens of no sequence have a ddt of 0 and count in no
            sum.
        ddelta, dg, dskip: the gradients of the time steps as factors and of the gates, and the terms of dD, [B, T, Hv],
            float32 and contiguous; dskip and dD may be None.
    """
    (B, T, Hv), BT, BH = dt.shape, 128, 16
    rows = ceil_div(B * T, BT)
    results = (dA, dbias, dD)
    sums = [None if y is None else ddelta.new_empty(rows, Hv) for y in results]
    arguments = {
        "dt_ptr": dt,
        "A_ptr": A,
        "bias_ptr": bias,
        "cu_seqlens_ptr": cu_seqlens,
        "ddelta_ptr": ddelta,
        "dg_ptr": dg,
        "dskip_ptr": dskip,
        "ddt_ptr": ddt,
        **dict(zip(("dA_ptr", "dbias_ptr", "dD_ptr"), sums, strict=True)),
        "dt_min": dt_min,
        "dt_max": dt_max,
        "dt_b": dt.stride(0),
        "dt_t": dt.stride(1),
        "dt_h": dt.stride(2),
        "A_h": A.stride(0),
        "bias_h": 0 if bias is None else bias.stride(0),
        "tokens": B * T,
        "T": T,
        "N": 0 if cu_seqlens is None else len(cu_seqlens) - 1,
        "Hv": Hv,
        "SOFTPLUS": softplus,
        "BT": BT,
        "BH": BH,
    }
    grid = (rows, ceil_div(Hv, BH), 1)
    summed = [
        launch_sum_of_rows(parts, y)
        for parts, y in zip(sums, results, strict=True)
        if parts is not None and y is not None
    ]
    return [Launch(_time_step_gradients_kernel, grid, arguments, {"num_warps": 4}), *summed]


@triton.jit(
    do_not_specialize=["dt_min", "dt_max", "dt_b", "dt_t", "dt_h", "A_h", "bias_h", "tokens", "T", "N"],
    do_not_specialize_on_alignment=["dt_ptr", "A_ptr", "bias_ptr", "cu_seqlens_ptr"],
)
def _time_step_gradients_kernel(
    dt_ptr,  # [B, T, Hv]
    A_ptr,  # [Hv]
    bias_ptr,  # [Hv] or None
    cu_seqlens_ptr,  # [N+1] or None
    ddelta_ptr,  # [B, T, Hv], contiguous, as the four below
    dg_ptr,
    dskip_ptr,  # or None
    ddt_ptr,
    dA_ptr,  # sums of each BT tokens, [programs, Hv], as the two below
    dbias_ptr,  # or None
    dD_ptr,  # or None
    dt_min,
    dt_max,
    dt_b,
    dt_t,
    dt_h,
    A_h,
    bias_h,
    tokens,  # B * T
    T,
    N,
    Hv: tl.constexpr,
    SOFTPLUS: tl.constexpr,
    BT: tl.constexpr,
    BH: tl.constexpr,
):
    """Computes ddt of BT tokens and BH heads, and their sums."""
    row = tl.program_id(0)
    token = (tl.cast(row, tl.int64) * BT + tl.arange(0, BT))[:, None]  # [BT, 1]
    head = tl.program_id(1) * BH + tl.arange(0, BH)  # [BH]
    h = head[None, :]  # [1, BH]
    exists = (token < tokens) & (h < Hv)  # [BT, BH]
    counts = exists  # whether the token belongs to a sequence
    if cu_seqlens_ptr is not None:
        counts = exists & (token >= tl.load(cu_seqlens_ptr)) & (token < tl.load(cu_seqlens_ptr + N))
    at = dt_ptr + token // T * dt_b + token % T * dt_t + h * dt_h  # [BT, BH]
    x = tl.load(at, mask=counts, other=0.0).to(tl.float32)  # [BT, BH]
    if bias_ptr is not None:
        x += tl.load(bias_ptr + h * bias_h, mask=h < Hv, other=0.0).to(tl.float32)
    steps = _softplus(x) if SOFTPLUS else x  # [BT, BH]
    A = tl.load(A_ptr + h * A_h, mask=h < Hv, other=0.0).to(tl.float32)  # [1, BH]
    i = token * Hv + h  # [BT, BH]
    dg = tl.load(dg_ptr + i, mask=counts, other=0.0)  # [BT, BH]
    ddt = tl.load(ddelta_ptr + i, mask=counts, other=0.0) + A * dg  # [BT, BH]
    ddt = tl.where((steps >= dt_min) & (steps <= dt_max), ddt, 0.0)
    if SOFTPLUS:
        ddt *= tl.sigmoid(x)
    tl.store(ddt_ptr + i, ddt.to(ddt_ptr.dtype.element_ty), mask=exists)
    delta = tl.minimum(tl.maximum(steps, dt_min), dt_max)  # [BT, BH]
    to = tl.cast(row, tl.int64) * Hv + head  # [BH]
    tl.store(dA_ptr + to, tl.sum(delta * dg, 0), mask=head < Hv)
    if dbias_ptr is not None:
        tl.store(dbias_ptr + to, tl.sum(ddt, 0), mask=head < Hv)
    if dskip_ptr is not None:
        tl.store(dD_ptr + to, tl.sum(tl.load(dskip_ptr + i, mask=counts, other=0.0), 0), mask=head < Hv)
