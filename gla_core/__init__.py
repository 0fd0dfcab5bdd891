"""Gated Linear Attention: a few abstract ops, several interchangeable backends, and a registry that picks one.

>>> import gla_core as gla
>>> o, state = gla.chunk_gla(q, k, v, g)
>>> print(gla.explain("chunk_gla", q, k, v, g))
"""

from gla_core import nn
from gla_core.dispatch.environment import environment as _environment
from gla_core.dispatch.errors import BackendError, NoBackendError, UnknownBackendError, UnknownOpError
from gla_core.dispatch.registry import BackendInfo, Registration, backends, register
from gla_core.dispatch.registry import rediscover as _rediscover
from gla_core.dispatch.request import batch_invariant, use_backend
from gla_core.dispatch.selection import Explanation
from gla_core.explanation import explain
from gla_core.ops.attention import SoftmaxAttention, merge_attention, online_softmax, softmax_attention
from gla_core.ops.delta import (
    ChunkDeltaGradientSummary,
    ChunkDeltaSummary,
    chunk_delta,
    chunk_delta_gradient_summary,
    chunk_delta_pool,
    chunk_delta_summary,
    recurrent_delta_replay,
    recurrent_delta_step,
    recurrent_delta_steps,
)
from gla_core.ops.gla import (
    ChunkGla,
    ChunkGlaGradientSummary,
    ChunkGlaSummary,
    ChunkGlaWithCheckpoints,
    LinearAttention,
    RecurrentGlaStep,
    chunk_gla,
    chunk_gla_gradient_summary,
    chunk_gla_pool,
    chunk_gla_summary,
    chunk_ssd,
    linear_attention,
    recurrent_gla_layer_step,
    recurrent_gla_replay,
    recurrent_gla_step,
    recurrent_gla_steps,
    recurrent_ssd_step,
)

__version__ = "0.1.0"

__all__ = [
    "BackendError",
    "BackendInfo",
    "ChunkDeltaGradientSummary",
    "ChunkDeltaSummary",
    "ChunkGla",
    "ChunkGlaGradientSummary",
    "ChunkGlaSummary",
    "ChunkGlaWithCheckpoints",
    "Explanation",
    "LinearAttention",
    "NoBackendError",
    "RecurrentGlaStep",
    "Registration",
    "SoftmaxAttention",
    "UnknownBackendError",
    "UnknownOpError",
    "backends",
    "batch_invariant",
    "chunk_delta",
    "chunk_delta_gradient_summary",
    "chunk_delta_pool",
    "chunk_delta_summary",
    "chunk_gla",
    "chunk_gla_gradient_summary",
    "chunk_gla_pool",
    "chunk_gla_summary",
    "chunk_ssd",
    "explain",
    "linear_attention",
    "merge_attention",
    "nn",
    "online_softmax",
    "recurrent_delta_replay",
    "recurrent_delta_step",
    "recurrent_delta_steps",
    "recurrent_gla_layer_step",
    "recurrent_gla_replay",
    "recurrent_gla_step",
    "recurrent_gla_steps",
    "recurrent_ssd_step",
    "register",
    "reload_environment",
    "softmax_attention",
    "use_backend",
]


def reload_environment() -> None:
    """Makes the next use read the GLA_* environment variables, the plugins and the calibrated constants again."""
    _environment.cache_clear()
    _rediscover()
