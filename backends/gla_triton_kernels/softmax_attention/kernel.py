"""Defines the kernels of softmax attention as values, and the plans that consist of them. Imports no Triton.

Tq, Tk queries and keys   K, V key and value width   BR rows of queries of a program   BT keys of a block
BK, BV key and value width, rounded up
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gla_core.dispatch.backend import OpCall, Reason
from gla_core.dispatch.tensors import ceil_div
from gla_triton_runtime.architecture import Gpu


@dataclass(frozen=True, eq=False)
class Kernel:
    """A kernel that computes attention, as a value.

    Attributes:
        name: the name of the kernel's file, or of the library that has it.
        load: imports the kernel, and returns the function that describes its launch; for a kernel of gradients, the
            function that prepares a call.
        refusal: takes a call and a GPU, and returns the reason why the kernel cannot compute the call, or None.
    """

    name: str
    load: Callable[[], Callable[..., Any]]
    refusal: Callable[[OpCall, Gpu], Reason | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The kernel of a call, with its launch parameters.

    Attributes:
        BR: number of rows of a program, or of each of its warpgroups.
        BT: number of keys of a block.
        BK: key width K, rounded up.
        BV: value width V, rounded up.
        warps: number of warps of a program, or of a warpgroup if warps are specialised.
        stages: number of pipeline stages: blocks of keys that are in shared memory at once.
        tma: whether TMA loads keys and values; otherwise the kernel loads them through pointers.
        exact: whether float32 is multiplied as float32; otherwise as TF32, which not every GPU has.
        registers: maximum number of registers of a thread, or None for no limit.
        split: number of keys of a split, a multiple of BT; None if one program attends to all keys.
    """

    kernel: Kernel
    BR: int
    BT: int
    BK: int
    BV: int
    warps: int
    stages: int = 2
    tma: bool = False
    exact: bool = False
    registers: int | None = None
    split: int | None = None

    def splits(self, Tk: int) -> int:
        """Returns the number of splits of Tk keys."""
        return 1 if self.split is None else ceil_div(Tk, self.split)


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientPlan:
    """The launch parameters of backward.py.

    One kernel holds keys and passes through rows of queries; another holds rows and passes through keys.

    Attributes:
        held: number of keys, or rows, that a program holds.
        passed: number of rows, or keys, of a block that it passes through.
        BK, BV, warps, stages, exact: as in `Plan`.
    """

    held: int
    passed: int
    BK: int
    BV: int
    warps: int
    stages: int
    exact: bool
