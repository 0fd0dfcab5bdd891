"""Chooses the launch parameters of the kernels of the delta rule. Imports no Triton.

K, V key and value width   BK, BV keys and values of a block
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gla_core.dispatch.backend import OpCall
from gla_triton_runtime.architecture import Architecture, Gpu
from gla_triton_runtime.sizes import power_of_two

MOST_KEYS = 256
"""The most keys of a head whose state the kernels over sequences keep on chip."""


@dataclass(frozen=True, slots=True)
class PairParameters:
    """Launch parameters of the kernel for pairs of tokens.

    Attributes:
        BK: keys of a tile.
        warps: number of warps of a program.
        precision: precision of products: "bf16", or float32 split into bfloat16 parts, "bf16x3" or "bf16x6".
        sums: precision of sums of gates, a name of `sums` in gla/general/backward.py.
    """

    BK: int
    warps: int
    precision: str
    sums: str


@dataclass(frozen=True, slots=True)
class StateParameters:
    """Launch parameters of a kernel that carries states, or gradients of states, through sequences.

    Attributes:
        BK: number of keys K, rounded up.
        BV: number of values of a block.
        warps: number of warps of a program.
        stages: number of chunks that are loaded at once.
        precision, sums: as in `PairParameters`.
    """

    BK: int
    BV: int
    warps: int
    stages: int
    precision: str
    sums: str


def precision_of(call: OpCall, gpu: Gpu) -> str:
    """Returns the precision of the products of a call."""
    if gpu.architecture is Architecture.INTERPRETED:
        return "ieee"  # the interpreter does not split operands
    if call.dtype == torch.bfloat16:
        return "bf16"
    return "bf16x6" if call.dtype == torch.float32 and call.float32_matmul_precision == "highest" else "bf16x3"


def sums_of(precision: str) -> str:
    """Returns the precision of sums of gates in a call with products of this precision."""
    return {"ieee": "ieee", "bf16x6": "three parts"}.get(precision, "two parts")


def plan_pairs(call: OpCall, gpu: Gpu) -> PairParameters:
    """Returns the launch parameters of the kernel for pairs of tokens."""
    precision = precision_of(call, gpu)
    widest = 128 if precision == "bf16" else 64
    return PairParameters(min(widest, power_of_two(call.dims["K"], 16)), 4, precision, sums_of(precision))


def plan_states(call: OpCall, gpu: Gpu) -> StateParameters:
    """Returns the launch parameters of a kernel that carries states."""
    precision = precision_of(call, gpu)
    BK = power_of_two(call.dims["K"], 16)
    BV = min(64, power_of_two(call.dims["V"], 16))
    return StateParameters(BK, BV, 4, 2, precision, sums_of(precision))
