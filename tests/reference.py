"""The reference's functions, for tests that wrap them in backends of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gla_core.dispatch import registry
from gla_core.dispatch.backend import Prepared


def function(op: str) -> Callable[..., Any]:
    """Returns the reference's function of an op, which takes arguments of the contract; also if the core lowers it."""
    implementation: Any = registry.get("reference").ops[op]
    return implementation.prepare(None) if isinstance(implementation, Prepared) else implementation
