"""Softmax attention in one pass over the keys.

The kernel is that of ../gla_triton_kernels/softmax_attention.py. On compute capability 9.0, softmax_attention_hopper.py
takes the calls that suit it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gla_triton_kernels.runtime.launch import on_device_of
from gla_triton_kernels.softmax_attention import forward as general
from gla_triton_kernels.softmax_attention import forward_sm90 as hopper


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """See gla_core/ops/softmax_attention.py."""
    if scale < 0:  # the kernels take the greatest product for the greatest score
        q, scale = -q, -scale
    with on_device_of(q):
        if hopper.suits(q, k, v):
            return hopper.softmax_attention(q, k, v, scale, causal)
        o = v.new_empty((*q.shape[:3], v.shape[3]))
        lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
        if lse.numel():
            general.run(q, k, v, scale, causal, o, lse, general.blocks(q, v))
        return o, lse
