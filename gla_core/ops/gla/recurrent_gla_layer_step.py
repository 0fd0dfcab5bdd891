"""Computes what a layer does for one token between its projections: the abstract op recurrent_gla_layer_step.

Per row and output head, with the recurrence of `recurrent_gla_step`, weight w and activation f:

    S' = diag(alpha) S + k^T v        u = scale * q S'        o = u / sqrt(mean(u^2) + norm_eps) * w * f(output_gate)

Sources: Yang et al., "Gated Linear Attention Transformers with Hardware-Efficient Training" (arXiv 2312.06635); Zhang
and Sennrich, "Root Mean Square Layer Normalization" (arXiv 1910.07467).

A backend's function receives and returns

    recurrent_gla_layer_step(q, k, v, g, state, output_gate, norm_weight, scale, norm_eps, activation, state_indices,
                             gate_normalizer) -> o

The mean is over the V values of a head. Without output_gate the factor f(output_gate) is 1, and without norm_weight w
is 1. The state is written in place. Row b reads and writes state[state_indices[b]], or state[b] without indices. A row
whose index is outside 0 to P-1 is skipped: its o is 0, whatever its output gate holds, and no state is written.
gate_normalizer is as in `chunk_gla`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from gla_core.dispatch.backend import Lowering, OpCall
from gla_core.dispatch.tensors import sigmoid, silu, wide
from gla_core.ops import checks
from gla_core.ops._invariant import needs_equal_bits
from gla_core.ops._serving import serving
from gla_core.ops.deprecated import backend_by_position, renamed
from gla_core.ops.gla.chunk_gla import FORWARD, NORMALIZER
from gla_core.ops.gla.recurrent_gla_step import STEP, refuse_in_place
from gla_core.ops.spec import AS_INPUT, AS_INPUT_OR_FLOAT32, INTEGER, POOL, Argument, OpSpec, Result, Role, plain_number

OUTPUT_ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {"silu": lambda x: silu(x, needs_equal_bits()), "sigmoid": lambda x: sigmoid(x, needs_equal_bits())}
)
"""The activations of the output gate of recurrent_gla_layer_step, by name."""


def recurrent_gla_layer_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    state: Tensor,
    output_gate: Tensor | None = None,
    norm_weight: Tensor | None = None,
    scale: float | None = None,
    slots: Tensor | None = None,
    *rest: str | None,
    backend: str | None = None,
    norm_eps: float = 1e-5,
    activation: str = "silu",
    state_v_first: bool = False,
    gate: str | None = None,
    gate_normalizer: int = 16,
    state_indices: Tensor | None = None,
) -> Tensor:
    """Advances states by one token per row in place, and returns the normed and gated outputs. Not differentiable.

    It is what a layer of gated linear attention does between its input projections and its output projection, for
    decoding: `recurrent_gla_step`, an RMS norm of each head's output, and the output gate. Everything between is
    float32 (float64 with float64 inputs). No value is read on the host, so the call can be captured into a CUDA graph.

    The inputs may be slices of one projection of several, without a copy, since only their last dimension has to be
    contiguous.

    Under autocast q, k, v and output_gate are cast to the dtype of autocast, and o has that dtype; g and norm_weight
    keep float32, and the state keeps its dtype.

    Args:
        q: queries [B, Hq, K]. The dtypes, heads and values of q, k, v and g are as in `chunk_gla`.
        k: keys [B, H, K].
        v: values [B, Hv, V].
        g: natural logarithm of the forget gate, [B, Hv, K], [B, Hv] or [Hv]; None means no decay.
        state: the state before the token [P, Hv, K, V], float32, bfloat16 or float16 (float64 with float64 inputs);
            written. P is B without slots; with them, state is a pool of P states. A number above 65504 becomes inf in
            float16.
        output_gate: what the activation is applied to [B, Ho, V], dtype of q, where Ho is the larger of Hq and Hv. None
            means no output gate.
        norm_weight: the weight of the norm [V], dtype of q or float32, the same for all heads. None means no weight.
        scale: factor of the output before the norm; None means K^-1/2.
        slots: for each row of the batch, the slot of the pool that it reads and writes [B], int32 or int64. No two rows
            may have the same slot. A row whose slot is outside 0 to P-1 is skipped: its o is 0.
        backend: a request such as "reference"; see `use_backend`.
        norm_eps: number added to the mean square.
        activation: "silu" or "sigmoid", the activation of the output gate.
        state_v_first: whether the state is [P, Hv, V, K].
        gate: None, or "logsigmoid" if g holds logits, as in `chunk_gla`.
        gate_normalizer: the whole number by which log sigma of the logits is divided.
        state_indices: the deprecated name of `slots`.

    Returns:
        o [B, Ho, V] with the dtype of v, contiguous.

    Raises:
        ValueError, TypeError, RuntimeError, NoBackendError, UnknownBackendError, NotImplementedError: as in
            `chunk_gla_pool`.

    Example:
        >>> state, gates = torch.zeros(2, 4, 32, 32), torch.randn(2, 4, 32)
        >>> token = [x[:, 0] for x in (q, k, v, g)]
        >>> o = gla.recurrent_gla_layer_step(*token, state, gates)
        >>> y = output_projection(o.flatten(1))
    """
    if rest:
        backend = backend_by_position("recurrent_gla_layer_step", rest, backend)
    if state_indices is not None:
        slots = renamed("recurrent_gla_layer_step", "state_indices", "slots", state_indices, slots)
    c = None if gate is None else checks.normalizer(gate, gate_normalizer, g)
    options = (scale, plain_number(norm_eps), activation, slots, c)
    return _call((q, k, v, g, state, output_gate, norm_weight, *options), backend, state_v_first)


def _bind(args: Mapping[str, Any], sizes: dict[str, Any]) -> None:
    activation = args["activation"]
    if activation not in OUTPUT_ACTIVATIONS:
        raise ValueError(f"activation is {activation!r}; expected {' or '.join(map(repr, OUTPUT_ACTIVATIONS))}")


# ---- by recurrent_gla_step in place, and PyTorch's operations for the norm and the output gate


def _step_of_layer_step(call: OpCall) -> OpCall:
    """Returns the call of recurrent_gla_step by which recurrent_gla_layer_step is computed."""
    return replace(
        call,
        op=STEP.name,
        scalars={"gate_normalizer": call.scalars.get("gate_normalizer"), "inplace": True},
        given=call.given.intersection(STEP.contract) | {"inplace"},
        layouts={name: layout for name, layout in call.layouts.items() if name in STEP.contract},
    )


def _by_step(step: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that computes recurrent_gla_layer_step by one with the arguments of recurrent_gla_step."""

    def recurrent_gla_layer_step(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor | None,
        state: Tensor,
        output_gate: Tensor | None,
        norm_weight: Tensor | None,
        scale: float,
        norm_eps: float,
        activation: str,
        state_indices: Tensor | None,
        gate_normalizer: int | None,
    ) -> Tensor:
        token = {"q": q, "k": k, "v": v, "g": g, "scale": scale, "gate_normalizer": gate_normalizer}
        o, _ = step(**token, state=state, state_indices=state_indices, inplace=True)
        dtype = wide(o.dtype)
        weight = None if norm_weight is None else norm_weight.to(dtype)
        y = torch.nn.functional.rms_norm(o.to(dtype), o.shape[-1:], weight, norm_eps)
        y = y if output_gate is None else y * OUTPUT_ACTIVATIONS[activation](output_gate.to(dtype))
        y = y.to(o.dtype).contiguous()
        if state_indices is None:
            return y
        is_used = (state_indices >= 0) & (state_indices < len(state))  # elsewhere the output gate may be NaN
        return torch.where(is_used[:, None, None], y, 0)

    return recurrent_gla_layer_step


LAYER_STEP = OpSpec(
    name="recurrent_gla_layer_step",
    public="recurrent_gla_layer_step",
    arguments=(
        *STEP.arguments[:4],  # q, k, v, g
        Argument("state", "Tensor(a!)", "P Hv K V", POOL, role=Role.STATE),
        Argument("output_gate", "Tensor?", "B Ho V", AS_INPUT, None),
        Argument("norm_weight", "Tensor?", "V", AS_INPUT_OR_FLOAT32, None),
        Argument("scale", "float?", default=None, in_call=False),
        Argument("norm_eps", "float", default=1e-5, in_call=False),
        Argument("activation", "str", default="silu"),
        Argument("state_indices", "Tensor?", "B", INTEGER, None, role=Role.SLOTS, public="slots"),
        NORMALIZER,
    ),
    results=(Result("o", "B Ho V"),),
    sizes=STEP.sizes,
    bind=_bind,
    reads=STEP.reads,
    flops=STEP.flops,
    tokens=STEP.tokens,
    lowering=Lowering(STEP.name, lambda call: [(_step_of_layer_step(call), 1)], _by_step),
)

_call = serving(LAYER_STEP, train_with=FORWARD, refuse_in_place=refuse_in_place)
