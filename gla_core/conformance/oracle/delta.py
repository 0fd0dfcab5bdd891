"""The meaning of each op of the delta rule, one token at a time in float64."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from gla_core.conformance.oracle.gla import alpha_of, chunk_gla
from gla_core.conformance.oracle.pools import (
    for_value_heads,
    over_sequences,
    prompts_in_pool,
    replay_in_pool,
    span,
    step_in_pool,
    steps_in_pool,
    zero_rows,
    zero_state,
)


def chunk_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Runs the recurrence of the delta rule over tokens, in float64.

    Args:
        Arguments of `gla_core.chunk_delta`, with any dtype and on any device.

    Returns:
        o [B, T, Hv, V] and the final state [N, Hv, K, V], both float64. o is 0 in rows that belong to no sequence.
    """
    o, state = chunk_delta_with_checkpoints(q, k, v, g, beta, scale, initial_state, cu_seqlens)
    return o, state


def chunk_delta_with_checkpoints(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    checkpoint_every: int | None = None,
) -> tuple[Tensor, ...]:
    """Returns the results of `chunk_delta`, and the checkpoints if `checkpoint_every` is not None."""
    factor = q.shape[-1] ** -0.5 if scale is None else scale

    def sequence(x: Mapping[str, Any], state: Tensor) -> tuple[Tensor, list[Tensor]]:
        states, q = [state, *(after for _, after in _steps(x, state))], for_value_heads(x["q"], x["v"])
        o = [factor * (q_t[:, :, None] @ after)[:, :, 0] for q_t, after in zip(q.unbind(1), states[1:], strict=True)]
        return torch.stack(o, 1) if o else zero_rows(q, x["v"], 0), states

    x = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
    return over_sequences(sequence, x, initial_state, cu_seqlens, checkpoint_every)


def _steps(x: Mapping[str, Any], state: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields u [B, Hv, V] of each token, and the state after it."""
    k, v, beta, alpha = for_value_heads(x["k"], x["v"]), x["v"].double(), x["beta"].double(), alpha_of(x["g"], x["v"])
    for t in range(v.shape[1]):
        state = alpha[:, t, :, :, None] * state
        u = beta[:, t, :, None] * (v[:, t] - (k[:, t, :, None] @ state)[:, :, 0])
        state = state + k[:, t, :, :, None] * u[:, :, None]
        yield u, state


def chunk_delta_summary(
    k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor, cu_seqlens: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Returns the transition [N, Hv, K, K] and the state from zero [N, Hv, K, V] of each sequence, in float64."""
    transitions, states = [], []
    for x in _sequences(cu_seqlens, k=k, v=v, g=g, beta=beta):
        state, transition = zero_state(x["k"], x["k"], x["v"]), _unit(x["k"], x["v"])
        for matrix, k_t, value in _matrices(x, x["v"]):
            transition, state = matrix @ transition, matrix @ state + k_t[..., None] * value[..., None, :]
        transitions.append(transition)
        states.append(state)
    none = zero_state(k, k, v)[:0]
    return torch.cat([_unit(k, v)[:0], *transitions]), torch.cat([none, *states])


def chunk_delta_gradient_summary(
    q: Tensor, k: Tensor, do: Tensor, g: Tensor | None, beta: Tensor, cu_seqlens: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Returns the transposed transition of each sequence, and the gradient of the state before it, in float64."""
    transitions, gradients = [], []
    for x in _sequences(cu_seqlens, q=q, k=k, v=do, g=g, beta=beta):
        gradient, transition = zero_state(x["q"], x["k"], x["v"]), _unit(x["k"], x["v"])
        queries = for_value_heads(x["q"], x["v"])
        for t, (matrix, _, _) in reversed(list(enumerate(_matrices(x, x["v"])))):
            gradient = matrix.mT @ (gradient + queries[:, t, :, :, None] * x["v"].double()[:, t, :, None])
            transition = matrix.mT @ transition
        transitions.append(transition)
        gradients.append(gradient)
    none = zero_state(q, k, do)[:0]
    return torch.cat([_unit(k, do)[:0], *transitions]), torch.cat([none, *gradients])


def _sequences(cu_seqlens: Tensor | None, **x: Any) -> Iterator[dict[str, Any]]:
    """Yields the tokens of each packed sequence; all tokens without offsets."""
    if cu_seqlens is None:
        yield x
        return
    for a, b in itertools.pairwise(cu_seqlens.tolist()):
        yield span(x, a, b)


def _matrices(x: Mapping[str, Any], v: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yields for each token (I - beta k^T k) diag(alpha) [B, Hv, K, K], k [B, Hv, K] and beta v [B, Hv, V]."""
    k, beta, alpha = for_value_heads(x["k"], v), x["beta"].double(), alpha_of(x["g"], v)
    unit = torch.eye(k.shape[-1], dtype=torch.float64, device=k.device)
    for t in range(k.shape[1]):
        forgotten = beta[:, t, :, None, None] * k[:, t, :, :, None] * k[:, t, :, None]
        yield (unit - forgotten) * alpha[:, t, :, None], k[:, t], beta[:, t, :, None] * v.double()[:, t]


def _unit(k: Tensor, v: Tensor) -> Tensor:
    """Returns the transition of no token [B, Hv, K, K]."""
    unit = torch.eye(k.shape[3], dtype=torch.float64, device=k.device)
    return unit.expand(len(k), v.shape[2], -1, -1)


def _kept(x: Mapping[str, Any], state: Tensor) -> Tensor:
    """Returns u [1, T, Hv, V] of the tokens of a sequence."""
    us = [u for u, _ in _steps(x, state)]
    return torch.stack(us, 1) if us else x["v"].double()


chunk_delta_pool = prompts_in_pool(chunk_delta)
recurrent_delta_step = step_in_pool(chunk_delta)
recurrent_delta_steps = steps_in_pool(chunk_delta)
recurrent_delta_replay = replay_in_pool(chunk_delta, chunk_gla, _kept)
