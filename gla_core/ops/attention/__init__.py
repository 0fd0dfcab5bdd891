"""Exports the ops of softmax attention, one file each, and their descriptions."""

from gla_core.ops.attention.online_softmax import BACKWARD as SOFTMAX_BACKWARD
from gla_core.ops.attention.online_softmax import SOFTMAX, online_softmax
from gla_core.ops.attention.softmax_attention import ATTENTION, SoftmaxAttention, merge_attention, softmax_attention
from gla_core.ops.attention.softmax_attention import BACKWARD as ATTENTION_BACKWARD

__all__ = ["SPECS", "SoftmaxAttention", "merge_attention", "online_softmax", "softmax_attention"]

SPECS = (SOFTMAX, SOFTMAX_BACKWARD, ATTENTION, ATTENTION_BACKWARD)
