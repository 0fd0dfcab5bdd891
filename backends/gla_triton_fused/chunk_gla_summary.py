"""The summary of sequences, each in one pass: the kernel that builds states of segments, on whole sequences."""

from __future__ import annotations

from torch import Tensor

from gla_triton_kernels import chunk_gla as kernels
from gla_triton_kernels.chunk_gla.plan_summary import plan_whole_summary


def chunk_gla_summary(
    left: Tensor, right: Tensor, g: Tensor | None, cu_seqlens: Tensor | None, backwards: bool
) -> tuple[Tensor, Tensor]:
    """See gla_core/ops/chunk_gla_summary.py."""
    return kernels.summary.summary(plan_whole_summary, left, right, g, cu_seqlens, backwards)
