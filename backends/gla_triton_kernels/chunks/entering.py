"""Computes the states that enter segments, or the gradients of the states that leave segments.

One kernel computes the states of all segments in parallel, each from a zero initial state. A scan then computes the
states that enter segments.

B batch   T tokens   Hv value heads   K, V key and value width   I segments
"""

from __future__ import annotations

import torch
from torch import Tensor

from gla_triton_kernels.chunks.kernel import SegmentPlan
from gla_triton_kernels.chunks.scan import launch_scan
from gla_triton_kernels.chunks.segments import Recurrence, Segments, cut
from gla_triton_kernels.chunks.slots import Slots
from gla_triton_runtime.launch import Launch


def launch_entering(
    plan: SegmentPlan,
    x: Recurrence,
    Hv: int,
    cu_seqlens: Tensor | None,
    dtype: torch.dtype = torch.float32,
    skip_first: bool = False,
    o: Tensor | None = None,
    slots: Slots | None = None,
) -> tuple[Tensor, Segments, list[Launch]]:
    """Returns entering states, or gradients of leaving states, [I, Hv, K, V]; the segments; and the launches.

    Args:
        dtype: the dtype of the returned states.
        skip_first: if True, the state that enters the first segment of a sequence is not written; it is x.before, or 0.
        o, slots: see `cut`.
    """
    B, T, _, K = x.left.shape
    V = x.right.shape[3]
    segments = cut(B, T, plan.length, plan.uncut, cu_seqlens, o, slots=slots)
    S = torch.empty(segments.count, Hv, K, V, dtype=torch.float32, device=x.left.device)
    D = None if x.g is None else torch.empty(segments.count, Hv, K, dtype=torch.float32, device=x.left.device)
    before = S if dtype == S.dtype else torch.empty_like(S, dtype=dtype)
    built = plan.states.load()(plan, x, segments, S, D)
    scanned = launch_scan(plan.overlap, x, segments, S, D, before, skip_first)
    return before, segments, [*segments.launches, *built, *scanned]
