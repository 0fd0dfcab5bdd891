"""Softmax along one dimension: each row in one pass, or in splits that are computed at once."""

from gla_triton_kernels.runtime.lazy import modules_of

__getattr__ = modules_of(__name__)
