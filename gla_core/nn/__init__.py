"""Layers over the ops, for training and decoding."""

from gla_core.nn.gated_linear_attention import GatedLinearAttention, GLAState

__all__ = ["GLAState", "GatedLinearAttention"]
