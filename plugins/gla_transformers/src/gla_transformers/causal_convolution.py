"""The causal convolution of whole sequences in one kernel, forward and backward.

transformers takes PyTorch's convolution, which copies its input to put time last, and computes tokens that it drops.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.compiler import is_compiling

from gla_core.ops import autocast
from gla_core.ops.calls import bypasses_torch, needs_gradient

WIDEST = 8
"""The greatest width of a filter that the kernels compute: they are unrolled over pairs of its taps."""
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def convolve_sequences(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor | None:
    """Returns f(convolution) of x [B, C, T], as `gla_core.compat.mamba_ssm.kernels.Kernels.convolve_sequences` says."""
    fits = x.ndim == 3 and weight.ndim == 2 and len(weight) == x.shape[1] and 0 < weight.shape[1] <= WIDEST
    kernels = _kernels(x, weight, bias) if fits and activation in (None, "silu", "swish") else None
    if kernels is None:
        return None
    if not needs_gradient(x, weight, bias):
        return kernels.convolve(x, weight, bias, activation is not None)
    return _Convolved.apply(kernels, x, weight, bias, activation is not None)  # pyright: ignore[reportReturnType]


def _kernels(x: Tensor, weight: Tensor, bias: Tensor | None) -> ModuleType | None:
    """Returns the module of the kernels; None if PyTorch computes the call."""
    if is_compiling() or x.dtype not in _DTYPES:
        return None
    for parameter in (weight, bias):
        if parameter is not None:
            plain = type(parameter) in (Tensor, nn.Parameter) and parameter.is_contiguous()
            if not plain or parameter.dtype not in _DTYPES or parameter.device != x.device:
                return None
    with autocast.off(x.device.type):  # it changes nothing here
        return _kernels_of(x.device) if bypasses_torch(x) else None


def _kernels_of(device: torch.device) -> ModuleType | None:
    return _of_triton() if device.type == "cuda" and device.index == torch.cuda.current_device() else None


@functools.cache
def _of_triton() -> ModuleType | None:
    try:
        from gla_transformers import causal_convolution_kernel
    except ImportError:
        return None
    return causal_convolution_kernel


class _Convolved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kernels: Any, x: Tensor, weight: Tensor, bias: Any, silu: bool) -> Tensor:
        ctx.kernels, ctx.silu = kernels, silu
        ctx.save_for_backward(x, weight, bias)
        return kernels.convolve(x, weight, bias, silu)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple:  # pyright: ignore[reportIncompatibleMethodOverride]
        return None, *ctx.kernels.convolve_backward(*ctx.saved_tensors, ctx.silu, dy), None
