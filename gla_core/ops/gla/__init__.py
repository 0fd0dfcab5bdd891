"""Exports the ops of gated linear attention, one file each, and their descriptions."""

# ruff: noqa: F401 - the imports are what it exports
from gla_core.ops.gla.chunk_gla import BACKWARD, FORWARD, ChunkGla, ChunkGlaWithCheckpoints, chunk_gla
from gla_core.ops.gla.chunk_gla_pool import CHUNK_POOL, chunk_gla_pool
from gla_core.ops.gla.chunk_gla_summary import (
    SUMMARY,
    ChunkGlaGradientSummary,
    ChunkGlaSummary,
    chunk_gla_gradient_summary,
    chunk_gla_summary,
)
from gla_core.ops.gla.chunk_ssd import SSD_BACKWARD, SSD_FORWARD, chunk_ssd
from gla_core.ops.gla.linear_attention import LinearAttention, linear_attention
from gla_core.ops.gla.recurrent_gla_layer_step import LAYER_STEP, recurrent_gla_layer_step
from gla_core.ops.gla.recurrent_gla_replay import REPLAY, recurrent_gla_replay
from gla_core.ops.gla.recurrent_gla_step import STEP, RecurrentGlaStep, recurrent_gla_step
from gla_core.ops.gla.recurrent_gla_steps import STEPS, recurrent_gla_steps
from gla_core.ops.gla.recurrent_ssd_step import SSD_STEP, recurrent_ssd_step

SPECS = (FORWARD, BACKWARD, CHUNK_POOL, SUMMARY, SSD_FORWARD, SSD_BACKWARD, STEP, LAYER_STEP, SSD_STEP, STEPS, REPLAY)
RUNS = {"chunk_gla_gradient_summary": (SUMMARY, {"backwards": True})}
"""Public functions that run an op with arguments that they fix."""
