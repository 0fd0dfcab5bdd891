"""Layers built on the ops, for training and decoding."""

from gla_core.nn.delta_net import DeltaNet
from gla_core.nn.gated_delta_net import GatedDeltaNet
from gla_core.nn.gated_linear_attention import GatedLinearAttention
from gla_core.nn.hgrn2 import HGRN2
from gla_core.nn.kimi_delta_attention import KimiDeltaAttention
from gla_core.nn.mamba2 import Mamba2
from gla_core.nn.recurrence import GLAState
from gla_core.nn.retention import Retention
from gla_core.nn.simple_gated_linear_attention import SimpleGatedLinearAttention

__all__ = [
    "HGRN2",
    "DeltaNet",
    "GLAState",
    "GatedDeltaNet",
    "GatedLinearAttention",
    "KimiDeltaAttention",
    "Mamba2",
    "Retention",
    "SimpleGatedLinearAttention",
]
