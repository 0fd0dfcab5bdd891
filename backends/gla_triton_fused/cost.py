"""Predicted seconds of the backend triton_fused: the prices of its ops' plans in gla_triton_kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gla_core.dispatch.backend import Constants, OpCall
from gla_triton_kernels.chunk_gla import cost as chunk_gla
from gla_triton_kernels.chunk_gla import cost_backward as chunk_gla_backward
from gla_triton_kernels.chunk_gla import cost_summary as chunk_gla_summary
from gla_triton_kernels.online_softmax import cost as online_softmax
from gla_triton_kernels.recurrent_gla_step import cost as recurrent_gla_step
from gla_triton_kernels.softmax_attention import cost as softmax_attention

_SECONDS: Mapping[str, Callable[[OpCall, Constants], float]] = {
    "chunk_gla_fwd": chunk_gla.one_pass,
    "chunk_gla_bwd": chunk_gla_backward.whole_sequences,
    "chunk_gla_summary": chunk_gla_summary.whole_sequences,
    "recurrent_gla_step": recurrent_gla_step.seconds,
    "online_softmax": online_softmax.one_pass,
    "softmax_attention": softmax_attention.one_pass,
}


def predicted_seconds(call: OpCall, c: Constants) -> float | None:
    """Seconds of a call, by the constants `c` of its op and device; None where kernels are interpreted."""
    return _SECONDS[call.op](call, c) if call.device.type == "cuda" else None
