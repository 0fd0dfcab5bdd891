"""The activation of the MLP, norms, and the gates of HGRN2, in one kernel each where there is Triton.

    gated(gate, x)                      silu(gate) * x
    normed(x, weight, gate, eps)        x / sqrt(mean(x^2) + eps) * weight * silu(gate), or of x silu(gate)
    forgetting(q, f, c)                 silu(q), 1 - alpha, log alpha       for alpha = c + (1 - c) sigmoid(f)

PyTorch takes several kernels, forward and backward, that read and write these large tensors again and again. Compiled
code is left to PyTorch's compiler, which makes one kernel of them too.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from gla_core.extension import needs_gradient, recomputed
from gla_transformers.dispatch import is_eager, is_taken, module_of

WIDEST = 8192
"""The greatest width of a norm that the kernels compute: registers hold whole rows."""


def gated(gate: Tensor, x: Tensor) -> Tensor:
    """Returns silu(gate) * x for gate and x [..., width]. Autograd keeps gate and x alone."""
    kernels = _kernels(x, gate) if x.ndim > 1 else None
    if kernels is None:
        return recomputed(lambda gate, x: F.silu(gate) * x, gate, x)
    return recomputed(kernels.gated, gate, x, gradients=kernels.gated_backward)


def normed(
    x: Tensor, weight: Tensor | None, gate: Tensor | None, eps: float, gate_first: bool = False
) -> Tensor | None:
    """Returns the norm of x [..., heads, width] with a gate, as at the top; None if it is left to PyTorch.

    Without a gate its factor is 1, and x may be [..., width]. Autograd keeps x, weight and gate alone. This function is
    a value for `RMSNormGated.kernel`.

    Args:
        weight: [width], or [heads, width].
        gate_first: whether the gate multiplies x before the norm.
    """
    fits = x.ndim > (gate is not None) + 1 and 0 < x.shape[-1] <= WIDEST and _is_plain(weight, x)
    kernels = _kernels(x, gate) if fits else None
    if kernels is None:
        return None
    if not needs_gradient(x, weight, gate):  # a Function takes longer on the host than the launch
        return kernels.normed(x, weight, gate, float(eps), gate_first)
    function, gradients = (
        functools.partial(kernel, eps=float(eps), gate_first=gate_first)
        for kernel in (kernels.normed, kernels.normed_backward)
    )
    return recomputed(function, x, weight, gate, gradients=gradients, weights=(weight,))


def forgetting(q: Tensor, f: Tensor, lower_bound: Tensor | None) -> tuple[Tensor, Tensor, Tensor] | None:
    """Returns the op's q, k and g of HGRN2 from q and f [..., width]; None if they are left to PyTorch.

    It is a value for `HGRN2.kernel`. Autograd keeps q, f and the bound. PyTorch computes bounds that are not [width].
    """
    fits = q.ndim > 1 and (lower_bound is None or lower_bound.shape == q.shape[-1:]) and _is_plain(lower_bound, q)
    kernels = _kernels(q, f) if fits else None
    if kernels is None:
        return None
    if not needs_gradient(q, f, lower_bound):
        return kernels.forgetting(q, f, lower_bound)
    return _Forgetting.apply(kernels, q, f, lower_bound)  # pyright: ignore[reportReturnType]


def _is_plain(weight: Tensor | None, x: Tensor) -> bool:
    """Returns whether the kernels take a weight together with x."""
    return weight is None or (is_taken(weight, x) and weight.is_contiguous())


def _kernels(x: Tensor, gate: Tensor | None) -> ModuleType | None:
    """Returns the module of the kernels; None if PyTorch computes the call."""
    if not is_eager(x):
        return None
    if gate is not None and (type(gate), gate.shape, gate.dtype, gate.device) != (Tensor, x.shape, x.dtype, x.device):
        return None
    return _kernels_of(x.device)


def _kernels_of(device: torch.device) -> ModuleType | None:
    return module_of("gated_kernel", device)


class _Forgetting(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kernels: Any, q: Tensor, f: Tensor, bound: Any) -> tuple[Tensor, Tensor, Tensor]:
        ctx.kernels = kernels
        ctx.save_for_backward(q, f, bound)
        return kernels.forgetting(q, f, bound)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, dk: Tensor, dg: Tensor) -> tuple:  # pyright: ignore[reportIncompatibleMethodOverride]
        return None, *ctx.kernels.forgetting_backward(*ctx.saved_tensors, dy, dk, dg, ctx.needs_input_grad[3])
