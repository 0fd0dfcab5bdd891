"""Computes gated linear attention over packed sequences whose states are in a pool: the abstract op chunk_gla_pool.

The recurrence is that of `chunk_gla`. A server keeps the states of its requests in a pool, one state in each slot. The
op reads the state that a sequence starts from out of one slot, and writes its last state into the same or another slot.

A backend's function receives and returns

    chunk_gla_pool(q, k, v, g, pool, cu_seqlens, read_slots, write_slots, scale, has_state, checkpoint_offsets,
                   checkpoint_slots, pad_slot, gate_normalizer, out) -> o

A slot s is used if 0 <= s < P and s is not pad_slot; any other slot is neither read nor written. For sequence n:

- It starts from pool[read_slots[n]] if the slot is used and has_state[n] is True or has_state is None. Otherwise it
  starts from 0, whatever the slot holds; the slot may hold NaN.
- Its last state is written into write_slots[n], if that slot is used. write_slots None means read_slots. A sequence
  without tokens copies the state that it starts from.
- Its checkpoint, the state before token checkpoint_offsets[n], is written into checkpoint_slots[n], if that slot is
  used and 0 < checkpoint_offsets[n] < the number of tokens.

A state is computed in float32 (float64 with float64 inputs), and is rounded to the dtype of the pool once, where it is
written. o and gate_normalizer are as in `chunk_gla`. o is returned in `out` if that is given.

A slot that one sequence writes is neither read nor written by another sequence of the call; several sequences may read
one slot. Numbers in the pool that belong to no written slot keep their bits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gla_core.dispatch.backend import CHUNK, Lowering, OpCall, Parts, contiguous_layout
from gla_core.dispatch.slots import is_slot, states_of_slots, write_states
from gla_core.dispatch.tensors import wide
from gla_core.ops import checks
from gla_core.ops._deprecated import backend_by_position, renamed
from gla_core.ops._serving import serving
from gla_core.ops.gla.chunk_gla import FORWARD, LONGEST, NORMALIZER, TOKENS
from gla_core.ops.gla.recurrent_gla_step import refuse_in_place
from gla_core.ops.spec import AS_INPUT, FLAG, INTEGER, POOL, Argument, OpSpec, Result, Role


def chunk_gla_pool(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    pool: Tensor,
    cu_seqlens: Tensor,
    read_slots: Tensor,
    write_slots: Tensor | None = None,
    scale: float | None = None,
    *rest: str | None,
    backend: str | None = None,
    has_state: Tensor | None = None,
    snapshot_offsets: Tensor | None = None,
    snapshot_slots: Tensor | None = None,
    pad_slot: int = -1,
    out: Tensor | None = None,
    max_seqlen: int | None = None,
    state_v_first: bool = False,
    gate: str | None = None,
    gate_normalizer: int = 16,
    checkpoint_offsets: Tensor | None = None,
    checkpoint_slots: Tensor | None = None,
) -> Tensor:
    """Computes gated linear attention over packed sequences, and advances their states in a pool in place.

    Not differentiable. A slot outside 0 to P-1, and `pad_slot`, is neither read nor written. A slot that one sequence
    writes must neither be read nor written by another sequence of the call; several sequences may read one slot. No
    value is read on the host, so the call can be captured into a CUDA graph.

    Under autocast q, k and v are cast to the dtype of autocast, and o has that dtype; g keeps float32, and the pool
    keeps its dtype.

    Args:
        q: queries [1, T, Hq, K], float64, float32, float16 or bfloat16. Query head i reads key/value head i // (Hq/H).
        k: keys [1, T, H, K], dtype of q.
        v: values [1, T, Hv, V], dtype of q. Value head i reads query and key head i // (Hv/H). Hv is H, or a multiple
            of H if Hq is H.
        g: natural logarithm of the forget gate, dtype of q or float32, in [-inf, 0]: [1, T, Hv, K] for each key,
            [1, T, Hv] for each token and head, or [Hv] for each head. None means no decay. Only with GLA_CHECK=1 in
            the environment are the values read; values above 0 then raise ValueError.
        pool: states [P, Hv, K, V], float32, bfloat16 or float16 (float64 with float64 inputs); written. The slots may
            be any distance apart, as in pages of memory. A state is rounded once, where it is written; a number above
            65504 becomes inf in float16.
        cu_seqlens: offsets of the sequences [N+1], int32 or int64: sequence n is rows cu_seqlens[n] to
            cu_seqlens[n+1]. Empty sequences are legal, so the last offset may be repeated. Rows before the first offset
            and after the last one belong to no sequence, and their o is 0.
        read_slots: for each sequence, the slot of the state that it starts from [N], int32 or int64. A sequence starts
            from 0 if the slot is outside the pool or is `pad_slot`.
        write_slots: for each sequence, the slot that its last state is written into [N], int32 or int64; None means
            `read_slots`. The last state of an empty sequence is the state that it starts from.
        scale: factor of the output; None means K^-1/2.
        backend: a request such as "reference"; see `use_backend`.
        has_state: for each sequence, whether it has a state [N], bool. A sequence without one starts from 0, whatever
            its slot holds. None means that all have one.
        snapshot_offsets: for each sequence, the number of tokens before its snapshot [N], int32 or int64, a multiple of
            64. There is no snapshot if this is not between 1 and the number of tokens minus 1.
        snapshot_slots: for each sequence, the slot that the state before that token is written into [N], int32 or
            int64. Both or neither of the two must be given.
        pad_slot: a slot that is never read or written.
        out: memory for o [1, T, Ho, V], contiguous, dtype of v; None means a new tensor.
        max_seqlen: the number of tokens of the longest sequence, or an upper bound; a hint, as in `chunk_gla`.
        state_v_first: whether the pool is [P, Hv, V, K].
        gate: None, or "logsigmoid" if g holds logits, as in `chunk_gla`.
        gate_normalizer: the whole number by which log sigma of the logits is divided.
        checkpoint_offsets: the deprecated name of `snapshot_offsets`.
        checkpoint_slots: the deprecated name of `snapshot_slots`.

    Returns:
        o [1, T, Ho, V] with the dtype of v, where Ho is the larger of Hq and Hv; `out` itself if it is given.

    Raises:
        ValueError, TypeError: an argument has a wrong shape, dtype or device, or cannot be written in place.
        RuntimeError: an input requires a gradient.
        NoBackendError, UnknownBackendError: no backend can serve the request.
        NotImplementedError: an input carries a tangent of forward-mode AD, or is under a transform of torch.func.

    Example:
        >>> pool = torch.zeros(100, 4, 32, 32)
        >>> new = torch.tensor([True, False])
        >>> cu_seqlens, slots = torch.tensor([0, 60, 100]), torch.tensor([7, 3])
        >>> batch = (q, k, v, g, pool, cu_seqlens, slots)
        >>> o = gla.chunk_gla_pool(*batch, has_state=~new)
    """
    if rest:
        backend = backend_by_position("chunk_gla_pool", rest, backend)
    if checkpoint_offsets is not None:
        names = ("checkpoint_offsets", "snapshot_offsets")
        snapshot_offsets = renamed("chunk_gla_pool", *names, checkpoint_offsets, snapshot_offsets)
    if checkpoint_slots is not None:
        names = ("checkpoint_slots", "snapshot_slots")
        snapshot_slots = renamed("chunk_gla_pool", *names, checkpoint_slots, snapshot_slots)
    c = None if gate is None else checks.normalizer(gate, gate_normalizer, g)
    slots, more = (cu_seqlens, read_slots, write_slots), (has_state, snapshot_offsets, snapshot_slots, pad_slot)
    return _call((q, k, v, g, pool, *slots, scale, *more, c, out, max_seqlen), backend, state_v_first)


def _bind(args: Mapping[str, Any], sizes: dict[str, Any]) -> None:
    checks.logits(args["g"], args["gate_normalizer"])
    slots = sizes["N"]
    checks.packed(sizes, of="q")
    checks.longest(args["max_seqlen"])
    if slots != sizes["N"]:
        raise ValueError(f"read_slots has {slots} entries; expected {sizes['N']}, one for each sequence of cu_seqlens")
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


# ---- by chunk_gla_fwd, between a copy of states out of the pool and a copy into it


def _forward_of_pool(call: OpCall, parts: int = 1) -> OpCall:
    """Returns the call of chunk_gla_fwd that computes a call of chunk_gla_pool between two copies of states.

    Args:
        parts: the number of parts that each sequence is cut into.
    """
    taken, N = FORWARD.contract, parts * call.dims["N"]
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
        op=FORWARD.name,
        dims=dims,
        state_dtype=wide(call.dtype),
        indexed=False,
        scalars={**every, "gate_normalizer": call.scalars.get("gate_normalizer")},
        given=call.given.intersection(taken) | {"initial_state", "output_final_state", "cu_seqlens"},
        layouts=layouts,
    )


def _forwards_of_pool(call: OpCall) -> Parts:
    """Returns the calls of chunk_gla_fwd that compute a call of chunk_gla_pool.

    The second one, if there is one, cuts each sequence in two at its checkpoint.
    """
    return [(_forward_of_pool(call, parts), 1) for parts in ((1, 2) if "checkpoint_offsets" in call.given else (1,))]


def _by_forward(whole: Callable[..., Any], cut: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """Returns a function that computes chunk_gla_pool.

    Args:
        whole: computes chunk_gla_fwd for N sequences.
        cut: computes it for 2 N parts of them; None if `whole` does.
    """
    for_parts = whole if cut is None else cut

    def chunk_gla_pool(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor | None,
        pool: Tensor,
        cu_seqlens: Tensor,
        read_slots: Tensor,
        write_slots: Tensor | None,
        scale: float,
        has_state: Tensor | None,
        checkpoint_offsets: Tensor | None,
        checkpoint_slots: Tensor | None,
        pad_slot: int,
        gate_normalizer: int | None,
        out: Tensor | None,
    ) -> Tensor:
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
            _, ends, *_ = for_parts(**tokens, initial_state=halves, cu_seqlens=parts)
            write_states(pool, checkpoint_slots, ends[::2], where)
        return o if out is None else out.copy_(o)

    return chunk_gla_pool


def _cut_in_two(cu_seqlens: Tensor, offsets: Tensor) -> Tensor:
    """Returns the offsets [2 N + 1] of packed sequences that are each cut after `offsets` [N] tokens."""
    starts = cu_seqlens[:-1]
    parts = torch.stack([starts, (starts + offsets).to(starts.dtype)], 1).flatten()
    return torch.cat([parts, cu_seqlens[-1:]])


CHUNK_POOL = OpSpec(
    name="chunk_gla_pool",
    public="chunk_gla_pool",
    arguments=(
        *(dataclasses.replace(argument, differentiable=False) for argument in TOKENS),
        Argument("pool", "Tensor(a!)", "P Hv K V", POOL, role=Role.STATE),
        Argument("cu_seqlens", "Tensor", "N+1", INTEGER, role=Role.OFFSETS),
        Argument("read_slots", "Tensor", "N", INTEGER, role=Role.SLOTS),
        Argument("write_slots", "Tensor?", "N", INTEGER, None, role=Role.MARKS),
        Argument("scale", "float?", default=None, in_call=False),
        Argument("has_state", "Tensor?", "N", FLAG, None, role=Role.MARKS),
        Argument("checkpoint_offsets", "Tensor?", "N", INTEGER, None, role=Role.MARKS, public="snapshot_offsets"),
        Argument("checkpoint_slots", "Tensor?", "N", INTEGER, None, role=Role.MARKS, public="snapshot_slots"),
        Argument("pad_slot", "int", default=-1),
        NORMALIZER,
        Argument("out", "Tensor(b!)?", "B T Ho V", AS_INPUT, None),
        LONGEST,
    ),
    results=(Result("o", "B T Ho V", into="out"),),
    sizes={"B": "B", "T": "T", "H": "H", "Hq": "H", "Hv": "H", "K": "K", "V": "V", "N": "N", "P": "N"},
    bind=_bind,
    reads=_reads,
    flops=FORWARD.flops,
    tokens=FORWARD.tokens,
    lowering=Lowering(FORWARD.name, _forwards_of_pool, _by_forward),
)

_call = serving(CHUNK_POOL, train_with=FORWARD, refuse_in_place=refuse_in_place)
