"""Softmax attention over blocks of keys, all by one program or in splits that are attended to at once."""

from gla_triton_kernels.runtime.lazy import modules_of

__getattr__ = modules_of(__name__)
