"""Steps and softmaxes in PyTorch, for a CPU; one file per op."""

from gla_parallel_scan.pytorch import cost, online_softmax, recurrent_gla_step, softmax_attention

__all__ = ["cost", "online_softmax", "recurrent_gla_step", "softmax_attention"]
