"""Describes launches of kernels, compiles the kernels in parallel, and makes the launches in order."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime.cache import triton_key
from triton.runtime.driver import driver

from gla_core.dispatch.backend import LaunchError
from gla_triton_runtime.architecture import interpreted


@dataclass(eq=False, slots=True)
class Launch:
    """A launch of a kernel, which `start` makes: `kernel[grid](*arguments.values(), **options)`.

    Attributes:
        kernel: a function of triton.jit or gluon.jit.
        grid: number of programs along each of three axes.
        arguments: the value of each parameter of the kernel, by name: a tensor, a descriptor of a tensor, None, a
            number, or a compile-time constant. They are stored and passed in the order of the parameters, because
            Triton takes longer to bind arguments by name.
        options: options of the launch, such as num_warps.
        compiled: the triton.compiler.CompiledKernel, after the launch.

    Raises:
        TypeError: an argument is missing, or the kernel has no parameter with the name of an argument.
    """

    kernel: Any
    grid: tuple[int, int, int]
    arguments: dict[str, Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    compiled: Any = None

    def __post_init__(self) -> None:
        """Checks the names, and puts the arguments in order."""
        names = self.kernel.arg_names
        if list(self.arguments) == names:
            return
        missing = [name for name in names if name not in self.arguments]
        unknown = [name for name in self.arguments if name not in names]
        if missing or unknown:
            wrong_names = (("missing", missing), ("unknown", unknown))
            said = "; ".join(f"{what}: {', '.join(wrong)}" for what, wrong in wrong_names if wrong)
            raise TypeError(f"arguments of {self.kernel.fn.__name__} do not match its parameters ({said})")
        self.arguments = {name: self.arguments[name] for name in names}


def strides_of(letter: str, x: Tensor | None) -> dict[str, int]:
    """Returns all strides of x [B, T, heads, width] except the last, as arguments of a kernel; 0 if x is None.

    Example:
        >>> strides_of("q", torch.empty(2, 5, 4, 8))
        {'stride_qb': 160, 'stride_qt': 32, 'stride_qh': 8}
    """
    b, t, h = (0, 0, 0) if x is None else x.stride()[:3]
    return {f"stride_{letter}b": b, f"stride_{letter}t": t, f"stride_{letter}h": h}


def overlapping(overlaps: bool) -> dict[str, bool]:
    """Returns the option that lets a kernel start while its predecessor ends; not all compilers accept its name."""
    return {"launch_pdl": True} if overlaps else {}


def start(launches: Sequence[Launch]) -> None:
    """Makes launches in order.

    Raises:
        LaunchError: a kernel does not fit or does not compile on this device. Earlier launches have been made.
    """
    for x in launches:
        with nullcontext() if interpreted() else failing(x.kernel.fn.__name__):
            x.compiled = x.kernel[x.grid](*x.arguments.values(), **x.options)


def compile_launches(launches: Sequence[Launch]) -> None:
    """Compiles the kernels of launches in parallel, and loads them on the device. The tensors need no values.

    Raises:
        LaunchError: a kernel does not fit or does not compile on this device.
    """
    with failing("Triton"):
        _prepare_compiler()
    if len(launches) > 1:
        _compile_side_by_side(launches)
    for x in launches:
        with failing(x.kernel.fn.__name__):
            compiled = x.kernel.warmup(*x.arguments.values(), grid=x.grid, **x.options)
            _ = compiled.run  # loads it, and raises if it needs more shared memory than there is


@contextlib.contextmanager
def failing(name: str) -> Iterator[None]:
    """Turns an error that Triton reports before a kernel runs into a LaunchError that names the kernel."""
    try:
        yield
    except Exception as error:
        if _is_of_the_device(error):
            raise
        raise LaunchError(f"{name} cannot be launched on this device: {type(error).__name__}: {error}") from error


def _is_of_the_device(error: Exception) -> bool:
    """Returns whether the device and not Triton reports this error. An earlier kernel may have caused it."""
    return isinstance(error, torch.AcceleratorError | torch.OutOfMemoryError) or str(error).startswith("Triton Error [")


@functools.cache
def _prepare_compiler() -> None:
    """Makes Triton hash its library while a C compiler builds its driver. Each takes tenths of a second, once."""
    with ThreadPoolExecutor(1) as thread:
        thread.submit(triton_key)
        _ = driver.active


def _compile_side_by_side(launches: Sequence[Launch]) -> None:
    """Makes Triton compile kernels in parallel, each in a thread.

    Errors are ignored here, because Triton 3.7 stays in this mode after an error. `compile_launches` raises them later.
    """
    with ThreadPoolExecutor(len(launches)) as threads, triton.AsyncCompileMode(threads, ignore_errors=True):
        for x in launches:
            with contextlib.suppress(Exception):
                x.kernel.warmup(*x.arguments.values(), grid=x.grid, **x.options)


current_device = torch.accelerator.current_device_index  # takes a third of the time of torch.cuda.current_device
_NOTHING = nullcontext()


def on_device(device: torch.device) -> AbstractContextManager:
    """Returns `torch.cuda.device(device)`, or a context that does nothing if `device` is the current device already."""
    if device.type != "cuda" or device.index == current_device():
        return _NOTHING
    return torch.cuda.device(device)
