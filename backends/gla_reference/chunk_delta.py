"""The delta rule in chunks: matrix products inside a chunk, and a loop over chunks that carries the state.

Per value head, with alpha_t = exp(g_t), a number for each key or one number, and beta_t a number,

    u_t = beta_t (v_t - k_t diag(alpha_t) S_{t-1})
    S_t = diag(alpha_t) S_{t-1} + k_t^T u_t
    o_t = scale * q_t S_t

For a chunk of C tokens let S be the state that enters it and S' the state that leaves it, D_ts the product of the gates
after token s through token t, B the diagonal matrix of the betas, and one row of a matrix belong to one token:

    q_in, k_in   scale * q_t and k_t times the gates from the start through t      k_out   k_s times the gates after s
    A_ts = scale * sum_d q_td k_sd D_tsd   for s <= t, else 0
    M_ts = sum_d k_td k_sd D_tsd           for s < t, else 0

    u_t subtracts what S and the tokens before t hold at k_t:   U = B (V - k_in S - M U)
    The solution is   U = W (V - k_in S),   W = B (I - G B),   G = (I + M B)^-1 M
    o  = q_in S + A U
    S' = decay S + k_out^T U   =   P S + R     with P = decay - k_out^T W k_in,  R = k_out^T W V

G is strictly lower triangular, and nothing is divided by beta, which may be 0. The products of gates come from halving
the chunk (_halving.py): q and k are two queries of each token for the key k. Without the read of the state, with M = 0
and k_in = 0, all of this is gated linear attention (chunk_gla.py).

The backward goes through the same equations in reverse. With dS' the gradient of the state that leaves the chunk,

    dU = A^T do + k_out dS'     Y = dU - G^T B dU     dV = B Y     dbeta = sum_V Y * (U without the factor B)
    dS = P^T dS' + q_in^T do - k_in^T W^T A^T do
    dA = do U^T                 dM = -dV U^T          d q_in = do S^T     d k_in = -dV S^T     d k_out = U dS'^T

and q, k and the gates get their gradients from the pairs of tokens at each level of halving, as in chunk_gla.py. No
large sums are subtracted, so the gradient of a gate of -inf is exactly 0.

B batch   T tokens   H value heads, and heads of states, gates and betas   N sequences   K, V key and value width
D keys of a gate: K, or 1 if the keys of a token share a gate
R rows, n chunks per row, C tokens per chunk (_chunks.py)   L length of a half block

If k has fewer heads than v, each head of k and q is copied for the value heads that read it, and their gradients are
summed at the end.

Sources: Yang et al., "Parallelizing Linear Transformers with the Delta Rule over Sequence Length" (arXiv 2406.06484)
and "Gated Delta Networks: Improving Mamba2 with Delta Rule" (arXiv 2412.06464); Kimi Team, "Kimi Linear: An Expressive,
Efficient Attention Architecture" (arXiv 2510.26692).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gla_core.dispatch.tensors import checkpoint_dtype, gradient_of_logits, log_gates, wide
from gla_reference._chunks import Dense, Packed, chunk
from gla_reference._halving import (
    add_key_gradient,
    add_query_gradient,
    as_rows,
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


def chunk_delta_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    scale: float,
    initial_state: Tensor | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
    checkpoint_every: int | None,
    gate_normalizer: int | None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Computes the op; see gla_core/ops/delta/chunk_delta.py."""
    chunks, *tokens = _split(q, k, v, g, beta, scale, cu_seqlens, gate_normalizer)
    x = _Chunk.from_tokens(*tokens)
    start = initial_or_zeros(initial_state, k, v, chunks.N)  # [N, H, K, V]
    entering, final = chunks.scan(start, x.transition, x.update)  # [R, H, n, K, V]
    o = join(chunks, x.q_in @ entering + x.A @ x.corrections(entering), v.dtype)
    checkpoints = None
    if checkpoint_every is not None:
        checkpoints = fresh(chunks.checkpoints(entering, checkpoint_every), checkpoint_dtype(q.dtype))
    return o, fresh(final) if output_final_state else None, checkpoints


