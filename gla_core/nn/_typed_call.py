"""A decorator for `__call__`: nn.Module leaves the types of a call open, and with it they are those of `forward`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

Forward = TypeVar("Forward", bound=Callable[..., Any])


def as_typed(forward: Forward) -> Callable[[Callable[..., Any]], Forward]:
    """Returns a decorator that gives a function the types of `forward`, overloads included."""
    return lambda function: cast("Forward", function)
