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
from gla_reference._chunks import Dense, Packed, chunk

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

    A = _diagonal_scores(qc, kc)  # [R, H, n, C, G, C]
    q_in, k_out, block_decay = qc.mul_(alpha[..., None, :]), kc, alpha
    for L in _halves(alpha):
        _scores(A, L).copy_(_rows(_right(q_in, L)) @ _left(k_out, L).mT)
        block_decay = _double(q_in, k_out, block_decay, L)
    decay = block_decay.squeeze(-2)  # [R, H, n, D]

    start = _state(initial_state, k, v, chunks.N)  # [N, H, K, V]
    entering, final = chunks.scan(start, decay, k_out.mT @ vc)  # [R, H, n, K, V]
    o = (_rows(A) @ vc).add_(_rows(q_in) @ entering)  # [R, H, n, C*G, V]
    o = o.unflatten(-2, (-1, qc.shape[-2]))  # [R, H, n, C, G, V]
    o = _join(chunks, o, v.dtype)
    checkpoints = None
    if checkpoint_every is not None:
        dtype = torch.bfloat16 if q.dtype == torch.bfloat16 else entering.dtype
        checkpoints = _fresh(chunks.checkpoints(entering, checkpoint_every), dtype)
    return o, _fresh(final) if output_final_state else None, checkpoints


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

    A = _diagonal_scores(qc, kc)  # [R, H, n, C, G, C]
    dA = (_rows(doc) @ vc.mT).view_as(A)
    dA_tt = dA.diagonal(dim1=3, dim2=5).movedim(-1, 3)[..., None]  # [R, H, n, C, G, 1]
    dq = dA_tt * kc[..., None, :]  # [R, H, n, C, G, K]
    dk = (dA_tt * qc).sum(-2)  # [R, H, n, C, K]
    dg = torch.zeros_like(alpha)  # [R, H, n, C, D]
    q_in, k_out, block_decay = qc.mul_(alpha[..., None, :]), kc, alpha
    upto, after = alpha.clone(), torch.ones_like(alpha)  # products of gates: through t, and after s
    for L in _halves(alpha):
        q_right, k_left = _rows(_right(q_in, L)), _left(k_out, L)  # [R, H, n, m, L*G, K], [R, H, n, m, L, K]
        dscores = _scores(dA, L)  # [R, H, n, m, L*G, L]
        _scores(A, L).copy_(q_right @ k_left.mT)
        _add_query_gradient(_right(dq, L), _right(dg, L), dscores @ k_left, q_right, _right(upto, L))
        _add_key_gradient(_left(dk, L), _left(dg, L), dscores.mT @ q_right, k_left, _left(after, L))
        _double(upto, after, block_decay, L)
        block_decay = _double(q_in, k_out, block_decay, L)
    decay = block_decay.squeeze(-2)  # [R, H, n, D]

    start = _state(initial_state, k, v, chunks.N)  # [N, H, K, V]
    update = k_out.mT @ vc  # [R, H, n, K, V]
    if checkpoints is None or checkpoint_every is None:
        entering, _ = chunks.scan(start, decay, update)  # [R, H, n, K, V]
    else:
        entering = chunks.resume(checkpoints, checkpoint_every, decay, update)
    dfinal = torch.zeros_like(start) if dstate is None else dstate
    leaving, dinitial = chunks.scan(dfinal, decay, _rows(q_in).mT @ _rows(doc), reverse=True)  # gradients of states
    dv = _rows(A).mT @ _rows(doc) + k_out @ leaving  # [R, H, n, C, V]
    _add_query_gradient(dq, dg, _rows(doc) @ entering.mT, q_in, upto)
    _add_key_gradient(dk, dg, vc @ leaving.mT, k_out, after)
    dg += _per_gate(decay * (entering * leaving).sum(-1), dg)[..., None, :]  # from the entering to the leaving state
    return (
        _sum_of_values(_join(chunks, scale * dq), q).to(q.dtype),
        _sum_of_values(_join(chunks, dk), k).to(k.dtype),
        _join(chunks, dv, v.dtype),
        None if g is None else gradient_of_logits(_sum_of_tokens(_join(chunks, dg), g), g, gate_normalizer).to(g.dtype),
        None if initial_state is None else _fresh(dinitial),
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
    gates = left.new_zeros(()).expand(B, T, H, 1) if g is None else _for_tokens(g, right[:, :, :H])
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

    q, k = (_for_values(x, k, v) for x in (q, k))
    gates = (
        q.new_zeros(()).expand(*v.shape[:3], 1) if g is None else _for_tokens(log_gates(g, gate_normalizer, dtype), v)
    )
    alpha = cut(gates).exp_()  # 1 past the end of a sequence, where g is 0
    return chunks, cut(_group(q, v)).mul_(scale), cut(k), cut(v), alpha


def _for_tokens(g: Tensor, v: Tensor) -> Tensor:
    """Returns a gate of any form as a view [B, T, H, D] for values [B, T, H, V]."""
    return g if g.ndim == 4 else g[..., None].expand(*v.shape[:3], 1)


def _for_values(x: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Copies each head of q or k for the value heads that read it; returns x itself if k has as many heads as v."""
    return x.repeat_interleave(v.shape[2] // k.shape[2], dim=2) if k.shape[2] < v.shape[2] else x


def _halves(alpha: Tensor) -> list[int]:
    """Returns the lengths L = 1, 2, 4 ... C/2 of the halves, innermost first."""
    return [1 << level for level in range(alpha.shape[3].bit_length() - 1)]


def _double(q: Tensor, k: Tensor, block_decay: Tensor, L: int) -> Tensor:
    """Joins neighbouring blocks of L tokens in place, by the associative rule of the gates.

    The rows of q [.., C, (G,) K] come decayed from the start of their block; right blocks are also decayed by the block
    to their left. The rows of k [.., C, K] come decayed to the end of their block; left blocks are also decayed by the
    block to their right. block_decay [.., C/L, D] holds the product of the gates of each block.

    Returns:
        The products of the joined blocks [.., C/2L, D].
    """
    left_decay, right_decay = _left(block_decay, 1), _right(block_decay, 1)  # [R, H, n, m, 1, K]
    q_right, k_left = _right(q, L), _left(k, L)
    q_right *= left_decay if q.ndim == k.ndim else left_decay[..., None, :]
    k_left *= right_decay
    return (left_decay * right_decay).squeeze(-2)


def _diagonal_scores(q: Tensor, k: Tensor) -> Tensor:
    """Returns A [R, H, n, C, G, C] with only the pairs s = t filled in; the rest is 0."""
    A = q.new_zeros(*q.shape[:-1], q.shape[3])
    A.diagonal(dim1=3, dim2=5).copy_((q * k[..., None, :]).sum(-1).movedim(3, -1))
    return A


def _scores(A: Tensor, L: int) -> Tensor:
    """Returns the view [R, H, n, m, L*G, L] of A [R, H, n, C, G, C]: queries of right halves, keys of left halves."""
    blocks = A.unflatten(-1, (-1, 2, L)).select(-2, 0).unflatten(3, (-1, 2, L)).select(4, 1)  # [.., m, L, G, m, L]
    return blocks.diagonal(dim1=3, dim2=6).movedim(-1, 3).flatten(4, 5)


def _add_query_gradient(dq: Tensor, dg: Tensor, d: Tensor, q: Tensor, decay: Tensor) -> None:
    """Adds the contribution of d [.., L*G, K], the gradient of decayed rows q, to dq [.., L, G, K] and dg [.., L, D].

    A gate at or before token t decays row t, so dg sums from each gate to the end of the block.
    """
    d, q = d.view_as(dq), q.view_as(dq)
    dq += d * decay[..., None, :]
    dg += _per_gate((d * q).sum(-2), dg).flip(-2).cumsum(-2).flip(-2)


def _add_key_gradient(dk: Tensor, dg: Tensor, d: Tensor, k: Tensor, decay: Tensor) -> None:
    """Adds the contribution of d [.., L, K], the gradient of decayed rows k, to dk [.., L, K] and dg [.., L, D].

    A gate after token s decays row s, so dg sums from the start of the block to the token before each gate.
    """
    dk += d * decay
    dg[..., 1:, :] += _per_gate(d * k, dg)[..., :-1, :].cumsum(-2)


def _per_gate(x: Tensor, dg: Tensor) -> Tensor:
    """Returns x [.., K] summed over the keys that share a gate: [.., D]."""
    return x.sum(-1, keepdim=True) if dg.shape[-1] == 1 else x


def _left(x: Tensor, L: int) -> Tensor:
    """Returns the view [R, H, n, m, L, ...] of x [R, H, n, C, ...] with the left halves of its blocks of 2L."""
    return x.unflatten(3, (-1, 2, L)).select(4, 0)


def _right(x: Tensor, L: int) -> Tensor:
    return x.unflatten(3, (-1, 2, L)).select(4, 1)


def _rows(x: Tensor) -> Tensor:
    """Returns x [..., L, G, K] as rows [..., L*G, K] of one matrix: the G queries of a token share its key."""
    return x.flatten(-3, -2)


def _group(q: Tensor, v: Tensor) -> Tensor:
    """Returns q or do [B, T, H G, ..] as [B, T, H, G, ..]."""
    return rearrange(q, "b t (h g) d -> b t h g d", h=v.shape[2])


def _join(chunks: Dense | Packed, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Returns a new tensor [B, T, H (G), ..] with the tokens of x [R, H, n, C, (G,) ..], by default in its dtype."""
    R, H = x.shape[:2]
    heads = H * (x.shape[4] if x.ndim == 6 else 1)
    out = torch.empty(R, chunks.T, heads, x.shape[-1], dtype=dtype or x.dtype, device=x.device)
    chunks.join(x, out.unflatten(2, (H, -1)) if x.ndim == 6 else out)
    return out


def _sum_of_values(dx: Tensor, x: Tensor) -> Tensor:
    """Sums the gradient of q or k over the value heads that read each head of x."""
    return dx if dx.shape[2] == x.shape[2] else dx.unflatten(2, (x.shape[2], -1)).sum(3)


def _sum_of_tokens(dg: Tensor, g: Tensor) -> Tensor:
    """Returns the gradient of g in its shape, from the gradient of each token's gates [B, T, H, D]."""
    return dg if g.ndim == 4 else dg.sum(-1) if g.ndim == 3 else dg.sum((0, 1, 3))


def _fresh(states: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Returns a copy; `states` may be an argument of the call, or a slice of a larger tensor."""
    return states.to(dtype or states.dtype, memory_format=torch.contiguous_format, copy=True)


def _state(initial: Tensor | None, k: Tensor, v: Tensor, N: int) -> Tensor:
    """Returns the initial state, or zeros [N, H, K, V] if it is None."""
    if initial is not None:
        return initial
    return k.new_zeros(N, v.shape[2], k.shape[3], v.shape[3], dtype=wide(k.dtype))
