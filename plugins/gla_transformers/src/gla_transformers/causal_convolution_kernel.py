"""Kernels of `gla_transformers.causal_convolution`, forward and backward. Imports Triton.

    z_t = sum_w filter_w x_(t - W + 1 + w) + bias                 y = f(z)
    dz = f'(z) dy        dx_t = sum_s filter_(W - 1 - s) dz_(t + s)        dfilter_w = sum_t dz_t x_(t - W + 1 + w)

f is silu or the identity, and x is 0 outside of its sequence. Each channel has a filter of its own. The backward
computes z again. A tile reads x and dy once from memory, and again from caches for the other taps. Sums are float32;
those over tokens are made of the sums of programs in a fixed order.

B sequences   T tokens   C channels   W taps of a filter   BT tokens and BC channels of a program
P programs that compute the tokens of a channel
"""

# pyright: reportGeneralTypeIssues=false, reportArgumentType=false
from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gla_core.dispatch.tensors import ceil_div
from gla_triton_kernels.runtime.launch import Launch
from gla_triton_kernels.runtime.prepared import Launches

BT, BC = 32, 64
"""The tile of a program, in which channels are 128 bytes of memory in bfloat16."""


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool) -> Tensor:
    """Returns y [B, C, T], whose channels are contiguous in memory.

    Args:
        x: [B, C, T], of any strides.
        weight: [C, W], contiguous.
        bias: [C], contiguous.
    """
    y = _like(x)
    _start(_convolve, (x, weight, bias, y), silu)
    return y


