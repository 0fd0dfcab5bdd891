"""Prepares calls: compiles their kernels before any result is written, and replays their launches on later calls."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gla_core.dispatch.backend import OpCall
from gla_triton_runtime.architecture import interpreted
from gla_triton_runtime.launch import Launch, compile_launches, on_device, start
from gla_triton_runtime.replay import RecordedCall, check_floats, record, replay


class Launches:
    """The launches of the calls of one signature on a device.

    Example:
        >>> if unrecorded := launched.replay(tensors, scale):
        ...     unrecorded.start(describe(tensors, scale))
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.recorded: RecordedCall | None = None

    def replay(self, tensors: Sequence[Tensor | None], *floats: float) -> UnrecordedCall | None:
        """Makes the recorded launches on the tensors of a call, which include the results, and with its floats.

        Returns:
            None if the launches were made; otherwise the call, whose launches have to be described and started.
        """
        if self.recorded is not None and replay(self.recorded, tensors, floats):
            return None
        return UnrecordedCall(self, tensors, floats)


class UnrecordedCall(NamedTuple):
    """A call of `Launches` whose launches were not replayed."""

    launched: Launches
    tensors: Sequence[Tensor | None]
    floats: tuple[float, ...]

    def start(self, launches: list[Launch]) -> None:
        """Makes the launches of the call and records them.

        If a tensor has no values, the kernels are compiled and no launch is made.

        Raises:
            ValueError: a launch takes some floats, but not as many as the call has.
        """
        check_floats(launches, self.floats)
        with on_device(self.launched.device):
            if any(x is not None and x.is_meta for x in self.tensors):
                compile_launches(launches)
                return
            start(launches)
            self.launched.recorded = record(self.tensors, launches)


@functools.lru_cache(4096)
def launches_for(device: torch.device, *signature: Hashable) -> Launches:
    """Returns the launches of calls of a signature, for code whose calls are not prepared."""
    return Launches(device)


def rehearsed(run: FunctionType, call: OpCall) -> Callable[..., Any]:
    """Compiles the kernels of `run` by calling it on tensors without values, and returns `run`.

    Args:
        run: a plain function that takes arguments of the op by name, and makes its launches through `Launches`.
        call: the call that is prepared.

    Raises:
        LaunchError: a kernel does not compile for this device, or does not fit it.
    """
    if not interpreted() and call.device.type == "cuda":
        names = run.__code__.co_varnames[: run.__code__.co_argcount]  # inspect.signature takes 50 us
        run(**{name: _without_values(name, call) for name in names})
    return run


def _without_values(name: str, call: OpCall) -> Any:
    """Returns an argument of a call: a tensor without values, a scalar, or None."""
    layout = call.layouts.get(name)
    if layout is not None:
        return torch.empty_strided(layout.shape, layout.strides, dtype=layout.dtype, device="meta")
    return 1.0 if name in ("scale", "norm_eps", "dt_min", "dt_max") else call.scalars.get(name)
