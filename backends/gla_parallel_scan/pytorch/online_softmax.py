"""Computes softmax of rows in splits: a maximum m and a sum z for each split, which are then merged.

    y = exp(x - m_p) exp(m_p - m) / z        m = max_p m_p        z = sum_p exp(m_p - m) z_p

The rule for merging two splits is associative; here it is applied to all splits of a row at once.

R rows of `columns` numbers   p splits of c numbers

Source: Milakov and Gimelshein, "Online normalizer calculation for softmax" (arXiv 1805.02867).
"""

from __future__ import annotations

import torch
from torch import Tensor

from gla_core.dispatch.tensors import ceil_div, wide

SPLIT = 4096
"""The largest number of elements of a split."""
BLOCK = 2**17
"""The largest number of elements of the rows that are computed at once, so that they stay in the cache."""


def online_softmax(x: Tensor, dim: int) -> Tensor:
    """Computes the op; see gla_core/ops/attention/online_softmax.py."""
    if x.numel() == 0:
        return torch.empty(x.shape, dtype=x.dtype, device=x.device)
    last = x.movedim(dim, -1)
    y = torch.empty(last.shape, dtype=x.dtype, device=x.device)
    step = max(1, BLOCK // last.shape[-1])
    for x_block, y_block in zip(*(z.reshape(-1, z.shape[-1]).split(step) for z in (last, y)), strict=True):
        y_block.copy_(_softmax(x_block))  # [rows of the block, columns]
    return y if dim == x.ndim - 1 else y.movedim(-1, dim).clone(memory_format=torch.contiguous_format)


def _softmax(x: Tensor) -> Tensor:
    """Computes the softmax of rows x [R, columns] in any number of splits, in the dtype of the computation."""
    R, columns = x.shape
    p = ceil_div(columns, SPLIT)
    c = ceil_div(columns, p)
    x = x.to(wide(x.dtype))
    if p * c > columns:
        x = torch.nn.functional.pad(x, (0, p * c - columns), value=-torch.inf)
    splits = x.reshape(R, p, c)
    m = splits.amax(-1, keepdim=True)  # [R, p, 1]
    e = (splits - finite(m)).exp_()  # [R, p, c]
    z = e.sum(-1, keepdim=True)  # [R, p, 1]
    weight = torch.exp(m - finite(m.amax(1, keepdim=True)))  # [R, p, 1]
    weight /= (weight * z).sum(1, keepdim=True)  # 0 / 0 = NaN for a row that is all -inf
    return e.mul_(weight).view(R, p * c)[:, :columns]


def finite(m: Tensor) -> Tensor:
    """Returns m with 0 in place of -inf, so that it can be subtracted; exp(-inf - 0) = 0, exp(-inf + inf) is NaN."""
    return torch.where(m.isneginf(), 0, m)
