"""Tensors [B, T, H, width] as tiles [rows, columns] of one head, as Hopper's copy engine (TMA) moves them.

What is read beyond a tensor's edges is 0, and what is written there is dropped.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from gla_core.dispatch.backend import ALIGNMENT, Layout

UNIT = ALIGNMENT
"""Bytes that addresses and strides must be multiples of."""


@functools.lru_cache(maxsize=4096)
def rows_aligned(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> bool:
    """Returns whether TMA can address a tensor [B, T, H, width] at a multiple of 16 bytes.

    It has to have elements, and all its rows have to begin at multiples of `UNIT` bytes.
    """
    free = [stride for stride, length in zip(strides[:3], shape[:3], strict=True) if length > 1]
    return 0 not in shape and all(stride > 0 and stride * itemsize % UNIT == 0 for stride in free)


def addressable(layout: Layout) -> bool:
    """Returns whether TMA can address a tensor [B, T, H, width] of this layout."""
    return layout.aligned and rows_aligned(layout.shape, layout.strides, layout.dtype.itemsize)


def tiles(x: Tensor, rows: int, columns: int) -> Any:
    """For a Triton kernel: blocks [1, 1, rows, columns] of x as [B, H, T, width]."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(x, *_heads_first(x), [1, 1, rows, columns])


def shared_tiles(x: Tensor, rows: int, columns: int) -> Any:
    """Returns blocks as `tiles` does, for a Gluon kernel: with the layout that wgmma expects in shared memory."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as SharedDescriptor

    return SharedDescriptor(x, *_heads_first(x), [1, 1, rows, columns], _layout(x.dtype, rows, columns))


def state_tiles(states: Tensor, keys: int, values: int) -> Any:
    """For a Gluon kernel: blocks [1, 1, keys, values] of states [.., H, K, V], contiguous, as [rows, H, K, V]."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as SharedDescriptor

    H, K, V = states.shape[-3:]
    shape, strides = [states.numel() // (H * K * V), H, K, V], [H * K * V, K * V, V, 1]
    return SharedDescriptor(states, shape, strides, [1, 1, keys, values], _layout(states.dtype, keys, values))


def _heads_first(x: Tensor) -> tuple[list[int], list[int]]:
    """Shape and strides of x as [B, H, T, width]."""
    B, T, H, width = x.shape
    b, t, h, _ = x.stride()
    # The stride of a dimension of size 1 is free, but has to look right.
    return [B, H, T, width], [*(stride if n > 1 else UNIT for stride, n in ((b, B), (h, H), (t, T))), 1]


@functools.cache
def _layout(dtype: torch.dtype, rows: int, columns: int) -> Any:
    from triton.experimental.gluon import language as gl

    return gl.NVMMASharedLayout.get_default_for([1, 1, rows, columns], getattr(gl, str(dtype).removeprefix("torch.")))
