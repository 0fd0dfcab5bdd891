"""The ops of each family, for the attribute `ops` of its layers."""

from __future__ import annotations

from typing import Any

from gla_core.nn.interface import Ops
from gla_core.ops.delta.chunk_delta import chunk_delta
from gla_core.ops.delta.recurrent_delta_step import recurrent_delta_step
from gla_core.ops.gla.chunk_gla import ChunkGla, chunk_gla
from gla_core.ops.gla.recurrent_gla_layer_step import recurrent_gla_layer_step
from gla_core.ops.gla.recurrent_gla_step import recurrent_gla_step


def _chunk_gla_over_ranks(*args: Any, **kwargs: Any) -> ChunkGla:
    from gla_core.distributed import chunk_gla  # imports torch.distributed

    return chunk_gla(*args, **kwargs)


def _chunk_delta_over_ranks(*args: Any, **kwargs: Any) -> ChunkGla:
    from gla_core.distributed import chunk_delta

    return chunk_delta(*args, **kwargs)


GATED_LINEAR_ATTENTION = Ops(4, chunk_gla, _chunk_gla_over_ranks, recurrent_gla_step, recurrent_gla_layer_step)
DELTA_RULE = Ops(5, chunk_delta, _chunk_delta_over_ranks, recurrent_delta_step, None)
