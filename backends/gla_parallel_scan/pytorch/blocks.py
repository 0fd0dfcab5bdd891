"""Divides heads and sequences into blocks that stay in the cache while they are computed."""

from __future__ import annotations

from collections.abc import Iterator

from gla_core.dispatch.tensors import ceil_div


def blocks(B: int, H: int, numbers: int, most: int) -> Iterator[tuple[slice, slice]]:
    """Yields the ranges of a batch and of its heads that form blocks of about `most` elements, of about equal size.

    Args:
        B: size of the batch.
        H: number of heads.
        numbers: number of elements of one head of one sequence.
        most: approximate maximum number of elements of a block.
    """
    rows, heads = block(B, H, numbers, most)
    for b in range(0, B, rows):
        for h in range(0, H, heads):
            yield slice(b, b + rows), slice(h, h + heads)


def block(B: int, H: int, numbers: int, most: int) -> tuple[int, int]:
    """Returns the number of rows and of heads of a block; the last blocks may have fewer."""
    sequence = H * numbers
    heads = _even(H, sequence / most)
    return (1 if heads < H else _even(B, B * sequence / most)), heads


def _even(n: int, parts: float) -> int:
    """Returns the size of a slice when n is cut into about `parts` slices."""
    return max(1, ceil_div(n, max(1, min(n, round(parts)))))
