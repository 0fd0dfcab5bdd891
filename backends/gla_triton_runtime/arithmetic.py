"""Holds arithmetic that kernels of several ops share."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def nearest_tf32(x):
    """Rounds x to the nearest TF32 number, with 10 bits after the point. Tensor cores would truncate the other bits.

    Tensor cores multiply float32 in TF32 if the user allows it.
    """
    bits = (x.to(tl.int32, bitcast=True) + (1 << 12)) & -(1 << 13)
    return tl.where(x == x, bits.to(tl.float32, bitcast=True), x)
