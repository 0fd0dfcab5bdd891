"""Gated linear attention over whole sequences in one pass, the state on chip: the kernels of gla_triton_shared."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from gla_triton_shared import chunk_gla as general
from gla_triton_shared import chunk_gla_whole as whole
from gla_triton_shared.launch import device_of, float32_precision, launch_again, layouts, remember_call


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
    B, T, Hq, K = q.shape
    H, V = v.shape[2:]
    N = B if cu_seqlens is None else len(cu_seqlens) - 1
    o = torch.empty(B, T, Hq, V, dtype=v.dtype, device=v.device)
    final = torch.empty(N, H, K, V, dtype=torch.float32, device=v.device) if output_final_state else None
    if N == 0 or (T == 0 and final is None):
        return o, final
    key: Hashable = (
        *("triton_fused", q.device, layouts(q, k, v, g, initial_state, cu_seqlens), output_final_state),
        *(float32_precision(), general.WORTH_TILING, whole.WORTH_WHOLE_CHUNKS),
    )
    tensors = (q, k, v, g, initial_state, cu_seqlens, o, final)
    with device_of(q):
        if not launch_again(key, tensors, scale):
            remember_call(key, tensors, whole.run(q, k, v, g, scale, initial_state, cu_seqlens, o, final))
    return o, final
