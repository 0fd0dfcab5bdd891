"""The algorithm of this backend in PyTorch, for a CPU and for readers; one file per op."""

from gla_parallel_scan.pytorch import chunk_gla, cost, online_softmax, recurrent_gla_step, softmax_attention

__all__ = ["chunk_gla", "cost", "online_softmax", "recurrent_gla_step", "softmax_attention"]
