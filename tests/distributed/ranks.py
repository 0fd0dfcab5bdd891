"""Code that the checks of several processes share; `start.py` starts the processes, the ranks of a group."""

import dataclasses
import itertools

import torch


@dataclasses.dataclass(frozen=True)
class Ranks:
    """The rank of a process, the number of ranks, and the device of its tensors."""

    rank: int
    number: int
    device: torch.device


def rows_of_rank(y, rank, lengths, layout):
    """Returns the rows of y [B, T, ...] that a rank holds, given the number of tokens of each rank."""
    halves = [n // 2 for n in lengths]
    pieces = [*halves, *reversed(halves)] if layout == "zigzag" else lengths
    bounds = list(itertools.pairwise(itertools.accumulate(pieces, initial=0)))
    places = (rank, len(pieces) - 1 - rank) if layout == "zigzag" else (rank,)
    return torch.cat([y[:, slice(*bounds[place])] for place in places], dim=1)
