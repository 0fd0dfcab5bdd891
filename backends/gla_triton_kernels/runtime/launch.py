"""Launching a kernel: what cannot be launched is told apart from what is wrong."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources, PTXASError

from gla_core.dispatch.backend import LaunchError


@dataclass(frozen=True, slots=True)
class Launch:
    """A launch that has been made: of a compiled kernel, with these arguments in this order.

    Attributes:
        kernel: a triton.compiler.CompiledKernel; None where it was interpreted.
        tensors: tensors, None, and descriptors of tensors.
        integers: among them constants of the compiler.
    """

    kernel: Any
    grid: tuple[int, int, int]
    tensors: Sequence[Any]
    floats: tuple[float, ...]
    integers: tuple[Any, ...]


def launch(
    kernel: Any,
    grid: tuple[int, int, int],
    tensors: Sequence[Any],
    floats: tuple[float, ...],
    integers: tuple[Any, ...],
    **options: Any,
) -> Launch:
    """Run `kernel[grid](*tensors, *floats, *integers, **options)`; the arguments are as in `Launch`.

    Raises:
        LaunchError: the kernel does not fit or does not compile on this device; nothing has been written.
    """
    try:
        compiled = kernel[grid](*tensors, *floats, *integers, **options)
    except (OutOfResources, CompilationError, PTXASError) as error:
        raise LaunchError(f"{kernel.fn.__name__} cannot be launched on this device: {error}") from error
    return Launch(compiled, grid, tensors, floats, integers)


current_device = torch.accelerator.current_device_index  # a third of the time of torch.cuda.current_device
_NOTHING = nullcontext()


def on_device_of(x: Tensor) -> AbstractContextManager:
    """As `torch.cuda.device_of(x)`, and quick where that is the current device already."""
    if not x.is_cuda or x.device.index == current_device():
        return _NOTHING
    return torch.cuda.device(x.device)
