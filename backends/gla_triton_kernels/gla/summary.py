"""Plans a summary of sequences, and describes its launches.

    decay = exp(g_1 + .. + g_T)        state = sum over t of (left_t exp(g_{t+1} + .. + g_T))^T right_t        forwards

One kernel computes the decay and the state of each segment from a zero initial state, and a scan combines them into the
decay and the state of each sequence. If sequences stay whole, each is one segment, and there is no scan.

B batch   T tokens   N sequences   Hv heads of states and gates   K, V key and value width
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gla_core.dispatch.backend import OpCall
from gla_core.dispatch.tensors import ceil_div
from gla_triton_kernels.chunks.cutting import INTERPRETED_SEGMENT, segment_length
from gla_triton_kernels.chunks.kernel import SegmentPlan
from gla_triton_kernels.gla.cost import summary_prices
from gla_triton_kernels.gla.forward import states_of_segments
from gla_triton_runtime.architecture import Architecture, Gpu, gpu_of_call

if TYPE_CHECKING:
    from gla_triton_kernels.chunks.segments import Recurrence
    from gla_triton_runtime.launch import Launch

Plans = list[tuple[OpCall, SegmentPlan]]
"""The plan of a call, with the call. All rows of a batch have the same plan."""


def plan(call: OpCall, gpu: Gpu, cut: bool) -> Plans:
    """Plans a call: each sequence is one segment, or with `cut` several; see `plan` of forward.py."""
    Hv, K, V = (call.dims[name] for name in ("Hv", "K", "V"))
    whole = _in_segments(call, gpu, call.dims["T"])
    if not cut:
        return [(call, whole)]
    blocks = Hv * ceil_div(K, whole.states.block_keys(whole.parameters)) * ceil_div(V, whole.parameters.BV)
    at_once = whole.states.at_once(call, whole.parameters) * gpu.multiprocessors

    def plan_segments(length: int) -> SegmentPlan:
        return _in_segments(call, gpu, length)

    length = segment_length(call, gpu, blocks, at_once, plan_segments, summary_prices)
    length = min(length, INTERPRETED_SEGMENT) if gpu.architecture is Architecture.INTERPRETED else length
    return [(call, plan_segments(length))]


def _in_segments(call: OpCall, gpu: Gpu, length: int) -> SegmentPlan:
    """Plans segments of `length` tokens. If `length` is T or more, sequences stay whole."""
    T = call.dims["T"]
    if length >= T:
        return replace(states_of_segments(call, gpu, T, T), overlap=False)
    return states_of_segments(call, gpu, length, length)


def prepare(call: OpCall, cut: bool) -> Callable[..., tuple[Tensor, Tensor]]:
    """Plans a call, compiles its kernels, and returns the function that computes calls of the same signature.

    Raises:
        LaunchError: a kernel does not compile for this device, or does not fit it.
    """
    from gla_triton_kernels.chunks.segments import Recurrence
    from gla_triton_runtime.prepared import Launches, rehearsed

    T, Hv, K, V, N = (call.dims[name] for name in ("T", "Hv", "K", "V", "N"))
    empty = N == 0 or T == 0
    plans = [] if empty else plan(call, gpu_of_call(call), cut)
    launched = Launches(call.device)

    def run(
        left: Tensor,
        right: Tensor,
        g: Tensor | None,
        cu_seqlens: Tensor | None,
        backwards: bool,
        gate_normalizer: int | None,
    ) -> tuple[Tensor, Tensor]:
        # Without gates, no kernel writes the decay. The kernel for SM90 writes nothing for an empty sequence.
        decay = left.new_ones(N, Hv, K, dtype=torch.float32)
        allocate = right.new_empty if cu_seqlens is None and not empty else right.new_zeros
        state = allocate(N, Hv, K, V, dtype=torch.float32)
        if not empty:
            tensors = (left, right, g, cu_seqlens, decay, state)
            if unrecorded := launched.replay(tensors, 1.0):
                ((_, planned),) = plans
                x = Recurrence(left, right, g, None, state, normalizer=gate_normalizer, backwards=backwards)
                unrecorded.start(launches(planned, x, decay, cu_seqlens))
        return decay, state

    return rehearsed(run, call)


def launches(plan: SegmentPlan, x: Recurrence, decay: Tensor, cu_seqlens: Tensor | None) -> list[Launch]:
    """Returns the launches that fill x.after [N, Hv, K, V] and, if there are gates, the decay [N, Hv, K]."""
    from gla_triton_kernels.chunks.scan import launch_scan
    from gla_triton_kernels.chunks.segments import cut, whole

    launch_states = plan.states.load()
    B, T = x.left.shape[:2]
    state = x.after
    assert state is not None
    if plan.length >= T:
        segments = whole(B, T, cu_seqlens)
        return [*segments.launches, *launch_states(plan, x, segments, state, None if x.g is None else decay)]
    segments = cut(B, T, plan.length, plan.uncut, cu_seqlens)
    S = state.new_empty(segments.count, *state.shape[1:])
    D = None if x.g is None else decay.new_empty(segments.count, *decay.shape[1:])
    built = launch_states(plan, x, segments, S, D)
    scanned = launch_scan(plan.overlap, x, segments, S, D, None, decay=None if D is None else decay)
    return [*segments.launches, *built, *scanned]
