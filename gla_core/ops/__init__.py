"""Exports the public ops, one file each, and the description of every abstract op."""

from typing import Any

from gla_core.ops.attention.online_softmax import SOFTMAX, online_softmax
from gla_core.ops.attention.softmax_attention import ATTENTION, merge_attention, softmax_attention
from gla_core.ops.gla.chunk_gla import BACKWARD, FORWARD, ChunkGla, ChunkGlaWithCheckpoints, chunk_gla
from gla_core.ops.gla.chunk_gla_pool import CHUNK_POOL, chunk_gla_pool
from gla_core.ops.gla.chunk_gla_summary import SUMMARY, chunk_gla_gradient_summary, chunk_gla_summary
from gla_core.ops.gla.linear_attention import LinearAttention, linear_attention
from gla_core.ops.gla.recurrent_gla_layer_step import LAYER_STEP, recurrent_gla_layer_step
from gla_core.ops.gla.recurrent_gla_replay import REPLAY, recurrent_gla_replay
from gla_core.ops.gla.recurrent_gla_step import STEP, recurrent_gla_step
from gla_core.ops.gla.recurrent_gla_steps import STEPS, recurrent_gla_steps
from gla_core.ops.spec import OpSpec, declare

__all__ = [
    "ABSTRACT_OPS",
    "PUBLIC_OPS",
    "RUNS",
    "ChunkGla",
    "ChunkGlaWithCheckpoints",
    "LinearAttention",
    "OpSpec",
    "chunk_gla",
    "chunk_gla_gradient_summary",
    "chunk_gla_pool",
    "chunk_gla_summary",
    "linear_attention",
    "merge_attention",
    "online_softmax",
    "recurrent_gla_layer_step",
    "recurrent_gla_replay",
    "recurrent_gla_step",
    "recurrent_gla_steps",
    "softmax_attention",
]

_SPECS = (FORWARD, BACKWARD, CHUNK_POOL, SUMMARY, STEP, LAYER_STEP, STEPS, REPLAY, SOFTMAX, ATTENTION)
ABSTRACT_OPS = {spec.name: spec for spec in _SPECS}
for _spec in ABSTRACT_OPS.values():
    declare(_spec)

_BACKWARDS = {spec.backward for spec in ABSTRACT_OPS.values()}
PUBLIC_OPS = {spec.public: spec for spec in ABSTRACT_OPS.values() if spec.name not in _BACKWARDS}
"""Maps the name of each public op to the abstract op of its forward."""

RUNS: dict[str, tuple[OpSpec, dict[str, Any]]] = {
    **{name: (spec, {}) for ops in (PUBLIC_OPS, ABSTRACT_OPS) for name, spec in ops.items()},
    "chunk_gla_gradient_summary": (SUMMARY, {"backwards": True}),
}
"""Maps a public or abstract name to its abstract op, and to the arguments that the name fixes."""
