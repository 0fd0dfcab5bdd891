"""Computes one token of gated linear attention.

    S' = diag(alpha) S + k^T v        o = scale * q S'

With a bonus u, o = scale * q (S + diag(u) k^T v).

B batch   P states in the pool   H value heads   G query heads per value head   K, V key and value width

Source: Yang et al., "Gated Linear Attention Transformers with Hardware-Efficient Training" (arXiv 2312.06635); of the
bonus, Peng et al., "Eagle and Finch" (arXiv 2404.05892).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from einops import einsum, rearrange
from torch import Tensor

from gla_core.dispatch.tensors import decayed, log_gates, new_state, swapped, wide


def recurrent_gla_step(
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
    """Computes the op; see gla_core/ops/gla/recurrent_gla_step.py."""
    g = None if g is None else log_gates(g, gate_normalizer, wide(q.dtype))
    heads = max(q.shape[1], v.shape[1])
    return advance(lambda states: _step(q, k, v, g, states, scale, bonus), v, heads, state, state_indices, inplace)


def _step(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, state: Tensor, scale: float, bonus: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Computes one step of the states [B, H, K, V] of a batch."""
    dtype = wide(q.dtype)
    H = v.shape[1]
    repeats = H // k.shape[1]
    if repeats > 1:  # several value heads read one head of k, q and the bonus
        q, k = (x.repeat_interleave(repeats, dim=1) for x in (q, k))
        bonus = None if bonus is None else bonus.repeat_interleave(repeats, dim=0)
    queries = rearrange(q.to(dtype), "b (h g) k -> b h g k", h=H)  # [B, H, G, K]
    new = decayed(state, g, dtype)  # [B, H, K, V]
    k, v_row = k.to(dtype), v.to(dtype)[..., None, :]
    new.addcmul_(k[..., :, None], v_row)  # on a CPU, new memory would take longer
    read = new if bonus is None else state.to(dtype) + (bonus.to(dtype) * k)[..., :, None] * v_row
    o = scale * einsum(queries, read, "b h g k, b h k v -> b h g v")
    return o.flatten(1, 2).to(v.dtype, copy=True), new


def advance(
    step: Callable[[Tensor], tuple[Tensor, Tensor]],
    v: Tensor,
    heads: int,
    state: Tensor,
    indices: Tensor | None,
    inplace: bool,
) -> tuple[Tensor, Tensor]:
    """Advances the states of the rows of a batch, which `indices` names if it is not None, by one token each.

    Args:
        step: takes states [B, H, K, V], and returns o [B, heads, V] with the dtype of v, and the states after the
            token, in the dtype of sums and in memory of their own.
        v: the values [B, H, V].
    """
    if indices is None:
        o, new = step(state)
        return o, state.copy_(new) if inplace else _dense(new.to(state.dtype), swapped(state))
    pool = state if inplace else new_state(state).copy_(state)
    return _advance_in_pool(step, v, heads, pool, indices.long())


def _dense(state: Tensor, v_first: bool) -> Tensor:
    """Returns a state in dense memory, with K and V swapped if v_first."""
    return state.mT.contiguous().mT if v_first else state.contiguous()


def _advance_in_pool(
    step: Callable[[Tensor], tuple[Tensor, Tensor]], v: Tensor, heads: int, pool: Tensor, indices: Tensor
) -> tuple[Tensor, Tensor]:
    """Advances the states pool[indices] in place; rows with an index outside the pool are skipped."""
    if not len(indices) or not len(pool):
        return v.new_zeros(len(v), heads, v.shape[2]), pool
    used = (indices >= 0) & (indices < len(pool))  # [B]
    indices = torch.where(used, indices, 0)
    state = pool[indices]  # [B, H, K, V]
    o, new = step(state)
    new = torch.where(used[:, None, None, None], new.to(pool.dtype), state)
    # A skipped row must write nothing, but reading the mask on the host would wait for the device. So it repeats the
    # first row that is not skipped, and writes the same values to the same place (row 0 unchanged if all are skipped).
    first = used.int().argmax(keepdim=True)  # [1]
    writer = torch.where(used, torch.arange(len(indices), device=indices.device), first)  # [B]
    pool.index_copy_(0, indices[writer], new[writer])
    return torch.where(used[:, None, None], o, 0), pool
