"""Computes a delta rule over packed sequences whose states are in a pool: the abstract op chunk_delta_pool.

The recurrence is that of `chunk_delta`. A backend's function receives and returns

    chunk_delta_pool(q, k, v, g, beta, pool, cu_seqlens, read_slots, write_slots, scale, has_state, checkpoint_offsets,
                     checkpoint_slots, pad_slot, gate_normalizer, out) -> o

Everything but beta [1, T, Hv] is as in `chunk_gla_pool`.
"""

from __future__ import annotations

from torch import Tensor

from gla_core.ops._pool import spec_of_pool
from gla_core.ops._serving import serving
from gla_core.ops.delta.chunk_delta import FORWARD
from gla_core.ops.delta.inputs import Gate, inputs
from gla_core.ops.delta.recurrent_delta_step import refuse_in_place
from gla_core.ops.gla.chunk_gla import NORMALIZER


def chunk_delta_pool(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    pool: Tensor,
    cu_seqlens: Tensor,
    read_slots: Tensor,
    write_slots: Tensor | None = None,
    scale: float | None = None,
    *,
    normalize: float | None = None,
    gate: Gate = None,
    gate_normalizer: int = 16,
    beta_limit: float | None = None,
    backend: str | None = None,
    has_state: Tensor | None = None,
    snapshot_offsets: Tensor | None = None,
    snapshot_slots: Tensor | None = None,
    pad_slot: int = -1,
    out: Tensor | None = None,
    max_seqlen: int | None = None,
    state_v_first: bool = False,
) -> Tensor:
    """Computes a delta rule over packed sequences, and advances their states in a pool in place. Not differentiable.

    Slots are read and written as `chunk_gla_pool` does. No value is read on the host, so the call can be captured into
    a CUDA graph. Under autocast q, k and v are cast to the dtype of autocast, and o has that dtype; g and beta keep
    float32, and the pool keeps its dtype.

    Args:
        q: queries [1, T, H, K]. The dtypes, heads and values of q, k, v, g and beta are as in `chunk_delta`.
        k: keys [1, T, H, K].
        v: values [1, T, Hv, V].
        g: natural logarithm of the forget gate, [1, T, Hv, K], [1, T, Hv] or [Hv]; None means no decay.
        beta: which part of the difference to v_t is learnt [1, T, Hv].
        pool: states [P, Hv, K, V], float32, bfloat16 or float16 (float64 with float64 inputs); written. The slots may
            be any distance apart, as in pages of memory. A state is rounded once, where it is written; a number above
            65504 becomes inf in float16.
        cu_seqlens: offsets of the sequences [N+1], int32 or int64: sequence n is rows cu_seqlens[n] to
            cu_seqlens[n+1]. The last offset may be repeated. Rows before the first offset and after the last one belong
            to no sequence, and their o is 0.
        read_slots: for each sequence, the slot of the state that it starts from [N], int32 or int64. A sequence starts
            from 0 if the slot is outside the pool or is `pad_slot`.
        write_slots: for each sequence, the slot that its last state is written into [N], int32 or int64; None means
            `read_slots`. The last state of an empty sequence is the state that it starts from.
        scale: factor of the output; None means K^-1/2.
        normalize: the eps of an l2 norm of q and k, as in `chunk_delta`; None means that they are used as they are.
        gate: None if g holds log gates; otherwise how they are computed from the logits g, as in `chunk_delta`.
        gate_normalizer: the whole number by which log sigma of the logits is divided.
        beta_limit: None if beta holds betas. Otherwise beta holds logits, and beta_limit sigma(beta) is used.
        backend: a request such as "reference"; see `use_backend`.
        has_state: for each sequence, whether it has a state [N], bool. A sequence without one starts from 0, whatever
            its slot holds. None means that all have one.
        snapshot_offsets: for each sequence, the number of tokens before its snapshot [N], int32 or int64, a multiple of
            64. There is no snapshot if this is not between 1 and the number of tokens minus 1.
        snapshot_slots: for each sequence, the slot that the state before that token is written into [N], int32 or
            int64. Both or neither of the two must be given.
        pad_slot: a slot that is never read or written.
        out: memory for o [1, T, Hv, V], contiguous, dtype of v; None means a new tensor.
        max_seqlen: the number of tokens of the longest sequence, or an upper bound; a hint, as in `chunk_gla`.
        state_v_first: whether the pool is [P, Hv, V, K].

    Returns:
        o [1, T, Hv, V] with the dtype of v; `out` itself if it is given.

    Raises:
        ValueError, TypeError: an argument has a wrong shape, dtype or device, an option is out of range, or a tensor
            cannot be written in place.
        RuntimeError: an input requires a gradient.
        NoBackendError, UnknownBackendError: no backend can serve the request.
        NotImplementedError: an input carries a tangent of forward-mode AD, or is under a transform of torch.func.

    Example:
        >>> pool = torch.zeros(100, 4, 32, 32)
        >>> cu_seqlens, slots = torch.tensor([0, 60, 100]), torch.tensor([7, 3])
        >>> batch = (q, k, v, g, beta, pool, cu_seqlens, slots)
        >>> o = gla.chunk_delta_pool(*batch, normalize=1e-6)
    """
    tokens = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
    options = (normalize, gate, gate_normalizer, beta_limit, backend)
    q, k, v, g, beta, c = inputs(CHUNK_POOL, tokens, None, *options).values()
    slots, more = (cu_seqlens, read_slots, write_slots), (has_state, snapshot_offsets, snapshot_slots, pad_slot)
    return _call((q, k, v, g, beta, pool, *slots, scale, *more, c, out, max_seqlen), backend, state_v_first)


CHUNK_POOL = spec_of_pool("chunk_delta_pool", FORWARD, NORMALIZER)

_call = serving(CHUNK_POOL, train_with=FORWARD, refuse_in_place=refuse_in_place)
