"""Steps and softmaxes in PyTorch, for a CPU; one file per op. A segment is hardly faster than the reference there."""

from collections.abc import Mapping

from gla_core.dispatch.backend import Op
from gla_core.dispatch.lowering import lowered
from gla_parallel_scan.pytorch import cost, online_softmax, recurrent_gla_step, softmax_attention

_step = recurrent_gla_step.recurrent_gla_step

OPS: Mapping[str, Op] = {
    "recurrent_gla_step": _step,
    **{op: lowered(op, _step) for op in ("recurrent_gla_layer_step", "recurrent_gla_steps", "recurrent_gla_replay")},
    "online_softmax": online_softmax.online_softmax,
    "softmax_attention": softmax_attention.softmax_attention,
}
"""The ops that are computed in PyTorch on a CPU."""

__all__ = ["OPS", "cost", "online_softmax", "recurrent_gla_step", "softmax_attention"]
