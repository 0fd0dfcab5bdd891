"""The choice of launch parameters of a step. Imports no Triton; the parameters were measured on an H200."""

from __future__ import annotations

from typing import NamedTuple

from gla_core.dispatch.backend import OpCall
from gla_triton_kernels.runtime.architecture import Gpu
from gla_triton_kernels.runtime.sizes import power_of_two

FULL = 3
"""The fewest programs per multiprocessor for which blocks are wide."""


class Plan(NamedTuple):
    """Launch parameters of a step; a program holds a block [BK, BV] of a state, with all of its keys.

    Attributes:
        BK: number of keys K, rounded up.
        BV: number of values of a block.
        warps: number of warps of a program.
        overlaps: whether the kernel starts while its predecessor ends.
    """

    BK: int
    BV: int
    warps: int
    overlaps: bool


def plan(call: OpCall, gpu: Gpu) -> Plan:
    """Returns the launch parameters of a step.

    With many states, blocks are wide. With few states, blocks are narrow, so that there are enough for all
    multiprocessors. In calls that are batch invariant, blocks are always narrow, because the number of warps changes
    the order in which a program sums over keys.
    """
    B, Hv, K, V = (call.dims[name] for name in ("B", "Hv", "K", "V"))
    itemsize = 4 if call.state_dtype is None else call.state_dtype.itemsize
    BK, columns = power_of_two(K), power_of_two(V)
    overlaps = gpu.facts.overlaps_kernels
    wide = min(columns, (256 if BK <= 256 else 128) // itemsize)
    if call.batch_invariant is None and B * Hv * (columns // wide) >= FULL * gpu.multiprocessors:
        return Plan(BK, wide, 4 if BK <= 128 else 8, overlaps)
    narrow = min(columns, (128 if BK <= 64 else 64) // itemsize)
    return Plan(BK, narrow, 2 if BK <= 64 else 1 if BK <= 128 else 4, overlaps)
