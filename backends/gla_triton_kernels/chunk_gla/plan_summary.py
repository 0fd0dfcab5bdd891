"""Plans of calls of chunk_gla_summary: kernels and launch parameters are decided here, without Triton.

As plan.py does for the forward, whose kernels for states these are.
"""

from __future__ import annotations

from gla_core.dispatch.backend import OpCall
from gla_triton_kernels.chunk_gla.plan import (
    INTERPRETED_SEGMENT,
    STATE_KEYS,
    CutTimes,
    Kernel,
    SegmentPlan,
    segment_length,
    states_of_segments,
)
from gla_triton_kernels.runtime.architecture import Architecture, Gpu

SUMMARY_CUT = CutTimes(building=0.0, spilling=1.5, launching=4.0)
"""In the time that a block needs for the state of 64 tokens, half of that for outputs: there is no second pass, and one
more launch in place of two. As `FORWARD_CUT` has it; not measured for this op."""


def plan_whole_summary(call: OpCall, gpu: Gpu, aligned: bool) -> SegmentPlan:
    """Each sequence as one segment.

    Args:
        aligned: whether TMA can address k, v and g.
    """
    T = call.dims["T"]
    return SegmentPlan(T, T, states_of_segments(call, gpu, aligned, T), overlap=False)


def plan_cut_summary(call: OpCall, gpu: Gpu, aligned: bool) -> SegmentPlan:
    """Segments of sequences at once, or whole ones where they fill the device: of T tokens or more.

    Args:
        aligned: whether TMA can address k, v and g.
    """
    T, H, K, V, N = (call.dims[name] for name in ("T", "H", "K", "V", "N"))
    kernel = states_of_segments(call, gpu, aligned, T)
    if kernel.kernel is Kernel.STATES_SM90:  # blocks of a sequence, and how many a multiprocessor runs at once
        blocks, at_once = H * -(-K // STATE_KEYS) * -(-V // kernel.BV), 2 if K <= kernel.BK else 1
    else:
        blocks, at_once = H * -(-K // kernel.BK) * -(-V // kernel.BV), 2
    length = segment_length(N, T, blocks, at_once * gpu.multiprocessors, call.variable_length, SUMMARY_CUT)
    if gpu.architecture is Architecture.INTERPRETED:
        length = min(length, INTERPRETED_SEGMENT)
    if length >= T:
        return plan_whole_summary(call, gpu, aligned)
    kernel = states_of_segments(call, gpu, aligned, length)
    return SegmentPlan(length, length, kernel, gpu.architecture.overlaps_kernels)
