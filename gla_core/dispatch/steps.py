"""Marks the functions of the core on the way of a call, which `gla explain --path` prints."""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType
from typing import TypeVar

STEPS: set[CodeType] = set()
"""The code of every marked function."""

_Function = TypeVar("_Function", bound=Callable)


def step(function: _Function) -> _Function:
    """Marks a function as a step on the way of a call. The mark costs a call no time."""
    STEPS.add(function.__code__)
    return function
