"""Computes the time steps and the log gates of Mamba-2's scan.

    delta = clamp(softplus(dt + bias), dt_min, dt_max)        g = delta A        without softplus if it is not asked for

B batch   T tokens   Hv value heads   BD numbers of a program
"""

# pyright: reportGeneralTypeIssues=false
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from gla_core.dispatch.tensors import ceil_div
from gla_triton_runtime.launch import Launch


def launch_time_steps(
    dt: Tensor,
    A: Tensor,
    bias: Tensor | None,
    delta: Tensor,
    g: Tensor,
    dt_min: float,
    dt_max: float,
    softplus: bool,
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
        u = tl.exp(-tl.abs(x))  # [BD]
        w = 1.0 + u  # rounded; log(w) u / (w - 1) is log(1 + u) without the error of this rounding
        x = tl.maximum(x, 0.0) + tl.where(w == 1.0, u, tl.log(w) * u / tl.where(w == 1.0, 1.0, w - 1.0))
    x = tl.minimum(tl.maximum(x, dt_min), dt_max)
    tl.store(delta_ptr + i, x, mask=i < numbers)
    tl.store(g_ptr + i, x * tl.load(A_ptr + h * A_h, mask=i < numbers, other=0.0).to(tl.float32), mask=i < numbers)
