"""Plans a backward of the delta rule over sequences, and describes its launches.

The first launches compute what all chunks need beside the state, and the states that enter chunks, unless checkpoints
hold them. A pass backwards over each sequence computes the gradients of states (general/backward.py). Then all
other gradients are computed, in parallel over chunks (general/gradients.py). On Hopper, the kernels of sm90/ take the
same steps for the calls that they compute, and the first two for wider keys. The forward for Hopper writes the states
that enter chunks for the other kernels too. Planning imports no Triton.

B batch   T tokens   N sequences   H heads of q and k   Hv value heads   K, V key and value width
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gla_core.dispatch.backend import CHUNK, OpCall, Reason
from gla_core.dispatch.tensors import checkpoint_dtype, checkpoint_shape
from gla_triton_kernels.chunks.results import contiguous_like, copy_or_clear, with_copies
from gla_triton_kernels.delta import sm90 as forward_sm90
from gla_triton_kernels.delta.plan import (
    GradientParameters,
    PassParameters,
    in_segments,
    parameters_of_gradients,
    plan_pass,
)
from gla_triton_kernels.delta.sm90 import backward_calls as sm90
from gla_triton_runtime.architecture import Gpu, gpu_of_call

if TYPE_CHECKING:
    from gla_triton_kernels.chunks.segments import Segments
    from gla_triton_kernels.delta.tensors import BackwardTensors
    from gla_triton_runtime.launch import Launch


@dataclass(frozen=True, slots=True)
class BackwardPlan:
    """The plan of a backward.

    Attributes:
        states: the launch parameters of the passes forwards and backwards.
        gradients: the launch parameters of the kernels of gradients.py.
        has_entering: whether checkpoints hold the states that enter chunks.
        refusal: the reason why the kernels for SM90 do not compute the call; None if they do.
        has_passes_by_sm90: whether they compute all, or all but what gradients.py computes.
        forward: the launch parameters of the forward for SM90 if it computes these states; else None.
        programs: the multiprocessors of the GPU.
    """

    states: PassParameters
    gradients: GradientParameters
    has_entering: bool
    refusal: Reason | None
    has_passes_by_sm90: bool
    forward: forward_sm90.Parameters | None
    programs: int


def explain(call: OpCall, cut: bool) -> list[str]:
    """Returns lines that name the kernels of a call, and give the reason why better kernels refuse it."""
    gpu = gpu_of_call(call)
    planned = plan(call, gpu, cut)
    states = "" if planned.forward is None else "delta.sm90.forward, "
    segments = in_segments(planned.states.length)
    if planned.refusal is None:
        return [
            f"kernel delta.sm90.gradients after {states}delta.sm90.backward_pairs and delta.sm90.backward{segments}"
        ]
    if planned.has_passes_by_sm90:
        passes = f"{states}delta.sm90.backward_pairs and delta.sm90.backward{segments}"
        return [f"kernel delta.general.gradients after {passes}", f"not delta.sm90.gradients: {planned.refusal}"]
    general = f"kernel delta.general.gradients after {states}delta.general.pairs and delta.general.backward{segments}"
    return [general, f"not delta.sm90.backward: {planned.refusal}"]


def plan(call: OpCall, gpu: Gpu, cut: bool) -> BackwardPlan:
    """Plans a call; for `cut` see forward.py."""
    layout = call.layouts.get("checkpoints")
    readable = not call.layouts or (layout is not None and layout.aligned and layout.is_contiguous)
    states, gradients, refusal = plan_pass(call, gpu, cut), parameters_of_gradients(call, gpu), sm90.refusal(call, gpu)
    readable &= checkpoint_dtype(call.dtype) == gradients.kept
    has_entering = call.scalars.get("checkpoint_every") == CHUNK and readable
    kept, forward = replace(call, scalars={**call.scalars, "checkpoint_every": CHUNK}), None
    by_forward = not has_entering and forward_sm90.refusal(kept, gpu) is None
    passes = refusal is None or (sm90.computes_passes(call, gpu) and (has_entering or by_forward))
    if passes:
        states = replace(states, length=forward_sm90.cut_length(call, gpu, cut))
    if by_forward:
        forward = forward_sm90.parameters(kept, gpu, states.length)
    return BackwardPlan(states, gradients, has_entering, refusal, passes, forward, gpu.multiprocessors)


def prepare(call: OpCall, cut: bool) -> Callable[..., tuple]:
    """Plans a call, compiles its kernels, and returns the function that computes calls of the same signature.

    Args:
        cut: whether to cut sequences into segments if they do not fill the device.

    Raises:
        LaunchError: a kernel does not compile for this device, or does not fit it.
    """
    from gla_triton_kernels.chunks.padding import clear_padding
    from gla_triton_kernels.delta.tensors import BackwardTensors
    from gla_triton_runtime.prepared import Launches, rehearsed

    gpu = gpu_of_call(call)
    T, Hv, K, V, N = (call.dims[name] for name in ("T", "Hv", "K", "V", "N"))
    empty, normalizer, planned = N == 0 or T == 0, call.scalars["gate_normalizer"], plan(call, gpu, cut)
    by_sm90 = planned.has_passes_by_sm90 or planned.forward is not None
    copied = sm90.copied(call) if by_sm90 else frozenset()

    def describe(x: BackwardTensors, scale: float) -> list[Launch]:
        cleared = []
        if x.cu_seqlens is not None:
            gates = [x.dg] if x.dg is not None and x.dg.ndim > 1 else []
            cleared = clear_padding([x.dq, x.dk, x.dv, x.dbeta, *gates], x.cu_seqlens)
        return [*launches(planned, x, scale, normalizer), *cleared]

    launched = Launches(call.device)

    def run(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor | None,
        beta: Tensor,
        scale: float,
        initial_state: Tensor | None,
        cu_seqlens: Tensor | None,
        checkpoints: Tensor | None,
        checkpoint_every: int | None,
        do: Tensor,
        dstate: Tensor | None,
        gate_normalizer: int | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor, Tensor | None]:
        dq, dk, dv, dbeta, dg = (None if x is None else contiguous_like(x) for x in (q, k, v, beta, g))
        dinitial = None if initial_state is None else v.new_empty(N, Hv, K, V, dtype=torch.float32)
        results: Any = (dq, dk, dv, dg, dbeta, dinitial)
        if empty:
            for y in results[:-1]:
                if y is not None:
                    y.zero_()  # tokens, if there are any, belong to no sequence
            if dinitial is not None:
                copy_or_clear(dinitial, dstate)
            return results
        if dinitial is not None and planned.states.length is not None and cu_seqlens is not None:
            copy_or_clear(dinitial, dstate)  # the gradients of empty sequences, which have no segment
        x = BackwardTensors(q, k, v, g, beta, initial_state, cu_seqlens, checkpoints, do, dstate, *results)
        x = with_copies(x, copied) if copied else x
        if unrecorded := launched.replay(x, scale):
            unrecorded.start(describe(x, scale))
        return results

    return rehearsed(run, call)


def launches(plan: BackwardPlan, x: BackwardTensors, scale: float, normalizer: int | None) -> list[Launch]:
    """Returns the launches that fill the gradients in x; for `normalizer` see `launches` of forward.py."""
    return (_sm90_launches if plan.has_passes_by_sm90 else _general_launches)(plan, x, scale, normalizer)


def _sm90_launches(plan: BackwardPlan, x: BackwardTensors, scale: float, normalizer: int | None) -> list[Launch]:
    """Returns the launches of the kernels for SM90, and of gradients.py for the gradients that these refuse."""
    from gla_triton_kernels.delta.forward import segments_of
    from gla_triton_kernels.delta.general import gradients as general
    from gla_triton_kernels.delta.sm90.backward import launch_states
    from gla_triton_kernels.delta.sm90.backward_pairs import launch_pairs
    from gla_triton_kernels.delta.sm90.gradients import launch_gradients

    segments = segments_of(plan.states.length, x.k, x.cu_seqlens)
    entering, states = x.checkpoints, []
    if plan.forward is not None:
        entering, states = _entering_by_sm90(plan.forward, x, segments, scale, normalizer)
    assert entering is not None
    y = None if plan.refusal is None else x.v.new_empty(x.v.shape)
    chunks, pairs = launch_pairs(x, scale, normalizer)
    leaving, passes = launch_states(x, chunks, segments, y)
    made = [*segments.launches, *states, *pairs, *passes]
    if y is None:
        return made + launch_gradients(x, chunks, entering, leaving, scale, plan.programs)
    read = general.Chunks(chunks.segments, chunks.G, chunks.units, None, False)
    return made + general.launch_gradients(plan.gradients, x, read, entering, leaving, y, scale, normalizer)


def _entering_by_sm90(
    forward: forward_sm90.Parameters, x: BackwardTensors, segments: Segments, scale: float, normalizer: int | None
) -> tuple[Tensor, list[Launch]]:
    """Returns the states that enter chunks, of which the forward for SM90 makes checkpoints, and its launches."""
    from gla_triton_kernels.delta.sm90.forward import launch_outputs
    from gla_triton_kernels.delta.tensors import Tensors

    shape = checkpoint_shape(x.k, x.v, x.cu_seqlens, CHUNK)
    entering = x.v.new_empty(shape, dtype=checkpoint_dtype(x.v.dtype))
    tensors = Tensors(x.q, x.k, x.v, x.g, x.beta, x.initial_state, x.cu_seqlens, None, None, entering)
    return entering, launch_outputs(forward, tensors, segments, scale, CHUNK, normalizer)


def _general_launches(plan: BackwardPlan, x: BackwardTensors, scale: float, normalizer: int | None) -> list[Launch]:
    """Returns the launches of the kernels for every GPU."""
    from gla_triton_kernels.chunks.scan import launch_scan
    from gla_triton_kernels.chunks.segments import Recurrence
    from gla_triton_kernels.delta.forward import launch_entering, segments_of
    from gla_triton_kernels.delta.general import gradients
    from gla_triton_kernels.delta.general.backward import launch_states, launch_summaries
    from gla_triton_kernels.delta.general.forward import launch_outputs
    from gla_triton_kernels.delta.general.pairs import launch_chunks
    from gla_triton_kernels.delta.tensors import Tensors

    (B, T), (Hv, V), K = x.k.shape[:2], x.v.shape[2:], x.k.shape[3]
    chunks, made = launch_chunks(plan.states.chunks, x, x.cu_seqlens, normalizer)
    segments = segments_of(plan.states.length, x.k, x.cu_seqlens)
    made += segments.launches
    leaving = x.v.new_empty(chunks.segments.count, Hv, K, V, dtype=plan.gradients.kept)
    entering = x.checkpoints
    if plan.forward is not None:
        entering, states = _entering_by_sm90(plan.forward, x, segments, scale, normalizer)
        made += states
    elif not plan.has_entering:
        entering = torch.empty_like(leaving)
        tensors = Tensors(x.q, x.k, x.v, x.g, x.beta, x.initial_state, x.cu_seqlens, None, None, entering)
        starts, before = launch_entering(plan.states, tensors, chunks, segments)
        tensors = tensors._replace(entering=starts)
        made += [*before, *launch_outputs(plan.states.states, tensors, chunks, segments, scale, CHUNK)]
    assert entering is not None
    behind = None
    if plan.states.length is not None:
        behind, transitions, before = launch_summaries(plan.states.states, x, chunks, segments, scale)
        recurrence = Recurrence(x.q, x.do, x.g, x.dstate, None, scale, backwards=True)
        made += [*before, *launch_scan(False, recurrence, segments, behind, transitions, behind, skip_first=True)]
    y = x.v.new_empty(B, T, Hv, V, dtype=plan.gradients.kept)
    made += launch_states(plan.states.states, x, chunks, behind, segments, scale, y, leaving)
    exact = plan.gradients.kept == torch.bfloat16 and (x.g is None or chunks.shared)  # whether k and S are operands
    kin = None if exact else chunks.kin
    read = gradients.Chunks(chunks.segments, chunks.matrices, chunks.numbers, kin, chunks.has_factors)
    return made + gradients.launch_gradients(plan.gradients, x, read, entering, leaving, y, scale, normalizer)
