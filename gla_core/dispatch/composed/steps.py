"""Computes recurrent_gla_steps by recurrent_gla_step, one token of each sequence at a time.

B batch   T tokens   N sequences   S tokens of a sequence   P slots   H, Hq, Hv heads of k, q and v   Ho heads of o
K, V key and value width
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from gla_core.dispatch.backend import OpCall, contiguous_layout
from gla_core.dispatch.composed.compose import Kind, compose
from gla_core.dispatch.slots import is_slot, states_of_slots, write_states
from gla_core.dispatch.tensors import wide


def step_of_steps(call: OpCall) -> OpCall:
    """Returns the call of recurrent_gla_step by which `through_steps` computes each token of recurrent_gla_steps."""
    N, dims = call.dims["N"], call.dims
    sizes = {"B": N, **{name: dims[name] for name in ("H", "Hq", "Hv", "K", "V")}, "P": N}
    shapes = {name: (N, dims[heads], dims[width]) for name, heads, width in (("q", "Hq", "K"), ("k", "H", "K"))}
    shapes["v"] = (N, dims["Hv"], dims["V"])
    layouts = {name: contiguous_layout(shape, call.dtype) for name, shape in shapes.items()}
    layouts["state"] = contiguous_layout((N, dims["Hv"], dims["K"], dims["V"]), wide(call.dtype))
    if call.gate_dtype is not None and call.gate_form is not None:
        of_gate = {"constant": (dims["Hv"],), "head": (N, dims["Hv"]), "key": (N, dims["Hv"], dims["K"])}
        layouts["g"] = contiguous_layout(of_gate[call.gate_form], call.gate_dtype)
    return replace(
        call,
        op="recurrent_gla_step",
        dims=sizes,
        state_dtype=wide(call.dtype),
        variable_length=False,
        indexed=False,
        scalars={"gate_normalizer": call.scalars.get("gate_normalizer"), "inplace": False},
        given=call.given.intersection(("g", "gate_normalizer")),
        layouts=layouts if call.layouts else {},
    )


def through_steps(step: Kind) -> Kind:
    """Returns an implementation of recurrent_gla_steps that computes by one of recurrent_gla_step.

    It copies states out of the pool, runs `step` once for each of the S tokens of a sequence, and copies each new state
    into the pool.

    Example:
        >>> ops = {"recurrent_gla_step": step}
        >>> ops["recurrent_gla_steps"] = through_steps(step)
        >>> Backend("mine", "1.0", ops)
    """
    return compose("recurrent_gla_steps", step, lambda call: [step_of_steps(call)], _through_steps)


def _through_steps(step: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that computes recurrent_gla_steps by one that takes the arguments of recurrent_gla_step."""

    def recurrent_gla_steps(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor | None,
        pool: torch.Tensor,
        slots: torch.Tensor,
        scale: float,
        cu_seqlens: torch.Tensor | None,
        num_accepted: torch.Tensor | None,
        read_slots: torch.Tensor | None,
        has_state: torch.Tensor | None,
        pad_slot: int,
        gate_normalizer: int | None,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        read = slots[:, 0] if read_slots is None else read_slots
        if read_slots is None and num_accepted is not None:
            read = slots.gather(1, num_accepted.long().clamp(1, slots.shape[1])[:, None] - 1)[:, 0]
        served = is_slot(pool, read, pad_slot)  # [N]
        if has_state is not None:
            served = torch.where(has_state, served, is_slot(pool, slots[:, 0], pad_slot))
        state = states_of_slots(pool, read, has_state, wide(q.dtype), pad_slot)  # [N, Hv, K, V]
        tokens, options = {"q": q, "k": k, "v": v, "g": g}, {"scale": scale, "gate_normalizer": gate_normalizer}
        o = rows_of_outputs(q, v)
        computed = token_by_token(step, tokens, cu_seqlens, slots.shape[1], served, state, o, **options)
        for j, (here, _, new) in enumerate(computed):
            write_states(pool, slots[:, j], new, here & is_slot(pool, slots[:, j], pad_slot))
        return in_shape(o, q, out)

    return recurrent_gla_steps


def rows_of_outputs(q: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Returns zeros [B T + 1, Ho, V] for the outputs of all tokens; the last row is that of no token."""
    return v.new_zeros(q.shape[0] * q.shape[1] + 1, max(q.shape[2], v.shape[2]), v.shape[3])


def in_shape(o: torch.Tensor, q: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    """Returns the rows of outputs as o [B, T, Ho, V], in `out` if it is given."""
    o = o[:-1].unflatten(0, q.shape[:2])
    return o.clone() if out is None else out.copy_(o)


def token_by_token(
    step: Callable[..., Any],
    tokens: Mapping[str, Any],
    cu_seqlens: torch.Tensor | None,
    most: int,
    served: torch.Tensor,
    state: torch.Tensor,
    o: torch.Tensor,
    **options: Any,
) -> Iterator[tuple[torch.Tensor, dict[str, Any], torch.Tensor]]:
    """Computes the tokens of sequences, one of each sequence at a time, and writes their outputs into rows of o.

    Args:
        step: computes recurrent_gla_step; takes its arguments by name.
        tokens: q, k, v and g of the tokens of all sequences.
        most: the most tokens of a sequence that are computed.
        served: which sequences are computed [N].
        state: the states from which they start [N, Hv, K, V].
        o: see `rows_of_outputs`.
        options: further arguments of `step`.

    Yields:
        which sequences have the token [N], the arguments of `step` that depend on it, and the states after it.
    """
    (B, T), N = tokens["q"].shape[:2], len(served)
    if cu_seqlens is None:
        starts = T * torch.arange(N, device=served.device)
        ends, most = starts + T, min(most, T)
    else:
        starts, ends = cu_seqlens[:-1].long(), cu_seqlens[1:].long()
    for j in range(most if N * B * T else 0):
        here = served & (starts + j < ends)
        rows = torch.where(here, starts + j, 0)
        token = {name: x if x is None or x.ndim == 1 else x.flatten(0, 1)[rows] for name, x in tokens.items()}
        o_j, new = step(**token, state=state, state_indices=None, inplace=False, **options)
        o.index_copy_(0, torch.where(here, starts + j, B * T), o_j)
        state = torch.where(here[:, None, None, None], new, state)
        yield here, token, state
