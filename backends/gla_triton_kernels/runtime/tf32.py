"""Rounds operands of matrix products to TF32, in which tensor cores multiply float32 if the user allows it."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def nearest_tf32(x):
    """Rounds x to the nearest number with 10 bits after the point. Tensor cores would truncate the other bits."""
    bits = (x.to(tl.int32, bitcast=True) + (1 << 12)) & -(1 << 13)
    return tl.where(x == x, bits.to(tl.float32, bitcast=True), x)
