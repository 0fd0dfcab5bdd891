"""FLA itself, imported when it is first used; benchmarks use FLA's own forward and backward from here."""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any, TypeVar

from gla_core.dispatch.backend import LaunchError

UNTUNED = "FLA_UNTUNED"
"""Environment variable. 1 makes each kernel run in its first configuration, untuned: for checks, not for timing."""

_F = TypeVar("_F", bound=Callable[..., Any])


@functools.cache
def _take_first_configurations() -> None:
    # FLA tunes for minutes for each width and dtype, and a check of values uses dozens of these.
    Autotuner = importlib.import_module("triton.runtime.autotuner").Autotuner
    make = Autotuner.__init__

    def with_first_configuration(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        self.configs = self.configs[:1]

    Autotuner.__init__ = with_first_configuration


@functools.cache
def fla(module: str) -> ModuleType:
    """Returns the module `fla.<module>`. Raises LaunchError if FLA is not installed or cannot be imported."""
    if os.environ.get(UNTUNED) == "1":
        _take_first_configurations()
    try:
        return importlib.import_module(f"fla.{module}")
    except ImportError as error:
        raise LaunchError(
            f"gla_fla could not import fla.{module} ({error}); pip install 'flash-linear-attention==0.6.0'"
        ) from error


def raising_launch_errors(function: _F) -> _F:
    """Wraps a function to raise errors of Triton's compiler as `LaunchError`, so that `auto` takes another backend."""

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            kinds = {kind.__name__ for kind in type(error).__mro__ if kind.__module__.startswith("triton")}
            if kinds.isdisjoint({"OutOfResources", "PTXASError", "CompilationError"}):
                raise
            raise LaunchError(f"a kernel of FLA cannot be launched: {type(error).__name__}: {error}") from error

    return wrapped  # pyright: ignore[reportReturnType]


def chunk_gla(*args: Any, **kwargs: Any) -> tuple:
    """Calls FLA's `fla.ops.gla.chunk_gla`, unchanged; FLA's own autograd function makes it differentiable.

    Example:
        >>> o, _ = gla_fla.native.chunk_gla(q, k, v, g)
        >>> o.sum().backward()
    """
    return fla("ops.gla").chunk_gla(*args, **kwargs)


def fused_recurrent_gla(*args: Any, **kwargs: Any) -> tuple:
    """Calls FLA's `fla.ops.gla.fused_recurrent_gla`, unchanged."""
    return fla("ops.gla").fused_recurrent_gla(*args, **kwargs)
