"""Gated linear attention over whole sequences: which kernel walks them.

Of three, a call takes the first that suits it: that of chunk_gla_hopper.py, those of chunk_gla_hopper_wide.py, and that
of chunk_gla.py, which suits every call.
"""

from __future__ import annotations

from torch import Tensor

from gla_triton_shared import chunk_gla as general
from gla_triton_shared.launch import Launched, capability

WORTH_WHOLE_CHUNKS = 96
"""Tokens of an average sequence from which on Hopper's kernels, with chunks of 64, are faster; up to K = 64, twice as
many."""


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
) -> list[Launched]:
    """Fill o, and final_state if there is one; see gla_core/ops/chunk_gla.py."""
    B, T, _, K = q.shape
    tokens = B * T / (B if cu_seqlens is None else len(cu_seqlens) - 1)
    fewest = WORTH_WHOLE_CHUNKS * (1 if K > 64 else 2)
    if capability(q.device) == (9, 0) and tokens >= fewest:
        from gla_triton_shared import chunk_gla_hopper as hopper
        from gla_triton_shared import chunk_gla_hopper_wide as wide

        if hopper.suits(q, k, v, g):
            return hopper.run(q, k, v, g, scale, initial_state, cu_seqlens, o, final_state)
        if g is not None and cu_seqlens is None and wide.suits(q, k, v, g):
            return wide.run(q, k, v, g, scale, initial_state, o, final_state)
    return general.run(q, k, v, g, scale, initial_state, cu_seqlens, o, final_state)
