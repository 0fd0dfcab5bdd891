"""Softmax along one dimension with the rows in splits: maximum and sum of all splits at once, then all outputs."""

from __future__ import annotations

from torch import Tensor

from gla_triton_kernels import online_softmax as kernels


def online_softmax(x: Tensor, dim: int) -> Tensor:
    """See gla_core/ops/online_softmax.py."""
    return kernels.splits.online_softmax(x, dim)
