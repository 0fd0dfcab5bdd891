"""Casts the arguments of the ops under autocast. Inside a backend autocast changes nothing.

Ops that multiply matrices take q, k and v in autocast's dtype, as PyTorch's own attention does; softmax takes float32.
Gates keep float32, because they are near 0, and states are always float32. float64 is left unchanged, as in PyTorch.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

in_force = torch._C._is_any_autocast_enabled
"""Returns whether autocast is on for any type of device. It is fast enough to be called in every op."""

_NOTHING = nullcontext()


def off(device_type: str) -> AbstractContextManager:
    """Returns a context in which autocast is off for devices of this type."""
    return torch.autocast(device_type, enabled=False) if _dtype(device_type) is not None else _NOTHING


def tokens(q: Any, k: Any, v: Any, g: Any, *others: Any) -> tuple[Any, ...]:
    """Casts q, k, v and g for an op that multiplies matrices, if autocast is on; others are cast as q is."""
    dtype = _dtype(q.device.type) if isinstance(q, Tensor) else None
    if dtype is None:
        return q, k, v, g, *others
    if isinstance(g, Tensor) and g.dtype != dtype:
        g = _cast(g, torch.float32)
    return _cast(q, dtype), _cast(k, dtype), _cast(v, dtype), g, *(_cast(x, dtype) for x in others)


def wide(x: Any) -> Any:
    """Casts x for a softmax, if autocast is on for its device."""
    return _cast(x, torch.float32) if isinstance(x, Tensor) and _dtype(x.device.type) is not None else x


def _dtype(device_type: str) -> torch.dtype | None:
    """Returns the dtype that autocast casts to on devices of this type; None if it is off."""
    if not in_force() or device_type == "meta" or not torch.is_autocast_enabled(device_type):
        return None
    return torch.get_autocast_dtype(device_type)


def _cast(x: Any, dtype: torch.dtype) -> Any:
    castable = isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float64
    return x.to(dtype) if castable else x
