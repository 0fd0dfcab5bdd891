"""Kernels for Hopper (SM90), with specialised warps."""

from __future__ import annotations

import itertools
from typing import NamedTuple

from gla_core.dispatch.tensors import ceil_div

SHARES_START = 8
"""The time that a division into shares adds, in chunks."""


class Division(NamedTuple):
    """A division of the jobs of a kernel among blocks; see shares.py.

    Attributes:
        warpgroups: state warpgroups of a block, 1 or 2.
        programs: number of blocks that share all jobs evenly; None stands for a block for each job.
    """

    warpgroups: int
    programs: int | None


def warpgroup_columns(K: int) -> int:
    """Returns the most columns of v of a state warpgroup with K keys. Its registers hold K rows of them."""
    return 64 if K <= 256 else 32 if K <= 512 else 16


def jobs_of_heads(heads: int, K: int, V: int, in_pairs: bool) -> dict[int, int]:
    """Returns the number of jobs of forward_head.py, by the number of state warpgroups of a block.

    Args:
        heads: number of heads of o of all sequences.
        in_pairs: whether a block can have two heads, one for each warpgroup, if a warpgroup can have all values.
    """
    W = warpgroup_columns(K)
    if V > W:
        return {groups: heads * ceil_div(V, groups * W) for groups in (1, 2)}
    return {1: heads, 2: heads // 2} if in_pairs else {1: heads}


def second_warpgroup(K: int) -> float:
    """Returns the time of a block of forward_head.py with two state warpgroups, as a multiple of the time with one."""
    return 1.5 if K <= 128 else 1.4


def fastest_division(
    jobs: dict[int, int], second: float, chunks: int, multiprocessors: int, may_share: bool
) -> Division:
    """Returns the fastest division of jobs among blocks.

    Args:
        jobs: the number of jobs, by the number of warpgroups of a block.
        second: the time of a block with two warpgroups, as a multiple of the time with one.
        chunks: chunks of a job.
        may_share: whether all jobs have the same number of chunks, and begin with known states.
    """

    def chunk_times(x: Division) -> float:
        waves = jobs[x.warpgroups] / multiprocessors
        time = ceil_div(jobs[x.warpgroups], multiprocessors) * chunks
        if x.programs is not None:
            time = max(1.0, waves) * chunks + SHARES_START
        return time * (second if x.warpgroups == 2 else 1.0)

    programs = (None, multiprocessors) if may_share else (None,)
    return min(itertools.starmap(Division, itertools.product(sorted(jobs, reverse=True), programs)), key=chunk_times)
