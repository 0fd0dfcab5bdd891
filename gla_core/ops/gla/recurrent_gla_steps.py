"""Computes up to eight tokens of each sequence, whose states are in a pool: the abstract op recurrent_gla_steps.

A server calls it to verify drafts. The recurrence is that of `recurrent_gla_step`. The state after each token goes into
a slot of its own, so that the next call can continue after any of them. A backend's function receives and returns

    recurrent_gla_steps(q, k, v, g, pool, slots, scale, cu_seqlens, num_accepted, read_slots, has_state, pad_slot,
                        gate_normalizer, out) -> o

A slot s is used if 0 <= s < P and s is not pad_slot; any other slot is neither read nor written. For sequence n:

- With a = num_accepted[n], brought into 1 to S, or a = 1 if num_accepted is None, it starts from pool[slots[n, a-1]],
  or from pool[read_slots[n]] if read_slots is given. If has_state[n] is False, it starts from 0, whatever its slot
  holds; the slot may hold NaN.
- It is skipped, so that its o is 0 and nothing is written, if the slot that it starts from is not used. A sequence
  without a state is skipped if slots[n, 0] is not used.
- The state after token j, counted from 0, is written into slots[n, j], if that slot is used.

Sequence n has the tokens cu_seqlens[n] to cu_seqlens[n+1], or row n of the batch. At most S of them are computed; the
o of others, and of rows that belong to no sequence, is 0. States between tokens are kept in float32 (float64 with
float64 inputs), and are rounded to the dtype of the pool where they are written. o and gate_normalizer are as in
`chunk_gla`. o is returned in `out` if that is given.

A slot that one sequence writes is neither read nor written by another sequence of the call; several sequences may read
one slot. Numbers in the pool that belong to no written slot keep their bits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gla_core.dispatch.backend import Lowering, OpCall, Parts, contiguous_layout
from gla_core.dispatch.slots import is_slot, states_of_slots, write_states
from gla_core.dispatch.tensors import wide
from gla_core.ops import checks
from gla_core.ops._deprecated import backend_by_position
from gla_core.ops._serving import serving
from gla_core.ops.gla.chunk_gla import FORWARD, NORMALIZER, TOKENS
from gla_core.ops.gla.recurrent_gla_step import STEP, refuse_in_place
from gla_core.ops.spec import AS_INPUT, FLAG, INTEGER, POOL, Argument, OpSpec, Result, Role

MOST = 8
"""The most tokens of a sequence in a call."""


def recurrent_gla_steps(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    pool: Tensor,
    slots: Tensor,
    scale: float | None = None,
    *rest: str | None,
    backend: str | None = None,
    cu_seqlens: Tensor | None = None,
    num_accepted: Tensor | None = None,
    read_slots: Tensor | None = None,
    has_state: Tensor | None = None,
    pad_slot: int = -1,
    out: Tensor | None = None,
    state_v_first: bool = False,
    gate: str | None = None,
    gate_normalizer: int = 16,
) -> Tensor:
    """Advances states in a pool in place by up to eight tokens per sequence, and keeps the state after each token.

    A draft of several tokens, each after the one before it, is verified in one call. Not differentiable. The next call
    continues after the tokens that were accepted: pass their number as `num_accepted` and the same `slots`. A slot
    outside 0 to P-1, and `pad_slot`, is neither read nor written. A slot that one sequence writes must neither be read
    nor written by another sequence of the call. No value is read on the host, so the call can be captured into a CUDA
    graph. `recurrent_gla_replay` verifies drafts with one slot per sequence.

    Under autocast q, k and v are cast to the dtype of autocast, and o has that dtype; g keeps float32, and the pool
    keeps its dtype.

    Args:
        q: queries [B, T, Hq, K], float64, float32, float16 or bfloat16. Query head i reads key/value head i // (Hq/H).
        k: keys [B, T, H, K], dtype of q.
        v: values [B, T, Hv, V], dtype of q. Value head i reads query and key head i // (Hv/H). Hv is H, or a multiple
            of H if Hq is H.
        g: natural logarithm of the forget gate, dtype of q or float32, in [-inf, 0]: [B, T, Hv, K] for each key,
            [B, T, Hv] for each token and head, or [Hv] for each head. None means no decay. Only with GLA_CHECK=1 in the
            environment are the values read; values above 0 then raise ValueError.
        pool: states [P, Hv, K, V], float32, bfloat16 or float16 (float64 with float64 inputs); written. The slots may
            be any distance apart, as in pages of memory. A number above 65504 becomes inf in float16.
        slots: for each sequence, the slots that receive the states after its tokens [N, S], int32 or int64, S from 1 to
            8. [N] stands for S = 1. N is B without cu_seqlens.
        scale: factor of the output; None means K^-1/2.
        backend: a request such as "reference"; see `use_backend`.
        cu_seqlens: offsets of packed sequences [N+1], int32 or int64, with B = 1: sequence n is rows cu_seqlens[n] to
            cu_seqlens[n+1], at most S of them. The last offset may be repeated; rows before the first offset and after
            the last one belong to no sequence, and their o is 0. None: B sequences of T tokens each, T at most S.
        num_accepted: for each sequence, the number of tokens of the call before that were accepted [N], int32 or int64;
            the sequence starts from slots[n, num_accepted[n] - 1]. Values are brought into 1 to S. None means 1.
        read_slots: for each sequence, the slot that it starts from [N], int32 or int64, in place of one of `slots`.
        has_state: for each sequence, whether it has a state [N], bool. A sequence without one starts from 0, whatever
            its slot holds. None means that all have one.
        pad_slot: a slot that is never read or written. A sequence that would start from such a slot is skipped: its o
            is 0 and nothing is written.
        out: memory for o [B, T, Ho, V], contiguous, dtype of v; None means a new tensor.
        state_v_first: whether the pool is [P, Hv, V, K].
        gate: None, or "logsigmoid" if g holds logits, as in `chunk_gla`.
        gate_normalizer: the whole number by which log sigma of the logits is divided.

    Returns:
        o [B, T, Ho, V] with the dtype of v, where Ho is the larger of Hq and Hv; `out` itself if it is given.

    Raises:
        ValueError, TypeError: an argument has a wrong shape, dtype or device, or cannot be written in place.
        RuntimeError: an input requires a gradient.
        NoBackendError, UnknownBackendError: no backend can serve the request.
        NotImplementedError: an input carries a tangent of forward-mode AD, or is under a transform of torch.func.

    Example:
        >>> pool = torch.zeros(10, 4, 32, 32)
        >>> # Two requests, with drafts of two tokens
        >>> slots = torch.tensor([[1, 2, 3], [4, 5, 6]])
        >>> tokens = [x[:, :3] for x in (q, k, v, g)]
        >>> o = gla.recurrent_gla_steps(*tokens, pool, slots)
        >>> accepted = torch.tensor([3, 1])
        >>> tokens = [x[:, 3:6] for x in (q, k, v, g)]
        >>> o = gla.recurrent_gla_steps(
        ...     *tokens, pool, slots, num_accepted=accepted
        ... )
    """
    if rest:
        backend = backend_by_position("recurrent_gla_steps", rest, backend)
    if isinstance(slots, Tensor) and slots.ndim == 1:
        slots = slots[:, None]
    c = None if gate is None else checks.normalizer(gate, gate_normalizer, g)
    sequences = (cu_seqlens, num_accepted, read_slots, has_state, pad_slot)
    return _call((q, k, v, g, pool, slots, scale, *sequences, c, out), backend, state_v_first)


def _limit(sizes: Mapping[str, int], packed: bool) -> None:
    T, S = sizes["T"], sizes["S"]
    if not 1 <= S <= MOST:
        raise ValueError(
            f"slots has {S} columns; expected 1 to {MOST}: a longer part of a sequence is a call of chunk_gla_pool"
        )
    if not packed and T > S:
        raise ValueError(f"q has T = {T} tokens for each sequence and slots has {S} columns")


def _bind(args: Mapping[str, Any], sizes: dict[str, Any]) -> None:
    checks.logits(args["g"], args["gate_normalizer"])
    N = sizes["N"]
    if args["cu_seqlens"] is not None:
        checks.packed(sizes, of="q")
    else:
        sizes["N"] = sizes["B"]
    if sizes["N"] != N:
        of = "row of q" if args["cu_seqlens"] is None else "sequence of cu_seqlens"
        raise ValueError(f"slots has {N} rows; expected {sizes['N']}, one for each {of}")


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


# ---- by recurrent_gla_step, one token of each sequence at a time


def step_of_steps(call: OpCall) -> OpCall:
    """Returns the call of recurrent_gla_step by which each token of recurrent_gla_steps is computed."""
    N, dims = call.dims["N"], call.dims
    sizes = {"B": N, **{name: dims[name] for name in ("H", "Hq", "Hv", "K", "V")}, "P": N}
    shapes = {name: (N, dims[heads], dims[width]) for name, heads, width in (("q", "Hq", "K"), ("k", "H", "K"))}
    shapes["v"] = (N, dims["Hv"], dims["V"])
    layouts = {name: contiguous_layout(shape, call.dtype) for name, shape in shapes.items()}
    layouts["state"] = contiguous_layout((N, dims["Hv"], dims["K"], dims["V"]), wide(call.dtype))
    if call.gate_dtype is not None and call.gate_form is not None:
        gate_shapes = {"constant": (dims["Hv"],), "head": (N, dims["Hv"]), "key": (N, dims["Hv"], dims["K"])}
        layouts["g"] = contiguous_layout(gate_shapes[call.gate_form], call.gate_dtype)
    return replace(
        call,
        op=STEP.name,
        dims=sizes,
        state_dtype=wide(call.dtype),
        variable_length=False,
        indexed=False,
        scalars={"gate_normalizer": call.scalars.get("gate_normalizer"), "inplace": False},
        given=call.given.intersection(("g", "gate_normalizer")),
        layouts=layouts if call.layouts else {},
    )


def _parts(call: OpCall) -> Parts:
    """Returns one step for each token of a sequence."""
    S = call.dims["S"]
    return [(step_of_steps(call), S if call.variable_length else min(S, call.dims["T"]))]


def _by_step(step: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that computes recurrent_gla_steps by one that takes the arguments of recurrent_gla_step."""

    def recurrent_gla_steps(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor | None,
        pool: Tensor,
        slots: Tensor,
        scale: float,
        cu_seqlens: Tensor | None,
        num_accepted: Tensor | None,
        read_slots: Tensor | None,
        has_state: Tensor | None,
        pad_slot: int,
        gate_normalizer: int | None,
        out: Tensor | None,
    ) -> Tensor:
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


