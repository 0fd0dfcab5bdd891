"""Softmax of each row x in plain PyTorch: y = exp(x - m) / z, with m the maximum of x and z the sum of exp(x - m)."""

from __future__ import annotations

import torch
from torch import Tensor


def online_softmax(x: Tensor, dim: int) -> Tensor:
    """Computes the op that gla_core/ops/attention/online_softmax.py describes.

    gla-core has checked x and dim before this call. The result must be contiguous, with the shape and dtype of x.
    """
    if not x.numel():
        return x.new_empty(x.shape)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    m = wide.amax(dim, keepdim=True)
    m = torch.where(m.isneginf(), 0, m)  # so a row that is all -inf gives 0 / 0 = NaN, as in torch.softmax
    z = torch.exp(wide - m).sum(dim, keepdim=True)
    return (torch.exp(wide - m) / z).to(x.dtype).contiguous()
