"""The causal convolution of whole sequences in one kernel, forward and backward.

transformers takes PyTorch's convolution, which copies its input to put time last, and computes tokens that it drops.
"""

from __future__ import annotations

import functools
from types import ModuleType

import torch
from torch import Tensor

from gla_core.extension import needs_gradient, recomputed
from gla_transformers.dispatch import is_eager, is_taken, module_of

WIDEST = 8
"""The greatest width of a filter that the kernels compute: they are unrolled over pairs of its taps."""


def convolve_sequences(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor | None:
    """Returns f(convolution) of x [B, C, T], as `gla_core.compat.mamba_ssm.kernels.Kernels.convolve_sequences` says."""
    fits = x.ndim == 3 and weight.ndim == 2 and len(weight) == x.shape[1] and 0 < weight.shape[1] <= WIDEST
    kernels = _kernels(x, weight, bias) if fits and activation in (None, "silu", "swish") else None
    if kernels is None:
        return None
    if not needs_gradient(x, weight, bias):
        return kernels.convolve(x, weight, bias, activation is not None)
    function, gradients = (
        functools.partial(kernel, silu=activation is not None)
        for kernel in (kernels.convolve, kernels.convolve_backward)
    )
    return recomputed(function, x, weight, bias, gradients=gradients, weights=(weight, bias))


def _kernels(x: Tensor, weight: Tensor, bias: Tensor | None) -> ModuleType | None:
    """Returns the module of the kernels; None if PyTorch computes the call."""
    parameters = [weight] if bias is None else [weight, bias]
    if not is_eager(x) or not all(is_taken(parameter, x) and parameter.is_contiguous() for parameter in parameters):
        return None
    return _kernels_of(x.device)


def _kernels_of(device: torch.device) -> ModuleType | None:
    return module_of("causal_convolution_kernel", device)
