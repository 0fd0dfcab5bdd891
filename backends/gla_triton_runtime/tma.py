"""Describes tensors [B, T, H, width] as tiles [rows, columns] of one head, which Hopper's copy engine (TMA) moves.

A read beyond the edges of a tensor returns 0, and a write beyond them is dropped.

B batch   T tokens   H key/value heads, or query heads   K, V key and value width
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from gla_core.dispatch.backend import ALIGNMENT, Layout

UNIT = ALIGNMENT
"""The unit of addresses and strides, in bytes: they must be multiples of it."""


@functools.lru_cache(maxsize=4096)
def addressable(layout: Layout) -> bool:
    """Returns whether TMA can address a tensor [B, T, H, width] of this layout.

    The tensor must have elements, and all its rows must begin at multiples of `UNIT` bytes.
    """
    free = [stride for stride, length in zip(layout.strides[:3], layout.shape[:3], strict=True) if length > 1]
    whole_units = all(stride > 0 and stride * layout.dtype.itemsize % UNIT == 0 for stride in free)
    return layout.aligned and 0 not in layout.shape and whole_units


def tiles(x: Tensor, rows: int, columns: int) -> Any:
    """Returns a descriptor of x as [B, H, T, width] in blocks [1, 1, rows, columns], for a Triton kernel."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(x, *_heads_first(x), [1, 1, rows, columns])


def shared_tiles(x: Tensor, rows: int, columns: int) -> Any:
    """Returns a descriptor like `tiles`, for a Gluon kernel: it adds the layout that wgmma expects in shared memory."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as SharedDescriptor

    return SharedDescriptor(x, *_heads_first(x), [1, 1, rows, columns], _layout(x.dtype, rows, columns))


def state_tiles(states: Tensor, keys: int, values: int) -> Any:
    """Returns a descriptor of contiguous states [.., H, K, V] as [rows, H, K, V], for a Gluon kernel.

    Its blocks are [1, 1, keys, values].
    """
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as SharedDescriptor

    H, K, V = states.shape[-3:]
    shape, strides = [states.numel() // (H * K * V), H, K, V], [H * K * V, K * V, V, 1]
    return SharedDescriptor(states, shape, strides, [1, 1, keys, values], _layout(states.dtype, keys, values))


def row_tiles(x: Tensor, rows: int, columns: int) -> Any:
    """Returns a descriptor of a contiguous tensor [.., width] as [n, width], for a Gluon kernel.

    Its blocks are [rows, columns].
    """
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as SharedDescriptor

    width = x.shape[-1]
    shape, strides = [x.numel() // width, width], [width, 1]
    return SharedDescriptor(x, shape, strides, [rows, columns], _layout(x.dtype, rows, columns, 0))


def _heads_first(x: Tensor) -> tuple[list[int], list[int]]:
    """Returns shape and strides of x as [B, H, T, width]."""
    B, T, H, width = x.shape
    b, t, h, _ = x.stride()
    # The stride of a dimension of size 1 has no effect, but must still be a valid stride.
    return [B, H, T, width], [*(stride if n > 1 else UNIT for stride, n in ((b, B), (h, H), (t, T))), 1]


@functools.cache
def _layout(dtype: torch.dtype, rows: int, columns: int, outer: int = 2) -> Any:
    from triton.experimental.gluon import language as gl

    return gl.NVMMASharedLayout.get_default_for(
        [*[1] * outer, rows, columns], getattr(gl, str(dtype).removeprefix("torch."))
    )
