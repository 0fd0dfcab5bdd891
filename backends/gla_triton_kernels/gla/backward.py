"""Plans a backward over sequences, and describes its launches.

The first launches compute the states that enter chunks, unless checkpoints hold these states. Where the forward has a
kernel that writes checkpoints quickly, it computes them, and its outputs are dropped. If sequences are cut, the
next launches compute the gradients of the states that leave segments. Then a kernel computes dq, dk, dv and dg;
general/backward.py gives the mathematics. If that kernel computes each query head separately, or value heads share a
head of q and k, it writes partial results for the heads of a group, and a last launch sums them.

B batch   T tokens   N sequences   H key heads   Hq query heads   Hv value heads   K, V key and value width
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gla_core.dispatch.backend import CHUNK, OpCall
from gla_core.dispatch.tensors import ceil_div, checkpoint_dtype, checkpoint_shape
from gla_triton_kernels.chunks.cutting import by_rows, most_segments, segment_length, uncut_length
from gla_triton_kernels.chunks.kernel import BackwardPlan, GradientKernel, first_able, refusals
from gla_triton_kernels.chunks.results import contiguous_like, copy_or_clear, with_copies
from gla_triton_kernels.gla import forward
from gla_triton_kernels.gla.cost import backward_prices
from gla_triton_kernels.gla.general import kernels as general
from gla_triton_kernels.gla.seen import copied_for_invariance, seen_by_kernels, seen_shape
from gla_triton_kernels.gla.sm90 import kernels as sm90
from gla_triton_runtime.architecture import Architecture, Gpu, gpu_of_call

if TYPE_CHECKING:
    from gla_triton_kernels.gla.tensors import BackwardTensors
    from gla_triton_runtime.launch import Launch

KERNELS: Sequence[GradientKernel] = (
    sm90.BACKWARD_WIDE,
    sm90.BACKWARD,
    sm90.BACKWARD_GROUP,
    sm90.BACKWARD_HEAD,
    general.BACKWARD_CHUNKS,
    general.BACKWARD,
)
"""The kernels that compute gradients, best first."""

Plans = list[tuple[OpCall, BackwardPlan]]
"""The plans of the rows of a batch, in order, each with the call of its rows."""


# ---- plans


def plan(call: OpCall, gpu: Gpu, cut: bool, kernels: Sequence[GradientKernel] = KERNELS) -> Plans:
    """Plans a call: one pass backwards, or with `cut` several at once; see `plan` of forward.py."""
    kernel = first_able(kernels, call, gpu)
    if not cut or kernel.by_chunks:
        return [(call, _whole(call, gpu, kernels))]
    if call.gate_form == "constant":  # all rows add to the gradient of a constant gate, so one plan computes them all
        return [(call, _segments(call, gpu, kernels))]
    return by_rows(
        call,
        gpu,
        *blocks_of(call, gpu, kernel),
        lambda rows: _whole(rows, gpu, kernels),
        lambda rows: _segments(rows, gpu, kernels),
        backward_prices,
    )


def blocks_of(call: OpCall, gpu: Gpu, kernel: GradientKernel) -> tuple[int, int]:
    """Returns the number of blocks that compute one sequence, and the number of blocks that the GPU runs at once.

    It counts the blocks that a call with many segments has.
    """
    x = kernel.parameters(call, gpu, gpu.multiprocessors)
    heads = max(call.dims["Hq"], call.dims["Hv"]) if kernel.heads_apart else call.dims["Hv"]
    blocks = heads * ceil_div(call.dims["K"], x.BK) * ceil_div(call.dims["V"], x.BV)
    return blocks, gpu.multiprocessors * kernel.at_once(x)


def _whole(call: OpCall, gpu: Gpu, kernels: Sequence[GradientKernel]) -> BackwardPlan:
    kernel = first_able(kernels, call, gpu)
    leaving = forward.states_of_segments(call, gpu, CHUNK, CHUNK) if kernel.by_chunks else None
    entering = checkpoints = None
    if call.scalars.get("checkpoint_every") != CHUNK:
        checkpoints = forward.plan_checkpoints(call, gpu)
        entering = forward.states_of_segments(call, gpu, CHUNK, CHUNK) if checkpoints is None else None
    return BackwardPlan(kernel, kernel.parameters(call, gpu, call.dims["N"]), entering, checkpoints, leaving)


def _cut(whole: BackwardPlan, call: OpCall, gpu: Gpu, length: int, uncut: int) -> BackwardPlan:
    """Returns the plan of a call that is cut into segments of `length` tokens; see `SegmentPlan`."""
    segments = most_segments(call.dims["N"], call.dims["T"], length, call.variable_length)
    parameters = whole.gradients.parameters(call, gpu, segments)
    leaving = forward.states_of_segments(call, gpu, length, uncut)
    return replace(whole, parameters=parameters, leaving=leaving)


def _segments(call: OpCall, gpu: Gpu, kernels: Sequence[GradientKernel]) -> BackwardPlan:
    whole, T, tokens = _whole(call, gpu, kernels), call.dims["T"], call.batch_invariant
    if tokens is not None:  # a scan always computes the gradient of an initial state; see forward.py
        stays_whole = tokens >= T and call.state_dtype is None
        return whole if stays_whole else _cut(whole, call, gpu, tokens, tokens)

    def plan_segments(length: int) -> BackwardPlan:
        return whole if length >= T else _cut(whole, call, gpu, length, uncut_length(length))

    length = segment_length(call, gpu, *blocks_of(call, gpu, whole.gradients), plan_segments, backward_prices)
    return plan_segments(min(length, CHUNK) if gpu.architecture is Architecture.INTERPRETED else length)


def explain(call: OpCall, cut: bool, kernels: Sequence[GradientKernel] = KERNELS) -> list[str]:
    """Returns lines that name the kernels of a call, and give the reasons why better kernels refuse the call."""
    gpu = gpu_of_call(call)
    seen = seen_by_kernels(call, gpu)
    chosen = plan(seen, gpu, cut, kernels)[0][1]
    segments = "" if chosen.leaving is None else f" in segments of {chosen.leaving.length} tokens"
    return [f"kernel {chosen.gradients.name}{segments}", *refusals(kernels, chosen.gradients, seen, gpu)]


# ---- launches


def prepare(call: OpCall, cut: bool, kernels: Sequence[GradientKernel] = KERNELS) -> Callable[..., tuple]:
    """Plans a call, compiles its kernels, and returns the function that computes calls of the same signature.

    Raises:
        LaunchError: a kernel does not compile for this device, or does not fit it.
    """
    from gla_triton_kernels.chunks.padding import clear_padding
    from gla_triton_kernels.chunks.widths import widened
    from gla_triton_kernels.gla.tensors import GRADIENTS, BackwardTensors, plans_with_rows
    from gla_triton_runtime.prepared import Launches, rehearsed

    gpu = gpu_of_call(call)
    call = without_unusable_checkpoints(call)
    seen, copied = seen_by_kernels(call, gpu), copied_for_invariance(call)
    T, Hv, K, V, N = (call.dims[name] for name in ("T", "Hv", "K", "V", "N"))
    empty, normalizer = N == 0 or T == 0, call.scalars["gate_normalizer"]
    plans = [] if empty else plan(seen, gpu, cut, kernels)
    same_widths = (seen.dims["K"], seen.dims["V"]) == (K, V)
    shape_of = functools.partial(seen_shape, K=seen.dims["K"], V=seen.dims["V"])

    def describe(tensors: tuple[Any, ...], scale: float) -> list[Launch]:
        x = BackwardTensors(*tensors)
        wide, before, after = (x, [], []) if same_widths else widened(x, shape_of, GRADIENTS)
        plans_of_rows = plans_with_rows(plans, wide)
        computed = [each for plan, rows in plans_of_rows for each in launches(plan, rows, scale, normalizer)]
        cleared = []
        if x.cu_seqlens is not None:
            gradients = [y for y in (x.dq, x.dk, x.dv, x.dg) if y is not None and y.ndim > 1]
            cleared = clear_padding(gradients, x.cu_seqlens)
        return [*before, *computed, *after, *cleared]

    launched = Launches(call.device)
    inputs = [call.layouts.get(name) for name in ("q", "k", "v", "g")]
    are_contiguous = call.layouts and all(x is None or x.is_contiguous for x in inputs)
    like = torch.empty_like if are_contiguous else contiguous_like

    def run(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor | None,
        scale: float,
        initial_state: Tensor | None,
        cu_seqlens: Tensor | None,
        checkpoints: Tensor | None,
        checkpoint_every: int | None,
        do: Tensor,
        dstate: Tensor | None,
        gate_normalizer: int | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
        dq, dk, dv, dg = like(q), like(k), like(v), None if g is None else like(g)
        dinitial = None if initial_state is None else v.new_empty(N, Hv, K, V, dtype=torch.float32)
        if empty:
            for y in (dq, dk, dv, dg):
                if y is not None:
                    y.zero_()  # tokens, if there are any, belong to no sequence
            if dinitial is not None:
                copy_or_clear(dinitial, dstate)
            return dq, dk, dv, dg, dinitial
        results = (dq, dk, dv, dg, dinitial)
        x = (q, k, v, g, initial_state, cu_seqlens, checkpoints, do, dstate, *results)
        x = with_copies(BackwardTensors(*x), copied) if copied else x
        if unrecorded := launched.replay(x, scale):
            unrecorded.start(describe(x, scale))
        return results

    return rehearsed(run, call)


def without_unusable_checkpoints(call: OpCall) -> OpCall:
    """Returns the call, but without checkpoints if kernels cannot read them in their layout."""
    layout = call.layouts.get("checkpoints")
    usable = layout is not None and layout.aligned and layout.is_contiguous
    if usable or not call.layouts:
        return call
    return replace(call, scalars={**call.scalars, "checkpoint_every": None})


def launches(plan: BackwardPlan, x: BackwardTensors, scale: float, normalizer: int | None = None) -> list[Launch]:
    """Returns the launches that fill the gradients in x; for `normalizer` see `launches` of forward.py."""
    from gla_triton_kernels.chunks.entering import launch_entering
    from gla_triton_kernels.chunks.segments import Recurrence, whole
    from gla_triton_kernels.gla.groups import for_query_heads, for_value_heads, launch_sums_over_groups
    from gla_triton_kernels.gla.tensors import Tensors

    Hv = x.v.shape[2]
    entering, made = x.checkpoints, []
    if plan.entering is not None:
        states = Recurrence(x.k, x.v, x.g, x.initial_state, None, normalizer=normalizer, factor=x.v_factor)
        entering, _, made = launch_entering(plan.entering, states, Hv, x.cu_seqlens, checkpoint_dtype(x.q.dtype))
    elif plan.forward is not None:
        shape = checkpoint_shape(x.k, x.v, x.cu_seqlens, CHUNK)
        entering = x.v.new_empty(shape, dtype=checkpoint_dtype(x.q.dtype))
        o = None if plan.forward.outputs.may_lack_outputs else x.v.new_empty(x.do.shape)
        tensors = Tensors(x.q, x.k, x.v, x.g, x.initial_state, x.cu_seqlens, o, None, entering, v_factor=x.v_factor)
        made = forward.launches(plan.forward, tensors, scale, CHUNK, normalizer)
    filled = x  # the kernel for gradients fills the results in `filled`
    if plan.leaving is None:
        leaving, segments = x.dstate, whole(len(x.q), x.q.shape[1], x.cu_seqlens)
        made += segments.launches
    else:
        states = Recurrence(x.q, x.do, x.g, x.dstate, x.dinitial_state, scale, True, normalizer)
        # Gradients of 0 for last segments are not written, because a call may have many packed sequences of which few
        # are cut.
        leaving, segments, before = launch_entering(
            plan.leaving, states, Hv, x.cu_seqlens, skip_first=x.last_leave_none
        )
        made += before
        filled = x._replace(dinitial_state=None)  # the scan fills it
    each = for_query_heads(filled) if plan.gradients.heads_apart else filled
    each = each if plan.gradients.by_groups else for_value_heads(each)
    made += plan.gradients.load()(plan.parameters, each, entering, leaving, segments, scale, normalizer)
    return made + launch_sums_over_groups(each, x)
