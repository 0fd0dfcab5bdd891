"""Computes one token of gated linear attention, for decoding: the abstract op recurrent_gla_step.

Per row and value head, with alpha = exp(g), a number for each key or one number:

    S' = diag(alpha) S + k^T v        o = scale * q S'

With a bonus u, a number for each key, the output reads the state before the token, and of the token itself a part:

    o = scale * q (S + diag(u) k^T v)

Source: Yang et al., "Gated Linear Attention Transformers with Hardware-Efficient Training" (arXiv 2312.06635);
of the bonus, which is RWKV-6's, Peng et al., "Eagle and Finch" (arXiv 2404.05892).

A backend's function receives and returns

    recurrent_gla_step(q, k, v, g, state, scale, state_indices, gate_normalizer, bonus, inplace) -> (o, state)

Row b reads and writes state[state_indices[b]], or state[b] without indices. A row whose index is outside 0 to P-1 is
skipped: its o is 0 and no state is written. gate_normalizer is as in `chunk_gla`. bonus is [H, K], or None; value heads
read it as they read k. With `inplace` the given state is written and returned. Without it, the given state is left
unchanged and a new tensor of the same shape is returned; states that no index names are copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

from torch import Tensor

from gla_core.dispatch.request import current_request
from gla_core.ops import _invariant, _step, autocast, checks
from gla_core.ops._run import bypasses_torch, needs_gradient, request_text, run, transformed
from gla_core.ops._torch_op import exportable, refusal_in_place, refuse_tangents, tell_autograd
from gla_core.ops.deprecated import backend_by_position, renamed
from gla_core.ops.gla.chunk_gla import FORWARD, NORMALIZER
from gla_core.ops.spec import (
    AS_INPUT,
    AS_INPUT_OR_FLOAT32,
    INPUT,
    INTEGER,
    POOL,
    Argument,
    OpSpec,
    Result,
    Role,
    gate,
    plain_number,
    scale_or_default,
)

_new_tuple = tuple.__new__  # RecurrentGlaStep(*results) takes twice the time


@exportable
class RecurrentGlaStep(NamedTuple):
    """Holds the results of `recurrent_gla_step`.

    Attributes:
        o: outputs [B, Ho, V], dtype of v.
        state: the new state, with the shape and dtype of the given one; the same tensor if it was written in place.
    """

    o: Tensor
    state: Tensor


def recurrent_gla_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    state: Tensor,
    scale: float | None = None,
    slots: Tensor | None = None,
    inplace: bool = False,
    *rest: str | None,
    backend: str | None = None,
    state_v_first: bool = False,
    gate: str | None = None,
    gate_normalizer: int = 16,
    bonus: Tensor | None = None,
    state_indices: Tensor | None = None,
) -> RecurrentGlaStep:
    """Advances a state by one token per row. Not differentiable: train with `chunk_gla`.

    Under autocast q, k and v are cast to the dtype of autocast, and o has that dtype; g keeps float32, and the state
    and the bonus keep their dtypes.

    Args:
        q: queries [B, Hq, K]. The dtypes, heads and values of q, k, v and g are as in `chunk_gla`.
        k: keys [B, H, K].
        v: values [B, Hv, V].
        g: natural logarithm of the forget gate, [B, Hv, K], [B, Hv] or [Hv]; None means no decay.
        state: the state before the token [P, Hv, K, V], float32, bfloat16 or float16 (float64 with float64 inputs). P
            is B without slots; with them, state is a pool of P states. A number above 65504 becomes inf in float16.
        scale: factor of the output; None means K^-1/2.
        slots: for each row of the batch, the slot of the pool that it reads and writes [B], int32 or int64. No two rows
            may have the same slot. A row whose slot is outside 0 to P-1 is skipped: its o is 0.
        inplace: whether to write the new state into `state` instead of returning a new tensor.
        backend: a request such as "reference"; see `use_backend`.
        state_v_first: whether the given and the returned state are [P, Hv, V, K].
        gate: None, or "logsigmoid" if g holds logits, as in `chunk_gla`.
        gate_normalizer: the whole number by which log sigma of the logits is divided.
        bonus: RWKV-6's u [H, K], dtype of q or float32. With it the output is scale * q (S + diag(u) k^T v), where S is
            the state before the token; without it, scale * q S' of the state S' after the token.
        state_indices: the deprecated name of `slots`.

    Returns:
        `o` [B, Ho, V] with the dtype of v, where Ho is the larger of Hq and Hv, and `state`, the new state with the
        shape and dtype of the given one (the same tensor if `inplace`).

    Raises:
        ValueError, TypeError: an argument has a wrong shape, dtype or device; with inplace, neither of the last two
            dimensions of the state is contiguous.
        RuntimeError: an input requires a gradient.
        NoBackendError, UnknownBackendError: no backend can serve the request.
        NotImplementedError: an input carries a tangent of forward-mode AD.

    Example:
        >>> state = torch.zeros(2, 4, 32, 32)
        >>> token = [x[:, 0] for x in (q, k, v, g)]
        >>> o, state = gla.recurrent_gla_step(*token, state)
    """
    if rest:
        backend = backend_by_position("recurrent_gla_step", rest, backend)
    if state_indices is not None:
        slots = renamed("recurrent_gla_step", "state_indices", "slots", state_indices, slots)
    if state_v_first:
        args = (q, k, v, g, checks.transposed(state), scale, slots)
        options: Any = {"backend": backend, "gate": gate, "gate_normalizer": gate_normalizer, "bonus": bonus}
        try:
            o, new = recurrent_gla_step(*args, inplace, **options)
        except (ValueError, TypeError) as error:
            raise STEP.error_in_layout(error, (*args, None, bonus, inplace)) from None
        return RecurrentGlaStep(o, state if inplace else new.mT)
    c = None if gate is None else checks.normalizer(gate, gate_normalizer, g)
    if needs_gradient(q, k, v, g, state, bonus):
        _no_backward()
    if bypasses_torch(q):
        args = (q, k, v, g, state, scale_or_default(q, scale), slots, c, bonus, inplace)
        results = run(STEP, args, current_request(backend))
        if inplace:
            tell_autograd(state)
        return _new_tuple(RecurrentGlaStep, results)
    q, k, v, g = autocast.inputs(STEP, q, k, v, g)
    refuse_tangents(q, k, v, g, state, bonus)
    args = (q, k, v, g, state, plain_number(scale), slots, c, bonus, request_text(backend))
    if inplace:
        if transformed():
            refuse_in_place()
        return RecurrentGlaStep(_torch_step_inplace(*args), state)
    return RecurrentGlaStep(*_torch_step(*args))


def _flops(q: Sequence[int], k: Sequence[int], v: Sequence[int], *_: Any, **__: Any) -> int:
    """Counts k^T v for each value head, and the product of q and the state for each head of o."""
    B, Hq, K = q
    return 2 * B * (max(Hq, v[1]) + v[1]) * K * v[2]


STEP = OpSpec(
    name="recurrent_gla_step",
    public="recurrent_gla_step",
    arguments=(
        Argument("q", "Tensor", "B Hq K", INPUT),
        Argument("k", "Tensor", "B H K", AS_INPUT),
        Argument("v", "Tensor", "B Hv V", AS_INPUT),
        gate({"constant": "Hv", "head": "B Hv", "key": "B Hv K"}),
        Argument("state", "Tensor", "P Hv K V", POOL, role=Role.STATE),
        Argument("scale", "float?", default=None, in_call=False),
        Argument("state_indices", "Tensor?", "B", INTEGER, None, role=Role.SLOTS, public="slots"),
        NORMALIZER,
        Argument("bonus", "Tensor?", "H K", AS_INPUT_OR_FLOAT32, None),
        Argument("inplace", "bool", default=False),
    ),
    results=(Result("o", "B Ho V"), Result("state", like="state", written=lambda args: args["inplace"], state=True)),
    sizes={"B": "B", "H": "H", "Hq": "H", "Hv": "H", "K": "K", "V": "V", "P": "B"},
    reads=_step.reads,
    flops=_flops,
    tokens=FORWARD.tokens,
    by_segments=_invariant.step,
)


refuse_in_place = refusal_in_place("chunk_gla with states of your own, or recurrent_gla_step with inplace=False")


def _no_backward(*_: Any) -> NoReturn:
    raise RuntimeError(
        "recurrent_gla_step has no backward and an input requires a gradient; "
        "train with chunk_gla, or decode under torch.no_grad()"
    )


_torch_step, _torch_step_inplace = _step.torch_ops(STEP, backward=_no_backward, refuse_in_place=refuse_in_place)
