"""Computes the sizes of blocks."""

from __future__ import annotations


def power_of_two(n: int, least: int = 1) -> int:
    """Returns the least power of two that is at least n and at least `least`: the size of a block is a power of two."""
    return max(least, 1 << (n - 1).bit_length())
