"""Parts of a Mamba-2 layer in one kernel each: `gla_core.compat.mamba_ssm.kernels` has the meaning of the functions.

`convolve_token` and `product` are for one token of each sequence, without gradients. The norm and
`convolve_sequences` have a backward, and serve prompts and training. Compiled code is left to PyTorch's compiler.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from gla_core.extension import needs_gradient
from gla_transformers import few_rows
from gla_transformers.causal_convolution import convolve_sequences
from gla_transformers.dispatch import is_eager, is_taken, module_of
from gla_transformers.gated import normed
from gla_transformers.hybrid_generation import sample

__all__ = ["convolve_sequences", "convolve_token", "norm", "product", "sample"]


def convolve_token(
    x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None
) -> Tensor | None:
    """Returns the convolution at one more token, as `Kernels.convolve_token` says."""
    if x.shape[2] != 1 or state.shape != (*x.shape[:2], weight.shape[1]) or activation not in (None, "silu", "swish"):
        return None
    if state.stride()[1:] != (state.shape[2], 1) or not weight.is_contiguous():
        return None
    kernels = _kernels(x, state, weight, bias) if bias is None or bias.is_contiguous() else None
    if kernels is None:
        return None
    return kernels.convolve_token(x[..., 0], state, weight, bias, activation is not None).mT


def norm(x: Tensor, weight: Tensor, gate: Tensor | None, eps: float, groups: int, gate_first: bool) -> Tensor | None:
    """Returns the norm of each group (see `Kernels.norm`), or None if the kernel does not take these tensors."""
    width = x.shape[-1]
    if x.ndim < 2 or width % groups or weight.dtype != x.dtype or weight.shape != (width,):
        return None
    if groups == 1 and (gate is None or x.shape[-2] == 1):  # views would take a third of the time on the host
        return normed(x, weight, gate, eps, gate_first)
    split = (groups, width // groups)
    gate = None if gate is None else gate.view(gate.shape[:-1] + split)
    y = normed(x.view(x.shape[:-1] + split), weight.view(split), gate, eps, gate_first)
    return None if y is None else y.view(x.shape)


def product(
    x: Tensor, weight: Tensor, norm_weight: Tensor | None, eps: float, groups: int, residual: Tensor | None
) -> Tensor | None:
    """Returns the product of x, or of the normed x, with the residual, as `Kernels.product` says."""
    kernel, M, (N, K), dtypes = few_rows.kernel_of(x.device), len(x), weight.shape, (weight.dtype, torch.float32)
    if kernel is None or not kernel.is_served(weight, M) or not _are_taken(x, weight, norm_weight, residual):
        return None
    if (x if norm_weight is None else norm_weight).dtype != weight.dtype:
        return None
    for tensor, shape in ((x, (M, 1, K)), (weight, (N, K)), (norm_weight, (K,)), (residual, (M, 1, N))):
        if tensor is not None and not (tensor.shape == shape and tensor.dtype in dtypes and tensor.is_contiguous()):
            return None
    if norm_weight is not None and groups > 1:
        normed = norm(x, norm_weight, None, eps, groups, True)
        return None if normed is None else product(normed, weight, None, eps, 1, residual)
    residual = None if residual is None else residual[:, 0]
    return kernel.product(x[:, 0], weight, norm_weight=norm_weight, norm_eps=float(eps), residual=residual)[:, None]


def _kernels(x: Tensor, *others: Tensor | None) -> ModuleType | None:
    """Returns the module of the kernels; None if PyTorch computes the call."""
    return _kernels_of(x.device) if _are_taken(x, *others) else None


def _are_taken(x: Tensor, *others: Tensor | None) -> bool:
    """Returns whether kernels without a backward take x and other tensors."""
    tensors = [x, *(other for other in others if other is not None)]
    return is_eager(x) and not needs_gradient(*tensors) and all(is_taken(tensor, x) for tensor in tensors)


def _kernels_of(device: torch.device) -> ModuleType | None:
    return module_of("mamba2_kernel", device)
