"""The folder that the package `kernels` loads as a kernel; see gla_core/compat/transformers/layers.py."""

from gla_core.compat.transformers import layers

__all__ = ["layers"]
