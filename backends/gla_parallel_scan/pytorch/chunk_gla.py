"""Gated linear attention in parallel segments, joined by a scan that takes a logarithmic number of steps.

Per head, with S the state that enters a segment of C tokens, alpha = exp g, and t and s counted within the segment:

    A_ts = sum_d q_td k_sd prod(alpha_j : s < j <= t)             for s <= t, else 0
    qg_t = q_t prod(alpha_j : j <= t)                             decayed from the start of the segment
    kg_s = k_s prod(alpha_j : j > s)                              decayed to its end
    1.  state of a segment from a zero state, and its decay       kg^T v and D = prod alpha
    2.  states that enter the segments, by a scan (scan.py)       (D2, S2) after (D1, S1) = (D1 * D2, diag(D2) S1 + S2)
    3.  outputs                                                   o = scale * (qg S + A v)

A, qg and kg come from halving the segment repeatedly. In a block of 2L tokens, the queries of the right half, decayed
from the middle, are multiplied with the keys of the left half, decayed to the middle. Every pair s < t is in exactly
one such block, and s = t has no gate. Two blocks are joined by decaying the queries of the right block by the product
of the left block's gates, and the keys of the left block by the product of the right block's gates. All factors are
products of gates in [0, 1], so gates down to exp(-inf) = 0 are exact.

B batch   T tokens   H value heads, and heads of states and gates   G query heads per value head   N sequences
K, V key and value width   D keys of a gate: K, or 1 if the keys of a token share a gate
n segments of C tokens in each of R rows (segments.py)   L tokens in half a block

If k has fewer heads than v, each head of k and q is cut once for each value head that reads it.

Source: Yang et al., "Gated Linear Attention Transformers with Hardware-Efficient Training" (arXiv 2312.06635).
"""

from __future__ import annotations

import torch
from torch import Tensor

from gla_core.dispatch.tensors import log_gates, new_checkpoints, wide
from gla_parallel_scan.pytorch.blocks import blocks
from gla_parallel_scan.pytorch.segments import Segments, dense, packed

SEGMENT = 64
BLOCK = 2**18
"""The maximum number of elements of a tensor that is computed at once, so that a block of heads and sequences stays in
the cache."""


def chunk_gla_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    scale: float,
    initial_state: Tensor | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
    checkpoint_every: int | None,
    gate_normalizer: int | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Computes the op; see gla_core/ops/gla/chunk_gla.py."""
    B, T, H, V = v.shape
    K = k.shape[3]
    dtype = wide(q.dtype)
    N = B if cu_seqlens is None else len(cu_seqlens) - 1
    o = v.new_empty(B, T, max(q.shape[2], H), V)
    final = v.new_empty(N, H, K, V, dtype=dtype)
    checkpoints = None if checkpoint_every is None else new_checkpoints(k, v, cu_seqlens, checkpoint_every)
    if N == 0:
        return o.zero_(), final if output_final_state else None, checkpoints  # no token belongs to a sequence
    C = min(SEGMENT, 1 << max(T - 1, 0).bit_length())  # at most the power of two that holds T
    segments = dense(T, C) if cu_seqlens is None else packed(C, cu_seqlens)
    queries, outputs = q.unflatten(2, (k.shape[2], -1)), o.unflatten(2, (H, -1))  # [B, T, .., G, K], [B, T, H, G, V]
    gates = None if g is None else for_tokens(log_gates(g, gate_normalizer, dtype), v)
    for rows, heads in blocks(B, H, T * max(K, V), BLOCK):
        tokens = (rows, slice(None), heads)
        states = (rows if cu_seqlens is None else slice(None), heads)
        qc, kc = (segments.cut(_read_by(heads, x[rows], H), dtype) for x in (queries, k))
        vc = segments.cut(v[tokens], dtype)
        gc = None if gates is None else segments.cut(gates[tokens], dtype)
        initial = None if initial_state is None else initial_state[states]
        o_block, final[states], entering = _forward(segments, qc, kc, vc, gc, initial)
        segments.join(o_block, scale, outputs[tokens])
        if checkpoints is not None and checkpoint_every is not None:
            segments.keep(entering, checkpoint_every, checkpoints[tokens])
    return o, final if output_final_state else None, checkpoints


def for_tokens(g: Tensor, v: Tensor) -> Tensor:
    """Returns a gate of any form as a view [B, T, H, D] for values [B, T, H, V]."""
    return g if g.ndim == 4 else g[..., None].expand(*v.shape[:3], 1)


def _read_by(heads: slice, x: Tensor, H: int) -> Tensor:
    """Returns the heads of q or k that a range of the H value heads reads, one for each of them."""
    if x.shape[2] == H:
        return x[:, :, heads]
    return x[:, :, torch.arange(H, device=x.device)[heads] // (H // x.shape[2])]


def _forward(
    segments: Segments, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, initial_state: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the unscaled output [n, R, H, C, G, V], final states [N, H, K, V] and entering states [n, R, H, K, V].

    Args:
        q: [n, R, H, C, G, K]. k: [n, R, H, C, K]. v: [n, R, H, C, V]. g: [n, R, H, C, D]. q, k and g are overwritten.
    """
    n, R, H, C, G, K = q.shape
    q = q.view(n * R * H, C * G, K)  # the G queries of a token share its key, so they are rows of one matrix
    k, v = k.flatten(0, 2), v.flatten(0, 2)  # [n*R*H, C, K], [n*R*H, C, V]
    A, decay = _ungated_scores(q, k) if g is None else _scores(q, k, g.flatten(0, 2).exp_())
    update = torch.bmm(k.mT, v)  # [n*R*H, K, V]
    decay, update = decay.unflatten(0, (n, R, H)), update.unflatten(0, (n, R, H))
    entering, final = segments.scan(decay, update, initial_state)  # [n, R, H, K, V], [N, H, K, V]
    o = torch.bmm(A, v).baddbmm_(q, entering.flatten(0, 2))  # [n*R*H, C*G, V]
    return o.view(n, R, H, C, G, v.shape[2]), final, entering


