"""Computes one token of gated linear attention.

    S' = diag(alpha) S + k^T v        o = scale * q S'

B batch   P states in the pool   H value heads   G query heads per value head   K, V key and value width

Source: Yang et al., "Gated Linear Attention Transformers with Hardware-Efficient Training" (arXiv 2312.06635).
"""

from __future__ import annotations

import torch
from einops import einsum, rearrange
from torch import Tensor

from gla_core.dispatch.tensors import log_gates, new_state, wide


def recurrent_gla_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    state: Tensor,
    scale: float,
    state_indices: Tensor | None,
    gate_normalizer: int | None,
    inplace: bool,
) -> tuple[Tensor, Tensor]:
    """Computes the op; see gla_core/ops/gla/recurrent_gla_step.py."""
    g = None if g is None else log_gates(g, gate_normalizer, wide(q.dtype))
    if state_indices is None:
        o, new = _step(q, k, v, g, state, scale)
        return (o, state.copy_(new)) if inplace else (o, new)
    pool = state if inplace else new_state(state).copy_(state)
    return _step_in_pool(q, k, v, g, pool, scale, state_indices.long())


def _step(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, state: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Computes one step of the states [B, H, K, V] of a batch."""
    dtype = wide(q.dtype)
    H = v.shape[1]
    if k.shape[1] < H:  # several value heads read one head of k and q
        q, k = (x.repeat_interleave(H // k.shape[1], dim=1) for x in (q, k))
    queries = rearrange(q.to(dtype), "b (h g) k -> b h g k", h=H)  # [B, H, G, K]
    update = k.to(dtype)[..., :, None] * v.to(dtype)[..., None, :]  # [B, H, K, V]
    kept = state.to(dtype) if g is None else _alpha(g, dtype) * state.to(dtype)
    new = kept + update
    o = scale * einsum(queries, new, "b h g k, b h k v -> b h g v")
    return o.flatten(1, 2).to(v.dtype, copy=True), new_state(state).copy_(new)


def _alpha(g: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns exp(g), shaped to multiply states [B, H, K, V]; g is [H], [B, H] or [B, H, K]."""
    alpha = g.to(dtype).exp()
    return alpha[..., None] if g.ndim == 3 else alpha[..., None, None]


def _step_in_pool(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, pool: Tensor, scale: float, indices: Tensor
) -> tuple[Tensor, Tensor]:
    """Computes one step of the rows pool[indices] in place; rows with an index outside the pool are skipped."""
    if not len(indices) or not len(pool):
        return v.new_zeros(len(q), max(q.shape[1], v.shape[1]), v.shape[2]), pool
    used = (indices >= 0) & (indices < len(pool))  # [B]
    indices = torch.where(used, indices, 0)
    state = pool[indices]  # [B, H, K, V]
    o, new = _step(q, k, v, g, state, scale)
    new = torch.where(used[:, None, None, None], new, state)
    # A skipped row must write nothing, but reading the mask on the host would wait for the device. So it repeats the
    # first row that is not skipped, and writes the same values to the same place (row 0 unchanged if all are skipped).
    first = used.int().argmax(keepdim=True)  # [1]
    writer = torch.where(used, torch.arange(len(indices), device=indices.device), first)  # [B]
    pool.index_copy_(0, indices[writer], new[writer])
    return torch.where(used[:, None, None], o, 0), pool
