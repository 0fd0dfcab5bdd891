"""Computes chunk_gla_pool by chunk_gla_fwd, between a copy of states out of the pool and a copy into it.

N sequences   P slots   Hv value heads   K, V key and value width
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from gla_core.dispatch.backend import (
    OP_PARAMETERS,
    OpCall,
    Prepared,
    any_of,
    arguments_of,
    as_received,
    contiguous_layout,
)
from gla_core.dispatch.composed.compose import Kind, compose
from gla_core.dispatch.slots import is_slot, states_of_slots, write_states
from gla_core.dispatch.tensors import wide


def forward_of_pool(call: OpCall, parts: int = 1) -> OpCall:
    """Returns the call of chunk_gla_fwd that computes a call of chunk_gla_pool between two copies of states.

    Args:
        parts: the number of parts that each sequence is cut into.
    """
    taken, N = OP_PARAMETERS["chunk_gla_fwd"], parts * call.dims["N"]
    dims = {**{name: size for name, size in call.dims.items() if name != "P"}, "N": N}
    layouts = {name: layout for name, layout in call.layouts.items() if name in taken}
    if layouts:
        shape = (N, *(dims[name] for name in ("Hv", "K", "V")))
        layouts["initial_state"] = contiguous_layout(shape, wide(call.dtype))
    if layouts and parts > 1:
        layouts["cu_seqlens"] = contiguous_layout((N + 1,), layouts["cu_seqlens"].dtype)
    every = {"output_final_state": True, "checkpoint_every": None}
    return replace(
        call,
        op="chunk_gla_fwd",
        dims=dims,
        state_dtype=wide(call.dtype),
        indexed=False,
        scalars={**every, "gate_normalizer": call.scalars.get("gate_normalizer")},
        given=call.given.intersection(taken) | {"initial_state", "output_final_state", "cu_seqlens"},
        layouts=layouts,
    )


def forwards_of_pool(call: OpCall) -> list[OpCall]:
    """Returns the calls of chunk_gla_fwd by which `through_pool` computes a call of chunk_gla_pool.

    The second one, if there is one, cuts each sequence in two at its checkpoint.
    """
    return [forward_of_pool(call, parts) for parts in ((1, 2) if "checkpoint_offsets" in call.given else (1,))]


def through_pool(forward: Kind) -> Kind:
    """Returns an implementation of chunk_gla_pool that computes by one of chunk_gla_fwd.

    It copies states out of the pool, runs `forward`, and copies the final states into the pool. Checkpoints take a
    second run of `forward`, with each sequence cut in two at its checkpoint.

    Args:
        forward: a function or a `Prepared` that takes initial_state, output_final_state and cu_seqlens.

    Raises:
        TypeError: `forward` does not take one of these.

    Example:
        >>> ops = {"chunk_gla_fwd": forward}
        >>> ops["chunk_gla_pool"] = through_pool(forward)
        >>> Backend("mine", "1.0", ops)
    """
    takes = arguments_of(forward)
    lacking = [name for name in ("initial_state", "output_final_state", "cu_seqlens") if name not in takes]
    if lacking:
        raise TypeError(f"chunk_gla_fwd takes no {any_of(lacking)}; through_pool needs it")

    def kernels(call: OpCall) -> list[str]:
        first = as_received(forward, forward_of_pool(call))
        return forward.kernels(first) if isinstance(forward, Prepared) and forward.kernels is not None else []

    return compose("chunk_gla_pool", forward, forwards_of_pool, _through_pool, kernels)


def _through_pool(whole: Callable[..., Any], cut: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """Returns a function that computes chunk_gla_pool.

    Args:
        whole: computes chunk_gla_fwd for N sequences.
        cut: computes it for 2 N parts of them; None if `whole` does.
    """
    of_parts = whole if cut is None else cut

    def chunk_gla_pool(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor | None,
        pool: torch.Tensor,
        cu_seqlens: torch.Tensor,
        read_slots: torch.Tensor,
        write_slots: torch.Tensor | None,
        scale: float,
        has_state: torch.Tensor | None,
        checkpoint_offsets: torch.Tensor | None,
        checkpoint_slots: torch.Tensor | None,
        pad_slot: int,
        gate_normalizer: int | None,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        always = {"output_final_state": True, "checkpoint_every": None, "gate_normalizer": gate_normalizer}
        tokens = {"q": q, "k": k, "v": v, "g": g, "scale": scale, **always}
        before = states_of_slots(pool, read_slots, has_state, wide(q.dtype), pad_slot)  # [N, Hv, K, V]
        o, after, *_ = whole(**tokens, initial_state=before, cu_seqlens=cu_seqlens)
        to = read_slots if write_slots is None else write_slots
        write_states(pool, to, after, is_slot(pool, to, pad_slot))
        if checkpoint_offsets is not None and checkpoint_slots is not None:
            is_inside = (checkpoint_offsets > 0) & (checkpoint_offsets < cu_seqlens.diff())
            where = is_inside & is_slot(pool, checkpoint_slots, pad_slot)
            parts = _cut_in_two(cu_seqlens, torch.where(where, checkpoint_offsets, 0))
            halves = torch.stack([before, torch.zeros_like(before)], 1).flatten(0, 1)  # [2 N, Hv, K, V]
            _, ends, *_ = of_parts(**tokens, initial_state=halves, cu_seqlens=parts)
            write_states(pool, checkpoint_slots, ends[::2], where)
        return o if out is None else out.copy_(o)

    return chunk_gla_pool


def _cut_in_two(cu_seqlens: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Returns the offsets [2 N + 1] of packed sequences that are each cut after `offsets` [N] tokens."""
    starts = cu_seqlens[:-1]
    parts = torch.stack([starts, (starts + offsets).to(starts.dtype)], 1).flatten()
    return torch.cat([parts, cu_seqlens[-1:]])
