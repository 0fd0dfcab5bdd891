"""Gated linear attention over packed sequences, with states in a pool.

The states are copied out of the pool, `chunk_gla_fwd` runs from them, and its final states are copied into the pool;
`through_pool` in gla_core/dispatch/composed/pool.py has the three lines. A checkpoint is the final state of the first
part of a sequence, so it takes a second run of `chunk_gla_fwd` on sequences that are cut in two.

Source: Yang et al., "Gated Linear Attention Transformers with Hardware-Efficient Training" (arXiv 2312.06635).
"""

from __future__ import annotations

from gla_core.dispatch.composed import through_pool
from gla_reference.chunk_gla import chunk_gla_fwd

chunk_gla_pool = through_pool(chunk_gla_fwd)
"""Computes the op; see gla_core/ops/gla/chunk_gla_pool.py."""
