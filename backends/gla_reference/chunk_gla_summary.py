"""Computes the decay of sequences and their states from a zero state, in chunks, forwards or backwards in time.

It computes no outputs and no scores. For a chunk of C tokens with gates alpha = exp g in [0, 1], as in chunk_gla.py,

    update = sum over t of (left_t * w_t)^T right_t    w_t = prod(alpha_j : j > t), or backwards prod(alpha_j : j <= t)
    S <- diag(decay of the chunk) S + update        from the first chunk to the last, or backwards from the last

B batch   T tokens   H heads of states and gates   G query heads that share a state   N sequences
K, V key and value width   D keys of a gate: K, or 1 if the keys of a token share a gate
R rows, n chunks per row, C tokens per chunk (_chunks.py)   L length of a half block

Source: Yang et al., "Gated Linear Attention Transformers with Hardware-Efficient Training" (arXiv 2312.06635).
"""

from __future__ import annotations

import torch
from torch import Tensor

from gla_core.dispatch.tensors import log_gates, wide
from gla_reference._chunks import chunk
from gla_reference.chunk_gla import CHUNK, _double, _fresh, _halves, _rows, for_tokens


def chunk_gla_summary(
    left: Tensor,
    right: Tensor,
    g: Tensor | None,
    cu_seqlens: Tensor | None,
    backwards: bool,
    gate_normalizer: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Computes the op; see gla_core/ops/gla/chunk_gla_summary.py."""
    B, T, Hq, K = left.shape
    V, H = right.shape[3], right.shape[2] if g is None else g.shape[-1] if g.ndim < 4 else g.shape[2]
    dtype = wide(left.dtype)
    g = None if g is None else log_gates(g, gate_normalizer, dtype)
    chunks = chunk(B, T, min(CHUNK, 1 << max(T - 1, 0).bit_length()), cu_seqlens)
    left = left.repeat_interleave(H // Hq, dim=2) if Hq < H else left
    lc, rc = (chunks.split(x.unflatten(2, (H, -1))).to(dtype) for x in (left, right))  # [R, H, n, C, G, K], [.., V]
    gates = left.new_zeros(()).expand(B, T, H, 1) if g is None else for_tokens(g, right[:, :, :H])
    alpha = chunks.split(gates).to(dtype, copy=True).exp_()  # [R, H, n, C, D]

    upto, after, decay = alpha.clone(), torch.ones_like(alpha), alpha  # [R, H, n, C, D]; decay of blocks
    for L in _halves(alpha):
        decay = _double(upto, after, decay, L)
    lc = lc * (upto if backwards else after)[..., None, :]
    update = _rows(lc).mT @ _rows(rc)  # [R, H, n, K, V]

    # An additional column begins as 1 and is only decayed, so it becomes the decay of the sequence for each key.
    start = lc.new_zeros(chunks.N, H, K, V + 1)
    start[..., V] = 1
    update = torch.nn.functional.pad(update, (0, 1))
    _, final = chunks.scan(start, decay.squeeze(-2), update, reverse=backwards)  # [N, H, K, V+1]
    return _fresh(final[..., V]), _fresh(final[..., :V])
