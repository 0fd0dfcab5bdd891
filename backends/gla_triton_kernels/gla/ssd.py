"""Plans Mamba-2's scan for the kernel that reads its time steps, skip and output gate, and describes its launches.

With delta and g from shared/time_steps.py, the scan is the forward of forward.py with v = x, factors delta of v, gates
g, scale 1, a skip D and an output gate z. So v = delta x is never in memory, and o is written once. Other calls are
computed by the forward and operations before and after it; see the op. Gradients are computed alike, but the kernel
knows a skip for each head only: shared/skip.py adds what one for each channel gives.

B batch   T tokens   N sequences   H key heads   Hv value heads   K, V key and value width
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gla_core.dispatch.backend import OP_LOWERINGS, OpCall, Reason
from gla_core.dispatch.tensors import checkpoint_dtype, checkpoint_rows
from gla_triton_kernels.chunks.results import contiguous_like
from gla_triton_kernels.gla import backward, forward
from gla_triton_kernels.gla.seen import seen_by_kernels
from gla_triton_kernels.gla.sm90 import kernels as sm90
from gla_triton_runtime.architecture import gpu_of_call
from gla_triton_runtime.tma import addressable

if TYPE_CHECKING:
    from gla_triton_runtime.launch import Launch


def refusal(call: OpCall, cut: bool) -> Reason | None:
    """Returns why no kernel reads the time steps of a call, or None."""
    if call.dtype not in (torch.bfloat16, torch.float16):
        return f"reads time steps with bfloat16 or float16; q is {str(call.dtype).removeprefix('torch.')}"
    if "z" in call.layouts and not addressable(call.layouts["z"]):
        return "reads z by TMA, which cannot address its strides"
    part = _part_of(call)
    if (reason := _refuse_sequences(call, part)) is not None:
        return reason
    other = next((plan.outputs for _, plan in _plans(part, cut) if plan.outputs is not sm90.FORWARD_HEAD), None)
    return None if other is None else f"computes by {other.name}, which reads no time steps"


def _refuse_sequences(call: OpCall, part: OpCall) -> Reason | None:
    """Returns why no kernel reads the time steps of these sequences, forward or backward, or None."""
    if call.batch_invariant is not None:
        return "computes no batch invariance"
    if call.dims["N"] == 0 or call.dims["T"] == 0:
        return "there are no tokens"
    copies = seen_by_kernels(part, gpu_of_call(call)) is not part
    return "copies x to a width that TMA can move" if copies else None


def explain(call: OpCall, cut: bool) -> list[str]:
    """Returns lines that name the kernels of a call."""
    return forward.explain(_part_of(call), cut)


def _part_of(call: OpCall) -> OpCall:
    """Returns the forward with v = x, of a call."""
    part = OP_LOWERINGS[call.op].parts(call)[0][0]
    return replace(part, layouts={**part.layouts, "v": call.layouts["x"]}) if part.layouts else part


def _plans(part: OpCall, cut: bool) -> forward.Plans:
    """Returns the plans of the rows of a forward."""
    return forward.plan(part, gpu_of_call(part), cut)


def prepare(call: OpCall, cut: bool) -> Callable[..., tuple]:
    """Plans a call that is not refused, compiles its kernels, and returns the function that computes such calls.

    Raises:
        LaunchError: a kernel does not compile for this device, or does not fit it.
    """
    from gla_triton_kernels.gla.tensors import Tensors, plans_with_rows
    from gla_triton_runtime.prepared import Launches, rehearsed

    plans = _plans(_part_of(call), cut)
    B, T, Hv, K, V, N = (call.dims[name] for name in ("B", "T", "Hv", "K", "V", "N"))
    every = call.scalars["checkpoint_every"]
    n = None if every is None else checkpoint_rows(T, N, every, call.variable_length)

    def describe(tensors: tuple[Any, ...]) -> list[Launch]:
        q, k, x, D, z, initial_state, cu_seqlens, o, final_state, checkpoints, delta, g = tensors
        y = Tensors(q, k, x, g, initial_state, cu_seqlens, o, final_state, checkpoints, v_factor=delta, skip=D, z=z)
        return [each for plan, rows in plans_with_rows(plans, y) for each in forward.launches(plan, rows, 1.0, every)]

    time_steps, launched = _time_steps(call), Launches(call.device)

    def run(
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
        delta, g = time_steps(dt, A, dt_bias, dt_min, dt_max)
        o = x.new_empty(B, T, Hv, V)
        final_state = x.new_empty(N, Hv, K, V, dtype=torch.float32) if output_final_state else None
        checkpoints = None if n is None else x.new_empty(B, n, Hv, K, V, dtype=checkpoint_dtype(call.dtype))
        tensors = (q, k, x, D, z, initial_state, cu_seqlens, o, final_state, checkpoints, delta, g)
        if unrecorded := launched.replay(tensors, 1.0):
            unrecorded.start(describe(tensors))
        return o, final_state, checkpoints

    return rehearsed(run, call)


def _time_steps(call: OpCall) -> Callable[..., tuple[Tensor, Tensor]]:
    """Returns the function that computes delta and g [B, T, Hv] from dt, A, its bias and the limits of dt."""
    from gla_triton_kernels.gla.shared.time_steps import launch_time_steps
    from gla_triton_runtime.prepared import Launches

    softplus, launched = call.scalars["dt_softplus"], Launches(call.device)

    def run(dt: Tensor, A: Tensor, dt_bias: Tensor | None, dt_min: float, dt_max: float) -> tuple[Tensor, Tensor]:
        delta, g = (dt.new_empty(*dt.shape, dtype=torch.float32) for _ in range(2))
        tensors = (dt, A, dt_bias, delta, g)
        if unrecorded := launched.replay(tensors, dt_min, dt_max):
            unrecorded.start(launch_time_steps(*tensors, dt_min, dt_max, softplus))
        return delta, g

    return run


# ---- gradients

GRADIENTS = (sm90.BACKWARD_FACTORS, *backward.KERNELS)
"""The kernels that compute gradients, best first. Only the first reads factors of v."""


def backward_refusal(call: OpCall, cut: bool) -> Reason | None:
    """Returns why no kernel computes the gradients of a call with its time steps, or None."""
    if call.dtype != torch.bfloat16:
        return f"computes gradients with bfloat16; q is {str(call.dtype).removeprefix('torch.')}"
    part = _part_of(call)
    if (reason := _refuse_sequences(call, part)) is not None:
        return reason
    for _, plan in _backward_plans(part, cut):
        if plan.gradients is not sm90.BACKWARD_FACTORS:
            return f"computes by {plan.gradients.name}, which reads no time steps"
        states = plan.forward.outputs if plan.forward is not None else plan.entering and plan.entering.states
        if states not in (None, sm90.FORWARD_HEAD, sm90.STATES):
            return f"computes states by {states.name}, which reads no time steps"
    return None


def explain_backward(call: OpCall, cut: bool) -> list[str]:
    """Returns lines that name the kernels of the gradients of a call."""
    return backward.explain(_part_of(call), cut, GRADIENTS)


def _backward_plans(part: OpCall, cut: bool) -> backward.Plans:
    part = backward.without_unusable_checkpoints(part)
    return backward.plan(part, gpu_of_call(part), cut, GRADIENTS)


def prepare_backward(call: OpCall, cut: bool) -> Callable[..., tuple]:
    """Plans the gradients of a call that is not refused, and returns the function that computes them; see `prepare`.

    Raises:
        LaunchError: a kernel does not compile for this device, or does not fit it.
    """
    from gla_triton_kernels.chunks.padding import clear_padding
    from gla_triton_kernels.gla.shared.skip import launch_skip_gradients
    from gla_triton_kernels.gla.shared.time_steps import launch_time_step_gradients
    from gla_triton_kernels.gla.tensors import BackwardTensors, plans_with_rows
    from gla_triton_runtime.prepared import Launches, rehearsed

    plans = _backward_plans(_part_of(call), cut)
    B, T, Hv, K, V, N = (call.dims[name] for name in ("B", "T", "Hv", "K", "V", "N"))
    softplus = call.scalars["dt_softplus"]

    def describe(tensors: tuple[Any, ...]) -> list[Launch]:
        y = BackwardTensors(*tensors)
        made = [each for plan, rows in plans_with_rows(plans, y) for each in backward.launches(plan, rows, 1.0)]
        return made if y.cu_seqlens is None else [*made, *clear_padding((y.dq, y.dk, y.dv), y.cu_seqlens)]

    time_steps = _time_steps(call)
    launched, added, after = (Launches(call.device) for _ in range(3))

    def run(
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
        delta, g = time_steps(dt, A, dt_bias, dt_min, dt_max)
        dg, ddelta = torch.empty_like(g), torch.empty_like(g)
        skip = None if D is None or D.ndim == 2 else D  # of heads; the kernel knows no skip of channels
        dskip = None if skip is None else torch.empty_like(dg)
        dq, dk, dx = map(contiguous_like, (q, k, x))
        dinitial = None if initial_state is None else x.new_empty(N, Hv, K, V, dtype=torch.float32)
        results = (dq, dk, dx, dg, dinitial)
        tensors = (q, k, x, g, initial_state, cu_seqlens, checkpoints, do, dstate, *results, delta, skip, ddelta, dskip)
        if unrecorded := launched.replay(tensors, 1.0):
            unrecorded.start(describe(tensors))
        ddt = dt.new_empty(B, T, Hv)
        dA, (dbias, dD) = A.new_empty(Hv), (None if y is None else y.new_empty(Hv) for y in (dt_bias, skip))
        steps = (dt, A, dt_bias, cu_seqlens, ddelta, dg, dskip, ddt, dA, dbias, dD)
        if unrecorded := after.replay(steps, dt_min, dt_max):
            unrecorded.start(launch_time_step_gradients(*steps, dt_min, dt_max, softplus))
        if D is not None and skip is None:
            dD = D.new_empty(Hv, V)
            channels = (x, D, cu_seqlens, do, dx, dD)
            if unrecorded := added.replay(channels):
                unrecorded.start(launch_skip_gradients(*channels))
        return dq, dk, dx, ddt, dA, dD, dbias, dinitial

    return rehearsed(run, call)
