"""Softmax along one dimension, rows in pieces: the kernels of gla_triton_kernels/online_softmax/pieces.py."""

from __future__ import annotations

from gla_triton_kernels.online_softmax.pieces import online_softmax

__all__ = ["online_softmax"]
