"""A row of a table of workloads: a name, tags, and sizes."""

from __future__ import annotations

import itertools
import random
from string import ascii_letters
from typing import NamedTuple

import torch

IN_BFLOAT16 = {"dtype": torch.bfloat16, "gate_dtype": torch.float32}
"""The dtypes of models: inputs are bfloat16, gates stay float32."""


class Row(NamedTuple):
    """A workload without its op: see `gla_core.workloads.named.Workload`."""

    name: str
    tags: frozenset[str]
    sizes: dict


def row(name: str, tags: str, dims: str = "", **sizes: object) -> Row:
    """Returns a row with tags separated by blanks; `dims` holds those sizes that have a letter, as in `sizes_of`."""
    return Row(name, frozenset(tags.split()), {**sizes_of(dims), **sizes})


def sizes_of(dims: str) -> dict[str, int]:
    """Returns the sizes that have a letter, as in "B2 T17 H2 K16 V16"."""
    return {dim.rstrip("0123456789"): int(dim.lstrip(ascii_letters)) for dim in dims.split()}


def cut(tokens: int, sequences: int) -> tuple[int, ...]:
    """Cuts a row of tokens into sequences at random places, and returns their lengths."""
    cuts = [0, *sorted(random.Random(0).sample(range(1, tokens), sequences - 1)), tokens]
    return tuple(end - start for start, end in itertools.pairwise(cuts))
