"""Kernels of `gla_transformers.mamba2`: two parts of a Mamba-2 layer for one token of each sequence. Imports Triton.

    convolution     s <- s[1:], x                                      y = f(sum_w filter_w s_w + bias)
    step            S <- exp(dt A) S + dt x^T B                        y = (S C + D x) silu(z)

Per channel, s has the last W inputs of the convolution, and f is silu or the identity. Per head, S [V, N] is a state,
dt = softplus(given dt + bias) is a number, and so is A, which may be given by its logarithm. Each kernel reads its
inputs once, computes in float32, and rounds each result once. States are overwritten.

B sequences   C channels   W width of the filter   BC channels of a program
P states   H heads   G groups of heads that share B and C   V channels of a head   N channels of B and C
BV channels of a program   ALL W or N rounded up to a power of two
"""

# pyright: reportGeneralTypeIssues=false, reportArgumentType=false
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from gla_core.dispatch.tensors import ceil_div
from gla_triton_runtime.architecture import Gpu, gpu_of
from gla_triton_runtime.gates import log_gates
from gla_triton_runtime.launch import Launch, overlapping
from gla_triton_runtime.prepared import launches_for
from gla_triton_runtime.sizes import power_of_two

CHANNELS = 128
"""The number of channels of a program of the convolution: one for each thread."""
MIN_PROGRAMS_PER_SM = 3
"""With at least this number of programs per multiprocessor, each program computes several channels of a head."""


def convolve_token(x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, silu: bool) -> Tensor:
    """Returns the convolution at one more token, [B, 1, C], and overwrites its history.

    Args:
        x: the token [B, C], of any strides.
        state: the last W inputs of each sequence [B, C, W]; the channels of a sequence are contiguous.
        weight: [C, W], contiguous.
        bias: [C], contiguous.
    """
    B, C = x.shape
    y = torch.empty(B, 1, C, dtype=x.dtype, device=x.device)
    _start(convolution, (x, state, weight, bias, y), silu)
    return y


def step(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    bias: Tensor | None,
    slots: Tensor | None,
    softplus: bool,
    A_is_log: bool,
) -> Tensor:
    """Returns y [B, H, V] after one more token, and overwrites the states.

    Args:
        state: [P, H, V, N]; it is read faster if V or N is contiguous.
        x, z: [B, H, V]; the last dimension is contiguous.
        dt: [B, H], of any strides.
        A, bias: [H], of any strides. If A_is_log, A holds log(-A).
        B, C: [B, G, N]; the last dimension is contiguous.
        D: [H, V], of any strides.
        slots: [B], the index of the state of each sequence. The state of a sequence with another index is 0.
    """
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _start(state_update, (state, x, dt, A, B, C, D, z, bias, slots, y), softplus, A_is_log)
    return y


def _start(describe: Callable[..., Launch], tensors: tuple[Tensor | None, ...], *flags: bool) -> None:
    """Runs the launch described by `describe(tensors, gpu, *flags)`; does nothing if the output is empty."""
    if tensors[-1] is not None and tensors[-1].numel():
        layouts = tuple([None if x is None else (x.shape, x.stride(), x.dtype) for x in tensors])
        launched = launches_for(device := tensors[-1].device, describe, layouts, *flags)
        if not launched.replay(tensors):
            launched.start([describe(tensors, gpu_of(device), *flags)], tensors)


def convolution(tensors: tuple[Any, ...], gpu: Gpu, silu: bool) -> Launch:
    """Returns the launch of `convolve_token`. The tensors are x, state, weight, bias and y."""
    x, state, weight, bias, y = tensors
    (B, C), W, overlaps = x.shape, weight.shape[1], gpu.facts.overlaps_kernels
    arguments = {
        "x_ptr": x,
        "state_ptr": state,
        "weight_ptr": weight,
        "bias_ptr": bias,
        "y_ptr": y,
        "x_stride_b": x.stride(0),
        "x_stride_c": x.stride(1),
        "state_stride_b": state.stride(0),
        "C": C,
        "W": W,
        "SILU": silu,
        "BC": CHANNELS,
        "ALL": power_of_two(W),
        "OVERLAPS": overlaps,
    }
    return Launch(_convolve_token, (B, ceil_div(C, CHANNELS), 1), arguments, overlapping(overlaps))


