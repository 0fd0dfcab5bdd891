"""Causal softmax attention with rotary positions: the layers that `attn` of the configuration names.

Parameters have the names and shapes of flash-linear-attention's `Attention`, so weights move between the two. Source of
the positions: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding" (arXiv 2104.09864).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.cache_utils import DynamicLayer


class SoftmaxAttention(nn.Module):
    """Softmax attention as a layer: [B, T, hidden_size] to [B, T, hidden_size].

    Args:
        hidden_size: width of the input, the output and all queries together.
        num_heads: number of query heads, a divisor of hidden_size.
        num_kv_heads: number of key/value heads, a divisor of num_heads.
        qkv_bias: give the projections of queries, keys and values a bias.
        window_size: how many tokens a token sees, itself included; None for all before it.
        rope_theta: base of the wavelengths of positions.

    Raises:
        ValueError: sizes that do not fit together.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        qkv_bias: bool = False,
        window_size: int | None = None,
        rope_theta: float = 10000.0,
    ) -> None:
        super().__init__()
        if hidden_size % (2 * num_heads) != 0 or num_heads % num_kv_heads != 0:
            raise ValueError(
                f"attn has num_heads {num_heads} and num_kv_heads {num_kv_heads}; expected the second to divide the "
                f"first, and heads of even width to make up hidden_size = {hidden_size}"
            )
        self.width, self.window_size, self.rope_theta = hidden_size // num_heads, window_size, rope_theta
        self.q_proj = nn.Linear(hidden_size, hidden_size, bias=qkv_bias)
        self.k_proj = nn.Linear(hidden_size, num_kv_heads * self.width, bias=qkv_bias)
        self.v_proj = nn.Linear(hidden_size, num_kv_heads * self.width, bias=qkv_bias)
        self.o_proj = nn.Linear(hidden_size, hidden_size, bias=False)

    def forward(
        self,
        x: Tensor,
        memory: DynamicLayer | None = None,
        attention_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor:
        """Read whole sequences, or go on with them.

        Args:
            x: [B, T, hidden_size].
            memory: keys and values from before, to which those of x are added.
            attention_mask: [B, past + T], 0 for padding, which nobody sees and whose y is 0.
            cu_seqlens: [N+1] offsets of packed sequences, B = 1, without memory.

        Raises:
            ValueError: cu_seqlens with memory; a mask without a column for each token.
        """
        if memory is not None and cu_seqlens is not None:
            raise ValueError("cu_seqlens is given with a cache; keys of packed sequences cannot be kept in one")
        T, past = x.shape[1], 0 if memory is None else memory.get_seq_length()
        q, k, v = (
            project(x).unflatten(-1, (-1, self.width)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        # Only distances count: padding in front, or a sequence packed before, shifts all positions alike.
        rows = torch.arange(past, past + T, device=x.device)
        q, k = (rotated(y, rows, self.rope_theta) for y in (q, k))
        if memory is not None:
            k, v = memory.update(k, v)
        visible = self._visible(rows, k.shape[2], attention_mask, cu_seqlens)
        o = F.scaled_dot_product_attention(q, k, v, visible, is_causal=visible is None and T > 1, enable_gqa=True)
        y = self.o_proj(o.transpose(1, 2).flatten(2))
        return y if attention_mask is None else torch.where(attention_mask[:, -T:, None] != 0, y, 0)

    def _visible(self, rows: Tensor, S: int, attention_mask: Tensor | None, cu_seqlens: Tensor | None) -> Tensor | None:
        """Which of S keys each row sees, [T, S] or [B, 1, T, S]; None where causality alone decides."""
        T = len(rows)
        if attention_mask is None and cu_seqlens is None and self.window_size is None and T in (1, S):
            return None
        columns = rows[-1] + 1 - S + torch.arange(S, device=rows.device)
        distance = rows[:, None] - columns
        visible = distance >= 0
        if self.window_size is not None:
            visible &= distance < self.window_size
        if cu_seqlens is not None:
            sequence = torch.searchsorted(cu_seqlens, rows, right=True)
            visible &= sequence[:, None] == sequence
        if attention_mask is None:
            return visible
        if attention_mask.ndim != 2 or attention_mask.shape[1] < S:
            raise ValueError(
                f"attention_mask is {list(attention_mask.shape)}; expected [B, {S} or more]: tokens from before count"
            )
        seen = attention_mask[:, None, None, -S:] != 0
        return (visible & seen) | (distance == 0)  # padding sees itself: the softmax of nothing is NaN


def rotated(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Turn each pair of channels i and i + D/2 of x [B, H, T, D] by the angles positions [T] * theta^(-2i / D)."""
    half, dtype = x.shape[-1] // 2, torch.promote_types(x.dtype, torch.float32)
    frequencies = theta ** (-torch.arange(half, device=x.device, dtype=dtype) / half)
    angles = positions[:, None] * frequencies
    cos, sin = angles.cos(), angles.sin()
    a, b = x.to(dtype).chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)
