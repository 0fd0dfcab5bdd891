"""Exports the ops of the delta rule, one file each, and their descriptions."""

# ruff: noqa: F401 - the imports are what it exports
from gla_core.ops.delta.chunk_delta import BACKWARD, FORWARD, chunk_delta
from gla_core.ops.delta.chunk_delta_pool import CHUNK_POOL, chunk_delta_pool
from gla_core.ops.delta.chunk_delta_summary import (
    GRADIENT_SUMMARY,
    SUMMARY,
    ChunkDeltaGradientSummary,
    ChunkDeltaSummary,
    chunk_delta_gradient_summary,
    chunk_delta_summary,
)
from gla_core.ops.delta.recurrent_delta_replay import REPLAY, recurrent_delta_replay
from gla_core.ops.delta.recurrent_delta_step import STEP, recurrent_delta_step
from gla_core.ops.delta.recurrent_delta_steps import STEPS, recurrent_delta_steps

SPECS = (FORWARD, BACKWARD, CHUNK_POOL, SUMMARY, GRADIENT_SUMMARY, STEP, STEPS, REPLAY)