STEPS = OpSpec(
    name="recurrent_gla_steps",
    public="recurrent_gla_steps",
    arguments=(
        *(dataclasses.replace(argument, differentiable=False) for argument in TOKENS),
        Argument("pool", "Tensor(a!)", "P Hv K V", POOL, role=Role.STATE),
        Argument("slots", "Tensor", "N S", INTEGER, role=Role.SLOTS),
        Argument("scale", "float?", default=None, in_call=False),
        Argument("cu_seqlens", "Tensor?", "N+1", INTEGER, None, role=Role.OFFSETS),
        Argument("num_accepted", "Tensor?", "N", INTEGER, None, role=Role.MARKS),
        Argument("read_slots", "Tensor?", "N", INTEGER, None, role=Role.MARKS),
        Argument("has_state", "Tensor?", "N", FLAG, None, role=Role.MARKS),
        Argument("pad_slot", "int", default=-1),
        NORMALIZER,
        Argument("out", "Tensor(b!)?", "B T Ho V", AS_INPUT, None),
    ),
    results=(Result("o", "B T Ho V", into="out"),),
    sizes={"B": "B", "T": "T", "H": "H", "Hq": "H", "Hv": "H", "K": "K", "V": "V", "N": "B", "S": "T", "P": "N"},
    limit=_limit,
    bind=_bind,
    reads=_reads,
    flops=FORWARD.flops,
    tokens=FORWARD.tokens,
    lowering=Lowering(STEP.name, _parts, _by_step),
    writes=lambda sizes: sizes["B"] * sizes["T"] / max(sizes["N"], 1),
)

_call = serving(STEPS, train_with=FORWARD, refuse_in_place=refuse_in_place)
