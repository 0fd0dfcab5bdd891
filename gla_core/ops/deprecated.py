"""Accepts arguments as the version before took them, with a DeprecationWarning: by an old name, or by position."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from torch.compiler import is_compiling


def renamed(function: str, old: str, new: str, by_old: Any, by_new: Any, wrapped: bool = False) -> Any:
    """Returns the value of an argument that a call passed by its old name.

    Args:
        wrapped: whether a decorator stands between the function and its caller, to whom the warning belongs.

    Raises:
        TypeError: the call passed it by its new name too.
    """
    if by_new is not None:
        raise TypeError(f"{function} got {new} and {old}, its name in version 0.1; pass {new} only")
    _warn(f"{old} of {function} is now called {new}; the old name goes after version 0.2", 4 + wrapped)
    return by_old


def backend_by_position(function: str, rest: Sequence[str | None], backend: str | None) -> str | None:
    """Returns the backend that a call passed by position, as the last of its positional arguments.

    Args:
        rest: the positional arguments after those that the function names.
        backend: the backend that the call passed by name.

    Raises:
        TypeError: `rest` has more than one argument, or the call passed the backend by name too.
    """
    if len(rest) > 1 or backend is not None:
        what = "too many positional arguments" if len(rest) > 1 else "backend by position and by name"
        raise TypeError(f"{function} got {what}; pass arguments after the first ones by name")
    _warn(f"pass backend to {function} by name; version 0.3 does not take it by position")
    return rest[0]


def _warn(text: str, stacklevel: int = 4) -> None:
    if not is_compiling():  # a compiler cannot trace a warning
        warnings.warn(text, DeprecationWarning, stacklevel=stacklevel)
