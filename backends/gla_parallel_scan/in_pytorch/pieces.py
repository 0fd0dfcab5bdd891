"""Work in pieces that stay in the cache."""

from __future__ import annotations

from collections.abc import Iterator


def pieces(B: int, H: int, numbers: int, most: int) -> Iterator[tuple[slice, slice]]:
    """Ranges of a batch and of its heads, all about as large, each with about `most` numbers at most.

    Args:
        B: size of the batch. H: number of heads. numbers: of one head of one sequence.
    """
    rows, heads = piece(B, H, numbers, most)
    for b in range(0, B, rows):
        for h in range(0, H, heads):
            yield slice(b, b + rows), slice(h, h + heads)


def piece(B: int, H: int, numbers: int, most: int) -> tuple[int, int]:
    """Rows and heads of the pieces, of which the last ones may have fewer."""
    heads = max(1, most // max(numbers, 1))
    rows = max(1, heads // max(H, 1))
    return _even(B, rows), _even(H, heads)


def _even(n: int, most: int) -> int:
    """The size of the parts of n where it is cut into the fewest that are no larger than `most`."""
    parts = max(1, -(-n // most))
    return max(1, -(-n // parts))
