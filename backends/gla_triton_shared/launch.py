"""Launching a kernel so that what cannot be launched here is told apart from what is wrong."""

from __future__ import annotations

import functools
import math
from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton import knobs
from triton.compiler.errors import CompilationError
from triton.runtime.driver import driver
from triton.runtime.errors import OutOfResources, PTXASError

from gla_core.dispatch.backend import LaunchError


def launch(kernel: Any, grid: Sequence[int], *args: Any, **options: Any) -> Any:
    """Run `kernel[grid](*args, **options)` and return the compiled kernel.

    Raises:
        LaunchError: the kernel does not fit or does not compile on this device; nothing has been written.
    """
    try:
        return kernel[tuple(grid)](*args, **options)
    except (OutOfResources, CompilationError, PTXASError) as error:
        raise LaunchError(f"{kernel.fn.__name__} cannot be launched on this device: {error}") from error


@dataclass(frozen=True, slots=True)
class _Launch:
    kernel: Any  # a triton.compiler.CompiledKernel
    device: int
    grid: tuple[int, int, int]
    integers: tuple[int, ...]


_launches: dict[Hashable, _Launch] = {}
_MOST_LAUNCHES = 4096


def remember(
    key: Hashable, kernel: Any, grid: tuple[int, int, int], tensors: Sequence[Tensor | None], integers: tuple[int, ...]
) -> None:
    """Keep a launch for `launch_again`, which spares the host most of the time of a small call.

    Args:
        key: holds the op and all that Triton compiles for and all that decides the grid and the integers, but for the
            alignment of addresses: only launches with multiples of 16 are kept, and looked up.
        kernel: what `launch` returned; None where it was interpreted.
        tensors, integers: arguments of the kernel: first these tensors, then floats, then these integers.
    """
    if kernel is not None and _aligned([0 if x is None else x.data_ptr() for x in tensors]):
        if len(_launches) >= _MOST_LAUNCHES:
            _launches.clear()
        _launches[key] = _Launch(kernel, torch.cuda.current_device(), grid, integers)


def launch_again(key: Hashable, tensors: Sequence[Tensor | None], *floats: float) -> bool:
    """Launch what was remembered under `key` on these tensors.

    Returns:
        False, and nothing is launched, if nothing was remembered, an address is not aligned, or another device is the
        current one.
    """
    known = _launches.get(key)
    if known is None:
        return False
    active: Any = driver.active
    if known.device != active.get_current_device():
        return False
    addresses = [0 if x is None else x.data_ptr() for x in tensors]
    if not _aligned(addresses):
        return False
    kernel = known.kernel
    if _watched():
        kernel[known.grid](*addresses, *floats, *known.integers)
    else:  # the same without the hooks, which take Triton a third of the time even where there are none
        options = (active.get_current_stream(known.device), kernel.function, kernel.packed_metadata, None, None, None)
        kernel.run(*known.grid, *options, *addresses, *floats, *known.integers)
    return True


def _aligned(addresses: list[int]) -> bool:
    return math.gcd(16, *addresses) == 16


def _watched() -> bool:
    """Whether a profiler wants to hear of launches."""
    return bool(knobs.runtime.launch_enter_hook.calls or knobs.runtime.launch_exit_hook.calls)


_NOTHING = nullcontext()


def device_of(x: Tensor) -> AbstractContextManager:
    """As `torch.cuda.device_of(x)`, and quick where that is the current device already."""
    if not x.is_cuda or x.device.index == torch.cuda.current_device():
        return _NOTHING
    return torch.cuda.device(x.device)


def float32_precision() -> str:
    """The `input_precision` of `tl.dot` for float32 operands: TF32 only where the user's setting allows it."""
    return "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"


def power_of_two(n: int, least: int = 1) -> int:
    """The least power of two that is not below n, nor below `least`: the sizes that a block may have."""
    return max(least, 1 << (n - 1).bit_length())


@functools.cache
def capability(device: torch.device) -> tuple[int, int]:
    """Compute capability, or (0, 0) where the kernels are interpreted."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" and not knobs.runtime.interpret else (0, 0)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """How many the device has; 1 where the kernels are interpreted."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
