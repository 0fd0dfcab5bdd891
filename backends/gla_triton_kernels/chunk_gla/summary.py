"""Decay and state from zero of whole sequences: what builds the states of segments, and the scan that joins them.

Where sequences stay whole each is a segment, and nothing is left to be joined.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from gla_core.dispatch.backend import OpCall
from gla_triton_kernels import chunk_gla as kernels
from gla_triton_kernels.chunk_gla import scan
from gla_triton_kernels.chunk_gla.call import all_aligned
from gla_triton_kernels.chunk_gla.plan import SegmentPlan
from gla_triton_kernels.chunk_gla.segments import Recurrence, cut, whole
from gla_triton_kernels.runtime.architecture import Gpu, gpu_of
from gla_triton_kernels.runtime.launch import Launch, on_device_of, start
from gla_triton_kernels.runtime.replay import layouts, record, replay

Plan = Callable[[OpCall, Gpu, bool], SegmentPlan]


def summary(
    plan: Plan, left: Tensor, right: Tensor, g: Tensor | None, cu_seqlens: Tensor | None, backwards: bool
) -> tuple[Tensor, Tensor]:
    """chunk_gla_summary, with sequences cut as `plan` says; see gla_core/ops/chunk_gla_summary.py."""
    T, Hq, K = left.shape[1:]
    H, V = Hq if g is None else g.shape[2], right.shape[3]
    N = len(left) if cu_seqlens is None else len(cu_seqlens) - 1
    # No kernel writes the decay where there are no gates, and that for Hopper nothing of a sequence without tokens.
    decay = left.new_ones(N, H, K, dtype=torch.float32)
    allocate = right.new_empty if cu_seqlens is None and T > 0 else right.new_zeros
    state = allocate(N, H, K, V, dtype=torch.float32)
    if N == 0 or T == 0:
        return decay, state
    precision = torch.get_float32_matmul_precision()
    given = (left, right, g, cu_seqlens)
    key: Hashable = ("chunk_gla_summary", plan, left.device, layouts(*given), backwards, precision)
    tensors = (*given, decay, state)
    if replay(key, tensors, 1.0):
        return decay, state
    with on_device_of(left):
        call = OpCall(
            op="chunk_gla_summary",
            device=left.device,
            dtype=left.dtype,
            dims={"B": len(left), "T": T, "H": H, "Hq": Hq, "K": K, "V": V, "N": N},
            gate_dtype=None if g is None else g.dtype,
            variable_length=cu_seqlens is not None,
            scalars={"backwards": backwards},
            float32_matmul_precision=precision,
        )
        gpu = gpu_of(left.device)
        x = Recurrence(left, right, g, None, state, backwards=backwards)
        launches = _launches(plan(call, gpu, all_aligned(gpu, left, right, g)), x, decay, cu_seqlens)
        start(launches)
        record(key, tensors, launches)
    return decay, state


def _launches(plan: SegmentPlan, x: Recurrence, decay: Tensor, cu_seqlens: Tensor | None) -> list[Launch]:
    """The launches that fill x.after [N, H, K, V] and, where there are gates, the decay [N, H, K]."""
    build = getattr(kernels, plan.states.kernel).run
    B, T = x.left.shape[:2]
    state = x.after
    assert state is not None
    if plan.length >= T:
        segments = whole(B, T, cu_seqlens)
        return [*segments.launches, *build(plan, x, segments, state, None if x.g is None else decay)]
    segments = cut(B, T, plan.length, plan.uncut, cu_seqlens)
    S = state.new_empty(segments.count, *state.shape[1:])
    D = None if x.g is None else decay.new_empty(segments.count, *decay.shape[1:])
    built = build(plan, x, segments, S, D)
    return [*segments.launches, *built, *scan.run(plan, x, segments, S, D, None, decay=None if D is None else decay)]
