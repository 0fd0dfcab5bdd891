"""The errors of selection, and the errors of plugins. Bad arguments raise plain ValueError and TypeError."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")


class BackendError(RuntimeError):
    """A backend does not honour the contract, for example in a signature, its name, its ops or its results."""


class UnknownBackendError(LookupError):
    """A request names a backend that is not installed."""


class UnknownOpError(LookupError):
    """A request or a call names an abstract op that does not exist."""


class NoBackendError(RuntimeError):
    """No backend that the request allows can run the call; the message holds every refusal."""


def attempt(function: Callable[_P, _R], *args: _P.args, **kwargs: _P.kwargs) -> tuple[_R | None, BaseException | None]:
    """Calls code of a plugin, whose faults must not take the rest down.

    Returns:
        What the function returns, and None; or None, and the exception that it raised. A plugin may raise what is no
        `Exception`: pytest.skip and sys.exit do, and so does a panic in Rust.

    Raises:
        KeyboardInterrupt, GeneratorExit: these are for the program, and not faults of a plugin.
    """
    try:
        return function(*args, **kwargs), None
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:
        return None, error


def said(error: BaseException) -> str:
    """Returns the type and the message of an exception, for a sentence."""
    return f"{type(error).__name__}: {error}"


def check_known(what: str, name: str, known: Iterable[str], kind: type[Exception] = ValueError) -> None:
    """Raises an error of a kind for a name that is not among the known ones; it says which one is near, and all."""
    if name not in known:
        raise kind(f"unknown {what} {name!r}{nearest(name, known)} (there are {', '.join(known)})")


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns "; did you mean 'x'?" with the known name that is spelled most like `name`, or '' if none is close."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""
