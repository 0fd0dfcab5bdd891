"""Computes state space duality, Mamba-2's form of the scan: the abstract ops chunk_ssd_fwd and chunk_ssd_bwd.

Per value head, with a rate A <= 0, a bias and a skip D, and for each token a time step dt_t, values x_t [V] and an
output gate z_t [V]:

    delta_t = clamp(f(dt_t + bias), dt_min, dt_max)             f is softplus with dt_softplus, else the identity
    S_t = exp(delta_t A) S_{t-1} + k_t^T (delta_t x_t)          S in R^{K x V}
    o_t = (q_t S_t + D x_t) silu(z_t)                           without z the factor silu(z_t) is 1

This is `chunk_gla` with v = delta x, gates per head g = delta A and scale 1, a skip, and an output gate. A backward is
given no z: if there is a gradient, the public function computes the scan without z, and then the gate by PyTorch's
operations. With dv and dg the gradients of `chunk_gla`, and sums over all tokens,

    ddelta_t = sum_V (x_t * dv_t) + A dg_t        dx_t = delta_t dv_t + D do_t
    dA = sum delta_t dg_t        dD = sum x_t * do_t        dbias = sum ddt_t
    ddt_t = f'(dt_t + bias) ddelta_t where f lies within the limits, else 0

The tensors have the names and shapes of `chunk_gla`: Mamba-2's C, B and headdim are q, k and V. Value head i reads
query and key head i // (Hv/H).

Source: Dao and Gu, "Transformers are SSMs: Generalized Models and Efficient Algorithms Through Structured State Space
Duality" (arXiv 2405.21060).

A backend's functions receive and return

    chunk_ssd_fwd(q, k, x, dt, A, D, dt_bias, dt_softplus, dt_min, dt_max, initial_state, output_final_state,
                  cu_seqlens, checkpoint_every, z) -> (o, state or None, checkpoints or None)
    chunk_ssd_bwd(q, k, x, dt, A, D, dt_bias, dt_softplus, dt_min, dt_max, initial_state, cu_seqlens, checkpoints,
                  checkpoint_every, do, dstate) -> (dq, dk, dx, ddt, dA, dD or None, ddt_bias or None,
                  dinitial_state or None)

dt, D and dt_bias may have any dtype of floating-point numbers. States, checkpoints and rows that belong to no sequence
are as in `chunk_gla`: whatever such a row holds, in z too, its o and gradients are 0, and it counts in no sum.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, overload

import torch
from torch import Tensor

from gla_core.dispatch.backend import Lowering, OpCall, Parts, contiguous_layout
from gla_core.dispatch.request import current_request
from gla_core.dispatch.tensors import pairwise_sum, wide
from gla_core.ops import _invariant, _sequences, autocast, checks
from gla_core.ops._autograd import gradient
from gla_core.ops._run import bypasses_torch, needs_gradient, plans_gradient, request_text, run, tracing, transformed
from gla_core.ops._torch_op import eager_op_of, no_second_derivative, refuse_tangents, torch_op_of
from gla_core.ops.checks import FLOATS
from gla_core.ops.fused import fused
from gla_core.ops.gla.chunk_gla import BACKWARD, FORWARD, ChunkGla, ChunkGlaWithCheckpoints, interval_for_backward
from gla_core.ops.gla.ssd import for_channels, output, time_steps
from gla_core.ops.spec import AS_INPUT, INPUT, WIDE, Argument, DType, OpSpec, Result, arguments_of, plain_number


@overload
def chunk_ssd(
    q: Tensor,
    k: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    z: Tensor | None = None,
    dt_softplus: bool = False,
    dt_min: float = 0.0,
    dt_max: float = math.inf,
    backend: str | None = None,
    checkpoint_every: None = None,
    max_seqlen: int | None = None,
    state_v_first: bool = False,
    recompute_states: bool = False,
) -> ChunkGla: ...


@overload
def chunk_ssd(
    q: Tensor,
    k: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    z: Tensor | None = None,
    dt_softplus: bool = False,
    dt_min: float = 0.0,
    dt_max: float = math.inf,
    backend: str | None = None,
    checkpoint_every: int,
    max_seqlen: int | None = None,
    state_v_first: bool = False,
    recompute_states: bool = False,
) -> ChunkGlaWithCheckpoints: ...


def chunk_ssd(
    q: Tensor,
    k: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    z: Tensor | None = None,
    dt_softplus: bool = False,
    dt_min: float = 0.0,
    dt_max: float = math.inf,
    backend: str | None = None,
    checkpoint_every: int | None = None,
    max_seqlen: int | None = None,
    state_v_first: bool = False,
    recompute_states: bool = False,
) -> ChunkGla | ChunkGlaWithCheckpoints:
    """Computes Mamba-2's scan with its time steps, skip and output gate, differentiable in all tensors but cu_seqlens.

    Per head, with a state S in R^{K x V}, and softplus only with dt_softplus:

        delta_t = clamp(softplus(dt_t + dt_bias), dt_min, dt_max)
        S_t = exp(delta_t A) S_{t-1} + k_t^T (delta_t x_t)
        o_t = (q_t S_t + D x_t) silu(z_t)

    It is `chunk_gla(q, k, delta x, delta A, scale=1.0)`, a skip and a gate, for any backend that has that. A backend
    may compute all of it in one kernel. delta, the gates, the skip and silu(z) are computed in float32 (float64 with
    float64 inputs). If a gradient is recorded, q S + D x is rounded to the dtype of x before it is multiplied by
    silu(z), because the backward reads it; else only the product is rounded. Under autocast q, k, x and z are cast to
    the dtype of autocast, and o has that dtype; all others keep theirs.

    Args:
        q: queries, which Mamba-2 calls C [B, T, H, K], float64, float32, float16 or bfloat16.
        k: keys, which Mamba-2 calls B [B, T, H, K], dtype of q.
        x: values [B, T, Hv, V], dtype of q. Head i reads query and key head i // (Hv/H). Hv is a multiple of H.
        dt: time steps [B, T, Hv], before dt_bias and softplus, of any dtype of floating-point numbers.
        A: the rate of each head [Hv], float32 (float64 with float64 inputs), at most 0: a head forgets the factor
            exp(delta A) per token.
        D: factor of x in the output [Hv] or [Hv, V], of any dtype of floating-point numbers. None means 0.
        dt_bias: it is added to dt [Hv], of any dtype of floating-point numbers. None means 0.
        initial_state: the state before the first token [N, Hv, K, V], float32 (float64 with float64 inputs). None means
            0.
        output_final_state: whether to return the state after the last token.
        cu_seqlens: offsets of packed sequences [N+1], int32 or int64 on q's device, as in `chunk_gla`; B is 1.
        z: what silu is applied to, [B, T, Hv, V], dtype of x. None means no output gate.
        dt_softplus: whether to apply softplus to dt + dt_bias.
        dt_min: the smallest delta, at least 0. Smaller values are clamped to it, after softplus.
        dt_max: the largest delta, at least dt_min. Larger values are clamped to it, after softplus.
        backend: a request such as "reference"; see `use_backend`.
        checkpoint_every: L, a multiple of 64: also return the state before every L-th token of a sequence, as in
            `chunk_gla`.
        max_seqlen: the number of tokens of the longest packed sequence, or an upper bound, as in `chunk_gla`.
        state_v_first: whether initial_state, the final state and the checkpoints have V before K: [N, Hv, V, K].
        recompute_states: whether the backward computes the states of all chunks again, as in `chunk_gla`.

    Returns:
        `o` [B, T, Hv, V] with the dtype of x, and `state`, the final state [N, Hv, K, V] with the dtype of A (None
        unless asked for). With checkpoint_every also `checkpoints`, as `chunk_gla` returns them.

    Raises:
        ValueError, TypeError: an argument has a wrong shape, dtype or device, or the limits are negative or cross.
        NoBackendError, UnknownBackendError: no backend can serve the request.
        NotImplementedError: an input carries a tangent of forward-mode AD.

    Example:
        >>> q, k = torch.randn(2, 100, 1, 64), torch.randn(2, 100, 1, 64)
        >>> x, dt = torch.randn(2, 100, 8, 32), torch.randn(2, 100, 8)
        >>> A, D = -torch.rand(8), torch.ones(8)
        >>> o, state = gla.chunk_ssd(
        ...     q, k, x, dt, A, D, dt_softplus=True, output_final_state=True
        ... )
    """
    check_limits(dt_min, dt_max)
    if state_v_first:
        initial_state = checks.transposed(initial_state)
    needs_grad = plans_gradient(q, k, x, dt, A, D, dt_bias, initial_state)
    request = current_request(backend) if bypasses_torch(q) else None  # None if PyTorch has to see the call
    if request is None:
        q, k, x = autocast.inputs(SSD_FORWARD, q, k, x)
        (z,) = autocast.inputs(SSD_FORWARD, z)
        refuse_tangents(q, k, x, dt, A, D, dt_bias, initial_state, z)
    # A backward reads o without the gate. So the gate is apart if there may be one.
    apart = z is not None and (needs_grad or needs_gradient(z) or transformed() or tracing())
    if apart:
        _check_gate(z, q, x)
    every = checkpoint_every
    if every is None and needs_grad and q.is_cuda and not recompute_states:
        every = interval_for_backward(request or backend, SSD_FORWARD.name)
    options = (dt_softplus, plain_number(dt_min), plain_number(dt_max))
    sequences = (initial_state, output_final_state, cu_seqlens, every)
    args = (q, k, x, dt, A, D, dt_bias, *options, *sequences, None if apart else z, max_seqlen)
    try:
        if request is None:
            o, state, checkpoints = _torch_fwd(*args, needs_grad, request_text(backend))
        elif needs_grad:
            o, state, checkpoints = _eager_fwd(*args, True, request)
        else:
            o, state, checkpoints = run(SSD_FORWARD, args, request)
    except (ValueError, TypeError) as error:
        if not state_v_first:
            raise
        raise SSD_FORWARD.error_in_layout(error, args) from None
    o = fused(_gated, o, z, cu_seqlens, backend=backend) if apart else o
    state = state if output_final_state else None
    if state_v_first:
        state, checkpoints = checks.transposed(state), checks.transposed(checkpoints)
    return ChunkGla(o, state) if checkpoint_every is None else ChunkGlaWithCheckpoints(o, state, checkpoints)


def _check_gate(z: Any, q: Tensor, x: Tensor) -> None:
    """Checks z as the op does."""
    sizes: dict[str, Any] = {}
    for name, y in (("x", x), ("z", z)):
        checks.tensor(name, y, "B T Hv V", sizes)
    checks.dtype("z", z, (q.dtype,), ", as q")
    checks.device("z", z, "q", q)


def check_limits(low: float, high: float, names: str = "(dt_min, dt_max)") -> None:
    """Raises ValueError unless 0 <= low <= high; `names` is what the message calls them."""
    if not 0 <= low <= high:
        raise ValueError(f"{names} is {(low, high)}; expected two numbers, the first at least 0 and at most the second")


# ---- by chunk_gla, and compiled operations before and after it


def values_and_gates(
    x: Tensor, dt: Tensor, A: Tensor, dt_bias: Tensor | None, softplus: bool, low: float, high: float
) -> tuple[Tensor, Tensor]:
    """Returns v = delta x with the dtype of x, and the log gates g = delta A in a wide dtype, both contiguous."""
    dtype = wide(x.dtype)
    delta = time_steps(dt, dt_bias, softplus, dtype).clamp(low, high)
    return (x * delta[..., None]).to(x.dtype).contiguous(), (delta * A.to(dtype)).contiguous()


def _skipped_and_gated(o: Tensor, x: Tensor, D: Tensor | None, z: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
    """Returns (o + D x) silu(z) with the dtype of x; 0 in rows of no sequence."""
    z = z if z is None else _sequences.rows_of_sequences(z, cu_seqlens)
    return output(o, _sequences.rows_of_sequences(x, cu_seqlens), D, z).contiguous()


def _gated(o: Tensor, z: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Returns o silu(z) with the dtype of o; 0 in rows of no sequence, where o is 0."""
    return output(o, o, None, _sequences.rows_of_sequences(z, cu_seqlens)).contiguous()


