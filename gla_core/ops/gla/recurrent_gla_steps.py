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

from torch import Tensor

from gla_core.ops import checks
from gla_core.ops._serving import serving
from gla_core.ops._steps import spec_of_steps
from gla_core.ops.deprecated import backend_by_position
from gla_core.ops.gla.chunk_gla import FORWARD, NORMALIZER
from gla_core.ops.gla.recurrent_gla_step import STEP, refuse_in_place


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
        q: queries [B, T, Hq, K]. The dtypes, heads and values of q, k, v and g are as in `chunk_gla`.
        k: keys [B, T, H, K].
        v: values [B, T, Hv, V].
        g: natural logarithm of the forget gate, [B, T, Hv, K], [B, T, Hv] or [Hv]; None means no decay.
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
        ValueError, TypeError, RuntimeError, NoBackendError, UnknownBackendError, NotImplementedError: as in
            `chunk_gla_pool`.

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


STEPS = spec_of_steps("recurrent_gla_steps", FORWARD, STEP, "chunk_gla_pool", NORMALIZER)

_call = serving(STEPS, train_with=FORWARD, refuse_in_place=refuse_in_place)
