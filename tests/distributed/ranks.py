"""What the checks of processes, the ranks of a group, have in common; `start.py` starts them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Ranks:
    """Which of how many a process is, and where its tensors lie."""

    rank: int
    number: int
    device: torch.device


def rows_of_rank(y: Tensor, rank: int, lengths: Sequence[int], layout: str) -> Tensor:
    """The rows of y [B, T, ...] that a rank has, where ranks have so many."""
    halves = [n // 2 for n in lengths]
    pieces = [*halves, *reversed(halves)] if layout == "zigzag" else lengths
    bounds = list(itertools.pairwise(itertools.accumulate(pieces, initial=0)))
    places = (rank, len(pieces) - 1 - rank) if layout == "zigzag" else (rank,)
    return torch.cat([y[:, slice(*bounds[place])] for place in places], dim=1)
