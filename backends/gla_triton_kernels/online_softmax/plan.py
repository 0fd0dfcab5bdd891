"""Plans a softmax: chooses kernels and launch parameters. Imports no Triton.

one_pass.py, splits.py and backward.py run a plan, and cost.py predicts the time of the same plan. Launch parameters
were chosen by measurements on an H200.

R rows   N columns of a row   BR, BN rows and columns of a tile
"""

from __future__ import annotations

import enum
import math
from typing import NamedTuple

from gla_core.dispatch.tensors import ceil_div
from gla_triton_kernels.online_softmax.rows import Rows
from gla_triton_runtime.architecture import Gpu
from gla_triton_runtime.sizes import power_of_two

# ---- rows in one pass

MOST_ON_CHIP = 2**14
"""The maximum number of columns of a row that is held on chip. With more columns, one block fills a multiprocessor, and
its loads wait for its stores."""
MOST_UNALIGNED_ON_CHIP = 2**13
"""The same limit if rows are not aligned and columns are loaded one at a time."""


class Kernel(enum.Enum):
    """The kernels of one_pass.py, and of the gradient in one pass."""

    ON_CHIP = enum.auto()
    TWO_SWEEPS = enum.auto()
    TWO_SWEEPS_UNALIGNED = enum.auto()


class OnePass(NamedTuple):
    """A kernel, its tiles [BR, BN], its number of warps, and the maximum number of registers of a thread, or None."""

    kernel: Kernel
    BR: int
    BN: int
    warps: int
    registers: int | None = None


def plan_one_pass(rows: Rows) -> OnePass:
    """Returns a plan in which one block computes each row: it holds the row on chip if it fits, or reads it twice."""
    R, N, contiguous, vector = rows.R, rows.N, rows.contiguous, rows.vector
    BN = power_of_two(N)
    long = N > 2 * MOST_ON_CHIP
    # With few registers, several blocks share a multiprocessor: one reads its row while another writes.
    if vector == 1 and rows.packed and N > MOST_UNALIGNED_ON_CHIP:
        return OnePass(Kernel.TWO_SWEEPS_UNALIGNED, 1, *((16384, 16, 64) if long else (4096, 8)))
    if contiguous and N > MOST_ON_CHIP and vector == 1:
        return OnePass(Kernel.TWO_SWEEPS, 1, *((8192, 32, 32) if long else (4096, 16, 32)))
    if contiguous and N > MOST_ON_CHIP:
        return OnePass(Kernel.TWO_SWEEPS, 1, *((16384, 16, 64) if long else (8192, 16)))
    if contiguous and BN == 1024 and vector == 1:
        return OnePass(Kernel.ON_CHIP, 1, BN, 2)
    if contiguous:
        # A single warp merges its lanes without waiting for other warps, which is best with many rows and wide loads.
        alone = vector > 1 and 256 <= BN <= 1024 and R >= 2048
        BR = min(power_of_two(R), max(1, 2048 // BN))
        return OnePass(Kernel.ON_CHIP, BR, BN, 1 if alone else max(4, BN // 1024))
    if BN > 1024:
        return OnePass(Kernel.TWO_SWEEPS, min(power_of_two(R), 32), 256, 16)
    return OnePass(Kernel.ON_CHIP, min(power_of_two(R), 128, max(16, 8192 // BN)), BN, 8)


def plan_gradient_one_pass(rows: Rows) -> OnePass:
    """Returns a plan in which one block computes the gradient of each row.

    A tile is of two tensors, x and dy: each thread holds half as many columns as in the plan of the softmax.
    """
    kernel, BR, BN, warps, registers = plan_one_pass(rows)
    if kernel is Kernel.ON_CHIP:
        return OnePass(kernel, BR, BN, min(2 * warps, 32) if BN > 1024 else warps)
    return OnePass(kernel, BR, BN // 2, warps, registers and 64)


# ---- rows in splits

PROGRAMS = 16
"""The number of programs of the first kernel per multiprocessor: two waves of eight programs."""


class Sweep(NamedTuple):
    """Launch parameters of a kernel that sweeps over rows.

    Attributes:
        BR: rows of a tile.
        BN: columns of a tile.
        warps: warps of a program.
        tiles: tiles of a program.
        programs: number of programs for BR rows.
    """

    BR: int
    BN: int
    warps: int
    tiles: int
    programs: int


class Splits(NamedTuple):
    """The launch parameters of the two kernels of splits.py: the first sums splits of rows, and the second writes y."""

    sums: Sweep
    writes: Sweep


def plan_splits(rows: Rows, gpu: Gpu) -> Splits:
    """Returns a plan in which several blocks compute each row in parallel, enough blocks to fill the device."""
    BR, BN, warps = _tile_of_splits(rows, 4096)
    blocks = rows.D0 * rows.D1 * ceil_div(rows.R, BR)
    columns = max(blocks * rows.N // (PROGRAMS * gpu.multiprocessors), 4 * math.isqrt(rows.N))
    tiles = ceil_div(columns, BN)
    sums = Sweep(BR, BN, warps, tiles, ceil_div(rows.N, tiles * BN))
    BR, BN, warps = _tile_of_splits(rows, 8192)
    tiles = ceil_div(4 * sums.programs, BN)  # a program reads all sums of its rows: few bytes compared with its writes
    return Splits(sums, Sweep(BR, BN, warps, tiles, ceil_div(rows.N, tiles * BN)))


def _tile_of_splits(rows: Rows, most: int) -> tuple[int, int, int]:
    """Returns BR, BN and warps of a tile with at most `most` contiguous columns."""
    if not rows.contiguous:
        return min(power_of_two(rows.R), 32), min(power_of_two(rows.N), 256), 8
    BN = min(power_of_two(rows.N), most)
    return min(power_of_two(rows.R), max(1, 2048 // BN)), BN, 8 if BN > 2048 else 4
