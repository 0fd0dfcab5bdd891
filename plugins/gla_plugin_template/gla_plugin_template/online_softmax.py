"""Softmax in two passes over a row: one for its maximum m and its sum z of exponentials, one for y = exp(x - m) / z."""

from __future__ import annotations

import torch
from torch import Tensor


def online_softmax(x: Tensor, dim: int) -> Tensor:
    """Computes the op of gla_core/ops/online_softmax.py. x is checked; y is contiguous, with x's shape and dtype."""
    if not x.numel():
        return x.new_empty(x.shape)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    m = wide.amax(dim, keepdim=True)
    m = torch.where(m.isneginf(), 0, m)  # a row that is all -inf gives 0 / 0 = NaN below, as in torch.softmax
    z = torch.exp(wide - m).sum(dim, keepdim=True)
    return (torch.exp(wide - m) / z).to(x.dtype).contiguous()
