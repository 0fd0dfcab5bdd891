"""Operands of matrix products in TF32, as Hopper and Ampere multiply float32 where a user allows it."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def nearest_tf32(x):
    """Rounds to the nearest number of 10 bits after the point: the tensor cores would cut the others off."""
    bits = (x.to(tl.int32, bitcast=True) + (1 << 12)) & -(1 << 13)
    return tl.where(x == x, bits.to(tl.float32, bitcast=True), x)
