"""Arithmetic of blocks."""

from __future__ import annotations


def power_of_two(n: int, least: int = 1) -> int:
    """The least power of two that is not below n, nor below `least`: the sizes that a block may have."""
    return max(least, 1 << (n - 1).bit_length())
