"""The errors of selection. Bad arguments raise plain ValueError and TypeError."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class BackendError(RuntimeError):
    """A backend does not honour the contract, for example in a signature, its name, its ops or its results."""


class UnknownBackendError(LookupError):
    """A request names a backend that is not installed."""


class UnknownOpError(LookupError):
    """A request or a call names an abstract op that does not exist."""


class NoBackendError(RuntimeError):
    """No backend that the request allows can run the call; the message holds every refusal."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns "; did you mean 'x'?" with the known name that is spelled most like `name`, or '' if none is close."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""
