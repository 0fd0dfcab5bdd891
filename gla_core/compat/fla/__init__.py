"""Helpers for flash-linear-attention 0.6.0: its GLA functions, computed here, and conversion of its states.

Importing this package does not import flash-linear-attention; `accelerate` does.
"""

from gla_core.compat.fla.accelerate import Acceleration, accelerate
from gla_core.compat.fla.ops import chunk_gla, fused_chunk_gla, fused_recurrent_gla
from gla_core.compat.fla.states import state_from_fla, state_to_fla

__all__ = [
    "Acceleration",
    "accelerate",
    "chunk_gla",
    "fused_chunk_gla",
    "fused_recurrent_gla",
    "state_from_fla",
    "state_to_fla",
]
