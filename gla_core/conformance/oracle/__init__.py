"""The meaning of each op in float64, differentiable by autograd: one file for each family of ops.

It shares no code with a backend. It is slow on purpose: one line per equation of "The mathematics" in README.md.
"""

# ruff: noqa: F401 - the imports are what it exports
from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from gla_core.conformance.oracle.attention import softmax, softmax_attention
from gla_core.conformance.oracle.delta import (
    chunk_delta,
    chunk_delta_gradient_summary,
    chunk_delta_pool,
    chunk_delta_summary,
    chunk_delta_with_checkpoints,
    recurrent_delta_replay,
    recurrent_delta_step,
    recurrent_delta_steps,
)
from gla_core.conformance.oracle.gla import (
    chunk_gla,
    chunk_gla_gradient_summary,
    chunk_gla_pool,
    chunk_gla_summary,
    chunk_gla_with_checkpoints,
    chunk_ssd,
    recurrent_gla_layer_step,
    recurrent_gla_replay,
    recurrent_gla_step,
    recurrent_gla_step_in_pool,
    recurrent_gla_steps,
    recurrent_ssd_step,
)
from gla_core.conformance.oracle.pools import tokens_of

ORACLES: Mapping[str, Callable[..., Any]] = {
    "chunk_gla": chunk_gla_with_checkpoints,
    "chunk_gla_pool": chunk_gla_pool,
    "chunk_ssd": chunk_ssd,
    "chunk_gla_summary": chunk_gla_summary,
    "chunk_gla_gradient_summary": chunk_gla_gradient_summary,
    "recurrent_gla_step": recurrent_gla_step_in_pool,
    "recurrent_gla_layer_step": recurrent_gla_layer_step,
    "recurrent_ssd_step": recurrent_ssd_step,
    "recurrent_gla_steps": recurrent_gla_steps,
    "recurrent_gla_replay": recurrent_gla_replay,
    "chunk_delta": chunk_delta_with_checkpoints,
    "chunk_delta_pool": chunk_delta_pool,
    "chunk_delta_summary": chunk_delta_summary,
    "chunk_delta_gradient_summary": chunk_delta_gradient_summary,
    "recurrent_delta_step": recurrent_delta_step,
    "recurrent_delta_steps": recurrent_delta_steps,
    "recurrent_delta_replay": recurrent_delta_replay,
    "online_softmax": softmax,
    "softmax_attention": softmax_attention,
}
"""The oracle of each public function. Its arguments have the names of the function's; it takes no options that leave
the results as they are, and log gates only.

It returns the results in order. An op on a pool of slots returns o; the new states by slot; and, if it has rings, the
new tokens in them by slot and position.
"""
