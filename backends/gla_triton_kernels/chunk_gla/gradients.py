"""The kernels of a backward, in order: states that enter chunks, gradients of states that leave segments, the rest.

Of grouped queries the kernels for SM90 compute each query head by itself, and what its group shares is summed.
"""

from __future__ import annotations

from gla_core.dispatch.backend import checkpoint_dtype
from gla_triton_kernels import chunk_gla as kernels
from gla_triton_kernels.chunk_gla import partials
from gla_triton_kernels.chunk_gla.before_segments import launch_states_before_segments
from gla_triton_kernels.chunk_gla.call import BackwardTensors
from gla_triton_kernels.chunk_gla.plan import Kernel
from gla_triton_kernels.chunk_gla.plan_backward import BackwardPlan
from gla_triton_kernels.chunk_gla.segments import Recurrence, whole
from gla_triton_kernels.runtime.launch import Launch


def launch_backward(plan: BackwardPlan, x: BackwardTensors, scale: float) -> list[Launch]:
    """Returns the launches that fill the gradients in x."""
    H = x.k.shape[2]
    entering, launches = x.checkpoints, []
    if plan.entering is not None:
        states = Recurrence(x.k, x.v, x.g, x.initial_state, None)
        entering, _, launches = launch_states_before_segments(
            plan.entering, states, H, x.cu_seqlens, checkpoint_dtype(x.q.dtype)
        )
    own = x  # of which the last kernel fills what is there
    if plan.leaving is None:
        leaving, segments = x.dstate, whole(len(x.q), x.q.shape[1], x.cu_seqlens)
        launches += segments.launches
    else:
        states = Recurrence(x.q, x.do, x.g, x.dstate, x.dinitial_state, scale, backwards=True)
        # Of packed sequences there may be many more than are cut: nothing is written for all of them.
        leaving, segments, before = launch_states_before_segments(
            plan.leaving, states, H, x.cu_seqlens, skip_first=x.last_leave_none
        )
        launches += before
        own = x._replace(dinitial_state=None)  # which is there
    each = own if plan.gradients.kernel is Kernel.BACKWARD else partials.for_query_heads(own)
    kernel = getattr(kernels, plan.gradients.kernel)
    launches += kernel.launch_gradients(plan.gradients, each, entering, leaving, segments, scale)
    return launches + partials.launch_sums_over_groups(each, x)
