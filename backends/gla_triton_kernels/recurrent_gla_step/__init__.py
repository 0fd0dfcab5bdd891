"""One token of gated linear attention, for decoding."""

from gla_triton_kernels.runtime.lazy import modules_of

__getattr__ = modules_of(__name__)
