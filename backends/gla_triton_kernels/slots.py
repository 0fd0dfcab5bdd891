"""Functions for slots of a pool of states, for kernels of several ops.

P slots of the pool   PAD the slot that is never used
"""

# pyright: reportGeneralTypeIssues=false
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def is_slot(p, P, PAD):
    """Returns whether p is a slot of the pool that may be read and written."""
    return (p >= 0) & (p < P) & (p != PAD)


@triton.jit
def slot_or_none(p, P, PAD):
    """Returns p if it is a slot that may be read and written, else -1; int32."""
    return tl.where(is_slot(p, P, PAD), p, -1).to(tl.int32)
