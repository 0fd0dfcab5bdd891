"""Casts the arguments of the ops under autocast. Inside a backend autocast changes nothing.

Ops that multiply matrices take q, k and v in autocast's dtype, as PyTorch's own attention does; softmax takes float32.
Gates keep float32, because they are near 0, and states are always float32. float64 is left unchanged, as in PyTorch.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from gla_core.ops.spec import AS_INPUT, AS_INPUT_OR_FLOAT32, INPUT, Argument, OpSpec

in_force = torch._C._is_any_autocast_enabled
"""Returns whether autocast is on for any type of device. It is fast enough to be called in every op."""

_NOTHING = nullcontext()


def off(device_type: str) -> AbstractContextManager:
    """Returns a context in which autocast is off for devices of this type."""
    return torch.autocast(device_type, enabled=False) if _dtype(device_type) is not None else _NOTHING


def inputs(spec: OpSpec, *args: Any) -> tuple[Any, ...]:
    """Casts the first arguments of an op, if autocast is on for their device.

    Arguments with the dtype of the first one are cast as it is. A gate, or another number of each token that may keep
    float32, is cast to float32, unless it has the dtype of autocast. All others are returned as they are.
    """
    dtype = _dtype(args[0].device.type) if isinstance(args[0], Tensor) else None
    if dtype is None:
        return args
    dtype = torch.float32 if spec.autocast_in_float32 else dtype
    return tuple(_input(spec, argument, x, dtype) for argument, x in zip(spec.arguments, args, strict=False))


def _input(spec: OpSpec, argument: Argument, x: Any, dtype: torch.dtype) -> Any:
    if argument.dtype is AS_INPUT_OR_FLOAT32 and argument.name in spec.tokens:
        return x if isinstance(x, Tensor) and x.dtype == dtype else _cast(x, torch.float32)
    return _cast(x, dtype) if argument.dtype in (INPUT, AS_INPUT) and not argument.written else x


def _dtype(device_type: str) -> torch.dtype | None:
    """Returns the dtype that autocast casts to on devices of this type; None if it is off."""
    if not in_force() or device_type == "meta" or not torch.is_autocast_enabled(device_type):
        return None
    return torch.get_autocast_dtype(device_type)


def _cast(x: Any, dtype: torch.dtype) -> Any:
    castable = isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float64
    return x.to(dtype) if castable else x
