"""Prepares calls of online_softmax and its gradient, with one block per row or with rows in splits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gla_core.dispatch.backend import OpCall
from gla_triton_kernels.online_softmax import backward, one_pass, splits
from gla_triton_kernels.online_softmax.rows import needs_copy
from gla_triton_runtime.architecture import Gpu, gpu_of_call
from gla_triton_runtime.launch import Launch
from gla_triton_runtime.prepared import Launches, rehearsed


def prepare_one_pass(call: OpCall) -> Callable[..., Tensor]:
    """Prepares a call in which one block computes each row."""
    return _prepare(call, one_pass.launch_softmax)


def prepare_splits(call: OpCall) -> Callable[..., Tensor]:
    """Prepares a call in which several blocks compute splits of each row."""
    return _prepare(call, splits.launch_softmax)


def prepare_gradient_one_pass(call: OpCall) -> Callable[..., Tensor]:
    """Prepares a backward in which one block computes each row."""
    return _prepare_gradient(call, backward.launch_one_pass)


def prepare_gradient_splits(call: OpCall) -> Callable[..., Tensor]:
    """Prepares a backward in which several blocks compute splits of each row."""
    return _prepare_gradient(call, backward.launch_splits)


def _prepare(call: OpCall, launch: Callable[[Tensor, Tensor, int, Gpu], list[Launch]]) -> Callable[..., Tensor]:
    """Compiles the kernels of a call, and returns the function that computes calls of the same signature.

    Raises:
        LaunchError: a kernel does not compile for this device, or does not fit it.
    """
    copied, gpu = _is_copied(call), gpu_of_call(call)
    launched = Launches(call.device)

    def run(x: Tensor, dim: int) -> Tensor:
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        if x.numel():
            x = x.contiguous() if copied else x
            if unrecorded := launched.replay((x, y)):
                unrecorded.start(launch(x, y, dim, gpu))
        return y

    return rehearsed(run, call)


def _prepare_gradient(
    call: OpCall, launch: Callable[[Tensor, Tensor, Tensor, int, Gpu], list[Launch]]
) -> Callable[..., Tensor]:
    """Compiles the kernels of a backward, as `_prepare` does. A dy that is not contiguous is copied."""
    copied, gpu = _is_copied(call), gpu_of_call(call)
    launched = Launches(call.device)

    def run(x: Tensor, dim: int, dy: Tensor) -> Tensor:
        dx = torch.empty_like(x, memory_format=torch.contiguous_format)
        if x.numel():
            x, dy = x.contiguous() if copied else x, dy.contiguous()
            if unrecorded := launched.replay((x, dy, dx)):
                unrecorded.start(launch(x, dy, dx, dim, gpu))
        return dx

    return rehearsed(run, call)


def _is_copied(call: OpCall) -> bool:
    """Returns whether the x of a call is copied to a contiguous tensor first."""
    layout = call.layouts["x"]
    x: Any = torch.empty_strided(layout.shape, layout.strides, dtype=layout.dtype, device="meta")
    return needs_copy(x, torch.empty_like(x, memory_format=torch.contiguous_format), call.scalars["dim"])
