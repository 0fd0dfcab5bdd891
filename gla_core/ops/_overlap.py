"""Checks that memory which an op writes belongs to one argument, and that no two places of that argument are alike.

The check runs once for each plan. A later call with the same shapes and strides is checked under GLA_CHECK=1 only,
because its addresses are not a part of its signature.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor


def check(arguments: Mapping[str, Any], written: Sequence[str]) -> None:
    """Raises ValueError for a written argument that shares memory with another one, or whose places share memory.

    Args:
        arguments: the arguments by name.
        written: the names of those that are written.
    """
    if not written:
        return
    places = [(name, x, _range(x)) for name, x in arguments.items() if isinstance(x, Tensor)]
    for name in written:
        x, (start, end) = arguments[name], _range(arguments[name])
        _check_alone(name, x)
        for other, y, (first, last) in places:
            if other != name and start < last and first < end and _share(x, y):
                raise ValueError(
                    f"{name} is written in place and shares memory with {other}; expected memory of its own: "
                    "allocate one of them anew"
                )


def _check_alone(name: str, x: Tensor) -> None:
    """Raises ValueError unless each stride of a tensor leads past all that smaller strides reach."""
    reach = 0
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)) if x.numel() else ():
        if size > 1 and stride <= reach:
            raise ValueError(
                f"{name} has shape {list(x.shape)} and strides {x.stride()}, so that its elements share memory, and is "
                "written in place; expected memory of its own for each element: call it with a clone()"
            )
        reach += (size - 1) * stride


def _range(x: Tensor) -> tuple[int, int]:
    """Returns the addresses of the first byte of a tensor and of the byte after its last; (0, 0) if it has none."""
    try:
        start = x.data_ptr()
    except RuntimeError:  # a tensor without values
        return 0, 0
    if start == 0 or x.numel() == 0:
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return start, start + (last + 1) * x.element_size()


class _Memory:
    """Describes the memory of a tensor to numpy, which does not touch it."""

    def __init__(self, x: Tensor) -> None:
        size = x.element_size()
        self.__array_interface__ = {
            "data": (x.data_ptr(), True),
            "shape": tuple(x.shape),
            "strides": tuple(stride * size for stride in x.stride()),
            "typestr": f"|V{size}",
            "version": 3,
        }


def _share(x: Tensor, y: Tensor) -> bool:
    """Returns whether two tensors whose ranges meet have a place in common; pages may hold both, side by side."""
    most: Any = 10**6  # steps of a search, some milliseconds
    try:
        return np.shares_memory(np.asarray(_Memory(x)), np.asarray(_Memory(y)), max_work=most)
    except RuntimeError:  # too hard to say; no layout of pages has such strides
        return False
