"""Steps and softmaxes in PyTorch, for a CPU; one file per op. A segment is hardly faster than the reference there."""

from collections.abc import Mapping

from gla_core.dispatch.backend import Constants, Op, OpCall
from gla_core.dispatch.lowering import lowered
from gla_parallel_scan.pytorch import cost, online_softmax, softmax_attention, step

_LOWERED = ("recurrent_gla_layer_step", "recurrent_ssd_step", "recurrent_gla_steps", "recurrent_gla_replay")
OPS: Mapping[str, Op] = {
    "recurrent_gla_step": step.step,
    **{op: lowered(op, step.step) for op in _LOWERED},
    "online_softmax": online_softmax.online_softmax,
    "online_softmax_bwd": lowered("online_softmax_bwd", online_softmax.online_softmax),
    "softmax_attention": softmax_attention.softmax_attention,
    "softmax_attention_bwd": lowered("softmax_attention_bwd", softmax_attention.softmax_attention),
}
"""The ops that are computed in PyTorch on a CPU."""

_COUNTS = {
    "recurrent_gla_step": cost.count_step,
    "online_softmax": cost.count_softmax,
    "softmax_attention": cost.count_attention,
}


def predicted_seconds(call: OpCall, c: Constants) -> float:
    """Returns the predicted seconds of a call from the constants `c` of its op on a CPU; see cost.py."""
    return cost.seconds(_COUNTS[call.op], call, c)
