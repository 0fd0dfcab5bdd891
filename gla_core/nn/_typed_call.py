"""A decorator that gives `__call__` the types of `forward`; nn.Module leaves them open."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

Forward = TypeVar("Forward", bound=Callable[..., Any])


def as_typed(forward: Forward) -> Callable[[Callable[..., Any]], Forward]:
    """Returns a decorator that gives a function the types of `forward`, overloads included."""
    return lambda function: cast("Forward", function)
