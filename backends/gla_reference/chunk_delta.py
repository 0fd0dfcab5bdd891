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

    u_t subtracts from v_t what S and the tokens before t hold at k_t:   U = B E,   E = V - k_in S - M U
    The solution is   E = T (V - k_in S),   T = (I + M B)^-1
    o  = q_in S + A U
    S' = decay S + k_out^T U

T is lower triangular with a diagonal of 1, and nothing is divided by beta, which may be 0. If the keys of a token share
a gate, A and M are products of q and k times D [C, C]. If not, they come from halving the chunk (_halving.py): q and k
are two queries of each token for the key k. With U = V all of this is gated linear attention (chunk_gla.py).

The backward goes through the same equations in reverse. With dS' the gradient of the state that leaves the chunk,

    dU = A^T do + k_out dS'     dv = T^T B dU     dbeta = sum_V E * (dU - M^T dv)
    dS = decay dS' + q_in^T do - k_in^T dv
    dA = do U^T                 dM = -dv U^T      d q_in = do S^T     d k_in = -dv S^T     d k_out = U dS'^T

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
from gla_reference._chunks import Dense, Packed, Step, chunk
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
    U = torch.empty_like(x.written)  # [R, H, n, C, V]

    def step(c: int | slice, S: Tensor) -> Tensor:
        U[:, :, c] = x.corrections(c, S)
        return x.after(c, S, U[:, :, c])

    entering, final = chunks.scan(start, step)  # [R, H, n, K, V]
    o = join(chunks, (x.q_in @ entering).add_(x.A @ U), v.dtype)
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
        entering, _ = chunks.scan(start, x.step)  # [R, H, n, K, V]
    else:
        entering = chunks.resume(checkpoints, checkpoint_every, x.step, alpha.dtype)
    dfinal = torch.zeros_like(start) if dstate is None else dstate
    leaving, dinitial = chunks.scan(dfinal, x.step_back(doc), reverse=True)

    E = x.T @ (vc - x.k_in @ entering)  # [R, H, n, C, V]
    U = bc * E
    dU = x.A.mT @ doc + x.k_out @ leaving
    dv = x.T.mT @ (bc * dU)
    dbeta = (E * (dU - x.M.mT @ dv)).sum(-1, keepdim=True)

    # The gradients of the rows q and k, which a gate decays from the left, and of the columns k.
    dscores = torch.stack([doc @ U.mT, -dv @ U.mT], -2)  # of A and M [R, H, n, C, 2, C]
    rows, columns, block_decay = _rows(qc, kc, alpha), kc.clone(), alpha
    drows, dcolumns, dg = torch.zeros_like(rows), torch.zeros_like(kc), torch.zeros_like(alpha)
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
        join(chunks, dbeta, beta.dtype).squeeze(-1).clone(),
        None if initial_state is None else fresh(dinitial),
    )


class _Chunk(NamedTuple):
    """The matrices of all chunks, [R, H, n, ..]; the names are those of the equations above."""

    q_in: Tensor  # [.., C, K]
    k_in: Tensor  # [.., C, K]
    k_out: Tensor  # [.., C, K]
    A: Tensor  # [.., C, C]
    M: Tensor  # [.., C, C]
    T: Tensor  # [.., C, C]
    beta: Tensor  # [.., C, 1]
    decay: Tensor  # [.., D]
    written: Tensor  # B T V [.., C, V], what U is if S is 0
    read: Tensor  # B T k_in [.., C, K], what U subtracts is this times S

    @staticmethod
    def from_tokens(q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, beta: Tensor) -> _Chunk:
        """Computes the matrices of chunks from scale * q, k [R, H, n, C, K], v, alpha and beta."""
        q_in, k_in, k_out, A, M, decay = (_whole if alpha.shape[-1] == 1 else _halved)(q, k, alpha)
        identity = torch.eye(M.shape[-1], dtype=M.dtype, device=M.device).expand_as(M)
        T = torch.linalg.solve_triangular(M * beta.mT, identity, upper=False, unitriangular=True)  # its diagonal is 1
        W = beta * T
        return _Chunk(q_in, k_in, k_out, A, M, T, beta, decay, W @ v, W @ k_in)

    def corrections(self, c: int | slice, S: Tensor) -> Tensor:
        """Returns U [R, H, (m,) C, V] of chunks c, what their tokens write, from the states S that enter them."""
        return self.written[:, :, c] - self.read[:, :, c] @ S

    def after(self, c: int | slice, S: Tensor, U: Tensor) -> Tensor:
        """Returns the states that leave chunks c, from the states S that enter them."""
        return torch.addcmul(self.k_out[:, :, c].mT @ U, self.decay[:, :, c, :, None], S)

    def step(self, c: int | slice, S: Tensor) -> Tensor:
        """Returns the states that leave chunks c, from the states S that enter them; see `Step`."""
        return self.after(c, S, self.corrections(c, S))

    def step_back(self, do: Tensor) -> Step:
        """Returns the step from the gradients of the states that leave chunks to those of the states that enter."""
        solve = (self.beta * self.T).mT
        from_o, from_state = solve @ (self.A.mT @ do), solve @ self.k_out  # dv is from_o + from_state dS'
        through_o = self.q_in.mT @ do  # [R, H, n, K, V]

        def step(c: int | slice, dS: Tensor) -> Tensor:
            dv = from_o[:, :, c] + from_state[:, :, c] @ dS
            return self.decay[:, :, c, :, None] * dS + through_o[:, :, c] - self.k_in[:, :, c].mT @ dv

        return step


def _whole(q: Tensor, k: Tensor, alpha: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Computes `_halved` if the keys of a token share a gate: alpha is [R, H, n, C, 1].

    Products of gates come from gates, without a division, so a gate of 0 needs no special case.
    """
    later = torch.ones(alpha.shape[3], alpha.shape[3], dtype=torch.bool, device=alpha.device).tril(-1)  # t > s
    D = torch.where(later, alpha, 1).cumprod(-2).tril()  # [R, H, n, C, C]
    upto, after = alpha[..., :1, :] * D[..., :1], D[..., -1, :, None]  # [R, H, n, C, 1]
    A, M = (q @ k.mT).mul_(D), (k @ k.mT).mul_(D)
    M.diagonal(dim1=-2, dim2=-1).zero_()
    return q * upto, k * upto, k * after, A, M, upto[..., -1, :]


def _halved(q: Tensor, k: Tensor, alpha: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Returns q_in, k_in, k_out [R, H, n, C, K], A, M [R, H, n, C, C], and the decay of chunks [R, H, n, K].

    Args:
        q, k, alpha: scale * q, k and the gates [R, H, n, C, K].
    """
    rows, columns, block_decay = _rows(q, k, alpha), k.clone(), alpha
    pairs = rows.new_zeros(*rows.shape[:-1], rows.shape[3])  # A and M [R, H, n, C, 2, C]
    pairs[..., 0, :].diagonal(dim1=-2, dim2=-1).copy_((q * k).sum(-1))
    for L in halves(alpha):
        scores(pairs, L).copy_(as_rows(right_halves(rows, L)) @ left_halves(columns, L).mT)
        block_decay = double(rows, columns, block_decay, L)
    (q_in, k_in), (A, M) = rows.unbind(-2), pairs.unbind(-2)
    return q_in, k_in, columns, A, M, block_decay.squeeze(-2)


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
