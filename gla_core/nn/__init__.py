"""Layers built on the ops, for training and decoding."""

from gla_core.nn.gated_linear_attention import GatedLinearAttention
from gla_core.nn.hgrn2 import HGRN2
from gla_core.nn.mamba2 import Mamba2
from gla_core.nn.recurrence import GLAState
from gla_core.nn.retention import Retention
from gla_core.nn.simple_gated_linear_attention import SimpleGatedLinearAttention

__all__ = ["HGRN2", "GLAState", "GatedLinearAttention", "Mamba2", "Retention", "SimpleGatedLinearAttention"]