def state_update(tensors: tuple[Any, ...], gpu: Gpu, softplus: bool, A_is_log: bool) -> Launch:
    """Returns the launch of `step`. The tensors are its arguments, in order, and y."""
    state, x, dt, A, B, C, D, z, bias, slots, y = tensors
    P, H, V, N = state.shape
    BV, warps = _tile(len(x) * H, V, N, state.element_size(), gpu.multiprocessors)
    arguments = {
        "state_ptr": state,
        "x_ptr": x,
        "B_ptr": B,
        "C_ptr": C,
        "z_ptr": z,
        "y_ptr": y,
        "dt_ptr": dt,
        "A_ptr": A,
        "D_ptr": D,
        "bias_ptr": bias,
        "slots_ptr": slots,
        **_strides("state", state, "phvn"),
        **_strides("x", x, "bh"),
        **_strides("B", B, "bg"),
        **_strides("C", C, "bg"),
        **_strides("z", z, "bh"),
        **_strides("dt", dt, "bh"),
        **_strides("A", A, "h"),
        **_strides("D", D, "hv"),
        **_strides("bias", bias, "h"),
        **_strides("slots", slots, "b"),
        "P": P,
        "H": H,
        "HEADS": H // B.shape[1],
        "V": V,
        "N": N,
        "SOFTPLUS": softplus,
        "A_IS_LOG": A_is_log,
        "BV": BV,
        "ALL": power_of_two(N),
        "OVERLAPS": gpu.facts.overlaps_kernels,
    }
    options = {"num_warps": warps, **overlapping(gpu.facts.overlaps_kernels)}
    return Launch(_step, (len(x), H, ceil_div(V, BV)), arguments, options)


