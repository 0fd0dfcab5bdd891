"""Computes softmax attention over blocks of keys, with a running maximum m, sum z and unnormalised output o.

    s = scale * q k_j^T        m' = max(m, rowmax s)
    z' = exp(m - m') z + rowsum exp(s - m')        o' = exp(m - m') o + exp(s - m') v_j
    o = o / z        lse = m + log z

B batch   Tq, Tk queries and keys   H key/value heads   G query heads per key/value head   K, V key and value width

Source: Dao et al., "FlashAttention" (arXiv 2205.14135).
"""

from __future__ import annotations

import torch
from einops import einsum, rearrange
from torch import Tensor

from gla_core.dispatch.tensors import wide
from gla_reference.online_softmax import finite

KEY_BLOCK = 256


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """Computes the op; see gla_core/ops/attention/softmax_attention.py."""
    dtype = wide(q.dtype)
    Tq, Tk = q.shape[1], k.shape[1]
    qs = scale * rearrange(q.to(dtype), "b i (h g) k -> b h g i k", h=k.shape[2])  # [B, H, G, Tq, K]
    m = torch.full_like(qs[..., :1], -torch.inf)  # [B, H, G, Tq, 1]
    z = torch.zeros_like(m)
    o = torch.zeros(*m.shape[:-1], v.shape[-1], dtype=dtype, device=v.device)  # [B, H, G, Tq, V]
    last_key = torch.arange(Tq, device=q.device)[:, None] + Tk - Tq  # [Tq, 1], the last key of a causal query
    for start in range(0, Tk, KEY_BLOCK):
        keys = slice(start, min(start + KEY_BLOCK, Tk))
        s = einsum(qs, k[:, keys].to(dtype), "b h g i k, b j h k -> b h g i j")
        if causal:
            s = s.masked_fill(torch.arange(keys.start, keys.stop, device=q.device) > last_key, -torch.inf)
        m_new = torch.maximum(m, s.amax(-1, keepdim=True))
        p, rescale = torch.exp(s - finite(m_new)), torch.exp(m - finite(m_new))
        z = z * rescale + p.sum(-1, keepdim=True)
        o = o * rescale + einsum(p, v[:, keys].to(dtype), "b h g i j, b j h v -> b h g i v")
        m = m_new
    o, lse = o / z, (m + z.log()).squeeze(-1)
    return (
        rearrange(o, "b h g i v -> b i (h g) v").to(v.dtype, memory_format=torch.contiguous_format, copy=True),
        rearrange(lse, "b h g i -> b i (h g)").clone(memory_format=torch.contiguous_format),
    )
