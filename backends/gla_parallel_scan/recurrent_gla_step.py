"""One token of gated linear attention: the kernel of gla_triton_kernels/recurrent_gla_step/step.py."""

from __future__ import annotations

from gla_triton_kernels.recurrent_gla_step.step import recurrent_gla_step

__all__ = ["recurrent_gla_step"]
