"""Calls of prepared ops of our own backends, without gla_core's selection and its cache of plans."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from gla_core.dispatch.backend import OpCall, Prepared
from gla_core.ops import ABSTRACT_OPS

Prepare = Callable[[OpCall], Callable[..., Any]]


def described(op: str, *arguments: Any) -> OpCall:
    """Returns the description of a call of an abstract op; it takes the first of the op's arguments, in order."""
    spec = ABSTRACT_OPS[op]
    return spec.describe(*spec.complete(arguments, {}))


def call_prepared(op: str, prepare: Prepare, *arguments: Any) -> Any:
    """Prepares a call of an abstract op, and returns what it computes."""
    spec = ABSTRACT_OPS[op]
    return prepare(described(op, *arguments))(*spec.complete(arguments, {})[: len(spec.contract)])


def preparing(backend: str, op: str) -> Prepare:
    """Returns the function with which one of our own backends prepares an op."""
    (found,) = importlib.import_module(f"gla_{backend}").gla_register_backends()
    prepared = found.ops[op]
    assert isinstance(prepared, Prepared)
    assert prepared.takes == ABSTRACT_OPS[op].contract
    return prepared.prepare
