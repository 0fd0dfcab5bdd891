"""What compiled code leaves alone: torch.compile would trace the functions of this package into many small graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

Function = TypeVar("Function", bound=Callable[..., Any])


def outside_graphs(function: Function) -> Function:
    """Have a function run as it is where compiled code calls it: the graph ends before it, and the next begins."""
    return cast("Function", torch.compiler.disable(function))
