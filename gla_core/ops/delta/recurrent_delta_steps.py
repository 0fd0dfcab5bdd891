"""Computes up to eight tokens of each sequence of a delta rule, whose states are in a pool: recurrent_delta_steps.

The recurrence is that of `recurrent_delta_step`. A backend's function receives and returns

    recurrent_delta_steps(q, k, v, g, beta, pool, slots, scale, cu_seqlens, num_accepted, read_slots, has_state,
                          pad_slot, gate_normalizer, normalize, beta_limit, gate_activation, bound, A_log, dt_bias,
                          out) -> o

Everything but beta [B, T, Hv], and the arguments after gate_normalizer, which `recurrent_delta_step` explains, is as in
`recurrent_gla_steps`.
"""

from __future__ import annotations

from torch import Tensor

from gla_core.ops._serving import serving
from gla_core.ops._steps import spec_of_steps
from gla_core.ops.delta.chunk_delta import FORWARD
from gla_core.ops.delta.inputs import ARGUMENTS, Gate, projections, with_projections
from gla_core.ops.delta.recurrent_delta_step import STEP, refuse_in_place
from gla_core.ops.gla.chunk_gla import NORMALIZER


def recurrent_delta_steps(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    pool: Tensor,
    slots: Tensor,
    scale: float | None = None,
    *,
    normalize: float | None = None,
    gate: Gate = None,
    gate_normalizer: int = 16,
    beta_limit: float | None = None,
    backend: str | None = None,
    cu_seqlens: Tensor | None = None,
    num_accepted: Tensor | None = None,
    read_slots: Tensor | None = None,
    has_state: Tensor | None = None,
    pad_slot: int = -1,
    out: Tensor | None = None,
    state_v_first: bool = False,
) -> Tensor:
    """Advances states of a delta rule by up to eight tokens per sequence, and keeps the state after each.

    Not differentiable. A draft of several tokens is verified in one call, and the next call continues after the tokens
    that were accepted, as in `recurrent_gla_steps`; `recurrent_delta_replay` does it with one state per sequence. No
    value is read on the host, so the call can be captured into a CUDA graph. Under autocast q, k and v are cast to the
    dtype of autocast, and o has that dtype; g and beta keep float32, and the pool keeps its dtype.

    Args:
        q: queries [B, T, H, K]. The dtypes, heads and values of q, k, v, g and beta are as in `chunk_delta`.
        k: keys [B, T, H, K].
        v: values [B, T, Hv, V].
        g: natural logarithm of the forget gate, [B, T, Hv, K], [B, T, Hv] or [Hv]; None means no decay.
        beta: which part of the difference to v_t is learnt [B, T, Hv].
        pool: states [P, Hv, K, V], float32, bfloat16 or float16 (float64 with float64 inputs); written. The slots may
            be any distance apart, as in pages of memory. A number above 65504 becomes inf in float16.
        slots: for each sequence, the slots that receive the states after its tokens [N, S], int32 or int64, S from 1 to
            8. [N] stands for S = 1. N is B without cu_seqlens.
        scale: factor of the output; None means K^-1/2.
        normalize: the eps of an l2 norm of q and k, as in `chunk_delta`; None means that they are used as they are.
        gate: None if g holds log gates; otherwise how they are computed from the logits g, as in `chunk_delta`.
        gate_normalizer: the whole number by which log sigma of the logits is divided.
        beta_limit: None if beta holds betas. Otherwise beta holds logits, and beta_limit sigma(beta) is used.
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
        out: memory for o [B, T, Hv, V], contiguous, dtype of v; None means a new tensor.
        state_v_first: whether the pool is [P, Hv, V, K].

    Returns:
        o [B, T, Hv, V] with the dtype of v; `out` itself if it is given.

    Raises:
        ValueError, TypeError, RuntimeError, NoBackendError, UnknownBackendError, NotImplementedError: as in
            `chunk_delta_pool`.

    Example:
        >>> pool = torch.zeros(10, 4, 32, 32)
        >>> # Two requests, with drafts of two tokens
        >>> slots = torch.tensor([[1, 2, 3], [4, 5, 6]])
        >>> tokens = [x[:, :3] for x in (q, k, v, g, beta)]
        >>> o = gla.recurrent_delta_steps(*tokens, pool, slots)
    """
    if isinstance(slots, Tensor) and slots.ndim == 1:
        slots = slots[:, None]
    tokens = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
    options = (normalize, gate, gate_normalizer, beta_limit, backend)
    taken, how = projections(STEPS, tokens, *options)
    sequences = (cu_seqlens, num_accepted, read_slots, has_state, pad_slot)
    return _call((*taken, pool, slots, scale, *sequences, *how, out), backend, state_v_first)


STEPS = with_projections(
    spec_of_steps("recurrent_delta_steps", FORWARD, STEP, "chunk_delta_pool", NORMALIZER, *ARGUMENTS)
)

_call = serving(STEPS, train_with=FORWARD, refuse_in_place=refuse_in_place)
