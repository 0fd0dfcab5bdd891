"""Computes one token of Mamba-2, for decoding, with its time step and output gate: the abstract op recurrent_ssd_step.

Per row and value head, with a rate A < 0 and a time step dt, both numbers:

    dt' = softplus(dt + dt_bias)        S' = exp(dt' A) S + k^T (dt' v)        o = (scale * q S' + D v) * silu(z)

This is `recurrent_gla_step` with the gate dt' A and the values dt' v. Mamba-2 calls q, k and v C, B and x.

Source: Dao and Gu, "Transformers are SSMs: Generalized Models and Efficient Algorithms Through Structured State Space
Duality" (arXiv 2405.21060).

A backend's function receives and returns

    recurrent_ssd_step(q, k, v, state, dt, A, dt_bias, D, z, scale, dt_softplus, A_is_log, state_indices) -> o

dt' is dt + dt_bias without dt_softplus. A is -exp(A) with A_is_log. Without dt_bias and D they are 0, and without z the
factor silu(z) is 1. The state is written in place. Row b reads and writes state[state_indices[b]], or state[b] without
indices. A row whose index is outside 0 to P-1 is skipped: its o is 0, whatever z holds, and no state is written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gla_core.dispatch.backend import Lowering, OpCall, contiguous_layout
from gla_core.dispatch.tensors import wide
from gla_core.ops._serving import serving
from gla_core.ops.gla.chunk_gla import FORWARD
from gla_core.ops.gla.recurrent_gla_step import STEP, refuse_in_place
from gla_core.ops.gla.ssd import output, rates, time_steps
from gla_core.ops.spec import AS_INPUT_OR_FLOAT32, INPUT, INTEGER, POOL, Argument, OpSpec, Result, Role


def recurrent_ssd_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    dt: Tensor,
    A: Tensor,
    dt_bias: Tensor | None = None,
    D: Tensor | None = None,
    z: Tensor | None = None,
    scale: float | None = None,
    slots: Tensor | None = None,
    *,
    dt_softplus: bool = False,
    A_is_log: bool = False,
    state_v_first: bool = False,
    backend: str | None = None,
) -> Tensor:
    """Advances states of Mamba-2 by one token per row in place, and returns the outputs. Not differentiable.

    It is all that a Mamba-2 layer does between its convolution and its norm, for decoding: the time step with its bias
    and softplus, the gate exp(dt A), `recurrent_gla_step` with the values dt v, the skip D v, and the output gate.
    Everything is float32 (float64 with float64 inputs). No value is read on the host, so the call can be captured into
    a CUDA graph. `gla_core.compat.mamba_ssm.selective_state_update` calls it with mamba_ssm's arguments.

    The inputs may be slices of one projection of several, without a copy, since only their last dimension has to be
    contiguous.

    Under autocast q, k and v are cast to the dtype of autocast, and o has that dtype; the other inputs keep float32,
    and the state keeps its dtype.

    Args:
        q: queries, Mamba-2's C [B, H, K], float64, float32, float16 or bfloat16.
        k: keys, Mamba-2's B [B, H, K], dtype of q.
        v: values, Mamba-2's x [B, Hv, V], dtype of q. Value head i reads query and key head i // (Hv/H).
        state: the state before the token [P, Hv, K, V], float32, bfloat16 or float16 (float64 with float64 inputs);
            written. P is B without slots; with them, state is a pool of P states. A number above 65504 becomes inf in
            float16.
        dt: time steps [B, Hv], before dt_bias and softplus, dtype of q or float32.
        A: rates [Hv], at most 0, dtype of q or float32.
        dt_bias: it is added to dt [Hv], dtype of q or float32. None means 0.
        D: factor of v in the output [Hv], dtype of q or float32. None means 0.
        z: what silu is applied to [B, Hv, V], dtype of q or float32. None means no output gate.
        scale: factor of q; None means K^-1/2. Mamba-2 has 1.
        slots: for each row of the batch, the slot of the pool that it reads and writes [B], int32 or int64. No two rows
            may have the same slot. A row whose slot is outside 0 to P-1 is skipped: its o is 0.
        dt_softplus: whether to apply softplus to dt + dt_bias.
        A_is_log: whether A holds log(-A).
        state_v_first: whether the state is [P, Hv, V, K], as Mamba-2's layers keep it.
        backend: a request such as "reference"; see `use_backend`.

    Returns:
        o [B, Hv, V] with the dtype of v, contiguous.

    Raises:
        ValueError, TypeError: an argument has a wrong shape, dtype or device, or the state cannot be written in place.
        RuntimeError: an input requires a gradient.
        NoBackendError, UnknownBackendError: no backend can serve the request.
        NotImplementedError: an input carries a tangent of forward-mode AD, or is under a transform of torch.func.

    Example:
        >>> B, C = torch.randn(2, 2, 1, 128)  # one group of keys and queries
        >>> x, dt, A = torch.randn(2, 8, 64), torch.rand(2, 8), -torch.rand(8)
        >>> state = torch.zeros(2, 8, 128, 64)
        >>> o = gla.recurrent_ssd_step(C, B, x, state, dt, A, scale=1.0)
    """
    options = (scale, dt_softplus, A_is_log, slots)
    return _call((q, k, v, state, dt, A, dt_bias, D, z, *options), backend, state_v_first)


def _bind(args: Mapping[str, Any], sizes: dict[str, Any]) -> None:
    if args["state_indices"] is None:
        sizes["P"] = sizes["B"]


# ---- by recurrent_gla_step in place, and PyTorch's operations for the rest


def _step_of_ssd_step(call: OpCall) -> OpCall:
    """Returns the call of recurrent_gla_step by which recurrent_ssd_step is computed."""
    B, H, Hv, K, V = (call.dims[name] for name in ("B", "H", "Hv", "K", "V"))
    dtype = wide(call.dtype)
    layouts = {name: layout for name, layout in call.layouts.items() if name in STEP.contract}
    if layouts:
        shapes = {"q": (B, H, K), "k": (B, H, K), "v": (B, Hv, V), "g": (B, Hv)}
        layouts |= {name: contiguous_layout(shape, dtype) for name, shape in shapes.items()}
    return replace(
        call,
        op=STEP.name,
        dtype=dtype,
        dims={name: call.dims.get(name, H) for name in STEP.sizes},
        gate_dtype=dtype,
        gate_form="head",
        scalars={"gate_normalizer": None, "inplace": True},
        given=call.given.intersection(STEP.contract) | {"g", "inplace"},
        layouts=layouts,
    )


def _by_step(step: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that computes recurrent_ssd_step by one with the arguments of recurrent_gla_step."""

    def recurrent_ssd_step(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state: Tensor,
        dt: Tensor,
        A: Tensor,
        dt_bias: Tensor | None,
        D: Tensor | None,
        z: Tensor | None,
        scale: float,
        dt_softplus: bool,
        A_is_log: bool,
        state_indices: Tensor | None,
    ) -> Tensor:
        dtype = wide(v.dtype)  # of the step too: values and outputs are rounded once, after everything
        dt = time_steps(dt, dt_bias, dt_softplus, dtype)
        token = {"q": q.to(dtype), "k": k.to(dtype), "v": v * dt[..., None], "g": dt * rates(A, A_is_log, dtype)}
        token = {name: x.contiguous() for name, x in token.items()}
        options = {"scale": scale, "state_indices": state_indices, "gate_normalizer": None, "inplace": True}
        o, _ = step(**token, state=state, **options)
        o = output(o, v, D, z)
        return without_skipped(o, state, state_indices).contiguous()

    return recurrent_ssd_step


