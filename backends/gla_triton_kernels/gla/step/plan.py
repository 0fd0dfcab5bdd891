"""Chooses the launch parameters of a step. Imports no Triton. The parameters were chosen by measurements on an H200."""

from __future__ import annotations

from typing import NamedTuple

from gla_core.dispatch.backend import OpCall
from gla_core.dispatch.tensors import ceil_div
from gla_triton_runtime.architecture import Gpu
from gla_triton_runtime.sizes import power_of_two

MIN_PROGRAMS_PER_SM = 3
"""With at least this number of programs per multiprocessor, blocks are wide."""
MIN_SSD_PROGRAMS_PER_SM = 8
"""The same for a step of Mamba-2: as many of its programs run on a multiprocessor at once."""


class Plan(NamedTuple):
    """Launch parameters of a step; a program holds a block [BK, BV] of a state, with all of its keys.

    Attributes:
        BK: number of keys K, rounded up.
        BV: number of values of a block.
        warps: number of warps of a program.
        overlaps: whether the kernel may start while its predecessor ends (programmatic dependent launch).
    """

    BK: int
    BV: int
    warps: int
    overlaps: bool


def plan(call: OpCall, gpu: Gpu) -> Plan:
    """Returns the launch parameters of a step.

    With many states, blocks are wide. With few states, blocks are narrow, so that there are enough blocks for all
    multiprocessors. In batch-invariant calls, blocks are always narrow, because the number of warps changes the order
    in which a program sums over keys.
    """
    B, Hv, V = (call.dims[name] for name in ("B", "Hv", "V"))
    wide = _wide(call, gpu)
    if (
        call.batch_invariant is None
        and B * Hv * (power_of_two(V) // wide.BV) >= MIN_PROGRAMS_PER_SM * gpu.multiprocessors
    ):
        return wide
    BK = wide.BK
    narrow = min(power_of_two(V), (128 if BK <= 64 else 64) // _itemsize(call))
    return Plan(BK, narrow, 2 if BK <= 64 else 1 if BK <= 128 else 4, wide.overlaps)


def plan_ssd(call: OpCall, gpu: Gpu) -> Plan:
    """Returns the launch parameters of a step of Mamba-2.

    A thread holds 32 numbers of a state. With few states, a program is one warp, so that there are enough programs for
    all multiprocessors.
    """
    B, Hv, K, V = (call.dims[name] for name in ("B", "Hv", "K", "V"))
    BK, BV = power_of_two(K), power_of_two(V)
    wide, narrow = (min(BV, max(32 * 32 * warps // BK, 1)) for warps in (4, 1))
    fills = B * Hv * ceil_div(V, wide) >= MIN_SSD_PROGRAMS_PER_SM * gpu.multiprocessors
    return Plan(BK, wide if fills else narrow, 4 if fills else 1, gpu.facts.overlaps_kernels)


def _wide(call: OpCall, gpu: Gpu) -> Plan:
    """Returns the launch parameters with wide blocks."""
    BK = power_of_two(call.dims["K"])
    wide = min(power_of_two(call.dims["V"]), (256 if BK <= 256 else 128) // _itemsize(call))
    return Plan(BK, wide, 4 if BK <= 128 else 8, gpu.facts.overlaps_kernels)


def _itemsize(call: OpCall) -> int:
    return 4 if call.state_dtype is None else call.state_dtype.itemsize
