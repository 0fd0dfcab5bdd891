"""Makes results, and fills those that no kernel writes. Imports no Triton."""

from __future__ import annotations

import torch
from torch import Tensor


def contiguous_like(x: Tensor) -> Tensor:
    """Returns new, contiguous memory for the gradient of x. This takes longer than torch.empty_like(x)."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def copy_or_clear(y: Tensor, x: Tensor | None) -> None:
    """Copies x to y, or writes 0 to y if x is None."""
    y.zero_() if x is None else y.copy_(x)
