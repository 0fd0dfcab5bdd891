"""What autocast means for the ops: it decides the dtype of their arguments, and nothing inside a backend.

Matrix-like ops take q, k and v in autocast's dtype, as PyTorch's own attention does; softmax takes float32. Gates keep
float32, where they are near 0, and states are float32 in any case. float64 is left alone, as PyTorch leaves it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

in_force = torch._C._is_any_autocast_enabled
"""Whether autocast is on for any type of device; quick, so that it is asked in every call."""

_NOTHING = nullcontext()


def off(device_type: str) -> AbstractContextManager:
    """A block in which autocast is off for devices of this type."""
    return torch.autocast(device_type, enabled=False) if _dtype(device_type) is not None else _NOTHING


def tokens(q: Any, k: Any, v: Any, g: Any) -> tuple[Any, Any, Any, Any]:
    """q, k, v and g as a matrix-like op takes them under the autocast in force."""
    dtype = _dtype(q.device.type) if isinstance(q, Tensor) else None
    if dtype is None:
        return q, k, v, g
    if isinstance(g, Tensor) and g.dtype != dtype:
        g = _cast(g, torch.float32)
    return _cast(q, dtype), _cast(k, dtype), _cast(v, dtype), g


def wide(x: Any) -> Any:
    """What a softmax takes in place of x under the autocast in force."""
    return _cast(x, torch.float32) if isinstance(x, Tensor) and _dtype(x.device.type) is not None else x


def _dtype(device_type: str) -> torch.dtype | None:
    """The dtype that autocast casts to on such devices; None where it is off."""
    if not in_force() or device_type == "meta" or not torch.is_autocast_enabled(device_type):
        return None
    return torch.get_autocast_dtype(device_type)


def _cast(x: Any, dtype: torch.dtype) -> Any:
    castable = isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float64
    return x.to(dtype) if castable else x
