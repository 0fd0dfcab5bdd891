"""The environment variables, read at first use and again on `reload_environment()`.

GLA_BACKEND         a request (see request.py), weaker than `use_backend` and `backend=`
GLA_BLOCK_PLUGINS   comma-separated entry-point names of plugins that are not to be imported
GLA_CHECK           1 adds checks that read tensor values (and so wait for the device)
"""

from __future__ import annotations

import functools
import os
import warnings
from dataclasses import dataclass

from gla_core.dispatch.errors import nearest

VARIABLES = ("GLA_BACKEND", "GLA_BLOCK_PLUGINS", "GLA_CHECK")
_FALSE = ("", "0", "false", "no", "off")
_TRUE = ("1", "true", "yes", "on")


@dataclass(frozen=True, slots=True)
class Environment:
    backend: str
    blocked_plugins: frozenset[str]
    check_values: bool


@functools.cache
def environment() -> Environment:
    """The settings in force. Raises ValueError for a GLA_CHECK that is neither true nor false."""
    _warn_of_unknown()
    check = os.environ.get("GLA_CHECK", "").strip().lower()
    if check not in _FALSE + _TRUE:
        raise ValueError(f"GLA_CHECK is {check!r}; expected 0 or 1")
    blocked = (name.strip() for name in os.environ.get("GLA_BLOCK_PLUGINS", "").split(","))
    return Environment(
        backend=os.environ.get("GLA_BACKEND", "").strip(),
        blocked_plugins=frozenset(filter(None, blocked)),
        check_values=check in _TRUE,
    )


def _warn_of_unknown() -> None:
    for name in sorted(os.environ):
        if name.startswith("GLA_") and name not in VARIABLES:
            warnings.warn(f"unknown environment variable {name}{nearest(name, VARIABLES)}", stacklevel=2)
