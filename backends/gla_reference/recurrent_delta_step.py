"""Computes one token of the delta rule.

    u = beta (v - k diag(alpha) S)        S' = diag(alpha) S + k^T u        o = scale * q S'

B batch   P states in the pool   H key heads   Hv value heads   K, V key and value width

chunk_delta.py names the sources.
"""

from __future__ import annotations

from torch import Tensor

from gla_core.dispatch.tensors import decayed, log_gates, wide
from gla_reference.recurrent_gla_step import advance


def recurrent_delta_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    state: Tensor,
    scale: float,
    state_indices: Tensor | None,
    gate_normalizer: int | None,
    inplace: bool,
) -> tuple[Tensor, Tensor]:
    """Computes the op; see gla_core/ops/delta/recurrent_delta_step.py."""
    dtype, repeats = wide(q.dtype), v.shape[1] // k.shape[1]
    if repeats > 1:  # several value heads read one head of k and q
        q, k = (x.repeat_interleave(repeats, dim=1) for x in (q, k))
    q, k, values = (x.to(dtype).unsqueeze(2) for x in (q, k, v))  # [B, Hv, 1, K], [B, Hv, 1, V]
    beta = beta.to(dtype)[..., None, None]  # [B, Hv, 1, 1]
    g = None if g is None else log_gates(g, gate_normalizer, dtype)

    def step(S: Tensor) -> tuple[Tensor, Tensor]:
        S = decayed(S, g, dtype)  # [B, Hv, K, V]
        S.addcmul_(k.mT, beta * (values - k @ S))  # on a CPU, new memory would take longer than the sum
        return (scale * (q @ S).squeeze(2)).to(v.dtype), S

    return advance(step, v, v.shape[1], state, state_indices, inplace)
