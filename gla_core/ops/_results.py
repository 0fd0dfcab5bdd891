"""Checks that a backend returns fresh, contiguous tensors of the right shape and dtype."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gla_core.dispatch.errors import BackendError
from gla_core.ops.spec import Expected


def check(source: str, results: Any, expected: Sequence[Expected | None], args: Sequence[Any]) -> None:
    """Raises BackendError unless `results`, the results that `source` returned for `args`, are the expected ones."""
    if len(expected) == 1:
        results = (results,)
    if not isinstance(results, tuple | list) or len(results) != len(expected):
        names = ", ".join("None" if result is None else result.name for result in expected)
        raise BackendError(f"{source} returned {_kind(results)}; expected a tuple ({names})")
    taken = {_memory(x): "an input" for x in args if isinstance(x, Tensor)}
    device = args[0].device
    for x, result in zip(results, expected, strict=True):
        if result is None:
            if x is not None:
                raise BackendError(f"{source} returned {_kind(x)} where nothing was asked for; expected None")
            continue
        wrong = _wrong(x, result, device, taken)
        if wrong is not None:
            raise BackendError(f"{source} returned {wrong}")
        taken[_memory(x)] = f"its {result.name}"


def _wrong(x: Any, result: Expected, device: torch.device, taken: dict[int | None, str]) -> str | None:
    name = result.name
    if not isinstance(x, Tensor):
        return f"{_kind(x)} for {name}; expected a tensor"
    if result.written is not None:
        return None if x is result.written else f"another tensor for {name}; expected the one it was given, written"
    if tuple(x.shape) != tuple(result.shape):
        return f"{name} of shape {list(x.shape)}; expected {list(result.shape)}"
    if x.dtype != result.dtype:
        return f"{name} as {x.dtype}; expected {result.dtype}"
    if x.device != device:
        return f"{name} on {x.device}; expected {device}"
    if not (x.mT if result.swapped else x).is_contiguous():
        how = ", its last two dimensions swapped" if result.swapped else ""
        return f"{name} with strides {tuple(x.stride())}; expected a contiguous tensor{how}"
    if _memory(x) is not None and _memory(x) in taken:
        return f"{name} in the memory of {taken[_memory(x)]}; expected a tensor of its own"
    if x._is_view() and not result.swapped:
        return f"{name} as a view of another tensor; expected a fresh one, such as its clone()"
    return None


def _memory(x: Tensor) -> int | None:
    """Returns the address of a tensor's memory; None if it has none."""
    return x.untyped_storage().data_ptr() or None


def _kind(x: Any) -> str:
    if isinstance(x, tuple | list):
        return f"{len(x)} values"
    return "None" if x is None else f"a {type(x).__name__}"
