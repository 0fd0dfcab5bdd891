"""Heads and sequences in blocks that stay in the cache while they are worked on."""

from __future__ import annotations

from collections.abc import Iterator


def blocks(B: int, H: int, numbers: int, most: int) -> Iterator[tuple[slice, slice]]:
    """Ranges of a batch and of its heads: as few as have about `most` numbers each, all about as large.

    Args:
        B: size of the batch. H: number of heads. numbers: of one head of one sequence.
    """
    rows, heads = block(B, H, numbers, most)
    for b in range(0, B, rows):
        for h in range(0, H, heads):
            yield slice(b, b + rows), slice(h, h + heads)


def block(B: int, H: int, numbers: int, most: int) -> tuple[int, int]:
    """Rows and heads of a block, of which the last ones may have fewer."""
    sequence = H * numbers
    heads = _even(H, sequence / most)
    return (1 if heads < H else _even(B, B * sequence / most)), heads


def _even(n: int, parts: float) -> int:
    """The size of the parts of n where it is cut into about so many."""
    return max(1, -(-n // max(1, min(n, round(parts)))))
