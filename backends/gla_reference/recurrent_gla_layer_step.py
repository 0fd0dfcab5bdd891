"""Computes one token of gated linear attention, with the norm and the output gate of a layer.

`recurrent_gla_step` runs in place, and PyTorch normalizes its output. `through_layer_step` in
gla_core/dispatch/composed/layer_step.py gives the equations.

Sources: Yang et al., "Gated Linear Attention Transformers with Hardware-Efficient Training" (arXiv 2312.06635); Zhang
and Sennrich, "Root Mean Square Layer Normalization" (arXiv 1910.07467).
"""

from __future__ import annotations

from gla_core.dispatch.composed import through_layer_step
from gla_reference.recurrent_gla_step import recurrent_gla_step

recurrent_gla_layer_step = through_layer_step(recurrent_gla_step)
"""Computes the op; see gla_core/ops/gla/recurrent_gla_layer_step.py."""
