"""Computes recurrent_gla_replay by recurrent_gla_step, one token of each sequence at a time, old tokens first.

N sequences   L tokens of a ring   P slots   Hv value heads   K, V key and value width
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gla_core.dispatch.backend import OpCall, of_log_gates
from gla_core.dispatch.composed.compose import Kind, compose
from gla_core.dispatch.composed.steps import in_shape, rows_of_outputs, step_of_steps, token_by_token
from gla_core.dispatch.slots import is_slot, states_of_slots, write_entries, write_states
from gla_core.dispatch.tensors import log_gates, wide


def step_of_replay(call: OpCall) -> OpCall:
    """Returns the call of recurrent_gla_step by which `through_replay` computes each token, old or new.

    Gates are log gates in a wide dtype, as rings hold them.
    """
    step = step_of_steps(call)
    return step if step.gate_dtype is None else of_log_gates(step)


def through_replay(step: Kind) -> Kind:
    """Returns an implementation of recurrent_gla_replay that computes by one of recurrent_gla_step.

    It copies states out of the pool, runs `step` once for each token of half a ring and once for each new token, and
    copies the states after the accepted tokens into the pool and the new tokens into the rings.

    Example:
        >>> ops = {"recurrent_gla_step": step}
        >>> ops["recurrent_gla_replay"] = through_replay(step)
        >>> Backend("mine", "1.0", ops)
    """
    return compose("recurrent_gla_replay", step, lambda call: [step_of_replay(call)], _through_replay)


def _through_replay(step: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that computes recurrent_gla_replay by one that takes the arguments of recurrent_gla_step."""

    def recurrent_gla_replay(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor | None,
        pool: torch.Tensor,
        ring_k: torch.Tensor,
        ring_v: torch.Tensor,
        ring_g: torch.Tensor | None,
        slots: torch.Tensor,
        ring_start: torch.Tensor,
        num_accepted: torch.Tensor,
        scale: float,
        cu_seqlens: torch.Tensor | None,
        has_state: torch.Tensor | None,
        pad_slot: int,
        gate_normalizer: int | None,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        (N, L), dtype = (len(slots), ring_k.shape[1]), wide(q.dtype)
        g = None if g is None else log_gates(g, gate_normalizer, dtype).contiguous()
        options = {"scale": scale, "gate_normalizer": None}
        served = is_slot(pool, slots, pad_slot)  # [N]
        accepted = num_accepted.clamp(0, L // 2).long()
        state = states_of_slots(pool, slots, has_state, dtype, pad_slot)  # [N, Hv, K, V]
        is_new = False if has_state is None else ~has_state

        def at(i: int | torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            """Returns the slots and the positions in the rings [N] of token i, counted from the ring's start."""
            return torch.where(served, slots, 0).long(), (ring_start.long() + i) % L

        no_query = q.new_zeros(N, *q.shape[2:])
        for i in range(L // 2 if N * len(pool) else 0):
            k_i, v_i = ring_k[at(i)].to(k.dtype), ring_v[at(i)].to(v.dtype)
            token = {"q": no_query, "k": k_i, "v": v_i, "g": g if ring_g is None else ring_g[at(i)]}
            _, new = step(**token, state=state, state_indices=None, inplace=False, **options)
            state = torch.where((i < accepted)[:, None, None, None], new, state)
        write_states(pool, slots, state, served & ((accepted > 0) | is_new))

        o, tokens = rows_of_outputs(q, v), {"q": q, "k": k, "v": v, "g": g}
        computed = token_by_token(step, tokens, cu_seqlens, L // 2, served, state, o, **options)
        for j, (here, token, _) in enumerate(computed):
            for ring, name in ((ring_k, "k"), (ring_v, "v"), (ring_g, "g")):
                if ring is not None:
                    write_entries(ring, at(accepted + j), token[name], here)
        return in_shape(o, q, out)

    return recurrent_gla_replay
