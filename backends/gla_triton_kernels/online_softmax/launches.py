"""Prepares calls of online_softmax, with one block per row or with rows in splits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gla_core.dispatch.backend import OpCall
from gla_triton_kernels.online_softmax import one_pass, splits
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


def _prepare(call: OpCall, launch: Callable[[Tensor, Tensor, int, Gpu], list[Launch]]) -> Callable[..., Tensor]:
    """Compiles the kernels of a call, and returns the function that computes calls of the same signature.

    Raises:
        LaunchError: a kernel does not compile for this device, or does not fit it.
    """
    layout, dim, gpu = call.layouts["x"], call.scalars["dim"], gpu_of_call(call)
    x: Any = torch.empty_strided(layout.shape, layout.strides, dtype=layout.dtype, device="meta")
    copied = needs_copy(x, torch.empty_like(x, memory_format=torch.contiguous_format), dim)
    launched = Launches(call.device)

    def run(x: Tensor, dim: int) -> Tensor:
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        if x.numel():
            x = x.contiguous() if copied else x
            if not launched.replay((x, y)):
                launched.start(launch(x, y, dim, gpu), (x, y))
        return y

    return rehearsed(run, call)
