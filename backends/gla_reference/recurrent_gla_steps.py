"""Computes up to eight tokens of each sequence, with states in a pool.

The states are copied out of the pool, `recurrent_gla_step` runs once for each token, and each new state is copied into
the pool. `through_steps` in gla_core/dispatch/composed/steps.py holds the loop.

Source: Yang et al., "Gated Linear Attention Transformers with Hardware-Efficient Training" (arXiv 2312.06635).
"""

from __future__ import annotations

from gla_core.dispatch.composed import through_steps
from gla_reference.recurrent_gla_step import recurrent_gla_step

recurrent_gla_steps = through_steps(recurrent_gla_step)
"""Computes the op; see gla_core/ops/gla/recurrent_gla_steps.py."""
