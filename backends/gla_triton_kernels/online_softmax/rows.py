"""Describes a tensor as rows of columns, with the strides that softmax kernels need. Imports no Triton.

N columns, the dimension that sums to one   R rows, the last of the other dimensions   D0, D1 the dimensions before R
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from gla_core.dispatch.backend import OpCall


class Rows(NamedTuple):
    """The sizes and strides of tensors x and y of the same shape, seen as [D0, D1, R, N].

    Attributes:
        D0: size of the first dimension.
        D1: size of the second dimension.
        R: number of rows.
        N: number of columns.
        strides: the strides of D0, D1, R and N, for each of these first in x and then in y.
        itemsize: bytes of an element.
    """

    D0: int
    D1: int
    R: int
    N: int
    strides: tuple[int, ...]
    itemsize: int

    @property
    def named_strides(self) -> dict[str, int]:
        """Returns the strides as a kernel's arguments."""
        names = (f"stride_{tensor}{dim}" for dim in ("0", "1", "r", "n") for tensor in "xy")
        return dict(zip(names, self.strides, strict=True))

    @property
    def contiguous(self) -> bool:
        """Returns whether the columns of x are neighbours in memory."""
        return self.strides[6] == 1

    @property
    def packed(self) -> bool:
        """Returns whether the rows of x and y follow each other in memory without gaps."""
        follow = self.R == 1 or self.strides[4:6] == (self.N, self.N)
        return self.D0 == self.D1 == 1 and follow and self.strides[6:] == (1, 1)

    @property
    def vector(self) -> int:
        """Returns the number of columns of x that a thread loads at once: 16 bytes, or 1 if rows may be unaligned."""
        aligned = self.contiguous and all(n % 16 == 0 for n in (self.N, *self.strides[:5:2]))
        return 16 // self.itemsize if aligned else 1


def rows_of_call(call: OpCall) -> Rows:
    """Returns the rows of a call, along the last dimension of a contiguous tensor."""
    R, N = call.dims["rows"], call.dims["columns"]
    return Rows(1, 1, R, N, (0, 0, 0, 0, N, N, 1, 1), call.dtype.itemsize)


def needs_copy(x: Tensor, y: Tensor, dim: int) -> bool:
    """Returns whether x must be copied to a contiguous tensor: more than three dimensions besides dim remain."""
    return len(_other_dimensions(x, y, dim)) > 3


def rows_of(x: Tensor, y: Tensor, dim: int) -> Rows:
    """Returns x and y as rows, along dim."""
    dims = _other_dimensions(x, y, dim)
    (D0, *x0y0), (D1, *x1y1), (R, *xryr) = [(1, 0, 0)] * (3 - len(dims)) + dims
    N = x.shape[dim]
    columns = (x.stride(dim), y.stride(dim)) if N > 1 else (1, 1)
    return Rows(D0, D1, R, N, (*x0y0, *x1y1, *xryr, *columns), x.itemsize)


def _other_dimensions(x: Tensor, y: Tensor, dim: int) -> list[tuple[int, int, int]]:
    """Returns (size, stride in x, stride in y) of each dimension except dim.

    Adjacent dimensions are merged if one stride describes both.
    """
    dims: list[tuple[int, int, int]] = []
    for d, size in enumerate(x.shape):
        if d == dim or size == 1:
            continue
        stride_x, stride_y = x.stride(d), y.stride(d)
        if dims and dims[-1][1:] == (size * stride_x, size * stride_y):
            size *= dims.pop()[0]
        dims.append((size, stride_x, stride_y))
    return dims
