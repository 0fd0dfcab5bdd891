"""Describes an op that replays the accepted tokens of the last call and computes new ones, and computes it by a step.

Tokens of the last call are in rings. What a ring holds of a token, and how a state is advanced by it, depends on the
family: gated linear attention keeps v, and a delta rule the u that it adds to a state.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from gla_core.dispatch.backend import Lowering, OpCall, Parts, call_with_log_gates
from gla_core.dispatch.slots import is_slot, states_of_slots, write_entries, write_states
from gla_core.dispatch.tensors import log_gates, wide
from gla_core.ops import checks
from gla_core.ops._steps import in_shape, one_step, rows_of_outputs, token_by_token
from gla_core.ops.spec import AS_INPUT, AS_INPUT_OR_FLOAT32, FLAG, INTEGER, POOL, WIDE, Argument, OpSpec, Result, Role

Replay = Callable[..., Tensor]
"""Takes the step of a backend with its options, and by name q = 0, k, v and log gates g of a token, as rings hold them,
and the states [N, Hv, K, V] before it; returns the states after it."""

Keep = Callable[[Mapping[str, Any], Tensor], Tensor]
"""Takes the arguments of a token and the states before it; returns what ring_v holds of the token [N, Hv, V]."""


def spec_of_replay(
    name: str, forward: OpSpec, step: OpSpec, longer: str, replay: Replay, keep: Keep, *options: Argument
) -> OpSpec:
    """Returns the description of an op that replays accepted tokens, and computes and keeps new ones.

    Args:
        forward: the op over whole sequences, with the same tokens.
        longer: the public op for longer parts of sequences, which an error names.
        replay: advances states by a token in rings. keep: returns what ring_v holds of a token.
        options: the scalar arguments of the step that the op takes too.
    """
    o = forward.results[0].shape
    spec = OpSpec(
        name=name,
        public=name,
        arguments=(
            *forward.token_arguments,
            Argument("pool", "Tensor(a!)", "P Hv K V", POOL, role=Role.STATE),
            Argument("ring_k", "Tensor(b!)", "P L H K", AS_INPUT_OR_FLOAT32, role=Role.RING),
            Argument("ring_v", "Tensor(c!)", "P L Hv V", AS_INPUT_OR_FLOAT32, role=Role.RING),
            Argument(
                "ring_g",
                "Tensor(d!)?",
                "P L Hv K",
                WIDE,
                None,
                forms={"head": "P L Hv", "key": "P L Hv K"},
                role=Role.GATE_RING,
            ),
            Argument("slots", "Tensor", "N", INTEGER, role=Role.SLOTS),
            Argument("ring_start", "Tensor", "N", INTEGER, role=Role.SLOTS),
            Argument("num_accepted", "Tensor", "N", INTEGER, role=Role.SLOTS),
            Argument("scale", "float?", default=None, in_call=False),
            Argument("cu_seqlens", "Tensor?", "N+1", INTEGER, None, role=Role.OFFSETS),
            Argument("has_state", "Tensor?", "N", FLAG, None, role=Role.MARKS),
            Argument("pad_slot", "int", default=-1),
            *options,
            Argument("out", "Tensor(e!)?", o, AS_INPUT, None),
        ),
        results=(Result("o", o, into="out"),),
        sizes={**{name: size for name, size in forward.sizes.items() if name != "N"}, "L": "L", "N": "B", "P": "N"},
        limit=functools.partial(_limit, longer),
        bind=_bind,
        reads=_reads,
        flops=forward.flops,  # the number of replayed tokens is known on the device alone
        tokens=forward.tokens,
    )
    by_step = functools.partial(_by_step, spec.contract, step.tokens, replay, keep)
    return dataclasses.replace(spec, lowering=Lowering(step.name, functools.partial(_parts, step), by_step))


def _limit(longer: str, sizes: Mapping[str, int], packed: bool) -> None:
    T, L = sizes["T"], sizes["L"]
    most = 2 * checks.MOST_STEPS
    if not 2 <= L <= most:
        raise ValueError(
            f"ring_k has L = {L} tokens; expected 2 to {most}: twice the tokens of a sequence in a call. "
            f"A longer part of a sequence is a call of {longer}"
        )
    if not packed and 2 * T > L:
        raise ValueError(
            f"q has T = {T} tokens for each sequence and ring_k has L = {L}; expected L of at least 2 T, "
            "so that accepted and new tokens fit: use longer rings, or fewer tokens"
        )


def _bind(args: Mapping[str, Any], sizes: dict[str, Any]) -> None:
    """Raises ValueError unless ring_g is given for gates that differ from token to token, in the form of g."""
    g, ring_g = args["g"], args["ring_g"]
    if g is None or g.ndim == 1:
        if ring_g is not None:
            kind = "None" if g is None else "constant"
            raise ValueError(f"ring_g is given and g is {kind}; expected None, as all tokens have the same gate")
        return
    shape = "[P, L, Hv, K]" if g.ndim == 4 else "[P, L, Hv]"
    if ring_g is None:
        raise ValueError(f"ring_g is None and g has shape {list(g.shape)}; expected memory {shape} for its log gates")
    if ring_g.ndim != g.ndim:
        raise ValueError(f"ring_g has shape {list(ring_g.shape)}; expected {shape}, because g has {list(g.shape)}")


def _reads(x: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the rows and the accepted tokens of sequences that are not skipped, and their states.

    A state is read if it is advanced, by an accepted or a new token.
    """
    slots, L = x["slots"].long(), x["ring_k"].shape[1]
    lengths = checks.lengths_of(x["cu_seqlens"], x["q"])
    for n, length in enumerate(lengths.tolist()):
        if 2 * length > L:
            raise ValueError(f"sequence {n} has {length} tokens; a ring of L = {L} tokens serves {L // 2}")
    served = is_slot(x["pool"], slots, x["pad_slot"])
    checks.slots([], {"slots": checks.slots_where(slots, served)})
    advanced = served & ((lengths > 0) | (x["num_accepted"] > 0))
    begins = advanced if x["has_state"] is None else advanced & x["has_state"]
    steps = torch.arange(L // 2, device=slots.device)
    places = (x["ring_start"][:, None].long() + steps) % L  # [N, L // 2]
    replayed = served[:, None] & (steps < x["num_accepted"][:, None])
    ring = slots[:, None].expand_as(places)[replayed], places[replayed]
    return {"B T": checks.rows_of(x["cu_seqlens"], served), "P L": ring, "P": slots[begins]}


# ---- by the step, one token of each sequence at a time, old tokens first


def _parts(spec: OpSpec, call: OpCall) -> Parts:
    """Returns one step for each token of half a ring, and for each new token."""
    half, step = call.dims["L"] // 2, one_step(spec, call)
    step = step if step.gate_dtype is None else call_with_log_gates(step)  # rings hold log gates, in a wide dtype
    return [(step, half + (half if call.variable_length else call.dims["T"]))]


def _by_step(
    names: tuple[str, ...],
    tokens: tuple[str, ...],
    replay: Replay,
    keep: Keep,
    step: Callable[..., Any],
) -> Callable[..., Any]:
    """Returns a function that computes the op.

    Args:
        names: the names of its arguments. tokens: those of them that hold tokens.
        step: computes the step; takes its arguments by name.
    """

    def on_rings(*args: Any) -> Tensor:
        x = dict(zip(names, args, strict=True))
        q, pool, slots, rings = x["q"], x["pool"], x["slots"], {name: x[f"ring_{name}"] for name in ("k", "v", "g")}
        (N, L), dtype = (len(slots), x["ring_k"].shape[1]), wide(q.dtype)
        new = {name: x[name] for name in tokens}
        if x["g"] is not None:
            new["g"] = log_gates(x["g"], x["gate_normalizer"], dtype).contiguous()
        served = is_slot(pool, slots, x["pad_slot"])  # [N]
        accepted = x["num_accepted"].clamp(0, L // 2).long()
        state = states_of_slots(pool, slots, x["has_state"], dtype, x["pad_slot"])  # [N, Hv, K, V]
        is_new = False if x["has_state"] is None else ~x["has_state"]

        def at(i: int | Tensor) -> tuple[Tensor, Tensor]:
            """Returns the slots and the positions in the rings [N] of token i, counted from the ring's start."""
            return torch.where(served, slots, 0).long(), (x["ring_start"].long() + i) % L

        no_query, shared = q.new_zeros(N, *q.shape[2:]), {"scale": x["scale"], "gate_normalizer": None}
        for i in range(L // 2 if N * len(pool) else 0):
            old = {name: ring if ring is None else ring[at(i)] for name, ring in rings.items()}
            old["g"] = new["g"] if old["g"] is None else old["g"]
            advanced = replay(functools.partial(step, **shared), q=no_query, **old, state=state)
            state = torch.where((i < accepted)[:, None, None, None], advanced, state)
        write_states(pool, slots, state, served & ((accepted > 0) | is_new))

        o = rows_of_outputs(q, x["v"])
        computed = token_by_token(step, new, x["cu_seqlens"], L // 2, served, state, o, **shared)
        for j, (here, token, after) in enumerate(computed):
            kept, state = {**token, "v": keep(token, state)}, after
            for name, ring in rings.items():
                if ring is not None:
                    write_entries(ring, at(accepted + j), kept[name], here)
        return in_shape(o, q, x["out"])

    return on_rings