def chunk_delta_bwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    scale: float,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    checkpoints: Tensor | None,
    checkpoint_every: int | None,
    do: Tensor,
    dstate: Tensor | None,
    gate_normalizer: int | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor, Tensor | None]:
    """Computes the op; see gla_core/ops/delta/chunk_delta.py."""
    chunks, qc, kc, vc, alpha, bc = _split(q, k, v, g, beta, scale, cu_seqlens, gate_normalizer)
    doc = chunks.split(do).to(alpha.dtype)  # [R, H, n, C, V]
    x = _Chunk.from_tokens(qc, kc, vc, alpha, bc)

    start = initial_or_zeros(initial_state, k, v, chunks.N)  # [N, H, K, V]
    if checkpoints is None or checkpoint_every is None:
        entering, _ = chunks.scan(start, x.transition, x.update)  # [R, H, n, K, V]
    else:
        entering = chunks.resume(checkpoints, checkpoint_every, x.transition, x.update)
    dfinal = torch.zeros_like(start) if dstate is None else dstate
    leaving, dinitial = chunks.scan(dfinal, x.transition.mT, x.gradient_update(doc), reverse=True)

    errors = x.errors(entering)  # U before it is multiplied by beta [R, H, n, C, V]
    U = bc * errors
    dU = x.A.mT @ doc + x.k_out @ leaving
    Y = dU - x.G.mT @ (bc * dU)
    dv = bc * Y

    # The gradients of the rows q and k, which a gate decays from the left, and of the columns k.
    dscores = torch.stack([doc @ U.mT, -dv @ U.mT], -2)  # of A and M [R, H, n, C, 2, C]
    drows, dcolumns, dg = torch.zeros_like(x.rows), torch.zeros_like(kc), torch.zeros_like(alpha)
    rows, columns, block_decay = _rows(qc, kc, alpha), kc.clone(), alpha
    upto, after = alpha.clone(), torch.ones_like(alpha)  # products of gates: through t, and after s
    for L in halves(alpha):
        right, left, d = as_rows(right_halves(rows, L)), left_halves(columns, L), scores(dscores, L)
        add_query_gradient(right_halves(drows, L), right_halves(dg, L), d @ left, right, right_halves(upto, L))
        add_key_gradient(left_halves(dcolumns, L), left_halves(dg, L), d.mT @ right, left, left_halves(after, L))
        double(upto, after, block_decay, L)
        block_decay = double(rows, columns, block_decay, L)
    from_entering = torch.stack([doc @ entering.mT, -dv @ entering.mT], -2)  # [R, H, n, C, 2, K]
    add_query_gradient(drows, dg, from_entering, rows, upto)
    add_key_gradient(dcolumns, dg, U @ leaving.mT, columns, after)
    through = block_decay.squeeze(-2) * (entering * leaving).sum(-1)  # [R, H, n, K]
    dg += per_gate(through, dg)[..., None, :]
    same = (doc * U).sum(-1, keepdim=True)  # the gradient of A_tt [R, H, n, C, 1]
    dq, dk = drows[..., 0, :] + same * kc, drows[..., 1, :] + dcolumns + same * qc
    return (
        sum_of_values(join(chunks, scale * dq), q).to(q.dtype),
        sum_of_values(join(chunks, dk), k).to(k.dtype),
        join(chunks, dv, v.dtype),
        None if g is None else gradient_of_logits(sum_of_tokens(join(chunks, dg), g), g, gate_normalizer).to(g.dtype),
        join(chunks, (Y * errors).sum(-1, keepdim=True), beta.dtype).squeeze(-1).clone(),
        None if initial_state is None else fresh(dinitial),
    )