def without_skipped(o: Tensor, state: Tensor, indices: Tensor | None) -> Tensor:
    """Returns o [B, Hv, V], with 0 in the rows whose index is outside the states [P, ...]."""
    if indices is None:
        return o
    return torch.where(((indices >= 0) & (indices < len(state)))[:, None, None], o, 0)


SSD_STEP = OpSpec(
    name="recurrent_ssd_step",
    public="recurrent_ssd_step",
    arguments=(
        Argument("q", "Tensor", "B H K", INPUT),
        *STEP.arguments[1:3],  # k, v
        Argument("state", "Tensor(a!)", "P Hv K V", POOL, role=Role.STATE),
        Argument("dt", "Tensor", "B Hv", AS_INPUT_OR_FLOAT32),
        Argument("A", "Tensor", "Hv", AS_INPUT_OR_FLOAT32),
        Argument("dt_bias", "Tensor?", "Hv", AS_INPUT_OR_FLOAT32, None),
        Argument("D", "Tensor?", "Hv", AS_INPUT_OR_FLOAT32, None),
        Argument("z", "Tensor?", "B Hv V", AS_INPUT_OR_FLOAT32, None),
        Argument("scale", "float?", default=None, in_call=False),
        Argument("dt_softplus", "bool", default=False),
        Argument("A_is_log", "bool", default=False),
        Argument("state_indices", "Tensor?", "B", INTEGER, None, role=Role.SLOTS, public="slots"),
    ),
    results=(Result("o", "B Hv V"),),
    sizes={"B": "B", "H": "H", "Hv": "H", "K": "K", "V": "V", "P": "B"},
    bind=_bind,
    reads=STEP.reads,
    flops=STEP.flops,
    tokens=("q", "k", "v"),
    lowering=Lowering(STEP.name, lambda call: [(_step_of_ssd_step(call), 1)], _by_step),
)

_call = serving(SSD_STEP, train_with=FORWARD, refuse_in_place=refuse_in_place)
