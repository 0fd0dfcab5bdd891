"""Gated linear attention in chunks: matrix products inside a chunk, and a loop over chunks that carries the state.

For a head and a chunk, let b_t be the sum of the log gates g of the chunk through token t, S the state that enters the
chunk, and S' the state that leaves it. Then

    A_ts = scale * sum_d q_td k_sd exp(b_td - b_sd)   for s <= t, else 0
    o    = (scale * q * exp b) S + A v
    S'   = diag(exp b_C) S + (k * exp(b_C - b))^T v

exp(b_t - b_s) is the product of the gates alpha = exp g after s through t. A quotient exp(b_t) / exp(b_s) would
overflow, and would be 0/0 after a gate of 0. So no division is used. Instead, the chunk is halved repeatedly. For s in
the left half and t in the right half of the same block,

    product of gates after s through t  =  (after s to the end of the left half) * (start of the right half through t)

Both factors lie in [0, 1], so gates down to exp(-inf) = 0 need no special case, and each block of A is one matrix
product. Every pair s < t occurs at exactly one of the log2(C) levels; a pair s = t has no gate. For the whole chunk,
the same products are exp(b_C - b_s) and exp b_t, which the state needs.

The gradient of g_j sums over all pairs s < j <= t. A pair contributes its share of q_t * dq_t, or of k_s * dk_s. These
shares are summed from the outer end of the block to token j. No large sums are subtracted, so the gradient is exactly 0
if alpha_j is 0.

B batch   T tokens   H value heads, and heads of states and gates   G query heads per value head   N sequences
K, V key and value width   D keys of a gate: K, or 1 if the keys of a token share a gate
R rows, n chunks per row, C tokens per chunk (_chunks.py)   L length of a half block   m blocks of 2L

If k has fewer heads than v, each head of k and q is copied for the value heads that read it, and their gradients are
summed at the end.

Source: Yang et al., "Gated Linear Attention Transformers with Hardware-Efficient Training" (arXiv 2312.06635).
"""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor

from gla_core.dispatch.tensors import gradient_of_logits, log_gates, wide
from gla_core.dispatch.transitions import apply
from gla_reference._chunks import Step, chunk
from gla_reference._halving import (
    add_key_gradient,
    add_query_gradient,
    as_rows,
    diagonal_scores,
    double,
    for_tokens,
    for_values,
    fresh,
    halves,
    initial_or_zeros,
    join,
    left_halves,
    per_gate,
    right_halves,
    scores,
    sum_of_tokens,
    sum_of_values,
)

CHUNK = 64


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
    chunks, qc, kc, vc, alpha = _split(q, k, v, g, scale, cu_seqlens, gate_normalizer)

    A = diagonal_scores(qc, kc)  # [R, H, n, C, G, C]
    q_in, k_out, block_decay = qc.mul_(alpha[..., None, :]), kc, alpha
    for L in halves(alpha):
        scores(A, L).copy_(as_rows(right_halves(q_in, L)) @ left_halves(k_out, L).mT)
        block_decay = double(q_in, k_out, block_decay, L)
    decay = block_decay.squeeze(-2)  # [R, H, n, D]

    start = initial_or_zeros(initial_state, k, v, chunks.N)  # [N, H, K, V]
    entering, final = chunks.scan(start, _step(decay, k_out.mT @ vc))  # [R, H, n, K, V]
    o = (as_rows(A) @ vc).add_(as_rows(q_in) @ entering)  # [R, H, n, C*G, V]
    o = o.unflatten(-2, (-1, qc.shape[-2]))  # [R, H, n, C, G, V]
    o = join(chunks, o, v.dtype)
    checkpoints = None
    if checkpoint_every is not None:
        dtype = torch.bfloat16 if q.dtype == torch.bfloat16 else entering.dtype
        checkpoints = fresh(chunks.checkpoints(entering, checkpoint_every), dtype)
    return o, fresh(final) if output_final_state else None, checkpoints


