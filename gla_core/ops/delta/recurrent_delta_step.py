"""Computes one token of a delta rule, for decoding: the abstract op recurrent_delta_step.

Per row and value head, with alpha = exp(g), a number for each key or one number, and beta a number:

    u = beta (v - k diag(alpha) S)        S' = diag(alpha) S + k^T u        o = scale * q S'

`chunk_delta` names its sources.

A backend's function receives and returns

    recurrent_delta_step(q, k, v, g, beta, state, scale, state_indices, gate_normalizer, normalize, beta_limit,
                         gate_activation, bound, A_log, dt_bias, inplace) -> (o, state)

beta is [B, Hv]. The six arguments after gate_normalizer say what to compute of q, k, g and beta first, as inputs.py
explains. A function that lacks any of them receives computed inputs, and no such argument. Everything else is as in
`recurrent_gla_step`, rows that are skipped too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from torch import Tensor

from gla_core.dispatch.request import current_request
from gla_core.ops import _invariant, _step, autocast, checks
from gla_core.ops._run import bypasses_torch, needs_gradient, request_text, run, transformed
from gla_core.ops._torch_op import refusal_in_place, refuse_tangents, tell_autograd
from gla_core.ops.delta.chunk_delta import FORWARD
from gla_core.ops.delta.inputs import ARGUMENTS, Gate, projections, with_projections
from gla_core.ops.gla.recurrent_gla_step import STEP as GLA_STEP
from gla_core.ops.gla.recurrent_gla_step import RecurrentGlaStep
from gla_core.ops.spec import (
    AS_INPUT_OR_FLOAT32,
    INPUT,
    Argument,
    OpSpec,
    Result,
    arguments_of,
    plain_number,
    scale_or_default,
)


def recurrent_delta_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    state: Tensor,
    scale: float | None = None,
    slots: Tensor | None = None,
    inplace: bool = False,
    *,
    normalize: float | None = None,
    gate: Gate = None,
    gate_normalizer: int = 16,
    beta_limit: float | None = None,
    backend: str | None = None,
    state_v_first: bool = False,
) -> RecurrentGlaStep:
    """Advances a state of a delta rule by one token per row. Not differentiable: train with `chunk_delta`.

    Under autocast q, k and v are cast to the dtype of autocast, and o has that dtype; g and beta keep float32, and the
    state keeps its dtype.

    Args:
        q: queries [B, H, K]. The dtypes, heads and values of q, k, v, g and beta are as in `chunk_delta`.
        k: keys [B, H, K].
        v: values [B, Hv, V].
        g: natural logarithm of the forget gate, [B, Hv, K], [B, Hv] or [Hv]; None means no decay.
        beta: which part of the difference to v is learnt [B, Hv].
        state: the state before the token [P, Hv, K, V], float32, bfloat16 or float16 (float64 with float64 inputs). P
            is B without slots; with them, state is a pool of P states. A number above 65504 becomes inf in float16.
        scale: factor of the output; None means K^-1/2.
        slots: for each row of the batch, the slot of the pool that it reads and writes [B], int32 or int64. No two rows
            may have the same slot. A row whose slot is outside 0 to P-1 is skipped: its o is 0.
        inplace: whether to write the new state into `state` instead of returning a new tensor.
        normalize: the eps of an l2 norm of q and k, as in `chunk_delta`; None means that they are used as they are.
        gate: None if g holds log gates; otherwise how they are computed from the logits g, as in `chunk_delta`.
        gate_normalizer: the whole number by which log sigma of the logits is divided.
        beta_limit: None if beta holds betas. Otherwise beta holds logits, and beta_limit sigma(beta) is used.
        backend: a request such as "reference"; see `use_backend`.
        state_v_first: whether the given and the returned state are [P, Hv, V, K].

    Returns:
        `o` [B, Hv, V] with the dtype of v, and `state`, the new state with the shape and dtype of the given one (the
        same tensor if `inplace`).

    Raises:
        ValueError, TypeError: an argument has a wrong shape, dtype or device, or an option is out of range; with
            inplace, neither of the last two dimensions of the state is contiguous.
        RuntimeError: an input requires a gradient.
        NoBackendError, UnknownBackendError: no backend can serve the request.
        NotImplementedError: an input carries a tangent of forward-mode AD.

    Example:
        >>> state = torch.zeros(2, 4, 32, 32)
        >>> token = [x[:, 0] for x in (q, k, v, g, beta)]
        >>> o, state = gla.recurrent_delta_step(*token, state, normalize=1e-6)
    """
    S = checks.transposed(state) if state_v_first else state
    tokens = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
    options = (normalize, gate, gate_normalizer, beta_limit, backend)
    taken, how = projections(STEP, tokens, *options)
    if needs_gradient(*taken, state):
        _no_backward()
    try:
        o, new = _call(taken, S, scale, slots, how, inplace, backend)
    except (ValueError, TypeError) as error:
        if not state_v_first:
            raise
        raise STEP.error_in_layout(error, (*taken, S, scale, slots, *how, inplace)) from None
    return RecurrentGlaStep(o, state if inplace else checks.transposed(new) if state_v_first else new)


def _call(
    tokens: tuple, state: Tensor, scale: Any, slots: Tensor | None, how: tuple, inplace: bool, backend: str | None
) -> tuple[Tensor, Tensor]:
    q = tokens[0]
    if bypasses_torch(q):
        args = (*tokens, state, scale_or_default(q, scale), slots, *how, inplace)
        results = run(STEP, args, current_request(backend))
        if inplace:
            tell_autograd(state)
        return results
    tokens = autocast.inputs(STEP, *tokens)
    refuse_tangents(*tokens, state)
    args = (*tokens, state, plain_number(scale), slots, *how, request_text(backend))
    if not inplace:
        return _torch_step(*args)
    if transformed():
        refuse_in_place()
    return _torch_step_inplace(*args), state


def _flops(q: Sequence[int], k: Sequence[int], v: Sequence[int], *_: Any, **__: Any) -> int:
    """Counts the products of k and the state, of k and u, and of q and the state for each value head."""
    B, _H, K = q
    return 6 * B * v[1] * K * v[2]


STEP = with_projections(
    OpSpec(
        name="recurrent_delta_step",
        public="recurrent_delta_step",
        arguments=(
            Argument("q", "Tensor", "B H K", INPUT),
            *arguments_of(GLA_STEP, "k", "v", "g"),
            Argument("beta", "Tensor", "B Hv", AS_INPUT_OR_FLOAT32),
            *arguments_of(GLA_STEP, "state", "scale", "state_indices", "gate_normalizer"),
            *ARGUMENTS,
            *arguments_of(GLA_STEP, "inplace"),
        ),
        results=(Result("o", "B Hv V"), GLA_STEP.results[1]),
        sizes={name: size for name, size in GLA_STEP.sizes.items() if name != "Hq"},
        reads=_step.reads,
        flops=_flops,
        tokens=FORWARD.tokens,
        by_segments=_invariant.step,
    )
)


refuse_in_place = refusal_in_place("chunk_delta with states of your own, or recurrent_delta_step with inplace=False")


def _no_backward(*_: Any) -> NoReturn:
    raise RuntimeError(
        "recurrent_delta_step has no backward and an input requires a gradient; "
        "train with chunk_delta, or decode under torch.no_grad()"
    )


_torch_step, _torch_step_inplace = _step.torch_ops(STEP, backward=_no_backward, refuse_in_place=refuse_in_place)
