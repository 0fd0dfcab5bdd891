"""Prepares calls: compiles their kernels before any result is written, and replays their launches on later calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from gla_core.dispatch.backend import OpCall
from gla_triton_runtime.architecture import interpreted
from gla_triton_runtime.launch import Launch, compile_launches, on_device, start
from gla_triton_runtime.replay import RecordedCall, record, replay


class Launches:
    """The launches of the calls of one signature.

    Args:
        device: the device of the calls.
        describe: takes the tensors and the floats of a call, and returns its launches.
    """

    def __init__(self, device: torch.device, describe: Callable[..., list[Launch]]) -> None:
        self._device, self._describe = device, describe
        self._recorded: RecordedCall | None = None

    def start(self, tensors: Sequence[Tensor | None], *floats: float) -> None:
        """Makes the launches of a call on its tensors, which include the results.

        If a tensor has no values, the kernels are compiled and no launch is made.
        """
        if self._recorded is not None and replay(self._recorded, tensors, floats):
            return
        with on_device(self._device):
            launches = self._describe(tensors, *floats)
            if any(x is not None and x.is_meta for x in tensors):
                compile_launches(launches)
                return
            start(launches)
            self._recorded = record(tensors, launches)


def rehearsed(run: FunctionType, call: OpCall) -> Callable[..., Any]:
    """Compiles the kernels of `run` by calling it on tensors without values, and returns `run`.

    Args:
        run: a plain function that takes arguments of the op by name, and makes its launches through `Launches.start`.
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
    return 1.0 if name in ("scale", "norm_eps") else call.scalars.get(name)
