"""Describes an op over packed sequences whose states are in a pool, and computes it by the forward of its family."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from gla_core.dispatch.backend import CHUNK, Lowering, OpCall, Parts, contiguous_layout
from gla_core.dispatch.slots import is_slot, states_of_slots, write_states
from gla_core.dispatch.tensors import wide
from gla_core.ops import checks
from gla_core.ops.spec import AS_INPUT, FLAG, INTEGER, LONGEST, POOL, Argument, OpSpec, Result, Role


def spec_of_pool(name: str, forward: OpSpec, *options: Argument) -> OpSpec:
    """Returns the description of an op that computes a forward from states in a pool, and into it.

    Args:
        options: the scalar arguments of the forward that the op takes too.
    """
    o = forward.results[0].shape
    spec = OpSpec(
        name=name,
        public=name,
        arguments=(
            *forward.token_arguments,
            Argument("pool", "Tensor(a!)", "P Hv K V", POOL, role=Role.STATE),
            Argument("cu_seqlens", "Tensor", "N+1", INTEGER, role=Role.OFFSETS),
            Argument("read_slots", "Tensor", "N", INTEGER, role=Role.SLOTS),
            Argument("write_slots", "Tensor?", "N", INTEGER, None, role=Role.MARKS),
            Argument("scale", "float?", default=None, in_call=False),
            Argument("has_state", "Tensor?", "N", FLAG, None, role=Role.MARKS),
            Argument("checkpoint_offsets", "Tensor?", "N", INTEGER, None, role=Role.MARKS, public="snapshot_offsets"),
            Argument("checkpoint_slots", "Tensor?", "N", INTEGER, None, role=Role.MARKS, public="snapshot_slots"),
            Argument("pad_slot", "int", default=-1),
            *options,
            Argument("out", "Tensor(b!)?", o, AS_INPUT, None),
            LONGEST,
        ),
        results=(Result("o", o, into="out"),),
        sizes={**forward.sizes, "N": "N", "P": "N"},
        bind=_bind,
        reads=_reads,
        flops=forward.flops,
        tokens=forward.tokens,
    )
    by_forward = functools.partial(_by_forward, forward, spec.contract)
    return dataclasses.replace(spec, lowering=Lowering(forward.name, functools.partial(_forwards, forward), by_forward))


def _bind(args: Mapping[str, Any], sizes: dict[str, Any]) -> None:
    for this, other in (("offsets", "slots"), ("slots", "offsets")):
        if args[f"checkpoint_{this}"] is not None and args[f"checkpoint_{other}"] is None:
            raise ValueError(f"snapshot_{this} is given and snapshot_{other} is None; expected both or neither")


def _reads(x: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the rows of sequences, and the slots of states that tokens advance or that are copied to another slot."""
    checks.offset_values(x["cu_seqlens"], x["q"].shape[1], x["max_seqlen"])
    lengths, offsets, has_state = x["cu_seqlens"].diff(), x["checkpoint_offsets"], x["has_state"]

    def is_used(name: str) -> Tensor:
        return is_slot(x["pool"], x[name], x["pad_slot"])

    to = "read_slots" if x["write_slots"] is None else "write_slots"
    writes = {to: checks.slots_where(x[to], is_used(to))}
    if offsets is not None:
        is_kept = (offsets > 0) & (offsets < lengths)
        writes["snapshot_slots"] = checks.slots_where(x["checkpoint_slots"], is_used("checkpoint_slots") & is_kept)
        _check_offsets(offsets.tolist(), writes["snapshot_slots"])
    goes_on = (lengths > 0) | (is_used(to) & (x[to] != x["read_slots"]))
    is_read = is_used("read_slots") & goes_on & (True if has_state is None else has_state)
    checks.slots(checks.slots_where(x["read_slots"], is_read), writes)
    return {"B T": checks.rows_of(x["cu_seqlens"]), "P": x["read_slots"][is_read].long()}


