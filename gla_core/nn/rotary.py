"""The rotary position embedding: q and k of a token at position p are turned by angles that are proportional to p.

    (x_i, x_{i+K/2}) -> (x_i cos a - x_{i+K/2} sin a, x_i sin a + x_{i+K/2} cos a)        a = p * base^(-2i/K)

The product of a query and a key then depends on the difference of their positions alone. A position is the number of
tokens before a token in its sequence; padding does not count.

Source: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding" (arXiv 2104.09864).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from gla_core.dispatch.tensors import wide


class Positions(NamedTuple):
    """Positions in N sequences of which a call reads some tokens.

    Attributes:
        tokens: [1 or B, T] int64, the position of each token. Rows outside all sequences have any position.
        after: [N] int64, the position of the next token of each sequence.
    """

    tokens: Tensor
    after: Tensor


def positions(
    x: Tensor, begun: Tensor | None = None, cu_seqlens: Tensor | None = None, lengths: Tensor | None = None
) -> Positions:
    """Returns the `Positions` of x [B, T, D], computed on the device.

    Args:
        begun: [N], number of tokens of each sequence before x; 0 by default.
        cu_seqlens: [N+1], offsets of packed sequences.
        lengths: [B], number of tokens of each row, if padding follows them; T by default.
    """
    B, T = x.shape[:2]
    tokens = torch.arange(T, device=x.device)
    if cu_seqlens is None:
        read = torch.full((B,), T, device=x.device) if lengths is None else lengths
        return Positions(tokens[None], read) if begun is None else Positions(begun[:, None] + tokens, begun + read)
    offsets = cu_seqlens.long()
    begun = torch.zeros_like(offsets[1:]) if begun is None else begun
    sequence = torch.searchsorted(offsets[:-1], tokens, right=True)  # [T], 0 in front of the first sequence, then 1
    shift = F.pad(begun - offsets[:-1], (1, 0))
    return Positions((tokens + shift[sequence])[None], begun + offsets.diff())


def rotated(q: Tensor, k: Tensor, tokens: Tensor, base: float) -> tuple[Tensor, Tensor]:
    """Turns queries and keys [B, T, heads, K], K even, of tokens at the positions `tokens` [1 or B, T].

    The angles and products are computed in float32 (float64 with float64 inputs). The results have the dtype of q.
    """
    dtype, K = wide(q.dtype), q.shape[-1]
    frequencies = 1 / base ** (torch.arange(0, K, 2, device=q.device, dtype=dtype) / K)
    angles = tokens[..., None, None].to(dtype) * frequencies  # [1 or B, T, 1, K/2]
    cos, sin = angles.cos(), angles.sin()
    return _turned(q, cos, sin), _turned(k, cos, sin)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.to(cos.dtype).chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1).to(x.dtype)
