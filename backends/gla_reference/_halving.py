"""Halves chunks to multiply rows that gates have decayed, without a division by a product of gates.

For s in the left half of a block and t in its right half, the product of the gates alpha after s through t is

    (after s to the end of the left half) * (start of the right half through t)

Both factors lie in [0, 1], so a gate of 0 needs no special case. Every pair s < t occurs at exactly one of the log2(C)
levels of halving, and each level is one product of matrices. The rows of right halves are queries q; those of left
halves are keys k. Several queries of a token share its keys.

B batch   T tokens   H value heads   G queries per token and value head   N sequences   K, V key and value width
D keys of a gate: K, or 1 if the keys of a token share a gate
R rows, n chunks per row, C tokens per chunk (_chunks.py)   L length of a half block   m blocks of 2L
"""

from __future__ import annotations

import torch
from torch import Tensor

from gla_core.dispatch.tensors import wide
from gla_reference._chunks import Dense, Packed


def for_tokens(g: Tensor, v: Tensor) -> Tensor:
    """Returns a gate of any form as a view [B, T, H, D] for values [B, T, H, V]."""
    return g if g.ndim == 4 else g[..., None].expand(*v.shape[:3], 1)


def for_values(x: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Copies each head of q or k for the value heads that read it; returns x itself if k has as many heads as v."""
    return x.repeat_interleave(v.shape[2] // k.shape[2], dim=2) if k.shape[2] < v.shape[2] else x


def halves(alpha: Tensor) -> list[int]:
    """Returns the lengths L = 1, 2, 4 ... C/2 of the halves, innermost first."""
    return [1 << level for level in range(alpha.shape[3].bit_length() - 1)]


def double(q: Tensor, k: Tensor, block_decay: Tensor, L: int) -> Tensor:
    """Joins neighbouring blocks of L tokens in place, by the associative rule of the gates.

    The rows of q [.., C, (G,) K] come decayed from the start of their block; right blocks are also decayed by the block
    to their left. The rows of k [.., C, K] come decayed to the end of their block; left blocks are also decayed by the
    block to their right. block_decay [.., C/L, D] holds the product of the gates of each block.

    Returns:
        The products of the joined blocks [.., C/2L, D].
    """
    left_decay, right_decay = left_halves(block_decay, 1), right_halves(block_decay, 1)  # [R, H, n, m, 1, K]
    q_right, k_left = right_halves(q, L), left_halves(k, L)
    q_right *= left_decay if q.ndim == k.ndim else left_decay[..., None, :]
    k_left *= right_decay
    return (left_decay * right_decay).squeeze(-2)


def diagonal_scores(q: Tensor, k: Tensor) -> Tensor:
    """Returns A [R, H, n, C, G, C] with only the pairs s = t filled in; the rest is 0."""
    A = q.new_zeros(*q.shape[:-1], q.shape[3])
    A.diagonal(dim1=3, dim2=5).copy_((q * k[..., None, :]).sum(-1).movedim(3, -1))
    return A


def scores(A: Tensor, L: int) -> Tensor:
    """Returns the view [R, H, n, m, L*G, L] of A [R, H, n, C, G, C]: queries of right halves, keys of left halves."""
    blocks = A.unflatten(-1, (-1, 2, L)).select(-2, 0).unflatten(3, (-1, 2, L)).select(4, 1)  # [.., m, L, G, m, L]
    return blocks.diagonal(dim1=3, dim2=6).movedim(-1, 3).flatten(4, 5)


def add_query_gradient(dq: Tensor, dg: Tensor, d: Tensor, q: Tensor, decay: Tensor) -> None:
    """Adds the contribution of d [.., L*G, K], the gradient of decayed rows q, to dq [.., L, G, K] and dg [.., L, D].

    A gate at or before token t decays row t, so dg sums from each gate to the end of the block.
    """
    d, q = d.view_as(dq), q.view_as(dq)
    dq += d * decay[..., None, :]
    dg += per_gate((d * q).sum(-2), dg).flip(-2).cumsum(-2).flip(-2)


def add_key_gradient(dk: Tensor, dg: Tensor, d: Tensor, k: Tensor, decay: Tensor) -> None:
    """Adds the contribution of d [.., L, K], the gradient of decayed rows k, to dk [.., L, K] and dg [.., L, D].

    A gate after token s decays row s, so dg sums from the start of the block to the token before each gate.
    """
    dk += d * decay
    dg[..., 1:, :] += per_gate(d * k, dg)[..., :-1, :].cumsum(-2)


def per_gate(x: Tensor, dg: Tensor) -> Tensor:
    """Returns x [.., K] summed over the keys that share a gate: [.., D]."""
    return x.sum(-1, keepdim=True) if dg.shape[-1] == 1 else x


def left_halves(x: Tensor, L: int) -> Tensor:
    """Returns the view [R, H, n, m, L, ...] of x [R, H, n, C, ...] with the left halves of its blocks of 2L."""
    return x.unflatten(3, (-1, 2, L)).select(4, 0)


def right_halves(x: Tensor, L: int) -> Tensor:
    return x.unflatten(3, (-1, 2, L)).select(4, 1)


def as_rows(x: Tensor) -> Tensor:
    """Returns x [..., L, G, K] as rows [..., L*G, K] of one matrix: the G queries of a token share its key."""
    return x.flatten(-3, -2)


def join(chunks: Dense | Packed, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Returns a new tensor [B, T, H (G), ..] with the tokens of x [R, H, n, C, (G,) ..], by default in its dtype."""
    R, H = x.shape[:2]
    heads = H * (x.shape[4] if x.ndim == 6 else 1)
    out = torch.empty(R, chunks.T, heads, x.shape[-1], dtype=dtype or x.dtype, device=x.device)
    chunks.join(x, out.unflatten(2, (H, -1)) if x.ndim == 6 else out)
    return out


def sum_of_values(dx: Tensor, x: Tensor) -> Tensor:
    """Sums the gradient of q or k over the value heads that read each head of x."""
    return dx if dx.shape[2] == x.shape[2] else dx.unflatten(2, (x.shape[2], -1)).sum(3)


def sum_of_tokens(dg: Tensor, g: Tensor) -> Tensor:
    """Returns the gradient of g in its shape, from the gradient of each token's gates [B, T, H, D]."""
    return dg if g.ndim == 4 else dg.sum(-1) if g.ndim == 3 else dg.sum((0, 1, 3))


def fresh(states: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Returns a copy; `states` may be an argument of the call, or a slice of a larger tensor."""
    return states.to(dtype or states.dtype, memory_format=torch.contiguous_format, copy=True)


def initial_or_zeros(initial: Tensor | None, k: Tensor, v: Tensor, N: int) -> Tensor:
    """Returns the initial state, or zeros [N, H, K, V] if it is None."""
    if initial is not None:
        return initial
    return k.new_zeros(N, v.shape[2], k.shape[3], v.shape[3], dtype=wide(k.dtype))
