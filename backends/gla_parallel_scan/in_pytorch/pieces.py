"""Work in pieces that stay in the cache."""

from __future__ import annotations

from collections.abc import Iterator


def pieces(B: int, H: int, numbers: int, most: int) -> Iterator[tuple[slice, slice]]:
    """Ranges of a batch and of its heads, each with about `most` numbers where one head of one sequence has `numbers`.

    Args:
        B: size of the batch. H: number of heads. numbers, most: sizes of a tensor.
    """
    heads = max(1, most // max(numbers, 1))
    rows = max(1, heads // max(H, 1))
    for b in range(0, B, rows):
        for h in range(0, H, heads):
            yield slice(b, b + rows), slice(h, h + heads)
