"""FLA itself, imported when first used. Benchmarks take FLA's own forward and backward from here."""

from __future__ import annotations

import functools
import importlib
from types import ModuleType
from typing import Any

from gla_core.dispatch.backend import LaunchError


@functools.cache
def fla(module: str) -> ModuleType:
    """The module `fla.<module>`. Raises LaunchError where FLA is not installed or does not import."""
    try:
        return importlib.import_module(f"fla.{module}")
    except ImportError as error:
        raise LaunchError(
            f"gla_fla could not import fla.{module} ({error}); pip install 'flash-linear-attention==0.6.0'"
        ) from error


def chunk_gla(*args: Any, **kwargs: Any) -> tuple:
    """FLA's `fla.ops.gla.chunk_gla`, differentiable by FLA's own autograd function, unchanged.

    Example:
        >>> o, _ = gla_fla.native.chunk_gla(q, k, v, g)
        >>> o.sum().backward()
    """
    return fla("ops.gla").chunk_gla(*args, **kwargs)


def fused_recurrent_gla(*args: Any, **kwargs: Any) -> tuple:
    """FLA's `fla.ops.gla.fused_recurrent_gla`, unchanged."""
    return fla("ops.gla").fused_recurrent_gla(*args, **kwargs)
