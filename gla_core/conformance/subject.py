"""The subject of a run, a backend on a device, from pytest's command line."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable

import pytest
import torch

from gla_core.dispatch import registry
from gla_core.dispatch.backend import Backend, Prepared


def subject(config: pytest.Config) -> tuple[Backend, str]:
    """Returns the backend and the device type. Raises pytest.UsageError for options that are missing or do not fit."""
    name = config.getoption("gla_backend", None)
    if not name:
        raise pytest.UsageError(f"pass --gla-backend NAME, the backend to judge: {', '.join(registry.installed())}")
    try:
        backend = registry.get(name, "--gla-backend: ")
    except LookupError as error:
        raise pytest.UsageError(error.args[0]) from None
    return backend, _device(backend, config.getoption("gla_device"))


def sources(backend: Backend) -> list[str]:
    """Returns the files of the code under test, a line for each file."""
    files: dict[str, list[str]] = {}
    for op, function in backend.ops.items():
        code = function.prepare if isinstance(function, Prepared) else function
        files.setdefault(_file(code), []).append(op)
    return [f"judges {', '.join(ops)} from {file}" for file, ops in files.items()]


def _file(function: Callable) -> str:
    function = inspect.unwrap(getattr(function, "func", function))  # the function of a functools.partial
    try:
        return inspect.getfile(function)
    except TypeError:  # compiled code, or a callable object
        module = sys.modules.get(getattr(function, "__module__", type(function).__module__) or "")
        return getattr(module, "__file__", None) or "no file"


def _device(backend: Backend, asked: str | None) -> str:
    can = backend.capabilities.devices
    device = asked or ("cpu" if can is None or "cpu" in can else "cuda")
    if device not in ("cpu", "cuda"):
        raise pytest.UsageError(f"the device is {device!r}; expected cpu or cuda")
    if can is not None and device not in can:
        raise pytest.UsageError(f"the device is {device}; backend {backend.name!r} runs on {', '.join(sorted(can))}")
    if device == "cuda" and not torch.cuda.is_available():
        raise pytest.UsageError(f"backend {backend.name!r} is to run on cuda; PyTorch sees no CUDA device here")
    return device