def chunk_gla_bwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    scale: float,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    checkpoints: Tensor | None,
    checkpoint_every: int | None,
    do: Tensor,
    dstate: Tensor | None,
    gate_normalizer: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Computes the op; see gla_core/ops/gla/chunk_gla.py."""
    chunks, qc, kc, vc, alpha = _split(q, k, v, g, scale, cu_seqlens, gate_normalizer)
    doc = chunks.split(_group(do, v)).to(alpha.dtype)  # [R, H, n, C, G, V]

    A = diagonal_scores(qc, kc)  # [R, H, n, C, G, C]
    dA = (as_rows(doc) @ vc.mT).view_as(A)
    dA_tt = dA.diagonal(dim1=3, dim2=5).movedim(-1, 3)[..., None]  # [R, H, n, C, G, 1]
    dq = dA_tt * kc[..., None, :]  # [R, H, n, C, G, K]
    dk = (dA_tt * qc).sum(-2)  # [R, H, n, C, K]
    dg = torch.zeros_like(alpha)  # [R, H, n, C, D]
    q_in, k_out, block_decay = qc.mul_(alpha[..., None, :]), kc, alpha
    upto, after = alpha.clone(), torch.ones_like(alpha)  # products of gates: through t, and after s
    for L in halves(alpha):
        q_right = as_rows(right_halves(q_in, L))  # [R, H, n, m, L*G, K]
        k_left = left_halves(k_out, L)  # [R, H, n, m, L, K]
        dscores = scores(dA, L)  # [R, H, n, m, L*G, L]
        scores(A, L).copy_(q_right @ k_left.mT)
        add_query_gradient(right_halves(dq, L), right_halves(dg, L), dscores @ k_left, q_right, right_halves(upto, L))
        add_key_gradient(left_halves(dk, L), left_halves(dg, L), dscores.mT @ q_right, k_left, left_halves(after, L))
        double(upto, after, block_decay, L)
        block_decay = double(q_in, k_out, block_decay, L)
    decay = block_decay.squeeze(-2)  # [R, H, n, D]

    start = initial_or_zeros(initial_state, k, v, chunks.N)  # [N, H, K, V]
    step = _step(decay, k_out.mT @ vc)
    if checkpoints is None or checkpoint_every is None:
        entering, _ = chunks.scan(start, step)  # [R, H, n, K, V]
    else:
        entering = chunks.resume(checkpoints, checkpoint_every, step, decay.dtype)
    dfinal = torch.zeros_like(start) if dstate is None else dstate
    back = _step(decay, as_rows(q_in).mT @ as_rows(doc))
    leaving, dinitial = chunks.scan(dfinal, back, reverse=True)  # gradients of states
    dv = as_rows(A).mT @ as_rows(doc) + k_out @ leaving  # [R, H, n, C, V]
    add_query_gradient(dq, dg, as_rows(doc) @ entering.mT, q_in, upto)
    add_key_gradient(dk, dg, vc @ leaving.mT, k_out, after)
    dg += per_gate(decay * (entering * leaving).sum(-1), dg)[..., None, :]  # from the entering to the leaving state
    return (
        sum_of_values(join(chunks, scale * dq), q).to(q.dtype),
        sum_of_values(join(chunks, dk), k).to(k.dtype),
        join(chunks, dv, v.dtype),
        None if g is None else gradient_of_logits(sum_of_tokens(join(chunks, dg), g), g, gate_normalizer).to(g.dtype),
        None if initial_state is None else fresh(dinitial),
    )


def chunk_gla_summary(
    left: Tensor,
    right: Tensor,
    g: Tensor | None,
    cu_seqlens: Tensor | None,
    backwards: bool,
    gate_normalizer: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Computes the op, without outputs and scores; see gla_core/ops/gla/chunk_gla_summary.py.

    The update of a chunk is the sum over t of (left_t * w_t)^T right_t. Forwards, w_t is the product of the gates after
    token t; backwards, of the gates through token t.
    """
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
    for L in halves(alpha):
        decay = double(upto, after, decay, L)
    lc = lc * (upto if backwards else after)[..., None, :]
    update = as_rows(lc).mT @ as_rows(rc)  # [R, H, n, K, V]

    # An additional column begins as 1 and is only decayed, so it becomes the decay of the sequence for each key.
    start = lc.new_zeros(chunks.N, H, K, V + 1)
    start[..., V] = 1
    update = torch.nn.functional.pad(update, (0, 1))
    _, final = chunks.scan(start, _step(decay.squeeze(-2), update), reverse=backwards)  # [N, H, K, V+1]
    return fresh(final[..., V]), fresh(final[..., :V])


def _step(decay: Tensor, update: Tensor) -> Step:
    """Returns the step of chunks with the decays [R, H, n, D] and the updates [R, H, n, K, V]."""
    return lambda c, S: apply(decay[:, :, c], S, update[:, :, c])


def _split(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    scale: float,
    cu_seqlens: Tensor | None,
    gate_normalizer: int | None,
) -> tuple:
    """Cuts copies of the arguments into chunks, in the dtype of the computation.

    Returns:
        The layout, scale * q [R, H, n, C, G, K], k [R, H, n, C, K], v [R, H, n, C, V], alpha [R, H, n, C, D].
    """
    dtype = wide(q.dtype)
    T = q.shape[1]
    C = min(CHUNK, 1 << max(T - 1, 0).bit_length())  # at most the power of two that holds T
    chunks = chunk(q.shape[0], T, C, cu_seqlens)

    def cut(x: Tensor) -> Tensor:
        return chunks.split(x).to(dtype, memory_format=torch.contiguous_format, copy=True)

    q, k = (for_values(x, k, v) for x in (q, k))
    gates = (
        q.new_zeros(()).expand(*v.shape[:3], 1) if g is None else for_tokens(log_gates(g, gate_normalizer, dtype), v)
    )
    alpha = cut(gates).exp_()  # 1 past the end of a sequence, where g is 0
    return chunks, cut(_group(q, v)).mul_(scale), cut(k), cut(v), alpha


def _group(q: Tensor, v: Tensor) -> Tensor:
    """Returns q or do [B, T, H G, ..] as [B, T, H, G, ..]."""
    return rearrange(q, "b t (h g) d -> b t h g d", h=v.shape[2])
