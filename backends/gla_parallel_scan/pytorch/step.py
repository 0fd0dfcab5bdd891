"""Computes one token of gated linear attention.

This is the rule that joins two segments, where the second is a single token:

    S' = diag(alpha) S + k^T v        o = scale * q S'

With a bonus u, o = scale * (q S + (q . u k) v).

B batch   P states in the pool   H key heads   G query heads, or R value heads, per key head   K, V key and value width

Source: Yang et al., "Gated Linear Attention Transformers with Hardware-Efficient Training" (arXiv 2312.06635); of the
bonus, Peng et al., "Eagle and Finch" (arXiv 2404.05892).
"""

from __future__ import annotations

import torch
from torch import Tensor

from gla_core.dispatch.tensors import log_gates, new_state, wide


def step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    state: Tensor,
    scale: float,
    state_indices: Tensor | None,
    gate_normalizer: int | None,
    bonus: Tensor | None,
    inplace: bool,
) -> tuple[Tensor, Tensor]:
    """Computes the op; see the step in gla_core/ops/gla/."""
    g = None if g is None else log_gates(g, gate_normalizer, wide(q.dtype))
    pool = state if inplace else new_state(state).copy_(state)
    if state_indices is None:
        return _step(q, k, v, g, pool, scale, bonus), pool
    used = torch.nonzero((state_indices >= 0) & (state_indices < len(pool)))[:, 0]  # rows that are not skipped
    rows = state_indices[used].long()
    states = pool[rows]  # [rows used, H*R, K, V]
    o = v.new_zeros(len(q), max(q.shape[1], v.shape[1]), v.shape[2])  # [B, H*G*R, V]
    gates = g if g is None or g.ndim == 1 else g[used]  # a constant gate [H*R] has no rows
    o[used] = _step(q[used], k[used], v[used], gates, states, scale, bonus)
    pool[rows] = states
    return o, pool


def _step(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, state: Tensor, scale: float, bonus: Tensor | None
) -> Tensor:
    """Returns the output [B, H*G*R, V], and updates the states [B, H*R, K, V] in place."""
    dtype, H = wide(q.dtype), k.shape[1]
    new = state.to(dtype)  # the states themselves if they have this dtype
    by_key_head = new.unflatten(1, (H, -1))  # [B, H, R, K, V], which shares their memory
    keys, values = k.to(dtype)[:, :, None], v.to(dtype).unflatten(1, (H, -1))  # [B, H, 1, K], [B, H, R, V]
    queries, o = q.to(dtype).unflatten(1, (H, 1, -1)), None  # [B, H, 1, G, K]
    if bonus is not None:
        factor = (queries * (bonus.to(dtype)[:, None] * keys)[:, :, :, None]).sum(-1, keepdim=True)  # [B, H, 1, G, 1]
        o = queries @ by_key_head + factor * values[..., None, :]
    if g is not None:
        alpha = g.to(dtype).exp()[..., None]
        new.mul_(alpha if g.ndim == 3 else alpha[..., None])
    by_key_head.addcmul_(keys[..., None], values[..., None, :])
    if new is not state:
        state.copy_(new)
    o = queries @ by_key_head if o is None else o
    return (scale * o).flatten(1, 3).to(v.dtype, copy=True)
