"""One token of gated linear attention: the associative rule (scan.py) applied to one more segment, of a single token.

    S' = diag(alpha) S + k^T v        o = scale * q S'

B batch   P states in the pool   H key/value heads   G query heads per key/value head   K, V key and value width

Source: Yang et al., "Gated Linear Attention Transformers with Hardware-Efficient Training" (arXiv 2312.06635).
"""

from __future__ import annotations

import torch
from torch import Tensor

from gla_core.dispatch.backend import new_state, wide


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
    """Computes the op; see gla_core/ops/recurrent_gla_step.py."""
    pool = state if inplace else new_state(state).copy_(state)
    if state_indices is None:
        return _step(q, k, v, g, pool, scale), pool
    used = torch.nonzero((state_indices >= 0) & (state_indices < len(pool)))[:, 0]  # rows that are not skipped
    rows = state_indices[used].long()
    states = pool[rows]  # [rows used, H, K, V]
    o = v.new_zeros(*q.shape[:2], v.shape[2])  # [B, Hq, V]
    o[used] = _step(q[used], k[used], v[used], None if g is None else g[used], states, scale)
    pool[rows] = states
    return o, pool


def _step(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, state: Tensor, scale: float) -> Tensor:
    """Returns the output [B, Hq, V], and updates the states [B, H, K, V] in place."""
    dtype = wide(q.dtype)
    new = state.to(dtype)  # the states themselves if they have this dtype
    if g is not None:
        new.mul_(g.to(dtype).exp()[..., None])
    new.addcmul_(k.to(dtype)[..., None], v.to(dtype)[..., None, :])
    if new is not state:
        state.copy_(new)
    queries = q.to(dtype).unflatten(1, (k.shape[1], -1))  # [B, H, G, K]
    return (scale * (queries @ new)).flatten(1, 2).to(v.dtype, copy=True)