def _scores(q: Tensor, k: Tensor, alpha: Tensor) -> tuple[Tensor, Tensor]:
    """Turns q [S, C*G, K] and k [S, C, K] of S segments with gates alpha [S, C, D] into qg and kg, in place.

    Returns:
        A [S, C*G, C], and the product of the gates of each segment [S, D].
    """
    S, C, K = k.shape
    G, D = q.shape[1] // C, alpha.shape[2]
    A = _diagonal_scores(q, k)
    q.view(S, C, G, K).mul_(alpha[:, :, None])
    products = alpha  # [S, C/L, D], products of the gates of L tokens
    for L in (1 << level for level in range(C.bit_length() - 1)):
        m = C // (2 * L)  # number of blocks of 2L
        q_right = q.view(S * m, 2, L * G, K)[:, 1]  # [S*m, L*G, K]
        k_left = k.view(S * m, 2, L, K)[:, 0]  # [S*m, L, K]
        blocks = A.view(S, m, 2, L * G, m, 2, L)[:, :, 1, :, :, 0].diagonal(dim1=1, dim2=3)  # [S, L*G, L, m]
        blocks.copy_(torch.bmm(q_right, k_left.mT).view(S, m, L * G, L).movedim(1, 3))
        left, right = products.view(S * m, 2, 1, D).unbind(1)  # [S*m, 1, D]
        q_right *= left
        k_left *= right
        products = left * right
    return A, products.view(S, D)


def _diagonal_scores(q: Tensor, k: Tensor) -> Tensor:
    """Returns A [S, C*G, C] with only the pairs s = t filled in; the rest is 0."""
    S, C, _ = k.shape
    A = q.new_zeros(S, q.shape[1], C)
    pairs = (q.unflatten(1, (C, -1)) * k[:, :, None]).sum(-1)  # [S, C, G]
    A.unflatten(1, (C, -1)).diagonal(dim1=1, dim2=3).copy_(pairs.mT)
    return A


def _ungated_scores(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Computes `_scores` for gates that are all 1: qg is q, and kg is k."""
    S, C, _ = k.shape
    A = torch.bmm(q, k.mT)  # [S, C*G, C]
    A.unflatten(1, (C, -1)).transpose(1, 2).tril_()
    return A, k.new_ones(S, 1)
