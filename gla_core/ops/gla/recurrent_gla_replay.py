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

from collections.abc import Callable
from typing import Any

from torch import Tensor

from gla_core.ops import checks
from gla_core.ops._replay import spec_of_replay
from gla_core.ops._serving import serving
from gla_core.ops.deprecated import backend_by_position
from gla_core.ops.gla.chunk_gla import FORWARD, NORMALIZER
from gla_core.ops.gla.recurrent_gla_step import STEP, refuse_in_place


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


def _replayed(step: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, state: Tensor) -> Tensor:
    """Advances states by a token in rings: a step without a query."""
    tokens = {"q": q, "k": k.to(q.dtype), "v": v.to(q.dtype), "g": g}
    return step(**tokens, state=state, state_indices=None, inplace=False)[1]


REPLAY = spec_of_replay(
    "recurrent_gla_replay", FORWARD, STEP, "chunk_gla_pool", _replayed, lambda token, state: token["v"], NORMALIZER
)

_call = serving(REPLAY, train_with=FORWARD, refuse_in_place=refuse_in_place)
