"""With which launch parameters a step is computed: decided here alone, without Triton, as an H200 found them best."""

from __future__ import annotations

from typing import NamedTuple

from gla_core.dispatch.backend import OpCall
from gla_triton_kernels.runtime.architecture import Gpu
from gla_triton_kernels.runtime.sizes import power_of_two

FULL = 3
"""Programs for each multiprocessor from which on each may have much to load."""


class Plan(NamedTuple):
    """A program holds a block [BK, BV] of a state, all of its keys; overlaps: it starts while its predecessor ends."""

    BK: int
    BV: int
    warps: int
    overlaps: bool


def plan(call: OpCall, gpu: Gpu) -> Plan:
    """Wide blocks where there are many states; else more and narrower ones, for all multiprocessors to have some.

    Where bits must not depend on how many there are, narrow ones: a warp sums over keys in an order of its own.
    """
    B, H, K, V = (call.dims[name] for name in ("B", "H", "K", "V"))
    itemsize = 4 if call.state_dtype is None else call.state_dtype.itemsize
    BK, columns = power_of_two(K), power_of_two(V)
    overlaps = gpu.architecture.overlaps_kernels
    wide = min(columns, (256 if BK <= 256 else 128) // itemsize)
    if call.batch_invariant is None and B * H * (columns // wide) >= FULL * gpu.multiprocessors:
        return Plan(BK, wide, 4 if BK <= 128 else 8, overlaps)
    narrow = min(columns, (128 if BK <= 64 else 64) // itemsize)
    return Plan(BK, narrow, 2 if BK <= 64 else 1 if BK <= 128 else 4, overlaps)
