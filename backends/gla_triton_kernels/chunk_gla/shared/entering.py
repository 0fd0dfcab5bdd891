"""States that enter segments, or gradients of those that leave them: built from zero side by side, then scanned."""

from __future__ import annotations

import torch
from torch import Tensor

from gla_triton_kernels.chunk_gla.kernel import SegmentPlan
from gla_triton_kernels.chunk_gla.shared.scan import launch_scan
from gla_triton_kernels.chunk_gla.shared.segments import Recurrence, Segments, cut
from gla_triton_kernels.runtime.launch import Launch


def launch_entering(
    plan: SegmentPlan,
    x: Recurrence,
    H: int,
    cu_seqlens: Tensor | None,
    dtype: torch.dtype = torch.float32,
    skip_first: bool = False,
    o: Tensor | None = None,
) -> tuple[Tensor, Segments, list[Launch]]:
    """Returns the states (or gradients) before each segment [I, H, K, V], the segments, and the launches.

    Args:
        skip_first: do not write the states before the first segments of sequences: they are x.before, or 0.
        o: as in `cut`.
    """
    B, T, _, K = x.left.shape
    V = x.right.shape[3]
    segments = cut(B, T, plan.length, plan.uncut, cu_seqlens, o)
    S = torch.empty(segments.count, H, K, V, dtype=torch.float32, device=x.left.device)
    D = None if x.g is None else torch.empty(segments.count, H, K, dtype=torch.float32, device=x.left.device)
    before = S if dtype == S.dtype else torch.empty_like(S, dtype=dtype)
    built = plan.states.load()(plan, x, segments, S, D)
    scanned = launch_scan(plan, x, segments, S, D, before, skip_first)
    return before, segments, [*segments.launches, *built, *scanned]