def _tile(heads: int, V: int, N: int, itemsize: int, multiprocessors: int) -> tuple[int, int]:
    """Returns BV and the number of warps of a step of all heads of all sequences.

    Channels are often contiguous in memory: a program then reads rows of 256 bytes, or of 64 if there are few heads.
    """
    wide, small = min(power_of_two(V), 256 // itemsize), N <= 128
    if heads * ceil_div(V, wide) >= MIN_PROGRAMS_PER_SM * multiprocessors:
        return wide, 4 if small else 8
    return min(power_of_two(V), 64 // itemsize), 1 if small else 4


def _strides(name: str, x: Tensor | None, dims: str) -> dict[str, int]:
    """Returns the first strides of x, as arguments of a kernel; 0 if x is None."""
    return {f"{name}_stride_{d}": 0 if x is None else x.stride(i) for i, d in enumerate(dims)}


@triton.jit(do_not_specialize_on_alignment=["bias_ptr"])
def _convolve_token(
    x_ptr,  # [B, C]
    state_ptr,  # [B, C, W], channels contiguous
    weight_ptr,  # [C, W], contiguous
    bias_ptr,  # [C] or None, contiguous
    y_ptr,  # [B, C], contiguous
    x_stride_b,
    x_stride_c,
    state_stride_b,
    C,
    W: tl.constexpr,
    SILU: tl.constexpr,
    BC: tl.constexpr,
    ALL: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Computes BC channels of y and of the history of one sequence."""
    b = tl.program_id(0).to(tl.int64)
    channels, w = tl.program_id(1) * BC + tl.arange(0, BC), tl.arange(0, ALL)  # [BC], [ALL]
    inside = channels < C
    if OVERLAPS:
        gdc_wait()
        gdc_launch_dependents()
    places = channels[:, None] * W + w[None, :]  # [BC, ALL]
    history = state_ptr + b * state_stride_b + places
    before = inside[:, None] & (w < W - 1)[None, :]
    tokens = tl.load(history + 1, mask=before, other=0.0).to(tl.float32)  # [BC, ALL]
    x_block = x_ptr + b * x_stride_b + channels[:, None] * x_stride_c + w[None, :] * 0
    tokens += tl.load(x_block, mask=inside[:, None] & (w == W - 1)[None, :], other=0.0).to(tl.float32)
    whole = inside[:, None] & (w < W)[None, :]
    weight = tl.load(weight_ptr + places, mask=whole, other=0.0).to(tl.float32)  # [BC, ALL]
    y = tl.sum(tokens * weight, axis=1)  # [BC]
    if bias_ptr is not None:
        y += tl.load(bias_ptr + channels, mask=inside, other=0.0).to(tl.float32)
    if SILU:
        y = y * tl.sigmoid(y)
    tl.store(y_ptr + b * C + channels, y.to(y_ptr.dtype.element_ty), mask=inside)
    tl.debug_barrier()  # other threads have read values that a thread overwrites now
    tl.store(history, tokens.to(state_ptr.dtype.element_ty), mask=whole)


@triton.jit(do_not_specialize_on_alignment=["dt_ptr", "A_ptr", "D_ptr", "bias_ptr", "slots_ptr"])
def _step(
    state_ptr,  # [P, H, V, N]
    x_ptr,  # [B, H, V]
    B_ptr,  # [B, G, N]
    C_ptr,  # [B, G, N]
    z_ptr,  # [B, H, V] or None
    y_ptr,  # [B, H, V], contiguous
    dt_ptr,  # [B, H]
    A_ptr,  # [H]
    D_ptr,  # [H, V] or None
    bias_ptr,  # [H] or None
    slots_ptr,  # [B] or None
    state_stride_p,
    state_stride_h,
    state_stride_v,
    state_stride_n,
    x_stride_b,
    x_stride_h,
    B_stride_b,
    B_stride_g,
    C_stride_b,
    C_stride_g,
    z_stride_b,
    z_stride_h,
    dt_stride_b,
    dt_stride_h,
    A_stride_h,
    D_stride_h,
    D_stride_v,
    bias_stride_h,
    slots_stride_b,
    P,
    H,
    HEADS,  # H / G
    V,
    N: tl.constexpr,
    SOFTPLUS: tl.constexpr,
    A_IS_LOG: tl.constexpr,
    BV: tl.constexpr,
    ALL: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Computes BV channels of one head of one sequence."""
    b, h = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    v, n = tl.program_id(2) * BV + tl.arange(0, BV), tl.arange(0, ALL)  # [BV], [ALL]
    in_v, in_n = v < V, n < N
    if OVERLAPS:
        gdc_wait()
        gdc_launch_dependents()
    p, inside = b, in_v[:, None] & in_n[None, :]  # [BV, ALL]
    if slots_ptr is not None:
        p = tl.load(slots_ptr + b * slots_stride_b).to(tl.int64)
        inside &= (p >= 0) & (p < P)
    block = state_ptr + p * state_stride_p + h * state_stride_h
    places = block + v[:, None] * state_stride_v + n[None, :] * state_stride_n  # [BV, ALL]
    S = tl.load(places, mask=inside, other=0.0).to(tl.float32)  # [BV, ALL]
    dt = tl.load(dt_ptr + b * dt_stride_b + h * dt_stride_h).to(tl.float32)
    if bias_ptr is not None:
        dt += tl.load(bias_ptr + h * bias_stride_h).to(tl.float32)
    if SOFTPLUS:
        dt = -log_gates(-dt, 1)
    A = tl.load(A_ptr + h * A_stride_h).to(tl.float32)
    if A_IS_LOG:
        A = -tl.exp(A)
    x = tl.load(x_ptr + b * x_stride_b + h * x_stride_h + v, mask=in_v, other=0.0).to(tl.float32)  # [BV]
    group = h // HEADS
    B = tl.load(B_ptr + b * B_stride_b + group * B_stride_g + n, mask=in_n, other=0.0).to(tl.float32)  # [ALL]
    C = tl.load(C_ptr + b * C_stride_b + group * C_stride_g + n, mask=in_n, other=0.0).to(tl.float32)  # [ALL]
    S = tl.where(inside, S * tl.exp(dt * A) + (dt * x)[:, None] * B[None, :], 0.0)
    tl.store(places, S.to(state_ptr.dtype.element_ty), mask=inside)
    y = tl.sum(S * C[None, :], axis=1)  # [BV]
    if D_ptr is not None:
        y += tl.load(D_ptr + h * D_stride_h + v * D_stride_v, mask=in_v, other=0.0).to(tl.float32) * x
    if z_ptr is not None:
        z = tl.load(z_ptr + b * z_stride_b + h * z_stride_h + v, mask=in_v, other=0.0).to(tl.float32)  # [BV]
        y *= z * tl.sigmoid(z)
    tl.store(y_ptr + (b * H + h) * V + v, y.to(y_ptr.dtype.element_ty), mask=in_v)
