"""Makes results, fills those that no kernel writes, and copies tensors. Imports no Triton."""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

AnyTensors = TypeVar("AnyTensors", bound=NamedTuple)


def contiguous_like(x: Tensor) -> Tensor:
    """Returns new, contiguous memory for the gradient of x. This takes longer than torch.empty_like(x)."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def copy_or_clear(y: Tensor, x: Tensor | None) -> None:
    """Copies x to y, or writes 0 to y if x is None."""
    y.zero_() if x is None else y.copy_(x)


def with_copies(x: AnyTensors, names: frozenset[str]) -> AnyTensors:
    """Returns x with contiguous copies of the tensors of these names."""
    return x._replace(**{name: getattr(x, name).clone(memory_format=torch.contiguous_format) for name in names})
