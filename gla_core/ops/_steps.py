"""Describes an op of up to eight tokens of each sequence, whose states are in a pool, and computes it by a step."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from gla_core.dispatch.backend import Lowering, OpCall, Parts, contiguous_layout
from gla_core.dispatch.slots import is_slot, states_of_slots, write_states
from gla_core.dispatch.tensors import wide
from gla_core.ops import checks
from gla_core.ops.spec import AS_INPUT, FLAG, INTEGER, POOL, Argument, OpSpec, Result, Role


def spec_of_steps(name: str, forward: OpSpec, step: OpSpec, longer: str, *options: Argument) -> OpSpec:
    """Returns the description of an op that computes several steps from a state in a pool, and keeps each new state.

    Args:
        forward: the op over whole sequences, with the same tokens.
        longer: the public op for longer parts of sequences, which an error names.
        options: the scalar arguments of the step that the op takes too.
    """
    o = forward.results[0].shape
    spec = OpSpec(
        name=name,
        public=name,
        arguments=(
            *forward.token_arguments,
            Argument("pool", "Tensor(a!)", "P Hv K V", POOL, role=Role.STATE),
            Argument("slots", "Tensor", "N S", INTEGER, role=Role.SLOTS),
            Argument("scale", "float?", default=None, in_call=False),
            Argument("cu_seqlens", "Tensor?", "N+1", INTEGER, None, role=Role.OFFSETS),
            Argument("num_accepted", "Tensor?", "N", INTEGER, None, role=Role.MARKS),
            Argument("read_slots", "Tensor?", "N", INTEGER, None, role=Role.MARKS),
            Argument("has_state", "Tensor?", "N", FLAG, None, role=Role.MARKS),
            Argument("pad_slot", "int", default=-1),
            *options,
            Argument("out", "Tensor(b!)?", o, AS_INPUT, None),
        ),
        results=(Result("o", o, into="out"),),
        sizes={**forward.sizes, "N": "B", "S": "T", "P": "N"},
        limit=functools.partial(_limit, longer),
        reads=_reads,
        flops=forward.flops,
        tokens=forward.tokens,
        writes=lambda sizes: sizes["B"] * sizes["T"] / max(sizes["N"], 1),
    )
    by_step = functools.partial(_by_step, step, spec.contract)
    return dataclasses.replace(spec, lowering=Lowering(step.name, functools.partial(_parts, step), by_step))


def _limit(longer: str, sizes: Mapping[str, int], packed: bool) -> None:
    T, S = sizes["T"], sizes["S"]
    if not 1 <= S <= checks.MOST_STEPS:
        expected = f"1 to {checks.MOST_STEPS}: a longer part of a sequence is a call of {longer}"
        raise ValueError(f"slots has {S} columns; expected {expected}")
    if not packed and T > S:
        raise ValueError(f"q has T = {T} tokens for each sequence and slots has {S} columns")


def _reads(x: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the rows of sequences that are not skipped, and the slots that those with tokens start from."""
    pool, slots, pad_slot, accepted = x["pool"], x["slots"], x["pad_slot"], x["num_accepted"]
    S = slots.shape[1]
    lengths = checks.lengths_of(x["cu_seqlens"], x["q"])
    for n, length in enumerate(lengths.tolist()):
        if length > S:
            raise ValueError(f"sequence {n} has {length} tokens; slots has {S} columns")
    starts = x["read_slots"]
    if starts is None:
        starts = slots[:, 0] if accepted is None else slots.gather(1, accepted.long().clamp(1, S)[:, None] - 1)[:, 0]
    served = begins = is_slot(pool, starts, pad_slot)
    if x["has_state"] is not None:
        served = torch.where(x["has_state"], begins, is_slot(pool, slots[:, 0], pad_slot))
        begins = begins & x["has_state"]
    begins = begins & (lengths > 0)
    writes = {
        f"slots[:, {j}]": checks.slots_where(to, is_slot(pool, to, pad_slot) & served & (j < lengths))
        for j, to in enumerate(slots.unbind(1))
    }
    read_name = "the slot that sequence {n} starts from" if x["read_slots"] is None else "read_slots[{n}]"
    checks.slots(checks.slots_where(starts, begins), writes, read_name)
    return {"B T": checks.rows_of(x["cu_seqlens"], served), "P": starts[begins].long()}


