"""The reference's functions, for tests that wrap them in backends of their own."""

import inspect
from collections.abc import Callable
from typing import Any

import torch

from gla_core.dispatch import registry
from gla_core.dispatch.backend import OpCall, Prepared


def function(op: str) -> Callable[..., Any]:
    """Returns the reference's function of an op, which takes arguments of the contract; also if the core lowers it."""
    implementation: Any = registry.get("reference").ops[op]
    return _with_names(op, implementation) if isinstance(implementation, Prepared) else implementation


def _with_names(op: str, implementation: Any) -> Callable[..., Any]:
    """Returns the function of an op that the core lowers, with the names of its arguments in its signature."""
    call = OpCall(op=op, device=torch.device("cpu"), dtype=torch.float32, dims={})  # all calls have the same function
    names, run = implementation.takes, implementation.prepare(call)

    def function(*args: Any, **others: Any) -> Any:
        return run(*args, *(others[name] for name in names[len(args) :]))

    parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names]
    function.__signature__ = inspect.Signature(parameters)
    return function
