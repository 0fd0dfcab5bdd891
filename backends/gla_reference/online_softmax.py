"""Computes softmax over tiles of columns, with a running maximum m and a running sum z of exponentials.

    m' = max(m, m_tile)        z' = exp(m - m') z + exp(m_tile - m') z_tile        y = exp(x - m) / z

Source: Milakov and Gimelshein, "Online normalizer calculation for softmax" (arXiv 1805.02867).
"""

from __future__ import annotations

import torch
from torch import Tensor

from gla_core.dispatch.tensors import wide

TILE = 1024


def online_softmax(x: Tensor, dim: int) -> Tensor:
    """Computes the op; see gla_core/ops/attention/online_softmax.py."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not x.numel():
        return y
    dtype = wide(x.dtype)
    rows = x.movedim(dim, -1)  # [..., columns]
    m = x.new_full((*rows.shape[:-1], 1), -torch.inf, dtype=dtype)  # [..., 1]
    z = torch.zeros_like(m)
    for tile in rows.split(TILE, dim=-1):
        tile = tile.to(dtype)
        m_new = torch.maximum(m, tile.amax(-1, keepdim=True))
        z = z * torch.exp(m - finite(m_new)) + torch.exp(tile - finite(m_new)).sum(-1, keepdim=True)
        m = m_new
    for tile, out in zip(rows.split(TILE, dim=-1), y.movedim(dim, -1).split(TILE, dim=-1), strict=True):
        out.copy_(torch.exp(tile.to(dtype) - finite(m)) / z)  # 0 / 0 = NaN for a row that is all -inf
    return y


def finite(m: Tensor) -> Tensor:
    """Returns m with 0 in place of -inf, so that it can be subtracted; exp(-inf - 0) = 0, exp(-inf + inf) is NaN."""
    return torch.where(m.isneginf(), 0, m)