# ---- by the step, one token of each sequence at a time


def one_step(step: OpSpec, call: OpCall) -> OpCall:
    """Returns the call of the step by which each token of a call is computed."""
    N = call.dims["N"]
    one = dataclasses.replace(
        call,
        op=step.name,
        dims={name: N if name in ("B", "P") else call.dims[name] for name in step.sizes},
        state_dtype=wide(call.dtype),
        variable_length=False,
        indexed=False,
        scalars={name: call.scalars.get(name, default) for name, default in step.scalars.items()},
        given=call.given.intersection(step.contract),
    )
    dtypes = {name: layout.dtype for name, layout in call.layouts.items() if name in step.tokens}
    dtypes |= {"state": wide(call.dtype)} if dtypes else {}
    shapes = {a.name: step.shape(a, one) for a in step.arguments if a.name in dtypes}
    layouts = {name: contiguous_layout(shape, dtypes[name]) for name, shape in shapes.items()}
    return dataclasses.replace(one, layouts=layouts)


def _parts(step: OpSpec, call: OpCall) -> Parts:
    """Returns one step for each token of a sequence."""
    S = call.dims["S"]
    return [(one_step(step, call), S if call.variable_length else min(S, call.dims["T"]))]


def _by_step(step: OpSpec, names: tuple[str, ...], compute: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that computes several steps.

    Args:
        names: the names of its arguments.
        compute: computes the step; takes its arguments by name.
    """

    def steps(*args: Any) -> Tensor:
        x = dict(zip(names, args, strict=True))
        pool, slots, pad_slot, has_state = x["pool"], x["slots"], x["pad_slot"], x["has_state"]
        read = slots[:, 0] if x["read_slots"] is None else x["read_slots"]
        if x["read_slots"] is None and x["num_accepted"] is not None:
            read = slots.gather(1, x["num_accepted"].long().clamp(1, slots.shape[1])[:, None] - 1)[:, 0]
        served = is_slot(pool, read, pad_slot)  # [N]
        if has_state is not None:
            served = torch.where(has_state, served, is_slot(pool, slots[:, 0], pad_slot))
        state = states_of_slots(pool, read, has_state, wide(x["q"].dtype), pad_slot)  # [N, Hv, K, V]
        taken = {name: x[name] for name in step.contract if name in x}
        tokens = {name: taken.pop(name) for name in step.tokens}
        o = rows_of_outputs(x["q"], x["v"])
        computed = token_by_token(compute, tokens, x["cu_seqlens"], slots.shape[1], served, state, o, **taken)
        for j, (here, _, new) in enumerate(computed):
            write_states(pool, slots[:, j], new, here & is_slot(pool, slots[:, j], pad_slot))
        return in_shape(o, x["q"], x["out"])

    return steps


def rows_of_outputs(q: Tensor, v: Tensor) -> Tensor:
    """Returns zeros [B T + 1, Ho, V] for the outputs of all tokens; the last row is that of no token."""
    return v.new_zeros(q.shape[0] * q.shape[1] + 1, max(q.shape[2], v.shape[2]), v.shape[3])


def in_shape(o: Tensor, q: Tensor, out: Tensor | None) -> Tensor:
    """Returns the rows of outputs as o [B, T, Ho, V], in `out` if it is given."""
    o = o[:-1].unflatten(0, q.shape[:2])
    return o.clone() if out is None else out.copy_(o)


def token_by_token(
    step: Callable[..., Any],
    tokens: Mapping[str, Any],
    cu_seqlens: Tensor | None,
    most: int,
    served: Tensor,
    state: Tensor,
    o: Tensor,
    **options: Any,
) -> Iterator[tuple[Tensor, dict[str, Any], Tensor]]:
    """Computes the tokens of sequences, one of each sequence at a time, and writes their outputs into rows of o.

    Args:
        step: computes the step; takes its arguments by name.
        tokens: the arguments of all sequences that hold tokens, such as q.
        most: the most tokens of a sequence that are computed.
        served: which sequences are computed [N].
        state: the states from which they start [N, Hv, K, V].
        o: see `rows_of_outputs`.
        options: further arguments of `step`, such as the scale.

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
