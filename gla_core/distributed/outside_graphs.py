"""A decorator that excludes functions from torch.compile, which would trace them into many small graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

Function = TypeVar("Function", bound=Callable[..., Any])


def outside_graphs(function: Function) -> Function:
    """Makes a function run eagerly when compiled code calls it: a graph ends before it and another begins after it."""
    return cast("Function", torch.compiler.disable(function))
