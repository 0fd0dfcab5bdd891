"""Bugs in delta rules."""

from types import SimpleNamespace

import torch
import torch.nn.functional as F

from tests.conformance.bugs.plant import REFERENCE, Op

delta = Op("chunk_delta_fwd", "o", "state", "checkpoints")
delta_backward = Op("chunk_delta_bwd", "dq", "dk", "dv", "dg", "dbeta", "dinitial_state")
delta_summary = Op("chunk_delta_summary", "transition", "state")
delta_step = Op("recurrent_delta_step", "o", "state")
delta_replayed = Op("recurrent_delta_replay")


def recurrence(x, transition_first=False, all_of_the_error=False, keys=None):
    """Computes a delta rule token by token, without packed sequences, and perhaps wrongly.

    Args:
        transition_first: whether the state forgets a key before it is decayed, and not after.
        all_of_the_error: whether the whole error is written, and not its share beta.
        keys: the keys by which the state is read, by default those by which it is written.
    """
    R, state = x.v.shape[2] // x.k.shape[2], x.initial_state
    q, k, read = (y.repeat_interleave(R, 2) for y in (x.q, x.k, x.k if keys is None else keys))
    state = k.new_zeros(*k.shape[:1], *k.shape[2:], x.v.shape[-1]) if state is None else state
    alpha = torch.ones_like(k) if x.g is None else x.g.exp()
    o = []
    for t in range(k.shape[1]):
        decay, beta = alpha[:, t, :, :, None], 1 if all_of_the_error else x.beta[:, t, :, None]
        state = state if transition_first else decay * state
        forgotten, learnt = beta * torch.einsum("bhk,bhkv->bhv", read[:, t], state), beta * x.v[:, t]
        state = state - torch.einsum("bhk,bhv->bhkv", k[:, t], forgotten)
        state = (decay * state if transition_first else state) + torch.einsum("bhk,bhv->bhkv", k[:, t], learnt)
        o.append(x.scale * torch.einsum("bhk,bhkv->bhv", q[:, t], state))
    return torch.stack(o, 1), state


delta.bugs(
    "test_values[short-float32]",
    beta_of_the_token_before=lambda x: delta(x, beta=x.beta.roll(1, 1)),
    transition_applied_before_the_decay=lambda x: (*recurrence(x, transition_first=True), None),
    u_not_times_beta=lambda x: (*recurrence(x, all_of_the_error=True), None),
    # (I + B M) U = B X with the diagonal of k k^T in M
    block_solved_with_its_diagonal=lambda x: delta(
        x, beta=x.beta / (1 + x.beta * x.k.square().sum(-1).repeat_interleave(x.v.shape[2] // x.k.shape[2], -1))
    ),
    read_left_out=lambda x: REFERENCE["chunk_gla_fwd"](**{n: y for n, y in vars(x).items() if n != "beta"}),
)
delta.bugs(
    "test_keys_of_any_length[last_chunk_partial-float32-4.0",
    keys_normalised_without_being_asked=lambda x: delta(x, k=F.normalize(x.k, dim=-1)),
)
delta.bugs("test_every_beta[short-float32-2.0]", beta_at_most_1=lambda x: delta(x, beta=x.beta.clamp(max=1)))
delta.bugs(
    "test_nothing_crosses_a_gate_of_minus_infinity[one_chunk-float32-41]",
    closed_gates_of_a_delta_rule_leak=lambda x: delta(x, g=x.g.clamp(min=-20)),
)


@delta.bug("test_values[grouped-float32]")
def value_heads_of_a_delta_rule_read_modulo(x):
    R = x.v.shape[2] // x.k.shape[2]
    return delta(x, q=x.q.repeat(1, 1, R, 1), k=x.k.repeat(1, 1, R, 1))


@delta_backward.bug("test_gradients[short-float32]", over={"dk"})
def sign_of_the_read_in_dk(x, y):
    k, read = (x.k.clone().requires_grad_() for _ in range(2))
    with torch.enable_grad():
        results = recurrence(SimpleNamespace(**{**vars(x), "k": k}), keys=read)
        loss = (results[0] * x.do).sum() + (0 if x.dstate is None else (results[1] * x.dstate).sum())
    dk, dread = torch.autograd.grad(loss, (k, read))
    y.dk = dk - dread


@delta_backward.bug("test_some_betas_of_0[short-float32]", over={"dbeta"})
def gradient_of_beta_divided_by_beta(x, y):
    y.dbeta = y.dbeta * x.beta / x.beta


delta_backward.bugs(
    "test_gradients[short-float32]",
    over={"dbeta"},
    gradient_of_beta_of_the_token_before=lambda x: SimpleNamespace(
        **{**vars(y := delta_backward(x)), "dbeta": y.dbeta.roll(1, 1)}
    ),
)


@delta_backward.bug("test_gradients[grouped-float32]", over={"dk"})
def dk_of_a_delta_rule_by_one_value_head(x, y):
    R = x.v.shape[2] // x.k.shape[2]
    y.dk = delta_backward(x, do=x.do * (torch.arange(x.v.shape[2]) % R == 0)[:, None], dstate=None).dk


@delta_summary.bug("test_values[last_chunk_partial-float32]", over={"transition"})
def transition_of_the_last_chunk_alone(x, y):
    if x.cu_seqlens is None and x.k.shape[1] > 64:
        last = {n: z[:, 64:] for n, z in vars(x).items() if isinstance(z, torch.Tensor) and z.ndim > 1}
        y.transition = delta_summary(x, **last).transition


delta_step.bugs(
    "test_values[small-float32]", beta_of_the_step_left_out=lambda x: delta_step(x, beta=torch.ones_like(x.beta))
)


@delta_step.bug("test_values[grouped-float32]")
def value_heads_of_a_step_read_modulo(x):
    R = x.v.shape[1] // x.k.shape[1]
    return delta_step(x, q=x.q.repeat(1, R, 1), k=x.k.repeat(1, R, 1))


@delta_replayed.bug("test_values[small-float32]", over={"ring_v"})
def ring_holds_v(x):
    o, L = delta_replayed(x), x.ring_v.shape[1]
    for n, slot in enumerate(x.slots.tolist()):
        for t in range(x.q.shape[1]):
            x.ring_v[slot, int(x.ring_start[n] + x.num_accepted[n] + t) % L] = x.v[n, t]
    return o


@delta_replayed.bug("test_values[small-float32]", over={"o"})
def accepted_tokens_read_the_state(x):
    """The delta rule advances a state by them, as if u were v."""
    for n, slot in enumerate(x.slots.tolist()):
        for i in range(int(x.num_accepted[n])):
            at = slot, int(x.ring_start[n] + i) % x.ring_k.shape[1]
            k, v, g = (ring[at][None] for ring in (x.ring_k, x.ring_v, x.ring_g))
            token = {"q": k, "k": k, "v": v, "g": g, "beta": v.new_ones(v.shape[:2]), "state": x.pool[slot][None]}
            options = {"scale": 1.0, "state_indices": None, "gate_normalizer": None, "inplace": False}
            x.pool[slot] = REFERENCE["recurrent_delta_step"](**token, **options)[1][0]
    none = torch.zeros_like(x.num_accepted)
    return delta_replayed(x, ring_start=x.ring_start + x.num_accepted, num_accepted=none)
