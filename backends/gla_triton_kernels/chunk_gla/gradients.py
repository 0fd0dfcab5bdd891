"""The kernels of a backward, in order: states that enter chunks, gradients of states that leave segments, the rest."""

from __future__ import annotations

from gla_triton_kernels import chunk_gla as kernels
from gla_triton_kernels.chunk_gla import before_segments
from gla_triton_kernels.chunk_gla.call import BackwardTensors
from gla_triton_kernels.chunk_gla.plan import checkpoint_dtype
from gla_triton_kernels.chunk_gla.plan_backward import BackwardPlan
from gla_triton_kernels.chunk_gla.segments import Recurrence
from gla_triton_kernels.runtime.launch import Launch


def run(plan: BackwardPlan, x: BackwardTensors, scale: float) -> list[Launch]:
    """Fill the gradients in x, and return what was launched."""
    H = x.k.shape[2]
    entering, launches = x.checkpoints, []
    if plan.entering is not None:
        states = Recurrence(x.k, x.v, x.g, x.initial_state, None)
        entering, _, launches = before_segments.run(plan.entering, states, H, x.cu_seqlens, checkpoint_dtype(x.q.dtype))
    leaving = segments = None
    if plan.leaving is not None:
        states = Recurrence(x.q, x.do, x.g, x.dstate, x.dinitial_state, scale, backwards=True)
        leaving, segments, launched = before_segments.run(plan.leaving, states, H, x.cu_seqlens)
        launches += launched
    kernel = getattr(kernels, plan.gradients.kernel)
    return launches + kernel.run(plan.gradients, x, entering, leaving, segments, scale)
