"""Causal softmax attention with rotary positions: the layers that `attn` of the configuration names.

Parameters have the names and shapes of flash-linear-attention's `Attention`, so weights move between the two. Source of
the positions: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding" (arXiv 2104.09864).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gla_core.extension import not_kept
from gla_transformers.cache import KeyMemory, Keys


class SoftmaxAttention(nn.Module):
    """Softmax attention as a layer: [B, T, hidden_size] to [B, T, hidden_size].

    Args:
        hidden_size: width of the input, the output and all queries together.
        num_heads: number of query heads, a divisor of hidden_size.
        num_kv_heads: number of key/value heads, a divisor of num_heads.
        qkv_bias: whether the projections of queries, keys and values have a bias.
        window_size: number of tokens that a token sees, including itself; None for all tokens before it.
        rope_theta: base of the frequencies by which positions rotate queries and keys.

    Raises:
        ValueError: sizes do not fit together.
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
        memory: KeyMemory | None = None,
        attention_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor:
        """Reads whole sequences, or continues them.

        Args:
            x: [B, T, hidden_size].
            memory: earlier keys and values; the call adds the keys and values of x.
            attention_mask: [B, T or more], of which the last T columns are used; 0 where x is padding. Padding may be
                before, behind or between the tokens of a sequence. No token sees padding. Padding takes no position,
                and its y is 0.
            cu_seqlens: [N+1] offsets of packed sequences, B = 1, without memory and mask.

        Returns:
            y [B, T, hidden_size].

        Raises:
            ValueError: cu_seqlens is given with memory or a mask; a mask has fewer than T columns.
        """
        (B, T), before = x.shape[:2], None if memory is None else memory.state
        if cu_seqlens is not None and (memory is not None or attention_mask is not None):
            other = "a cache; pass use_cache=False" if memory is not None else "attention_mask; leave the mask out"
            raise ValueError(f"cu_seqlens is given with {other}")
        if attention_mask is not None:
            shape = list(attention_mask.shape)
            if len(shape) != 2 or shape[0] != B or shape[1] < T:
                raise ValueError(f"attention_mask is {shape}; expected [{B}, {T} or more]")
        with not_kept(x):
            projections = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        q, k, v = (y.unflatten(-1, (-1, self.width)).transpose(1, 2) for y in projections)
        # Only distances matter: the sequences before a packed sequence shift all of its positions equally.
        rows = positions(attention_mask, T, before, x.device)
        q, k = (rotated(y, rows, self.rope_theta) for y in (q, k))
        columns, padded = rows, attention_mask is not None
        if memory is not None:
            k, v, columns = memory.read_on(k, v, rows.expand(B, T), padded)
            padded = memory.padded
        visible = None
        if padded or cu_seqlens is not None or self.window_size is not None or T not in (1, k.shape[2]):
            visible = self._visible(rows, columns, cu_seqlens)[:, None]
        o = F.scaled_dot_product_attention(q, k, v, visible, is_causal=visible is None and T > 1, enable_gqa=True)
        y = self.o_proj(o.transpose(1, 2).flatten(2))
        return y if attention_mask is None else torch.where(attention_mask[:, -T:, None] != 0, y, 0)

    def _visible(self, rows: Tensor, columns: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        """Returns whether queries at positions rows [B, T] see keys at positions columns [B, S], as [B, T, S]."""
        (_, T), (_, S) = rows.shape, columns.shape
        distance = rows[:, :, None] - columns[:, None]
        visible = (distance >= 0) & (columns >= 0)[:, None]
        if self.window_size is not None:
            visible &= distance < self.window_size
        if cu_seqlens is not None:
            sequence = torch.searchsorted(cu_seqlens.to(rows.dtype), rows, right=True)
            visible &= sequence[:, :, None] == sequence[:, None]
        itself = torch.arange(S, device=rows.device) == torch.arange(S - T, S, device=rows.device)[:, None]
        return visible | itself  # padding sees itself, because a softmax over no keys is NaN


def positions(attention_mask: Tensor | None, T: int, before: Keys | None, device: torch.device) -> Tensor:
    """Returns the positions of T tokens that follow `before`: [B, T], or [1, T] for equal rows; -1 for padding."""
    first = 0 if before is None else before.positions.amax(1, keepdim=True) + 1
    if attention_mask is None:
        return first + torch.arange(T, device=device)[None]
    seen = attention_mask[:, -T:] != 0
    return torch.where(seen, first + seen.cumsum(1) - 1, -1)


def rotated(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotates channels i and i + D/2 of x [B, H, T, D] by the angles positions [B, T] * theta^(-2i / D)."""
    half, dtype = x.shape[-1] // 2, torch.promote_types(x.dtype, torch.float32)
    frequencies = theta ** (-torch.arange(half, device=x.device, dtype=dtype) / half)
    angles = positions[:, None, :, None] * frequencies  # [B, 1, T, D / 2]
    cos, sin = angles.cos(), angles.sin()
    a, b = x.to(dtype).chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)
