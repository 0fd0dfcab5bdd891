"""Kernels of `gla_transformers.causal_convolution`, forward and backward. Imports Triton.

    z_t = sum_w filter_w x_(t - W + 1 + w) + bias                 y = f(z)
    dz = f'(z) dy        dx_t = sum_s filter_(W - 1 - s) dz_(t + s)        dfilter_w = sum_t dz_t x_(t - W + 1 + w)

f is silu or the identity, and x is 0 outside of its sequence. Each channel has a filter of its own. A thread goes
through the tokens of a run in order, and keeps W - 1 values of x in registers; the backward computes z again, and keeps
W - 1 values of dz too. So each value is loaded and computed once, and W - 1 more of them at each end of a run. Sums are
float32; those over tokens are made of the sums of programs in a fixed order.

B sequences   T tokens   C channels   W taps of a filter   L tokens of a run   R runs and BC channels of a program
P programs that compute the tokens of a channel
"""

# pyright: reportGeneralTypeIssues=false, reportArgumentType=false
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gla_core.dispatch.tensors import ceil_div
from gla_triton_runtime.arithmetic import LOG2E
from gla_triton_runtime.launch import Launch
from gla_triton_runtime.prepared import launches_for

R, BC = 4, 128
"""The tile of a program of 4 warps. A thread has 4 channels of a run, in bfloat16 8 bytes of memory."""
AHEAD = tl.constexpr(4)
"""The number of tokens that the backward loads at once. With 4 taps and contiguous channels, its threads then have at
most 128 registers, so 16 warps run on a multiprocessor of an H100."""
SHORT, LONG = 8, 32
"""The tokens of a run, multiples of AHEAD. The forward loads a whole run at once, a short one. In the backward, a long
run reads and computes fewer tokens beside its own."""
MANY = 2**22
"""The number of values of x from which the backward has long runs, enough of them to fill a GPU."""


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
    programs, taps = B * ceil_div(T, R * _run(x)), W + (bias is not None)
    sums = torch.empty(programs, taps, C, dtype=torch.float32, device=x.device)
    _start(_convolve_backward, (x, weight, bias, dy, dx, sums), silu)
    total = sums.sum(0)
    return dx, total[:W].t().to(weight.dtype), None if bias is None else total[W].to(bias.dtype)


def _like(x: Tensor) -> Tensor:
    """Returns memory for [B, C, T] with the channels of a token contiguous."""
    B, C, T = x.shape
    return torch.empty(B, T, C, dtype=x.dtype, device=x.device).mT


def _run(x: Tensor) -> int:
    """Returns the number of tokens of a run of the backward."""
    return LONG if x.numel() >= MANY else SHORT


def _start(kernel: Any, tensors: tuple[Tensor | None, ...], silu: bool) -> None:
    """Makes the launch of a kernel, whose first two tensors are x and weight; none for no tokens."""
    if tensors[0] is not None and tensors[0].numel():
        layouts = tuple([None if x is None else (x.shape, x.stride(), x.dtype) for x in tensors])
        launched = launches_for(tensors[0].device, kernel, layouts, silu)
        if unrecorded := launched.replay(tensors):
            unrecorded.start([launch(kernel, tensors, silu)])


def launch(kernel: Any, tensors: tuple[Any, ...], silu: bool) -> Launch:
    """Returns the launch of a kernel on its tensors."""
    x, weight, _, dy = tensors[:4]
    (B, C, T), W = x.shape, weight.shape[1]
    strides, L = ((*x.stride(), *dy.stride()), _run(x)) if kernel is _convolve_backward else (x.stride(), SHORT)
    values = (*tensors, *strides, T, C, W, silu, L, R, BC)
    grid = (ceil_div(C, BC) * ceil_div(T, R * L), B, 1)
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
    L: tl.constexpr,
    R: tl.constexpr,
    BC: tl.constexpr,
):
    """Computes R runs of BC channels of y."""
    b, _, t, c = _place(C, L, R, BC)
    x_ptr = _at(x_ptr, b, t, c, x_stride_b, x_stride_t, x_stride_c)  # [R, BC]
    y_ptr += (b * T + t) * C + c  # [R, BC]
    taps, bias = _filter(weight_ptr, bias_ptr, c, C, W)
    x = _load(x_ptr, x_stride_t, 1 - W, W - 1 + L, t, T, c < C)
    for i in tl.static_range(L):
        z = _filtered(x, taps, bias, i, W)  # [R, BC]
        if SILU:
            z *= _sigmoid(z)
        _store(y_ptr, C, i, z, t, T, c < C)


