"""Softmax along one dimension, rows in one pass: the kernels of gla_triton_kernels/online_softmax/one_pass.py."""

from __future__ import annotations

from gla_triton_kernels.online_softmax.one_pass import online_softmax

__all__ = ["online_softmax"]
