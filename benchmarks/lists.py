"""Reads lists on the command lines of these scripts: values separated by commas."""

from __future__ import annotations

import argparse
from collections.abc import Sequence


def numbers(text: str) -> list[int]:
    """Returns the numbers in `text`."""
    return [int(number) for number in text.split(",")]


def names(text: str, known: Sequence[str] | None = None) -> list[str]:
    """Returns the names in `text`.

    Raises:
        argparse.ArgumentTypeError: a name is not one of the `known` ones, if these are given.
    """
    listed = text.split(",")
    if known is not None and (unknown := set(listed) - set(known)):
        raise argparse.ArgumentTypeError(f"unknown {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    return listed
