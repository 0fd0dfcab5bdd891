"""A decoding step by FLA's fused recurrent kernel: each row is a sequence of one token."""

from __future__ import annotations

import torch
from torch import Tensor

from gla_fla import native


def recurrent_gla_step(
    q: Tensor,  # [B, H, K]
    k: Tensor,  # [B, H, K]
    v: Tensor,  # [B, H, V]
    g: Tensor | None,  # [B, H, K]
    state: Tensor,  # [B, H, K, V] float32
    scale: float,
    state_indices: Tensor | None,
    inplace: bool,
) -> tuple[Tensor, Tensor]:
    """Computes the op; see gla_core/ops/gla/recurrent_gla_step.py. With `inplace`, writes `state` itself."""
    if not q.numel():
        return v.new_empty(v.shape), state if inplace else state.clone(memory_format=torch.contiguous_format)
    with torch.no_grad():
        o, new_state = native.fused_recurrent_gla(
            q[:, None],
            k[:, None],
            v[:, None],
            gk=None if g is None else g[:, None],
            scale=scale,
            initial_state=state,
            output_final_state=True,
        )
        return o.squeeze_(1), state.copy_(new_state) if inplace else new_state
