"""An op with dense transitions and one more tensor of tokens over ranks: a delta rule, written as its recurrence."""

import dataclasses
import itertools

import torch
from ranks import rows_of_rank
from torch import Tensor

from gla_core.dispatch.tensors import number_of_sequences
from gla_core.distributed.over_ranks import OpOverRanks, OverRanks, over_ranks
from gla_core.distributed.shard import LAYOUTS
from gla_core.ops.gla.chunk_gla import BACKWARD, FORWARD
from gla_core.ops.spec import AS_INPUT, Argument, Result
from gla_core.workloads.inputs import gla_inputs


def recurrence(q, k, v, g, beta, S):
    """Computes S <- (1 - beta k^T k) diag(exp g) S + beta k^T v and o = q S from S [H, K, V], for tokens [T, H, ..]."""
    rows = [q.new_zeros(0, *v.shape[1:])]
    for t in range(len(q)):
        S = g[t].exp()[..., None] * S
        S = S + (beta[t, :, None] * k[t])[..., None] * (v[t] - torch.einsum("hk,hkv->hv", k[t], S))[:, None]
        rows.append(torch.einsum("hk,hkv->hv", q[t], S)[None])
    return torch.cat(rows), S


def sequences(tokens, state, cu_seqlens):
    """Computes the recurrence of every sequence, from state [N, H, K, V]; o is 0 outside of them."""
    v = tokens[2]
    if cu_seqlens is None:
        results = [recurrence(*(x[b] for x in tokens), state[b]) for b in range(len(v))]
        return torch.stack([o for o, _ in results]), torch.stack([S for _, S in results])
    offsets, ends, o = cu_seqlens.tolist(), [], torch.zeros_like(v)
    for n, (begin, end) in enumerate(itertools.pairwise(offsets)):
        y, S = recurrence(*(x[0, begin:end] for x in tokens), state[n])
        o = torch.cat([o[:, :begin], y[None], o[:, end:]], 1)
        ends.append(S)
    return o, torch.stack(ends)


def zero_state(tokens, cu_seqlens, V):
    k = tokens[1]
    return k.new_zeros(number_of_sequences(len(k), cu_seqlens), *k.shape[2:], V)


def summary(tokens, cu_seqlens, _backend):
    """Returns P [N, H, K, K], the map of the identity without values, and the states from zero [N, H, K, V]."""
    q, k, v, g, beta = tokens
    identity = zero_state(tokens, cu_seqlens, k.shape[3]) + torch.eye(k.shape[3], dtype=k.dtype)
    _, P = sequences((q, k, v.new_zeros(k.shape), g, beta), identity, cu_seqlens)
    return P, sequences(tokens, zero_state(tokens, cu_seqlens, v.shape[3]), cu_seqlens)[1]


def gradient_summary(tokens, scale, cu_seqlens, do, backend):
    state = zero_state(tokens, cu_seqlens, do.shape[3])
    with torch.enable_grad():
        o, _ = sequences(tokens, state.requires_grad_(), cu_seqlens)
        (dstate,) = torch.autograd.grad(scale * o + 0 * state.sum(), state, do)  # all sequences may be empty
    return summary(tokens, cu_seqlens, backend)[0].mT, dstate


def forward(*args):
    *tokens, scale, state, _, cu_seqlens, _, _, _, _, _ = args
    return scale * sequences(tokens, state, cu_seqlens)[0], None, None


def backward(*args):
    *inputs, cu_seqlens, _, _, do, dstate, _, _, _ = args
    with torch.enable_grad():
        *tokens, scale, state = [x.detach().requires_grad_() if isinstance(x, Tensor) else x for x in inputs]
        o, final = sequences(tokens, state, cu_seqlens)
        return torch.autograd.grad((scale * o, final), (*tokens, state), (do, dstate), materialize_grads=True)


class _chunk_delta_over_ranks(OverRanks):
    pass


BETA = Argument("beta", "Tensor", "B T Hv", AS_INPUT, differentiable=True)
FORWARD_SPEC, BACKWARD_SPEC = (
    dataclasses.replace(spec, arguments=(*spec.arguments[:4], BETA, *spec.arguments[4:]))
    for spec in (FORWARD, BACKWARD)
)
BACKWARD_SPEC = dataclasses.replace(
    BACKWARD_SPEC, results=(*BACKWARD.results[:4], Result("dbeta", like="beta"), BACKWARD.results[4])
)
OP = OpOverRanks(
    _chunk_delta_over_ranks, summary, gradient_summary, FORWARD_SPEC, forward, BACKWARD_SPEC, backward, lambda _: None
)


def check_an_op_with_dense_transitions(ranks):
    """Outputs, final states and gradients equal those of one process that has all tokens."""
    T, lengths = 6 * ranks.number, (6,) * ranks.number
    for layout in LAYOUTS:
        for packed, states in ((None, True), ((T - 4, 0, 4), True), ((T - 4, 0, 4), False)):
            sizes = {"T": T, "B": 2} if packed is None else {"lengths": packed}
            x = gla_inputs(**sizes, H=2, K=3, V=4, dtype=torch.float64, initial_state=True, device=ranks.device)
            k = torch.nn.functional.normalize(x.k, dim=-1)
            tokens = [y.requires_grad_() for y in (x.q, k, x.v, x.g, torch.rand_like(x.g[..., 0]))]
            initial = x.initial_state.requires_grad_()
            start = initial if states else torch.zeros_like(initial)
            o, final = sequences(tokens, start, x.cu_seqlens)
            do, dfinal = torch.randn_like(o), torch.randn_like(final) if states else torch.zeros_like(final)
            wanted = [*tokens, initial] if states else tokens
            gradients = torch.autograd.grad((0.3 * o, final), wanted, (do, dfinal))

            def rows(y, layout=layout):
                return rows_of_rank(y, ranks.rank, lengths, layout)

            local = [rows(y).detach().requires_grad_() for y in tokens]
            where = (None, x.cu_seqlens, None, None, layout)
            state = initial if states else None
            y, last = over_ranks(OP, tuple(local), 0.3, state, states, False, *where, None, 16, None)
            torch.testing.assert_close(y, rows(0.3 * o))
            outs, seeds = ((y, last), (rows(do), dfinal)) if states else ((y,), (rows(do),))
            actual = torch.autograd.grad(outs, [*local, initial] if states else local, seeds)
            expected = [rows(d) for d in gradients[:5]] + list(gradients[5:])
            torch.testing.assert_close(list(actual), expected)
            if states:
                torch.testing.assert_close(last, final)
