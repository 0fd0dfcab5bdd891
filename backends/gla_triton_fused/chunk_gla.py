"""Gated linear attention over whole sequences in one pass, the state on chip.

Three kernels, of which a call takes the first that suits it: chunk_gla_hopper.py and chunk_gla.py of
gla_triton_shared, which walk a sequence from the state that enters it, and chunk_gla_hopper_wide.py beside this file.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gla_triton_shared import chunk_gla as general
from gla_triton_shared.launch import capability, device_of

WORTH_WHOLE_CHUNKS = 256
"""Tokens of an average sequence from which on Hopper's kernel, with chunks of 64, is faster."""


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
    with device_of(q):
        if capability(q.device) == (9, 0) and B * T >= WORTH_WHOLE_CHUNKS * N:
            from gla_triton_fused import chunk_gla_hopper_wide as wide
            from gla_triton_shared import chunk_gla_hopper as hopper

            if hopper.suits(q, k, v, g):
                hopper.run(q, k, v, g, scale, initial_state, cu_seqlens, o, final)
                return o, final
            if g is not None and cu_seqlens is None and wide.suits(q, k, v, g):
                wide.run(q, k, v, g, scale, initial_state, o, final)
                return o, final
        general.run(q, k, v, g, scale, initial_state, cu_seqlens, o, final)
    return o, final
