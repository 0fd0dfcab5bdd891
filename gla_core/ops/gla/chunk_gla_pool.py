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

from torch import Tensor

from gla_core.ops import checks
from gla_core.ops._pool import spec_of_pool
from gla_core.ops._serving import serving
from gla_core.ops.deprecated import backend_by_position, renamed
from gla_core.ops.gla.chunk_gla import FORWARD, NORMALIZER
from gla_core.ops.gla.recurrent_gla_step import refuse_in_place


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
        q: queries [1, T, Hq, K]. The dtypes, heads and values of q, k, v and g are as in `chunk_gla`.
        k: keys [1, T, H, K].
        v: values [1, T, Hv, V].
        g: natural logarithm of the forget gate, [1, T, Hv, K], [1, T, Hv] or [Hv]; None means no decay.
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


CHUNK_POOL = spec_of_pool("chunk_gla_pool", FORWARD, NORMALIZER)

_call = serving(CHUNK_POOL, train_with=FORWARD, refuse_in_place=refuse_in_place)
