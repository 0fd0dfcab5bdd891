"""Computes up to eight tokens of each sequence, after the accepted tokens of the last call: recurrent_gla_replay.

A server calls it to verify drafts. The recurrence is that of `recurrent_gla_step`. A sequence has one state in a pool,
and its slot of three rings holds k, v and the log gates of the tokens of its last call. A call first replays the tokens
that were accepted, so it reads a state once and writes it once, however many tokens it computes. A backend's function
receives and returns

    recurrent_gla_replay(q, k, v, g, pool, ring_k, ring_v, ring_g, slots, ring_start, num_accepted, scale, cu_seqlens,
                         has_state, pad_slot, gate_normalizer, out) -> o

A slot s is used if 0 <= s < P and s is not pad_slot. A sequence whose slot is not used is skipped: its o is 0, and
nothing is read or written. Any other sequence n has the slot s = slots[n]. With S = L // 2, with
a = num_accepted[n], brought into 0 to S, and with r = ring_start[n]:

- Its base state is pool[s], or 0 if has_state[n] is False, whatever the slot holds; the slot may hold NaN. This state
  is advanced by the tokens r, r+1, ... r+a-1, modulo L, of the rings in slot s.
- If a > 0 or has_state[n] is False, the base state is written into pool[s].
- The new tokens are computed from the base state, and their k, v and log gates are written into the tokens r+a, r+a+1,
  ... modulo L, of the rings in slot s. The state after them is not written.

Sequence n has the new tokens cu_seqlens[n] to cu_seqlens[n+1], or row n of the batch. At most S of them are computed;
the o of others, and of rows that belong to no sequence, is 0. As there are at most S accepted tokens and S new ones, no
token of a ring is both read and written. States are computed in float32 (float64 with float64 inputs), and are rounded
to the dtype of the pool only where they are written. ring_g holds log gates also if g holds logits; it is None if g is
None or constant, as all tokens then have the same gate. o and gate_normalizer are as in `chunk_gla`. o is returned in
`out` if that is given.

No two sequences of a call have the same used slot. All other numbers in the pool and in the rings keep their bits.

The rings are those of ReplaySSM, which vLLM uses for Mamba-2 (vLLM #48018 and #49847).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from gla_core.dispatch.backend import Lowering, OpCall, Parts, call_with_log_gates
from gla_core.dispatch.slots import is_slot, states_of_slots, write_entries, write_states
from gla_core.dispatch.tensors import log_gates, wide
from gla_core.ops import checks
from gla_core.ops._deprecated import backend_by_position
from gla_core.ops._serving import serving
from gla_core.ops._steps import in_shape, one_step, rows_of_outputs, token_by_token
from gla_core.ops.gla.chunk_gla import FORWARD, NORMALIZER
from gla_core.ops.gla.recurrent_gla_step import STEP, refuse_in_place
from gla_core.ops.spec import AS_INPUT, AS_INPUT_OR_FLOAT32, FLAG, INTEGER, POOL, WIDE, Argument, OpSpec, Result, Role


def recurrent_gla_replay(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    pool: Tensor,
    ring_k: Tensor,
    ring_v: Tensor,
    ring_g: Tensor | None,
    slots: Tensor,
    ring_start: Tensor,
    num_accepted: Tensor,
    scale: float | None = None,
    *rest: str | None,
    backend: str | None = None,
    cu_seqlens: Tensor | None = None,
    has_state: Tensor | None = None,
    pad_slot: int = -1,
    out: Tensor | None = None,
    state_v_first: bool = False,
    gate: str | None = None,
    gate_normalizer: int = 16,
) -> Tensor:
    """Advances states in place by the accepted tokens of the last call, and computes up to eight new tokens each.

    It verifies drafts, in which each token follows the one before it, with one state per sequence. A call keeps k, v
    and the log gates of its tokens in rings. The next call replays the tokens that were accepted, writes the state
    after them, and continues from there. Each call reads the state of a sequence once and writes it once.
    `recurrent_gla_steps` reads it once and writes it after each token, into a slot of its own. It needs more slots and
    moves more memory, but computes no token twice, and its states are up to date after each call. Not differentiable.

    A server keeps two numbers for each sequence on the device:

        start, accepted = zeros, zeros
        for each call:
            o = recurrent_gla_replay(q, k, v, g, pool, ring_k, ring_v, ring_g, slots, start, accepted)
            start = (start + accepted) % L
            accepted = number of tokens of this call that are accepted

    For a new sequence, and after a call of `chunk_gla_pool`, which advances the state itself, accepted is 0 and start
    may be any number. A call with T = 0 only replays. It brings the states in the pool up to date, for example before
    they are copied into a prefix cache. After it, accepted is 0.

    The rings are written in place too. A slot outside 0 to P-1, and `pad_slot`, is neither read nor written. No two
    sequences of a call may have the same slot. No value is read on the host, so the call can be captured into a CUDA
    graph.

    Under autocast q, k and v are cast to the dtype of autocast, and o has that dtype; g keeps float32, and the pool and
    the rings keep their dtypes.

    Args:
        q: queries [B, T, Hq, K]. The dtypes, heads and values of q, k, v and g are as in `chunk_gla`.
        k: keys [B, T, H, K].
        v: values [B, T, Hv, V].
        g: natural logarithm of the forget gate, [B, T, Hv, K], [B, T, Hv] or [Hv]; None means no decay.
        pool: states [P, Hv, K, V], float32, bfloat16 or float16 (float64 with float64 inputs); written. The slots may
            be any distance apart, as in pages of memory. A number above 65504 becomes inf in float16.
        ring_k: keys of the tokens of the last call [P, L, H, K], dtype of q or float32; written. A ring of L tokens, 2
            to 16, serves calls of up to L // 2 tokens per sequence. The slots may be any distance apart.
        ring_v: values of these tokens [P, L, Hv, V], dtype of q or float32; written.
        ring_g: natural logarithms of the forget gates of these tokens, float32 (float64 with float64 inputs); written:
            [P, L, Hv, K] or [P, L, Hv], as g. None if g is None or [Hv]; the gate must then be the same in each call.
        slots: for each sequence, its slot of the pool and of the rings [N], int32 or int64. N is B without cu_seqlens.
        ring_start: for each sequence, the position in the ring of the first token of its last call, modulo L [N], int32
            or int64. The new tokens follow the accepted ones.
        num_accepted: for each sequence, the number of tokens of its last call that were accepted [N], int32 or int64.
            Values are brought into 0 to L // 2.
        scale: factor of the output; None means K^-1/2.
        backend: a request such as "reference"; see `use_backend`.
        cu_seqlens: offsets of packed sequences [N+1], int32 or int64, with B = 1: sequence n is rows cu_seqlens[n] to
            cu_seqlens[n+1], at most L // 2 of them. The last offset may be repeated; rows before the first offset and
            after the last one belong to no sequence, and their o is 0. None: B sequences of T tokens each, T at most L
            // 2.
        has_state: for each sequence, whether its slot holds a state [N], bool. A sequence without one starts from 0,
            whatever its slot holds. None means that all have one.
        pad_slot: a slot that is never read or written. A sequence with such a slot is skipped: its o is 0 and nothing
            is written.
        out: memory for o [B, T, Ho, V], contiguous, dtype of v; None means a new tensor.
        state_v_first: whether the pool is [P, Hv, V, K].
        gate: None, or "logsigmoid" if g holds logits, as in `chunk_gla`. ring_g holds log gates in either case.
        gate_normalizer: the whole number by which log sigma of the logits is divided.

    Returns:
        o [B, T, Ho, V] with the dtype of v, where Ho is the larger of Hq and Hv; `out` itself if it is given.

    Raises:
        ValueError, TypeError, RuntimeError, NoBackendError, UnknownBackendError, NotImplementedError: as in
            `chunk_gla_pool`.

    Example:
        >>> pool, slots = torch.zeros(10, 4, 32, 32), torch.tensor([7, 2])
        >>> # For three tokens a call
        >>> rings = [torch.zeros(10, 6, 4, 32) for _ in range(3)]
        >>> start, accepted = torch.tensor([0, 0]), torch.tensor([0, 0])
        >>> tokens = [x[:, :3] for x in (q, k, v, g)]
        >>> o = gla.recurrent_gla_replay(
        ...     *tokens, pool, *rings, slots, start, accepted
        ... )
        >>> start, accepted = (start + accepted) % 6, torch.tensor([3, 1])
        >>> tokens = [x[:, 3:6] for x in (q, k, v, g)]
        >>> o = gla.recurrent_gla_replay(
        ...     *tokens, pool, *rings, slots, start, accepted
        ... )
    """
    if rest:
        backend = backend_by_position("recurrent_gla_replay", rest, backend)
    c = None if gate is None else checks.normalizer(gate, gate_normalizer, g)
    memory, numbers = (pool, ring_k, ring_v, ring_g), (slots, ring_start, num_accepted)
    return _call(
        (q, k, v, g, *memory, *numbers, scale, cu_seqlens, has_state, pad_slot, c, out), backend, state_v_first
    )


def _limit(sizes: Mapping[str, int], packed: bool) -> None:
    T, L = sizes["T"], sizes["L"]
    most = 2 * checks.MOST_STEPS
    if not 2 <= L <= most:
        raise ValueError(
            f"ring_k has L = {L} tokens; expected 2 to {most}: twice the tokens of a sequence in a call. "
            "A longer part of a sequence is a call of chunk_gla_pool"
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


# ---- by recurrent_gla_step, one token of each sequence at a time, old tokens first


def _parts(call: OpCall) -> Parts:
    """Returns one step for each token of half a ring, and for each new token."""
    half, step = call.dims["L"] // 2, one_step(STEP, call)
    step = step if step.gate_dtype is None else call_with_log_gates(step)  # rings hold log gates, in a wide dtype
    return [(step, half + (half if call.variable_length else call.dims["T"]))]


def _by_step(step: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that computes recurrent_gla_replay by one that takes the arguments of recurrent_gla_step."""

    def recurrent_gla_replay(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor | None,
        pool: Tensor,
        ring_k: Tensor,
        ring_v: Tensor,
        ring_g: Tensor | None,
        slots: Tensor,
        ring_start: Tensor,
        num_accepted: Tensor,
        scale: float,
        cu_seqlens: Tensor | None,
        has_state: Tensor | None,
        pad_slot: int,
        gate_normalizer: int | None,
        out: Tensor | None,
    ) -> Tensor:
        (N, L), dtype = (len(slots), ring_k.shape[1]), wide(q.dtype)
        g = None if g is None else log_gates(g, gate_normalizer, dtype).contiguous()
        options = {"scale": scale, "gate_normalizer": None}
        served = is_slot(pool, slots, pad_slot)  # [N]
        accepted = num_accepted.clamp(0, L // 2).long()
        state = states_of_slots(pool, slots, has_state, dtype, pad_slot)  # [N, Hv, K, V]
        is_new = False if has_state is None else ~has_state

        def at(i: int | Tensor) -> tuple[Tensor, Tensor]:
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


REPLAY = OpSpec(
    name="recurrent_gla_replay",
    public="recurrent_gla_replay",
    arguments=(
        *FORWARD.token_arguments,
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
        NORMALIZER,
        Argument("out", "Tensor(e!)?", "B T Ho V", AS_INPUT, None),
    ),
    results=(Result("o", "B T Ho V", into="out"),),
    sizes={"B": "B", "T": "T", "H": "H", "Hq": "H", "Hv": "H", "K": "K", "V": "V", "L": "L", "N": "B", "P": "N"},
    limit=_limit,
    bind=_bind,
    reads=_reads,
    flops=FORWARD.flops,  # the number of replayed tokens is known on the device alone
    tokens=FORWARD.tokens,
    lowering=Lowering(STEP.name, _parts, _by_step),
)

_call = serving(REPLAY, train_with=FORWARD, refuse_in_place=refuse_in_place)