def _input_gradients(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    D: Tensor | None,
    dt_bias: Tensor | None,
    softplus: bool,
    low: float,
    high: float,
    cu_seqlens: Tensor | None,
    do: Tensor,
    dv: Tensor,
    dg: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Returns dx, ddt, dA, dD and ddt_bias from the gradients of v and g."""
    dtype = wide(x.dtype)
    x, dt, do = (_sequences.rows_of_sequences(y, cu_seqlens) for y in (x, dt, do))
    steps = time_steps(dt, dt_bias, softplus, dtype)
    delta, dv, do = steps.clamp(low, high), dv.to(dtype), do.to(dtype)
    ddelta = pairwise_sum(x * dv) + A.to(dtype) * dg
    passed = torch.where((steps >= low) & (steps <= high), ddelta, 0)
    # the derivative of softplus is 1 - exp(-softplus), and PyTorch's softplus is the identity from 20 on
    ddt = torch.where(steps > 20, passed, passed * -torch.expm1(-steps)) if softplus else passed
    dx, dD = delta[..., None] * dv, None
    if D is not None:
        dx = dx + do * for_channels(D, dtype)
        # summed over channels first, in one pass over x
        dD = (x * do).sum((0, 1)) if D.ndim == 2 else (x * do).sum(-1).sum((0, 1))
        dD = dD.to(D.dtype)
    dbias = None if dt_bias is None else ddt.sum((0, 1)).to(dt_bias.dtype)
    return dx.to(x.dtype).contiguous(), ddt.to(dt.dtype).contiguous(), (delta * dg).sum((0, 1)), dD, dbias


def _chunk_gla_of(part: OpSpec, call: OpCall) -> Parts:
    """Returns the call of chunk_gla_fwd or chunk_gla_bwd by which a call is computed."""
    layouts = {name: layout for name, layout in call.layouts.items() if name in part.contract}
    if layouts:
        layouts["v"] = contiguous_layout(call.layouts["x"].shape, call.dtype)
        layouts["g"] = contiguous_layout(call.layouts["dt"].shape, wide(call.dtype))
    scalars = {name: call.scalars.get(name, default) for name, default in part.scalars.items()}
    call = dataclasses.replace(
        call,
        op=part.name,
        dims=part.dims(call.dims),
        gate_dtype=wide(call.dtype),
        gate_form="head",
        scalars=scalars,
        given=call.given.intersection(part.contract) | {"g"},
        layouts=layouts,
    )
    return [(call, 1)]


_FIXED = {"scale": 1.0, "gate_normalizer": None}
"""The arguments of `chunk_gla` that are the same in all calls."""


def _by_chunk_gla_fwd(chunk_gla_fwd: Callable[..., Any]) -> Callable[..., tuple]:
    """Returns a function that computes chunk_ssd_fwd by one with the arguments of chunk_gla_fwd."""

    def chunk_ssd_fwd(
        q: Tensor,
        k: Tensor,
        x: Tensor,
        dt: Tensor,
        A: Tensor,
        D: Tensor | None,
        dt_bias: Tensor | None,
        dt_softplus: bool,
        dt_min: float,
        dt_max: float,
        initial_state: Tensor | None,
        output_final_state: bool,
        cu_seqlens: Tensor | None,
        checkpoint_every: int | None,
        z: Tensor | None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        v, g = fused(values_and_gates, x, dt, A, dt_bias, dt_softplus, dt_min, dt_max)
        sequences = {"initial_state": initial_state, "cu_seqlens": cu_seqlens, "checkpoint_every": checkpoint_every}
        o, state, checkpoints = chunk_gla_fwd(
            q=q, k=k, v=v, g=g, output_final_state=output_final_state, **sequences, **_FIXED
        )
        o = o if D is None and z is None else fused(_skipped_and_gated, o, x, D, z, cu_seqlens)
        return o, state, checkpoints

    return chunk_ssd_fwd


def _by_chunk_gla_bwd(chunk_gla_bwd: Callable[..., Any]) -> Callable[..., tuple]:
    """Returns a function that computes chunk_ssd_bwd by one with the arguments of chunk_gla_bwd."""

    def chunk_ssd_bwd(
        q: Tensor,
        k: Tensor,
        x: Tensor,
        dt: Tensor,
        A: Tensor,
        D: Tensor | None,
        dt_bias: Tensor | None,
        dt_softplus: bool,
        dt_min: float,
        dt_max: float,
        initial_state: Tensor | None,
        cu_seqlens: Tensor | None,
        checkpoints: Tensor | None,
        checkpoint_every: int | None,
        do: Tensor,
        dstate: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        steps = (dt_softplus, dt_min, dt_max)
        v, g = fused(values_and_gates, x, dt, A, dt_bias, *steps)
        sequences = {"initial_state": initial_state, "cu_seqlens": cu_seqlens, "dstate": dstate}
        kept = {"checkpoints": checkpoints, "checkpoint_every": checkpoint_every}
        dq, dk, dv, dg, dinitial_state = chunk_gla_bwd(q=q, k=k, v=v, g=g, do=do, **sequences, **kept, **_FIXED)
        gradients = fused(_input_gradients, x, dt, A, D, dt_bias, *steps, cu_seqlens, do, dv, dg)
        return dq, dk, *gradients, dinitial_state

    return chunk_ssd_bwd


# ---- the ops

ANY_FLOAT = DType(lambda dtype: (dtype, *FLOATS))
_PARAMETERS = (
    Argument("q", "Tensor", "B T H K", INPUT, differentiable=True),
    Argument("k", "Tensor", "B T H K", AS_INPUT, differentiable=True),
    Argument("x", "Tensor", "B T Hv V", AS_INPUT, differentiable=True),
    Argument("dt", "Tensor", "B T Hv", ANY_FLOAT, differentiable=True),
    Argument("A", "Tensor", "Hv", WIDE, differentiable=True),
    Argument("D", "Tensor?", "Hv", ANY_FLOAT, None, differentiable=True, forms={"head": "Hv", "channel": "Hv V"}),
    Argument("dt_bias", "Tensor?", "Hv", ANY_FLOAT, None, differentiable=True),
    Argument("dt_softplus", "bool", default=False),
    # like a scale, these are numbers of a call, and no facts by which it is planned
    Argument("dt_min", "float", default=0.0, in_call=False),
    Argument("dt_max", "float", default=math.inf, in_call=False),
)

_SIZES = {name: size for name, size in FORWARD.sizes.items() if name != "Hq"}
SSD_FORWARD = OpSpec(
    name="chunk_ssd_fwd",
    public="chunk_ssd",
    arguments=(
        *_PARAMETERS,
        *arguments_of(FORWARD, "initial_state", "output_final_state", "cu_seqlens", "checkpoint_every"),
        Argument("z", "Tensor?", "B T Hv V", AS_INPUT, None, differentiable=True),
        *arguments_of(FORWARD, "max_seqlen"),
    ),
    results=(Result("o", "B T Hv V"), *FORWARD.results[1:]),
    sizes=_SIZES,
    reads=_sequences.reads,
    flops=FORWARD.flops,
    tokens=("q", "k", "x", "dt", "z"),
    backward="chunk_ssd_bwd",
    lowering=Lowering(FORWARD.name, functools.partial(_chunk_gla_of, FORWARD), _by_chunk_gla_fwd),
    by_segments=_invariant.forward,
)
SSD_BACKWARD = OpSpec(
    name="chunk_ssd_bwd",
    public="chunk_ssd",
    arguments=(
        *(dataclasses.replace(argument, differentiable=False) for argument in _PARAMETERS),
        *arguments_of(BACKWARD, "initial_state", "cu_seqlens", "checkpoints", "checkpoint_every"),
        Argument("do", "Tensor", "B T Hv V", AS_INPUT, None),
        *arguments_of(BACKWARD, "dstate", "max_seqlen"),
    ),
    results=tuple(
        Result(f"d{name}", like=name) for name in ("q", "k", "x", "dt", "A", "D", "dt_bias", "initial_state")
    ),
    sizes=_SIZES,
    reads=None,
    flops=BACKWARD.flops,
    tokens=("q", "k", "x", "dt", "do"),
    forward=SSD_FORWARD.name,
    lowering=Lowering(BACKWARD.name, functools.partial(_chunk_gla_of, BACKWARD), _by_chunk_gla_bwd),
    by_segments=_invariant.backward,
)


_torch_bwd = torch_op_of(SSD_BACKWARD, backward=no_second_derivative("chunk_ssd"))
_gradient = gradient(SSD_FORWARD, SSD_BACKWARD, _torch_bwd)
_torch_fwd = torch_op_of(SSD_FORWARD, *_gradient)
_eager_fwd = eager_op_of(SSD_FORWARD, *_gradient)
