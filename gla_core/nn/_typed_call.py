"""nn.Module leaves the types of a call open; a `__call__` declared with this decorator has those of `forward`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

Forward = TypeVar("Forward", bound=Callable[..., Any])


def as_typed(forward: Forward) -> Callable[[Callable[..., Any]], Forward]:
    """Give a function the types of `forward`, overloads included."""
    return lambda function: cast("Forward", function)
