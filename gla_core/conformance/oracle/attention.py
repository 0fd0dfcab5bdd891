"""The meaning of softmax and of softmax attention, in float64."""

from __future__ import annotations

import torch
from torch import Tensor


def softmax(x: Tensor, dim: int = -1) -> Tensor:
    """Computes softmax in float64."""
    return torch.softmax(x.double(), dim)


def softmax_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, causal: bool = False
) -> tuple[Tensor, Tensor]:
    """Computes attention in float64, with all scores at once: o [B, Tq, Hq, V] and lse [B, Tq, Hq]."""
    q, k, v = q.double(), k.double(), v.double()
    Tq, Tk, groups = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(groups, dim=2), v.repeat_interleave(groups, dim=2)
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    scores = factor * torch.einsum("bihk,bjhk->bihj", q, k)
    if causal:
        seen = torch.ones(Tq, Tk, dtype=torch.bool, device=q.device).tril(Tk - Tq)
        scores = scores.masked_fill(~seen[:, None, :], -torch.inf)
    return torch.einsum("bihj,bjhv->bihv", scores.softmax(-1), v), scores.logsumexp(-1)
