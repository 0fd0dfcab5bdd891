"""Gated linear attention over whole sequences in one pass, the state on chip: the kernels of gla_triton_kernels."""

from __future__ import annotations

from torch import Tensor

from gla_triton_kernels.chunk_gla import one_pass as whole


def chunk_gla_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    scale: float,
    initial_state: Tensor | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """See gla_core/ops/chunk_gla.py."""
    return whole.chunk_gla_fwd(whole.run, None, q, k, v, g, scale, initial_state, output_final_state, cu_seqlens)
