"""RMS norm over the last dimension, with an optional gate: y = weight * x / sqrt(mean(x^2) + eps) * f(gate).

In Mamba-2, the gate multiplies x before the norm, and each group of channels has a mean of its own.

Source: Zhang and Sennrich, "Root Mean Square Layer Normalization" (arXiv 1910.07467).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.types import Device

from gla_core.dispatch.tensors import wide
from gla_core.nn._typed_call import as_typed
from gla_core.nn.activations import ACTIVATIONS, Activation, activation
from gla_core.nn.plain import is_plain
from gla_core.nn.recompute import recomputed


class RMSNormGated(nn.Module):
    """RMS norm over the last dimension, multiplied by f(gate) if a gate is given.

    Args:
        width: size of the last dimension.
        eps: number added to the mean square.
        elementwise_affine: whether there is a `weight` [width].
        gate_fn: f, by name or as a function; see `activations`.
        groups: number of equal parts of the last dimension over which means are taken, a divisor of width.
        norm_before_gate: whether f(gate) multiplies the normalized x, and not x before the norm.
        device: device of the weight, as in torch's own modules.
        dtype: dtype of the weight.

    Attributes:
        mean_over_ranks: a differentiable function that averages over ranks, if each rank holds an equal slice of the
            last dimension. It maps the mean of this rank's slice to the mean of all slices. None if one rank holds all.
        kernel: a differentiable function (x, weight, gate, eps) that computes a norm of one group in less time than
            PyTorch, and after it the gate if there is one, with f = silu. For the backward it keeps its arguments
            alone. It returns None for a call that PyTorch is to compute. None if there is no function.

    Example:
        >>> norm = RMSNormGated(64)
        >>> x, gate = torch.randn(2, 2, 100, 4, 64)
        >>> y = norm(x, gate=gate)
    """

    weight: nn.Parameter | None

    def __init__(
        self,
        width: int,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        gate_fn: str | Activation = "swish",
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        groups: int = 1,
        norm_before_gate: bool = True,
    ) -> None:
        super().__init__()
        self.width, self.eps, self.groups, self.norm_before_gate = width, eps, groups, norm_before_gate
        self.gate_fn = activation("gate_fn", gate_fn)
        self.mean_over_ranks: Callable[[Tensor], Tensor] | None = None
        self.kernel: Callable[[Tensor, Tensor | None, Tensor | None, float], Tensor | None] | None = None
        weight = nn.Parameter(torch.empty(width, device=device, dtype=dtype)) if elementwise_affine else None
        self.register_parameter("weight", weight)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets the weight to ones."""
        if self.weight is not None:
            nn.init.ones_(self.weight)

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        """Normalizes x [..., width], with gate [..., width], in float32 or float64. The result has x's dtype."""
        if self.kernel is not None and self._activation(gate) == "silu":
            y = self.kernel(x, self.weight, gate, self.eps)
            if y is not None:
                return y
        if self.mean_over_ranks is None and (gate is None or self.gate_fn in ACTIVATIONS.values()):  # no parameters
            weight = self.weight
            return recomputed(self._computed, x, weight, gate, weights=(weight,))
        return self._computed(x, self.weight, gate)

    def activation_in_op(self, gate: Tensor | None) -> str | None:
        """Returns the activation with which the op of a layer's step computes this norm, None if it does not.

        Norms that are not plain, of several groups or over ranks are not computed elsewhere.
        """
        return self._activation(gate) if is_plain(self, RMSNormGated) else None

    def _activation(self, gate: Tensor | None) -> str | None:
        """Returns the activation if this is a plain norm, followed by a gate if there is one; None if it is not."""
        if self.groups > 1 or self.mean_over_ranks is not None:
            return None
        if gate is None:
            return "silu"
        activation = "silu" if self.gate_fn is F.silu else "sigmoid" if self.gate_fn is F.sigmoid else None
        return activation if self.norm_before_gate else None

    def _computed(self, x: Tensor, weight: Tensor | None, gate: Tensor | None) -> Tensor:
        alike = weight is None or weight.dtype == x.dtype
        if gate is None and self.groups == 1 and self.mean_over_ranks is None and alike:
            # In float32 within one kernel. Autocast makes the result float32.
            return F.rms_norm(x, (self.width,), weight, self.eps).to(x.dtype)
        dtype = wide(x.dtype)
        factor = None if gate is None else self.gate_fn(gate.to(dtype))
        y = x.to(dtype)
        if factor is not None and not self.norm_before_gate:
            y = y * factor
        y = self._normed(y, None if weight is None else weight.to(dtype))
        if factor is not None and self.norm_before_gate:
            y = y * factor
        return y.to(x.dtype)

    def _normed(self, x: Tensor, weight: Tensor | None) -> Tensor:
        if self.mean_over_ranks is not None:
            y = x * torch.rsqrt(self.mean_over_ranks(x.square().mean(-1, keepdim=True)) + self.eps)
        elif self.groups == 1:
            return F.rms_norm(x, (self.width,), weight, self.eps)
        else:
            width = self.width // self.groups
            y = F.rms_norm(x.unflatten(-1, (self.groups, width)), (width,), None, self.eps).flatten(-2)
        return y if weight is None else y * weight

    if TYPE_CHECKING:

        @as_typed(forward)
        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    def extra_repr(self) -> str:
        return f"{self.width}, eps={self.eps}, elementwise_affine={self.weight is not None}"
