"""Softmax attention with the keys in splits: all splits at once, then one output from those of the splits.

A few rows of queries read keys and values as fast as they come only if all multiprocessors have some of the keys.
"""

from __future__ import annotations

from torch import Tensor

from gla_triton_kernels import softmax_attention as kernels
from gla_triton_kernels.softmax_attention.plan import plan_splits


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """See gla_core/ops/softmax_attention.py."""
    return kernels.call.softmax_attention(plan_splits, q, k, v, scale, causal)
