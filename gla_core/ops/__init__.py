"""The public ops, one file each."""

from gla_core.ops._flops import register_with_counter
from gla_core.ops.chunk_gla import BACKWARD, FORWARD, chunk_gla
from gla_core.ops.linear_attention import linear_attention
from gla_core.ops.online_softmax import SOFTMAX, online_softmax
from gla_core.ops.recurrent_gla_step import STEP, recurrent_gla_step
from gla_core.ops.softmax_attention import ATTENTION, merge_attention, softmax_attention

__all__ = [
    "ABSTRACT_OPS",
    "chunk_gla",
    "linear_attention",
    "merge_attention",
    "online_softmax",
    "recurrent_gla_step",
    "softmax_attention",
]

register_with_counter()

ABSTRACT_OPS = {op.name: op for op in (FORWARD, BACKWARD, STEP, SOFTMAX, ATTENTION)}
