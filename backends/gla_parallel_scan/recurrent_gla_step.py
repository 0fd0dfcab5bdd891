"""One token of gated linear attention: there is nothing to split, and the kernel is that of triton_fused."""

from __future__ import annotations

from torch import Tensor

from gla_triton_kernels import recurrent_gla_step as kernels


def recurrent_gla_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    state: Tensor,
    scale: float,
    state_indices: Tensor | None,
    inplace: bool,
) -> tuple[Tensor, Tensor]:
    """See gla_core/ops/recurrent_gla_step.py."""
    return kernels.step.recurrent_gla_step(q, k, v, g, state, scale, state_indices, inplace)
