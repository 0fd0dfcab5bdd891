"""Modules that are imported when they are first used: those with kernels import Triton, which may not be installed."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from types import ModuleType


def modules_of(package: str) -> Callable[[str], ModuleType]:
    """The `__getattr__` of a package whose modules are its attributes without having been imported.

    Example:
        >>> __getattr__ = modules_of(__name__)  # in the package's __init__.py
    """

    def imported(name: str) -> ModuleType:
        if name.startswith("_") or importlib.util.find_spec(f"{package}.{name}") is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return importlib.import_module(f"{package}.{name}")

    return imported
