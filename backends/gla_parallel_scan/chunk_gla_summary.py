"""The summary of sequences from those of their segments, all at once: what a forward begins with."""

from __future__ import annotations

from torch import Tensor

from gla_triton_kernels import chunk_gla as kernels
from gla_triton_kernels.chunk_gla.plan_summary import plan_cut_summary


def chunk_gla_summary(
    left: Tensor, right: Tensor, g: Tensor | None, cu_seqlens: Tensor | None, backwards: bool
) -> tuple[Tensor, Tensor]:
    """See gla_core/ops/chunk_gla_summary.py."""
    return kernels.summary.summary(plan_cut_summary, left, right, g, cu_seqlens, backwards)