class _Chunk(NamedTuple):
    """The matrices of all chunks, [R, H, n, ..]; the names are those of the equations above."""

    rows: Tensor  # [.., C, 2, K], q_in and k_in
    k_out: Tensor  # [.., C, K]
    A: Tensor  # [.., C, C]
    G: Tensor  # [.., C, C]
    v: Tensor  # [.., C, V]
    beta: Tensor  # [.., C, 1]
    transition: Tensor  # P [.., K, K]
    update: Tensor  # R [.., K, V]

    @staticmethod
    def from_tokens(q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, beta: Tensor) -> _Chunk:
        """Computes the matrices of chunks from scale * q, k [R, H, n, C, K], v, alpha and beta."""
        rows, k_out, block_decay = _rows(q, k, alpha), k.clone(), alpha
        pairs = rows.new_zeros(*rows.shape[:-1], rows.shape[3])  # A and M [R, H, n, C, 2, C]
        pairs[..., 0, :].diagonal(dim1=-2, dim2=-1).copy_((q * k).sum(-1))
        for L in halves(alpha):
            scores(pairs, L).copy_(as_rows(right_halves(rows, L)) @ left_halves(k_out, L).mT)
            block_decay = double(rows, k_out, block_decay, L)
        decay = block_decay.squeeze(-2)  # [R, H, n, D]
        A, M = pairs.unbind(-2)
        # unitriangular: the diagonal of I + M B is 1
        G = torch.linalg.solve_triangular(M * beta.mT, M, upper=False, unitriangular=True)
        read, written = (beta * (x - G @ (beta * x)) for x in (rows[..., 1, :], v))  # W k_in, W V
        transition = torch.diag_embed(decay.expand(*decay.shape[:-1], k.shape[-1])) - k_out.mT @ read
        return _Chunk(rows, k_out, A, G, v, beta, transition, k_out.mT @ written)

    @property
    def q_in(self) -> Tensor:
        return self.rows[..., 0, :]

    @property
    def k_in(self) -> Tensor:
        return self.rows[..., 1, :]

    def errors(self, entering: Tensor) -> Tensor:
        """Returns what U is before it is multiplied by beta [R, H, n, C, V], from the states that enter chunks."""
        rest = self.v - self.k_in @ entering
        return rest - self.G @ (self.beta * rest)

    def corrections(self, entering: Tensor) -> Tensor:
        """Returns U [R, H, n, C, V], what the tokens write, from the states that enter chunks."""
        return self.beta * self.errors(entering)

    def gradient_update(self, do: Tensor) -> Tensor:
        """Returns the gradients of the states that enter chunks [R, H, n, K, V] if those that leave have none."""
        dU = self.A.mT @ do
        return self.q_in.mT @ do - self.k_in.mT @ (self.beta * (dU - self.G.mT @ (self.beta * dU)))


def _rows(q: Tensor, k: Tensor, alpha: Tensor) -> Tensor:
    """Returns q and k [.., C, K] as rows [.., C, 2, K], each decayed by the gate of its own token."""
    return torch.stack([q, k], -2) * alpha[..., None, :]


def _split(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    scale: float,
    cu_seqlens: Tensor | None,
    gate_normalizer: int | None,
) -> tuple[Dense | Packed, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Cuts copies of the arguments into chunks, in the dtype of the computation.

    Returns:
        The layout, scale * q and k [R, H, n, C, K], v [R, H, n, C, V], alpha [R, H, n, C, D], beta [R, H, n, C, 1].
    """
    (B, T), dtype = q.shape[:2], wide(q.dtype)
    chunks = chunk(B, T, min(CHUNK, 1 << max(T - 1, 0).bit_length()), cu_seqlens)  # C: at most the power of 2 above T

    def cut(x: Tensor) -> Tensor:
        return chunks.split(x).to(dtype, memory_format=torch.contiguous_format, copy=True)

    q, k = (for_values(x, k, v) for x in (q, k))
    gates = q.new_zeros(()).expand(*v.shape[:3], 1)  # without a gate
    if g is not None:
        gates = for_tokens(log_gates(g, gate_normalizer, dtype), v)
    return chunks, cut(q).mul_(scale), cut(k), cut(v), cut(gates).exp_(), cut(beta[..., None])
