"""The kernels of a forward, in order: states that enter segments where sequences are cut, then the outputs."""

from __future__ import annotations

from gla_triton_kernels import chunk_gla as kernels
from gla_triton_kernels.chunk_gla.before_segments import launch_states_before_segments
from gla_triton_kernels.chunk_gla.call import Tensors
from gla_triton_kernels.chunk_gla.plan import Plan
from gla_triton_kernels.chunk_gla.segments import Recurrence, whole
from gla_triton_kernels.runtime.launch import Launch


def launch_forward(plan: Plan, x: Tensors, scale: float, every: int | None) -> list[Launch]:
    """Returns the launches that fill the results in x, with `every` tokens between checkpoints."""
    B, T = x.q.shape[:2]
    o = x.o if T > 0 else None
    if plan.segments is None:
        segments = whole(B, T, x.cu_seqlens, o)
        launches, each = [*segments.launches], x
    else:
        states = Recurrence(x.k, x.v, x.g, x.initial_state, x.final_state)
        entering, segments, launches = launch_states_before_segments(
            plan.segments, states, x.k.shape[2], x.cu_seqlens, skip_first=True, o=o
        )
        each = x._replace(entering=entering, final_state=None)
    return launches + getattr(kernels, plan.outputs.kernel).launch_outputs(plan, each, segments, scale, every)
