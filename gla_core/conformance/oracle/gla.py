"""The meaning of each op of gated linear attention, one token at a time in float64."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gla_core.conformance.oracle.pools import (
    for_value_heads,
    over_sequences,
    prompts_in_pool,
    replay_in_pool,
    step_in_pool,
    steps_in_pool,
    tokens_of,
    used_rows,
    zero_rows,
)


def chunk_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Runs the GLA recurrence over tokens, in float64.

    Args:
        Arguments of `gla_core.chunk_gla`, with any dtype and on any device.

    Returns:
        o [B, T, Ho, V] and the final state [N, Hv, K, V], both float64. o is 0 in rows that belong to no sequence.
    """
    o, state = chunk_gla_with_checkpoints(q, k, v, g, scale, initial_state, cu_seqlens)
    return o, state


def chunk_gla_with_checkpoints(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    checkpoint_every: int | None = None,
) -> tuple[Tensor, ...]:
    """Returns the results of `chunk_gla`, and the checkpoints if `checkpoint_every` is not None."""
    factor = q.shape[-1] ** -0.5 if scale is None else scale

    def sequence(x: Mapping[str, Any], state: Tensor) -> tuple[Tensor, list[Tensor]]:
        q, k, v = for_value_heads(x["q"], x["v"]), for_value_heads(x["k"], x["v"]), x["v"].double()
        states = [state]
        for k_t, v_t, alpha_t in zip(k.unbind(1), v.unbind(1), alpha_of(x["g"], v).unbind(1), strict=True):
            states.append(_next_state(k_t, v_t, alpha_t, states[-1]))
        o = zero_rows(q, v, 0) if len(states) == 1 else _read(q, torch.stack(states[1:], 1), factor)
        return o, states

    return over_sequences(sequence, {"q": q, "k": k, "v": v, "g": g}, initial_state, cu_seqlens, checkpoint_every)


