"""Computes up to eight tokens of each sequence, after the accepted tokens of the last call: recurrent_delta_replay.

The recurrence is that of `recurrent_delta_step`. A backend's function receives and returns

    recurrent_delta_replay(q, k, v, g, beta, pool, ring_k, ring_v, ring_g, slots, ring_start, num_accepted, scale,
                           cu_seqlens, has_state, pad_slot, gate_normalizer, normalize, beta_limit, gate_activation,
                           bound, A_log, dt_bias, out) -> o

beta is [B, T, Hv], and `recurrent_delta_step` explains the arguments after gate_normalizer. Everything else is as in
`recurrent_gla_replay`, but ring_v holds what a token adds to a state:

    u = beta (v - k diag(alpha) S)        S' = diag(alpha) S + k^T u

So accepted tokens are replayed as those of gated linear attention, without a read of the state between them. u is
rounded to the dtype of ring_v, which should be float32: the rounding errors of a bfloat16 ring add up in the states.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from gla_core.dispatch.tensors import decayed, pairwise_sum
from gla_core.ops._replay import spec_of_replay
from gla_core.ops._serving import serving
from gla_core.ops.delta.chunk_delta import FORWARD
from gla_core.ops.delta.inputs import ARGUMENTS, Gate, projections, with_projections
from gla_core.ops.delta.recurrent_delta_step import STEP, refuse_in_place
from gla_core.ops.gla.chunk_gla import NORMALIZER


def recurrent_delta_replay(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    pool: Tensor,
    ring_k: Tensor,
    ring_v: Tensor,
    ring_g: Tensor | None,
    slots: Tensor,
    ring_start: Tensor,
    num_accepted: Tensor,
    scale: float | None = None,
    *,
    normalize: float | None = None,
    gate: Gate = None,
    gate_normalizer: int = 16,
    beta_limit: float | None = None,
    backend: str | None = None,
    cu_seqlens: Tensor | None = None,
    has_state: Tensor | None = None,
    pad_slot: int = -1,
    out: Tensor | None = None,
    state_v_first: bool = False,
) -> Tensor:
    """Advances states in place by the accepted tokens of the last call, and computes up to eight new tokens each.

    It verifies drafts with one state per sequence. A call keeps k, the log gates and what each token adds to the state
    in rings. The next call adds what the accepted tokens added, and continues from there: this needs no delta rule.
    `recurrent_gla_replay` says what a server keeps for each sequence, and how slots are read and written. Not
    differentiable.

    No value is read on the host, so the call can be captured into a CUDA graph. Under autocast q, k and v are cast to
    the dtype of autocast, and o has that dtype; g and beta keep float32, and the pool and the rings keep their dtypes.

    Args:
        q: queries [B, T, H, K]. The dtypes, heads and values of q, k, v, g and beta are as in `chunk_delta`.
        k: keys [B, T, H, K].
        v: values [B, T, Hv, V].
        g: natural logarithm of the forget gate, [B, T, Hv, K], [B, T, Hv] or [Hv]; None means no decay.
        beta: which part of the difference to v_t is learnt [B, T, Hv].
        pool: states [P, Hv, K, V], float32, bfloat16 or float16 (float64 with float64 inputs); written. The slots may
            be any distance apart, as in pages of memory. A number above 65504 becomes inf in float16.
        ring_k: keys of the tokens of the last call [P, L, H, K], normalised if `normalize` is given, dtype of q or
            float32; written. A ring of L tokens, 2 to 16, serves calls of up to L // 2 tokens per sequence.
        ring_v: what these tokens added to the state at their keys, u [P, L, Hv, V], dtype of q or float32; written.
            Use float32, so that rounding errors do not add up in the states.
        ring_g: natural logarithms of the forget gates of these tokens, float32 (float64 with float64 inputs); written:
            [P, L, Hv, K] or [P, L, Hv], as g. None if g is None or [Hv]; the gate must then be the same in each call.
        slots: for each sequence, its slot of the pool and of the rings [N], int32 or int64. N is B without cu_seqlens.
        ring_start: for each sequence, the position in the ring of the first token of its last call, modulo L [N], int32
            or int64. The new tokens follow the accepted ones.
        num_accepted: for each sequence, the number of tokens of its last call that were accepted [N], int32 or int64.
            Values are brought into 0 to L // 2.
        scale: factor of the output; None means K^-1/2.
        normalize: the eps of an l2 norm of q and k, as in `chunk_delta`; None means that they are used as they are.
        gate: None if g holds log gates; otherwise how they are computed from the logits g, as in `chunk_delta`.
        gate_normalizer: the whole number by which log sigma of the logits is divided.
        beta_limit: None if beta holds betas. Otherwise beta holds logits, and beta_limit sigma(beta) is used.
        backend: a request such as "reference"; see `use_backend`.
        cu_seqlens: offsets of packed sequences [N+1], int32 or int64, with B = 1: sequence n is rows cu_seqlens[n] to
            cu_seqlens[n+1], at most L // 2 of them. The last offset may be repeated; rows before the first offset and
            after the last one belong to no sequence, and their o is 0. None: B sequences of T tokens each, T at most L
            // 2.
        has_state: for each sequence, whether its slot holds a state [N], bool. A sequence without one starts from 0,
            whatever its slot holds. None means that all have one.
        pad_slot: a slot that is never read or written. A sequence with such a slot is skipped: its o is 0 and nothing
            is written.
        out: memory for o [B, T, Hv, V], contiguous, dtype of v; None means a new tensor.
        state_v_first: whether the pool is [P, Hv, V, K].

    Returns:
        o [B, T, Hv, V] with the dtype of v; `out` itself if it is given.

    Raises:
        ValueError, TypeError, RuntimeError, NoBackendError, UnknownBackendError, NotImplementedError: as in
            `chunk_delta_pool`.

    Example:
        >>> pool, slots = torch.zeros(10, 4, 32, 32), torch.tensor([7, 2])
        >>> # For three tokens a call
        >>> rings = [torch.zeros(10, 6, 4, 32) for _ in range(3)]
        >>> start, accepted = torch.tensor([0, 0]), torch.tensor([0, 0])
        >>> tokens = [x[:, :3] for x in (q, k, v, g, beta)]
        >>> o = gla.recurrent_delta_replay(
        ...     *tokens, pool, *rings, slots, start, accepted
        ... )
    """
    tokens = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
    options = (normalize, gate, gate_normalizer, beta_limit, backend)
    taken, how = projections(REPLAY, tokens, *options)
    memory, numbers = (pool, ring_k, ring_v, ring_g), (slots, ring_start, num_accepted)
    sequences = (cu_seqlens, has_state, pad_slot)
    return _call((*taken, *memory, *numbers, scale, *sequences, *how, out), backend, state_v_first)


def _replayed(step: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, state: Tensor) -> Tensor:
    """Returns diag(alpha) S + k^T u for a token in rings, of which v holds u; it needs no step."""
    return decayed(state, g, state.dtype) + _keys_of(k, state)[..., None] * v.to(state.dtype)[..., None, :]


def _kept(token: Mapping[str, Any], state: Tensor) -> Tensor:
    """Returns u [N, Hv, V] of a token, from the states before it."""
    k, v, beta = (token[name].to(state.dtype) for name in ("k", "v", "beta"))
    # the sum over keys has the same bits for a sequence whatever sequences are beside it
    read = pairwise_sum((_keys_of(k, state)[..., None] * decayed(state, token["g"], state.dtype)).mT)  # [N, Hv, V]
    return beta[..., None] * (v - read)


def _keys_of(k: Tensor, state: Tensor) -> Tensor:
    """Returns the key of each value head [N, Hv, K]."""
    return k.to(state.dtype).repeat_interleave(state.shape[1] // k.shape[1], dim=1)


REPLAY = with_projections(
    spec_of_replay(
        "recurrent_delta_replay", FORWARD, STEP, "chunk_delta_pool", _replayed, _kept, NORMALIZER, *ARGUMENTS
    )
)

_call = serving(REPLAY, train_with=FORWARD, refuse_in_place=refuse_in_place)
