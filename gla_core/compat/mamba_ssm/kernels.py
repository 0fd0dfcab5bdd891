"""Kernels for parts of a Mamba-2 layer that no op computes, and a loop that generates.

A plugin provides them: `import gla_transformers` does.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor


class Kernels(Protocol):
    """Functions that compute a part of a layer in one kernel. They return None for a call that PyTorch is to compute,
    and have then computed nothing.
    """

    def convolve_token(
        self, x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None
    ) -> Tensor | None:
        """Returns f(convolution) at one more token x [B, C, 1], and overwrites the last inputs, `state` [B, C, W].

        Args:
            weight: [C, W].
            bias: [C].
            activation: the name of f; None for the identity.
        """
        ...

    def convolve_sequences(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None
    ) -> Tensor | None:
        """Returns f(causal convolution) of whole sequences x [B, C, T], differentiably.

        Args: as in `convolve_token`.
        """
        ...

    def norm(
        self, x: Tensor, weight: Tensor, gate: Tensor | None, eps: float, groups: int, gate_first: bool
    ) -> Tensor | None:
        """Returns the RMS norm of each of the equal groups of x [..., width], differentiably.

        Args:
            weight: [width].
            gate: [..., width]; silu(gate) multiplies x if gate_first, and otherwise the normed x.
        """
        ...

    def product(
        self, x: Tensor, weight: Tensor, norm_weight: Tensor | None, eps: float, groups: int, residual: Tensor | None
    ) -> Tensor | None:
        """Returns n W^T + residual [B, 1, N] of one token; n is the RMS norm of each group of x [B, 1, K].

        Args:
            x: of the dtype of weight, to which float32 is rounded before a norm.
            weight: W [N, K].
            norm_weight: [K]; None if n is x.
            groups: number of equal groups.
            residual: [B, 1, N], of the dtype of weight, or float32; None for 0. The sum has its dtype.
        """
        ...

    def sample(self, model: Any, input_ids: Tensor, **options: Any) -> Any:
        """Returns what the method `_sample` of one of transformers' models returns, from CUDA graphs where possible."""
        ...


provided: Kernels | None = None
"""The functions of the plugin that was imported last; None if there is none."""


def provide_kernels(functions: Kernels) -> None:
    """Has parts of Mamba-2 layers computed by these functions, in `gla_core.compat`."""
    global provided
    provided = functions
