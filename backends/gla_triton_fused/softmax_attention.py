"""Softmax attention in one pass: a program goes over all keys that its queries see."""

from __future__ import annotations

from torch import Tensor

from gla_triton_kernels import softmax_attention as kernels
from gla_triton_kernels.softmax_attention.plan import plan_one_pass


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """See gla_core/ops/softmax_attention.py."""
    return kernels.call.softmax_attention(plan_one_pass, q, k, v, scale, causal)
