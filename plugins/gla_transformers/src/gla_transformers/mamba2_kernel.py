"""A kernel of `gla_transformers.mamba2`: the convolution of one token of each sequence. Imports Triton.

    s <- s[1:], x        y = f(sum_w filter_w s_w + bias)

Per channel, s has the last W inputs of the convolution, and f is silu or the identity. The kernel reads its inputs
once, computes in float32, and rounds each result once. The histories s are overwritten.

B sequences   C channels   W width of the filter   BC channels of a program   ALL W rounded up to a power of two
"""

# pyright: reportGeneralTypeIssues=false, reportArgumentType=false
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from gla_core.dispatch.tensors import ceil_div
from gla_triton_runtime.architecture import Gpu, gpu_of
from gla_triton_runtime.launch import Launch, overlapping
from gla_triton_runtime.prepared import launches_for
from gla_triton_runtime.sizes import power_of_two

CHANNELS = 128
"""The number of channels of a program of the convolution: one for each thread."""


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
    tensors = (x, state, weight, bias, y)
    if y.numel():
        layouts = tuple([None if t is None else (t.shape, t.stride(), t.dtype) for t in tensors])
        launched = launches_for(y.device, convolution, layouts, silu)
        if unrecorded := launched.replay(tensors):
            unrecorded.start([convolution(tensors, gpu_of(y.device), silu)])
    return y


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
