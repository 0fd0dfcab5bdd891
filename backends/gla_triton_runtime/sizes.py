"""Computes the sizes of blocks."""

from __future__ import annotations


def power_of_two(n: int, least: int = 1) -> int:
    """Returns the smallest power of two that is at least n and at least `least`. Sizes of blocks are powers of two."""
    return max(least, 1 << (n - 1).bit_length())