def _check_offsets(offsets: list[int], kept: list[int | None]) -> None:
    """Raises ValueError for a snapshot that is no multiple of 64 tokens after the first token of its sequence."""
    for n, (offset, slot) in enumerate(zip(offsets, kept, strict=True)):
        if slot is not None and offset % CHUNK:
            raise ValueError(f"snapshot_offsets[{n}] is {offset}; expected a multiple of {CHUNK}")


# ---- by the forward, between a copy of states out of the pool and a copy into it


def _forwards(forward: OpSpec, call: OpCall) -> Parts:
    """Returns the calls of the forward that compute a call on a pool.

    The second one, if there is one, cuts each sequence in two at its snapshot.
    """
    return [(_forward(forward, call, parts), 1) for parts in ((1, 2) if "checkpoint_offsets" in call.given else (1,))]


def _forward(forward: OpSpec, call: OpCall, parts: int) -> OpCall:
    """Returns the call of the forward that computes a call on a pool between two copies of states.

    Args:
        parts: the number of parts that each sequence is cut into.
    """
    taken, N = forward.contract, parts * call.dims["N"]
    dims = {**{name: size for name, size in call.dims.items() if name != "P"}, "N": N}
    layouts = {name: layout for name, layout in call.layouts.items() if name in taken}
    if layouts:
        shape = (N, *(dims[name] for name in ("Hv", "K", "V")))
        layouts["initial_state"] = contiguous_layout(shape, wide(call.dtype))
    if layouts and parts > 1:
        layouts["cu_seqlens"] = contiguous_layout((N + 1,), layouts["cu_seqlens"].dtype)
    scalars = {name: call.scalars.get(name, default) for name, default in forward.scalars.items()}
    return dataclasses.replace(
        call,
        op=forward.name,
        dims=dims,
        state_dtype=wide(call.dtype),
        indexed=False,
        scalars={**scalars, "output_final_state": True},
        given=call.given.intersection(taken) | {"initial_state", "output_final_state", "cu_seqlens"},
        layouts=layouts,
    )


def _by_forward(
    forward: OpSpec, names: tuple[str, ...], whole: Callable[..., Any], cut: Callable[..., Any] | None = None
) -> Callable[..., Any]:
    """Returns a function that computes an op on a pool.

    Args:
        names: the names of its arguments.
        whole: computes the forward for N sequences.
        cut: computes it for 2 N parts of them; None if `whole` does.
    """
    for_parts = whole if cut is None else cut

    def on_pool(*args: Any) -> Tensor:
        x = dict(zip(names, args, strict=True))
        pool, cu_seqlens, pad_slot, offsets = x["pool"], x["cu_seqlens"], x["pad_slot"], x["checkpoint_offsets"]
        taken = {name: x[name] for name in forward.contract if name in x}
        taken = {**forward.scalars, **taken, "output_final_state": True}
        before = states_of_slots(pool, x["read_slots"], x["has_state"], wide(x["q"].dtype), pad_slot)  # [N, Hv, K, V]
        o, after, *_ = whole(**taken, initial_state=before)
        to = x["read_slots"] if x["write_slots"] is None else x["write_slots"]
        write_states(pool, to, after, is_slot(pool, to, pad_slot))
        if offsets is not None and x["checkpoint_slots"] is not None:
            is_inside = (offsets > 0) & (offsets < cu_seqlens.diff())
            where = is_inside & is_slot(pool, x["checkpoint_slots"], pad_slot)
            taken["cu_seqlens"] = _cut_in_two(cu_seqlens, torch.where(where, offsets, 0))
            halves = torch.stack([before, torch.zeros_like(before)], 1).flatten(0, 1)  # [2 N, Hv, K, V]
            _, ends, *_ = for_parts(**taken, initial_state=halves)
            write_states(pool, x["checkpoint_slots"], ends[::2], where)
        return o if x["out"] is None else x["out"].copy_(o)

    return on_pool


def _cut_in_two(cu_seqlens: Tensor, offsets: Tensor) -> Tensor:
    """Returns the offsets [2 N + 1] of packed sequences that are each cut after `offsets` [N] tokens."""
    starts = cu_seqlens[:-1]
    parts = torch.stack([starts, (starts + offsets).to(starts.dtype)], 1).flatten()
    return torch.cat([parts, cu_seqlens[-1:]])
