"""Helpers for flash-linear-attention 0.6.0: its functions that are GLA or a delta rule, and conversion of its states.

The functions are computed here. Importing this package does not import flash-linear-attention; `accelerate` does.
`use_gla_core` is the same function.
"""

from gla_core.compat.fla.accelerate import Acceleration, accelerate, use_gla_core
from gla_core.compat.fla.composed import (
    chunk_lightnet,
    chunk_rwkv6,
    fused_recurrent_lightnet,
    fused_recurrent_rwkv6,
)
from gla_core.compat.fla.delta import (
    chunk_delta_rule,
    chunk_gated_delta_rule,
    chunk_gdn,
    chunk_kda,
    fused_recurrent_delta_rule,
    fused_recurrent_gated_delta_rule,
    fused_recurrent_gdn,
    fused_recurrent_kda,
)
from gla_core.compat.fla.heads import (
    chunk_lightning_attn,
    chunk_linear_attn,
    chunk_retention,
    chunk_simple_gla,
    fused_chunk_linear_attn,
    fused_chunk_retention,
    fused_chunk_simple_gla,
    fused_recurrent_lightning_attn,
    fused_recurrent_linear_attn,
    fused_recurrent_retention,
    fused_recurrent_simple_gla,
    parallel_retention,
    parallel_simple_gla,
)
from gla_core.compat.fla.ops import chunk_gla, fused_chunk_gla, fused_recurrent_gla
from gla_core.compat.fla.slots import chunk_gsa, fused_recurrent_gsa
from gla_core.compat.fla.states import state_from_fla, state_to_fla

__all__ = [
    "Acceleration",
    "accelerate",
    "chunk_delta_rule",
    "chunk_gated_delta_rule",
    "chunk_gdn",
    "chunk_gla",
    "chunk_gsa",
    "chunk_kda",
    "chunk_lightnet",
    "chunk_lightning_attn",
    "chunk_linear_attn",
    "chunk_retention",
    "chunk_rwkv6",
    "chunk_simple_gla",
    "fused_chunk_gla",
    "fused_chunk_linear_attn",
    "fused_chunk_retention",
    "fused_chunk_simple_gla",
    "fused_recurrent_delta_rule",
    "fused_recurrent_gated_delta_rule",
    "fused_recurrent_gdn",
    "fused_recurrent_gla",
    "fused_recurrent_gsa",
    "fused_recurrent_kda",
    "fused_recurrent_lightnet",
    "fused_recurrent_lightning_attn",
    "fused_recurrent_linear_attn",
    "fused_recurrent_retention",
    "fused_recurrent_rwkv6",
    "fused_recurrent_simple_gla",
    "parallel_retention",
    "parallel_simple_gla",
    "state_from_fla",
    "state_to_fla",
    "use_gla_core",
]