def convolve_backward(
    x: Tensor, weight: Tensor, bias: Tensor | None, dy: Tensor, silu: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns the gradients of x, weight and bias from that of y [B, C, T], which may have any strides."""
    (B, C, T), W = x.shape, weight.shape[1]
    dx = _like(x)
    sums = torch.empty(ceil_div(T, BT) * B, W + 1, C, dtype=torch.float32, device=x.device)
    _start(_convolve_backward, (x, weight, bias, dy, dx, sums), silu)
    total = sums.sum(0)
    return dx, total[:W].t().to(weight.dtype), None if bias is None else total[W].to(bias.dtype)


def _like(x: Tensor) -> Tensor:
    """Returns memory for [B, C, T] with the channels of a token contiguous."""
    B, C, T = x.shape
    return torch.empty(B, T, C, dtype=x.dtype, device=x.device).mT


def _start(kernel: Any, tensors: tuple[Tensor | None, ...], silu: bool) -> None:
    """Makes the launch of a kernel, whose first two tensors are x and weight; none for no tokens."""
    if tensors[0] is not None and tensors[0].numel():
        layouts = tuple([None if x is None else (x.shape, x.stride(), x.dtype) for x in tensors])
        _launches(tensors[0].device, kernel, layouts, silu).start(tensors)


@functools.lru_cache(1024)
def _launches(device: torch.device, kernel: Any, layouts: tuple[Any, ...], silu: bool) -> Launches:
    """Returns the launches of calls that differ in the values and addresses of their tensors alone."""
    return Launches(device, lambda tensors: [launch(kernel, tensors, silu)])


def launch(kernel: Any, tensors: tuple[Any, ...], silu: bool) -> Launch:
    """Returns the launch of a kernel on its tensors."""
    (B, C, T), W = tensors[0].shape, tensors[1].shape[1]
    strides = tensors[0].stride() + (tensors[3].stride() if kernel is _convolve_backward else ())
    values = (*tensors, *strides, T, C, W, silu, BT, BC)
    grid = (ceil_div(C, BC) * ceil_div(T, BT), B, 1)
    return Launch(kernel, grid, dict(zip(kernel.arg_names, values, strict=True)))


@triton.jit
def _convolve(
    x_ptr,  # [B, C, T]
    weight_ptr,  # [C, W], contiguous
    bias_ptr,  # [C] or None, contiguous
    y_ptr,  # [B, C, T]; [B, T, C] is contiguous
    x_stride_b,
    x_stride_c,
    x_stride_t,
    T,
    C,
    W: tl.constexpr,
    SILU: tl.constexpr,
    BT: tl.constexpr,
    BC: tl.constexpr,
):
    """Computes BT tokens of BC channels of y."""
    b, _, t, c = _place(C, BT, BC)
    z = _filtered(x_ptr + b * x_stride_b, weight_ptr, bias_ptr, x_stride_c, x_stride_t, t, c, T, C, 0, W)  # [BT, BC]
    if SILU:
        z = z * tl.sigmoid(z)
    inside = (t < T)[:, None] & (c < C)[None, :]
    tl.store(y_ptr + (b * T + t[:, None]) * C + c[None, :], z.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _convolve_backward(
    x_ptr,  # [B, C, T]
    weight_ptr,  # [C, W], contiguous
    bias_ptr,  # [C] or None, contiguous
    dy_ptr,  # [B, C, T]
    dx_ptr,  # [B, C, T]; [B, T, C] is contiguous
    sums_ptr,  # [P, W + 1, C], contiguous: the sums of each program for dfilter and, behind it, for dbias
    x_stride_b,
    x_stride_c,
    x_stride_t,
    dy_stride_b,
    dy_stride_c,
    dy_stride_t,
    T,
    C,
    W: tl.constexpr,
    SILU: tl.constexpr,
    BT: tl.constexpr,
    BC: tl.constexpr,
):
    """Computes BT tokens of BC channels of dx, and their part of the sums."""
    b, tile, t, c = _place(C, BT, BC)
    x_ptr, dy_ptr = x_ptr + b * x_stride_b, dy_ptr + b * dy_stride_b
    sums_ptr += (b * tl.cdiv(T, BT) + tile) * (W + 1) * C + c
    in_c = c < C
    dx = tl.zeros([BT, BC], tl.float32)
    for s in tl.static_range(W - 1, -1, -1):  # the stores of the sums come last, so that no value is loaded twice
        dz = _load(dy_ptr, dy_stride_c, dy_stride_t, t, c, T, C, s)  # [BT, BC], of tokens t + s
        if SILU:
            z = _filtered(x_ptr, weight_ptr, bias_ptr, x_stride_c, x_stride_t, t, c, T, C, s, W)  # [BT, BC]
            sigma = tl.sigmoid(z)
            dz *= sigma * (1.0 + z * (1.0 - sigma))
        dx += dz * _tap(weight_ptr, c, C, W - 1 - s, W)
        if s == 0:
            for w in tl.static_range(W):
                x = _load(x_ptr, x_stride_c, x_stride_t, t, c, T, C, w - W + 1)  # [BT, BC]
                tl.store(sums_ptr + w * C, tl.sum(dz * x, axis=0), mask=in_c)
            tl.store(sums_ptr + W * C, tl.sum(dz, axis=0), mask=in_c)
    inside = (t < T)[:, None] & in_c[None, :]
    tl.store(dx_ptr + (b * T + t[:, None]) * C + c[None, :], dx.to(dx_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _place(C, BT: tl.constexpr, BC: tl.constexpr):
    """Returns the sequence b, the tile of tokens, its tokens t [BT] and the channels c [BC] of a program."""
    tiles = tl.cdiv(C, BC)
    tile = (tl.program_id(0) // tiles).to(tl.int64)
    c = tl.program_id(0) % tiles * BC + tl.arange(0, BC)
    return tl.program_id(1).to(tl.int64), tile, tile * BT + tl.arange(0, BT), c


@triton.jit
def _filtered(x_ptr, weight_ptr, bias_ptr, stride_c, stride_t, t, c, T, C, SHIFT: tl.constexpr, W: tl.constexpr):
    """Returns z [BT, BC] of tokens t + SHIFT."""
    z = _load(x_ptr, stride_c, stride_t, t, c, T, C, SHIFT) * _tap(weight_ptr, c, C, W - 1, W)
    for w in tl.static_range(W - 1):
        z += _load(x_ptr, stride_c, stride_t, t, c, T, C, SHIFT + w - W + 1) * _tap(weight_ptr, c, C, w, W)
    if bias_ptr is not None:
        z += tl.load(bias_ptr + c, mask=c < C, other=0.0).to(tl.float32)[None, :]
    return z


@triton.jit
def _tap(weight_ptr, c, C, w: tl.constexpr, W: tl.constexpr):
    """Returns a tap [1, BC] of the filters."""
    return tl.load(weight_ptr + c * W + w, mask=c < C, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _load(x_ptr, stride_c, stride_t, t, c, T, C, SHIFT: tl.constexpr):
    """Returns the values [BT, BC] of tokens t + SHIFT of one sequence, 0 outside of it."""
    place = t + SHIFT
    inside = ((place >= 0) & (place < T))[:, None] & (c < C)[None, :]
    values = tl.load(x_ptr + place[:, None] * stride_t + c[None, :] * stride_c, mask=inside, other=0.0)
    return values.to(tl.float32)
