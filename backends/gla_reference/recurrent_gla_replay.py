"""Computes up to eight tokens of each sequence, after the accepted tokens of its last call, with states in a pool.

The states are copied out of the pool, `recurrent_gla_step` runs once for each token, and the states after the accepted
tokens are copied into the pool. `through_replay` in gla_core/dispatch/composed/replay.py holds the loops.

Source: Yang et al., "Gated Linear Attention Transformers with Hardware-Efficient Training" (arXiv 2312.06635).
"""

from __future__ import annotations

from gla_core.dispatch.composed import through_replay
from gla_reference.recurrent_gla_step import recurrent_gla_step

recurrent_gla_replay = through_replay(recurrent_gla_step)
"""Computes the op; see gla_core/ops/gla/recurrent_gla_replay.py."""