@triton.jit
def _convolve_backward(
    x_ptr,  # [B, C, T]
    weight_ptr,  # [C, W], contiguous
    bias_ptr,  # [C] or None, contiguous
    dy_ptr,  # [B, C, T]
    dx_ptr,  # [B, C, T]; [B, T, C] is contiguous
    sums_ptr,  # [P, W or W + 1, C], contiguous: the sums of each program for dfilter and, behind it, for dbias
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
    L: tl.constexpr,
    R: tl.constexpr,
    BC: tl.constexpr,
):
    """Computes R runs of BC channels of dx, and their part of the sums."""
    b, tile, t, c = _place(C, L, R, BC)
    x_ptr = _at(x_ptr, b, t, c, x_stride_b, x_stride_t, x_stride_c)  # [R, BC]
    dy_ptr = _at(dy_ptr, b, t, c, dy_stride_b, dy_stride_t, dy_stride_c)  # [R, BC]
    dx_ptr += (b * T + t) * C + c  # [R, BC]
    taps, bias = _filter(weight_ptr, bias_ptr, c, C, W)
    SUMS: tl.constexpr = W if bias_ptr is None else W + 1
    sums = ()
    for _ in tl.static_range(SUMS):
        sums += (tl.zeros([R, BC], tl.float32),)
    first_x = _load(x_ptr, x_stride_t, 1 - W, 2 * W - 2, t, T, c < C)
    first_dy = _load(dy_ptr, dy_stride_t, 0, W - 1, t, T, c < C)
    last_x, last_dz = first_x[W - 1 :], ()
    for w in tl.static_range(W - 1):
        last_dz += (_dz(first_x, first_dy, taps, bias, w, W, SILU),)
    for i in range(0, L, AHEAD):
        x = last_x + _load(x_ptr, x_stride_t, W - 1 + i, AHEAD, t, T, c < C)  # of the tokens from t + i on
        dy = _load(dy_ptr, dy_stride_t, W - 1 + i, AHEAD, t, T, c < C)
        dz = last_dz
        for u in tl.static_range(AHEAD):
            dz += (_dz(x, dy, taps, bias, u, W, SILU),)
            _store(dx_ptr, C, i + u, _filtered(dz, taps[::-1], 0.0, u, W), t, T, c < C)
            more = ()
            for w in tl.static_range(W):
                more += (sums[w] + x[u] * dz[u + W - 1 - w],)
            if bias_ptr is not None:
                more += (sums[W] + dz[u],)
            sums = more
        last_x, last_dz = x[AHEAD:], dz[AHEAD:]
    sums_ptr += (b * tl.cdiv(T, R * L) + tile) * SUMS * C + c
    for w in tl.static_range(SUMS):
        tl.store(sums_ptr + w * C, tl.sum(sums[w], axis=0, keep_dims=True), mask=c < C)


@triton.jit
def _place(C, L: tl.constexpr, R: tl.constexpr, BC: tl.constexpr):
    """Returns the sequence b, the tile of tokens, the first token t [R, 1] of each run and the channels c [1, BC]."""
    tiles = tl.cdiv(C, BC)
    tile = tl.program_id(0) // tiles
    t = (tile * R + tl.arange(0, R)) * L
    c = tl.program_id(0) % tiles * BC + tl.arange(0, BC)
    return tl.program_id(1).to(tl.int64), tile, t[:, None], c[None, :]


@triton.jit
def _at(x_ptr, b, t, c, stride_b, stride_t, stride_c):
    """Returns pointers [R, BC] to the tokens t and channels c of sequence b."""
    return x_ptr + (b * stride_b + t.to(tl.int64) * stride_t + c.to(tl.int64) * stride_c)


@triton.jit
def _filter(weight_ptr, bias_ptr, c, C, W: tl.constexpr):
    """Returns W taps [1, BC], and the bias [1, BC] or 0."""
    taps, bias = (), 0.0
    for w in tl.static_range(W):
        taps += (tl.load(weight_ptr + c * W + w, mask=c < C, other=0.0).to(tl.float32),)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + c, mask=c < C, other=0.0).to(tl.float32)
    return taps, bias


@triton.jit
def _load(x_ptr, stride_t, first, N: tl.constexpr, t, T, in_c):
    """Returns N values [R, BC], of the tokens from t + first on; 0 outside of the sequence. x_ptr points to token t."""
    values = ()
    for n in tl.static_range(N):
        inside = (first + n >= -t) & (first + n < T - t) & in_c
        x = tl.load(x_ptr + tl.cast(first + n, tl.int64) * stride_t, mask=inside, other=0.0)  # [R, BC]
        values += (x.to(tl.float32),)
    return values


@triton.jit
def _store(x_ptr, stride_t, n, x, t, T, in_c):
    """Stores the values [R, BC] of token t + n. x_ptr points to token t."""
    inside = (n < T - t) & in_c
    tl.store(x_ptr + tl.cast(n, tl.int64) * stride_t, x.to(x_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _filtered(x, taps, bias, first: tl.constexpr, W: tl.constexpr):
    """Returns the bias and the sum of W values of x, from the first on, times the taps."""
    z = bias
    for w in tl.static_range(W):
        z += x[first + w] * taps[w]
    return z


@triton.jit
def _dz(x, dy, taps, bias, n: tl.constexpr, W: tl.constexpr, SILU: tl.constexpr):
    """Returns dz [R, BC] of the token of dy[n] and x[n + W - 1]."""
    if not SILU:
        return dy[n]
    z = _filtered(x, taps, bias, n, W)
    sigma = _sigmoid(z)
    return dy[n] * (sigma * (1.0 + z * (1.0 - sigma)))


@triton.jit
def _sigmoid(z):
    """Returns sigmoid(z). tl.sigmoid takes 4 instructions more, because its exponential may be subnormal."""
    return 1.0 / (1.0 + tl.exp2(z * -LOG2E))