def chunk_ssd(
    q: Tensor,
    k: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    dt_softplus: bool = False,
    dt_min: float = 0.0,
    dt_max: float = math.inf,
    checkpoint_every: int | None = None,
    z: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Returns o [B, T, Hv, V], the final state, and the checkpoints if `checkpoint_every` is not None, in float64."""
    x, delta = x.double(), dt.double() if dt_bias is None else dt.double() + dt_bias.double()
    delta = (torch.nn.functional.softplus(delta) if dt_softplus else delta).clamp(dt_min, dt_max)
    v, g = delta[..., None] * x, delta * A.double()
    o, *states = chunk_gla_with_checkpoints(q, k, v, g, 1.0, initial_state, cu_seqlens, checkpoint_every)
    if D is not None:
        o = o + x * (D[:, None] if D.ndim == 1 else D).double()
    if z is not None:
        o = o * z.double() * z.double().sigmoid()
    if cu_seqlens is not None:  # rows of no sequence have no output
        rows = torch.arange(x.shape[1], device=x.device)
        o = torch.where(((rows >= cu_seqlens[0]) & (rows < cu_seqlens[-1]))[:, None, None], o, 0)
    return o, *states


def alpha_of(g: Tensor | None, v: Tensor) -> Tensor:
    """Returns the forget gate of each token and value head [B, T, Hv, 1], or of each key of them [B, T, Hv, K]."""
    if g is None:
        return torch.ones_like(v[..., :1], dtype=torch.float64)
    g = g.double() if g.ndim == 4 else g.double()[..., None]
    return g.expand(*v.shape[:3], g.shape[-1]).exp()


def chunk_gla_gradient_summary(
    q: Tensor, do: Tensor, g: Tensor | None = None, cu_seqlens: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Returns the decay of each sequence, and the gradient of the state before it, in float64."""
    return chunk_gla_summary(q, do, g, cu_seqlens, backwards=True)


def chunk_gla_summary(
    k: Tensor, v: Tensor, g: Tensor | None = None, cu_seqlens: Tensor | None = None, backwards: bool = False
) -> tuple[Tensor, Tensor]:
    """Returns the decay [N, Hv, K] and the state from zero [N, Hv, K, V] of each sequence, in float64.

    With `backwards`, k and v are q and do.
    """
    if cu_seqlens is not None:
        parts = [
            chunk_gla_summary(k[:, a:b], v[:, a:b], tokens_of(g, a, b), None, backwards)
            for a, b in itertools.pairwise(cu_seqlens.tolist())
        ]
        none = [x[:0] for x in chunk_gla_summary(k[:, :0], v[:, :0], tokens_of(g, 0, 0))]
        decays, states = zip(none, *parts, strict=True)
        return torch.cat(decays), torch.cat(states)
    H = v.shape[2] if g is None else g.shape[-1] if g.ndim < 4 else g.shape[2]
    k = for_value_heads(k, v[:, :, :H])
    k, v = (x.double().unflatten(2, (H, -1)) for x in (k, v))  # [B, T, H, heads of a group, K or V]
    alpha = alpha_of(g, v[:, :, :, 0])
    decay = k.new_ones(len(k), H, k.shape[-1])
    state = k.new_zeros(*decay.shape, v.shape[-1])
    tokens = range(k.shape[1])
    for t in reversed(tokens) if backwards else tokens:
        product = k[:, t].mT @ v[:, t]
        decay = decay * alpha[:, t]
        state = alpha[:, t, ..., None] * (state + product) if backwards else alpha[:, t, ..., None] * state + product
    return decay, state


def recurrent_gla_step(
    q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, state: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Computes one token of each row in the dtype of the arguments; returns o [B, Ho, V] and the new state.

    Args:
        q: [B, Ho, K]. k: [B, Hv, K]. v: [B, Hv, V]. state: [B, Hv, K, V].
        alpha: [B, Hv, K] or [B, Hv, 1], the forget gate exp(g), not its logarithm g.
    """
    state = _next_state(k, v, alpha, state)
    return _read(q, state, scale), state


def recurrent_gla_layer_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    state: Tensor,
    output_gate: Tensor | None = None,
    norm_weight: Tensor | None = None,
    scale: float | None = None,
    slots: Tensor | None = None,
    norm_eps: float = 1e-5,
    activation: str = "silu",
) -> tuple[Tensor, Tensor]:
    """Computes a step, a norm and an output gate in float64; the o of a skipped row is 0, whatever its gate holds.

    Returns:
        o [B, Ho, V] and all states [P, Hv, K, V].
    """
    o, new = recurrent_gla_step_in_pool(q=q, k=k, v=v, g=g, state=state, scale=scale, slots=slots)
    used = used_rows(q, state, slots)
    return torch.where(used[:, None, None], normed(o, output_gate, norm_weight, norm_eps, activation), 0), new


def recurrent_ssd_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    dt: Tensor,
    A: Tensor,
    dt_bias: Tensor | None = None,
    D: Tensor | None = None,
    z: Tensor | None = None,
    scale: float | None = None,
    slots: Tensor | None = None,
    dt_softplus: bool = False,
    A_is_log: bool = False,
) -> tuple[Tensor, Tensor]:
    """Computes a step of Mamba-2 in float64; the o of a skipped row is 0, whatever z holds.

    Returns:
        o [B, Hv, V] and all states [P, Hv, K, V].
    """
    times, rates = dt.double() + (0 if dt_bias is None else dt_bias.double()), A.double()
    times = (1 + times.exp()).log() if dt_softplus else times
    rates = -rates.exp() if A_is_log else rates
    values = times[..., None] * v.double()
    o, new = recurrent_gla_step_in_pool(q=q, k=k, v=values, g=times * rates, state=state, scale=scale, slots=slots)
    o = o if D is None else o + D.double()[:, None] * v.double()
    o = o if z is None else o * z.double() * z.double().sigmoid()
    return torch.where(used_rows(q, state, slots)[:, None, None], o, 0), new


def normed(
    o: Tensor, output_gate: Tensor | None, weight: Tensor | None, norm_eps: float = 1e-5, activation: str = "silu"
) -> Tensor:
    """Returns the RMS norm of each head of o [..., Ho, V], times the activation of the output gate, in float64."""
    y = o.double() / (o.double().square().mean(-1, keepdim=True) + norm_eps).sqrt()
    y = y if weight is None else y * weight.double()
    if output_gate is None:
        return y
    gate = output_gate.double()
    return y * torch.sigmoid(gate) * (gate if activation == "silu" else 1)


def _next_state(k: Tensor, v: Tensor, alpha: Tensor, state: Tensor) -> Tensor:
    return alpha[..., :, None] * state + k[..., :, None] * v[..., None, :]


def _read(q: Tensor, state: Tensor, scale: float) -> Tensor:
    """Returns the outputs [..., Hq, V] of queries q [..., Hq, K] for states [..., H, K, V]."""
    q = q.unflatten(-2, (state.shape[-3], -1))  # [..., H, Hq/H, K]
    return scale * (q @ state).flatten(-3, -2)


def recurrent_gla_step_in_pool(*, bonus: Tensor | None = None, **x: Any) -> tuple[Tensor, Tensor]:
    """Returns the results of `pools.step_in_pool` in float64; with a bonus [H, K] the output reads the states before.

    Args:
        x: the other arguments of `gla_core.recurrent_gla_step`, with log gates.
    """
    return step_in_pool(chunk_gla if bonus is None else functools.partial(_with_bonus, bonus))(**x)


def _with_bonus(
    u: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, scale: float | None, initial_state: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns o = scale q (S + diag(u) k^T v) of one token [B, 1, ..], and the state after it."""
    token = for_value_heads(u * k.double(), v)[:, 0, :, :, None] * v.double()[:, 0, :, None, :]  # [B, Hv, K, V]
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    o = _read(for_value_heads(q, v)[:, 0], initial_state.double() + token, factor)
    return o[:, None], chunk_gla(q, k, v, g, scale, initial_state)[1]


chunk_gla_pool = prompts_in_pool(chunk_gla)
recurrent_gla_steps = steps_in_pool(chunk_gla)
recurrent_gla_replay = replay_in_pool(chunk_gla, chunk_gla, lambda x, state: x["v"])
