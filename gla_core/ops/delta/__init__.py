"""Exports the ops of the delta rule, one file each, and their descriptions."""

# ruff: noqa: F401 - the imports are what it exports
from gla_core.ops.delta.chunk_delta import BACKWARD, FORWARD, chunk_delta
from gla_core.ops.delta.recurrent_delta_step import STEP, recurrent_delta_step

SPECS = (FORWARD, BACKWARD, STEP)
