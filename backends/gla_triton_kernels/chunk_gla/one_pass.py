"""Gated linear attention over whole sequences: which kernel walks them. And the way of any call to its kernels.

Of three, a call takes the first that suits it: that of chunk_gla_hopper.py, those of chunk_gla_hopper_wide.py, and that
of chunk_gla.py, which suits every call.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from gla_triton_kernels.chunk_gla import forward as general
from gla_triton_kernels.chunk_gla.padding import clear_padding
from gla_triton_kernels.runtime.architecture import gpu_of, tf32_allowed
from gla_triton_kernels.runtime.launch import Launch, on_device_of
from gla_triton_kernels.runtime.replay import layouts, record, replay

WORTH_WHOLE_CHUNKS = 96
"""Tokens of an average sequence from which on Hopper's kernels, with chunks of 64, are faster; up to K = 64, twice as
many."""


def chunk_gla_fwd(
    fill: Callable[..., list[Launch]],
    settings: Hashable,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    scale: float,
    initial_state: Tensor | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """See gla_core/ops/chunk_gla.py.

    Args:
        fill: takes and does what `run` does. Its launches are kept for the next call of the same layouts.
        settings: what else decides which they are.
    """
    B, T, Hq, _ = q.shape
    H, V = v.shape[2:]
    N = B if cu_seqlens is None else len(cu_seqlens) - 1
    o = torch.empty(B, T, Hq, V, dtype=v.dtype, device=v.device)
    final = torch.empty(N, H, k.shape[3], V, dtype=torch.float32, device=v.device) if output_final_state else None
    if N == 0 or (T == 0 and final is None):
        return o.zero_(), final  # any token there is belongs to no sequence
    key: Hashable = (
        *(fill, settings, q.device, layouts(q, k, v, g, initial_state, cu_seqlens), output_final_state),
        *(tf32_allowed(), general.WORTH_TILING, WORTH_WHOLE_CHUNKS),
    )
    tensors = (q, k, v, g, initial_state, cu_seqlens, o, final)
    with on_device_of(q):
        if not replay(key, tensors, scale):
            launches = fill(q, k, v, g, scale, initial_state, cu_seqlens, o, final)
            if cu_seqlens is not None and T > 0:
                launches = [*launches, *clear_padding(o, cu_seqlens)]
            record(key, tensors, launches)
    return o, final


def run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    scale: float,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    o: Tensor,
    final_state: Tensor | None,
) -> list[Launch]:
    """Fill o, and final_state if there is one; see gla_core/ops/chunk_gla.py."""
    B, T, _, K = q.shape
    tokens = B * T / (B if cu_seqlens is None else len(cu_seqlens) - 1)
    fewest = WORTH_WHOLE_CHUNKS * (1 if K > 64 else 2)
    if gpu_of(q.device).architecture.has_wgmma and tokens >= fewest:
        from gla_triton_kernels.chunk_gla import forward_sm90 as hopper
        from gla_triton_kernels.chunk_gla import forward_sm90_wide as wide

        if hopper.suits(q, k, v, g):
            return hopper.run(q, k, v, g, scale, initial_state, cu_seqlens, o, final_state)
        if g is not None and cu_seqlens is None and wide.suits(q, k, v, g):
            return wide.run(q, k, v, g, scale, initial_state, o, final_state)
    return general.run(q, k, v, g, scale, initial_state, cu_seqlens, o, final_state)
