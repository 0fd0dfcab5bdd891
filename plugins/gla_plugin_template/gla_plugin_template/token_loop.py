"""An example of a second op: chunk_gla_fwd as a loop over tokens. README.md shows how to add it to the backend.

Per head, with S the state [K, V]:    S_t = diag(exp g_t) S_{t-1} + k_t^T v_t    and    o_t = scale * q_t S_t
"""

from __future__ import annotations

import torch
from torch import Tensor

from gla_core.dispatch.backend import Capabilities

CAPABILITIES = Capabilities(
    dtypes=frozenset({torch.float32, torch.bfloat16}),
    grouped_queries=False,  # q must have the same number of heads as k
    gates=frozenset({"key"}),  # the default: g is [B, T, H, K], or None
)


def chunk_gla_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    scale: float,
    initial_state: Tensor | None,
    output_final_state: bool,
) -> tuple[Tensor, Tensor | None, None]:
    """Computes the op that gla_core/ops/gla/chunk_gla.py describes, without packed sequences and without checkpoints.

    Shapes: q, k, g [B, T, H, K], v and o [B, T, H, V], states [B, H, K, V] float32.

    Returns:
        o, the final state (None if output_final_state is False), and None in place of checkpoints.
    """
    B, T, H, K = q.shape
    state = q.new_zeros(B, H, K, v.shape[-1], dtype=torch.float32) if initial_state is None else initial_state.clone()
    o = v.new_empty(v.shape)
    for t in range(T):
        decay = 1.0 if g is None else g[:, t, :, :, None].float().exp()  # [B, H, K, 1]
        state = decay * state + k[:, t, :, :, None].float() * v[:, t, :, None, :].float()
        o[:, t] = scale * (q[:, t, :, None, :].float() @ state)[:, :, 0]
    return o, state if output_final_state else None, None
