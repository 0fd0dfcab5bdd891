"""Plans of a softmax: kernels and launch parameters are decided here alone, without Triton.

The launchers run a plan (one_pass.py, splits.py), and the cost models price the same one (cost.py). Launch parameters
were measured on an H200.

R rows of N columns   BR, BN rows and columns of a tile
"""

from __future__ import annotations

import enum
import math
from typing import NamedTuple

from gla_triton_kernels.online_softmax.rows import Rows
from gla_triton_kernels.runtime.architecture import Gpu
from gla_triton_kernels.runtime.sizes import power_of_two

# ---- rows in one pass

MOST_ON_CHIP = 2**14
"""Columns of a row that are held on chip: with more, one block fills a multiprocessor, and loads wait for stores."""
MOST_UNALIGNED_ON_CHIP = 2**13
"""The same of rows that are not aligned, whose columns are loaded one at a time."""


class Kernel(enum.Enum):
    """The kernels of one_pass.py."""

    ON_CHIP = enum.auto()
    TWO_SWEEPS = enum.auto()
    TWO_SWEEPS_UNALIGNED = enum.auto()


class OnePass(NamedTuple):
    """A kernel, its tiles [BR, BN], its warps, and how many registers a thread may have, if not as many as it likes."""

    kernel: Kernel
    BR: int
    BN: int
    warps: int
    registers: int | None = None


def plan_one_pass(rows: Rows) -> OnePass:
    """Each row by one block: held on chip if it fits, read twice if not."""
    R, N, contiguous, vector = rows.R, rows.N, rows.contiguous, rows.vector
    BN = power_of_two(N)
    long = N > 2 * MOST_ON_CHIP
    # Few registers let a multiprocessor be filled: while one row is read, another is written.
    if vector == 1 and rows.packed and N > MOST_UNALIGNED_ON_CHIP:
        return OnePass(Kernel.TWO_SWEEPS_UNALIGNED, 1, *((16384, 16, 64) if long else (4096, 8)))
    if contiguous and N > MOST_ON_CHIP and vector == 1:
        return OnePass(Kernel.TWO_SWEEPS, 1, *((8192, 32, 32) if long else (4096, 16, 32)))
    if contiguous and N > MOST_ON_CHIP:
        return OnePass(Kernel.TWO_SWEEPS, 1, *((16384, 16, 64) if long else (8192, 16)))
    if contiguous and BN == 1024 and vector == 1:
        return OnePass(Kernel.ON_CHIP, 1, BN, 2)
    if contiguous:
        # One warp merges its lanes without waiting for others: best where there are many, and each loads much at once.
        alone = vector > 1 and 256 <= BN <= 1024 and R >= 2048
        BR = min(power_of_two(R), max(1, 2048 // BN))
        return OnePass(Kernel.ON_CHIP, BR, BN, 1 if alone else max(4, BN // 1024))
    if BN > 1024:
        return OnePass(Kernel.TWO_SWEEPS, min(power_of_two(R), 32), 256, 16)
    return OnePass(Kernel.ON_CHIP, min(power_of_two(R), 128, max(16, 8192 // BN)), BN, 8)


# ---- rows in splits

PROGRAMS = 16
"""Programs of the first kernel per multiprocessor: two waves of eight."""


class Sweep(NamedTuple):
    """The way of a kernel over rows: tiles [BR, BN], warps of a program, tiles of a program, programs of BR rows."""

    BR: int
    BN: int
    warps: int
    tiles: int
    programs: int


class Splits(NamedTuple):
    """The two kernels of splits.py. A program of the first one sums a split of its rows; the second one writes."""

    sums: Sweep
    writes: Sweep


def plan_splits(rows: Rows, gpu: Gpu) -> Splits:
    """Each row by as many blocks at once as the device has room for."""
    BR, BN, warps = _tile_of_splits(rows, 4096)
    blocks = rows.D0 * rows.D1 * -(-rows.R // BR)
    columns = max(blocks * rows.N // (PROGRAMS * gpu.multiprocessors), 4 * math.isqrt(rows.N))
    tiles = -(-columns // BN)
    sums = Sweep(BR, BN, warps, tiles, -(-rows.N // (tiles * BN)))
    BR, BN, warps = _tile_of_splits(rows, 8192)
    tiles = -(-4 * sums.programs // BN)  # a program reads all sums of its rows: little beside what it writes
    return Splits(sums, Sweep(BR, BN, warps, tiles, -(-rows.N // (tiles * BN))))


def _tile_of_splits(rows: Rows, most: int) -> tuple[int, int, int]:
    """BR, BN and warps, with up to `most` neighbours in memory a tile."""
    if not rows.contiguous:
        return min(power_of_two(rows.R), 32), min(power_of_two(rows.N), 256), 8
    BN = min(power_of_two(rows.N), most)
    return min(power_of_two(rows.R), max(1, 2048 // BN)), BN, 8 if BN > 2048 else 4
