"""Rows of a packed tensor that belong to no sequence are made 0: those before the first offset and behind the last.

Which they are is known on the device alone, so every program looks at rows of its own, and mostly has nothing to do.

T tokens   N sequences   D numbers of a row of each tensor   R rows of a program   BD numbers written at once
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from gla_triton_kernels.runtime.launch import Launch

ROWS = 64
MOST = 4
"""Tensors that one launch clears: a call has at most as many gradients with rows."""


def clear_padding(tensors: Sequence[Tensor], cu_seqlens: Tensor) -> list[Launch]:
    """The launch that writes 0 to the rows of up to `MOST` tensors [1, T, ...], contiguous, that are of no sequence."""
    T, N = tensors[0].shape[1], len(cu_seqlens) - 1
    missing = MOST - len(tensors)
    widths = [x.numel() // T for x in tensors] + [0] * missing
    given = (*tensors, *[None] * missing, cu_seqlens)
    grid = (-(-T // ROWS), 1, 1)
    return [Launch(_clear_padding_kernel, grid, given, (), (T, N, *widths, ROWS, 1024), {"num_warps": 4})]


@triton.jit(do_not_specialize=["T", "N", "D0", "D1", "D2", "D3"])
def _clear_padding_kernel(
    x0_ptr,  # [T, D0]
    x1_ptr,  # [T, D1] or None
    x2_ptr,  # [T, D2] or None
    x3_ptr,  # [T, D3] or None
    cu_seqlens_ptr,  # [N+1]
    T,
    N,
    D0,
    D1,
    D2,
    D3,
    R: tl.constexpr,
    BD: tl.constexpr,
):
    first = tl.load(cu_seqlens_ptr)
    last = tl.load(cu_seqlens_ptr + N)
    begin = tl.program_id(0) * R
    for t in range(begin, tl.minimum(begin + R, T)):
        if (t < first) | (t >= last):
            _clear_row(x0_ptr, t, D0, BD)
            _clear_row(x1_ptr, t, D1, BD)
            _clear_row(x2_ptr, t, D2, BD)
            _clear_row(x3_ptr, t, D3, BD)


@triton.jit
def _clear_row(x_ptr, t, D, BD: tl.constexpr):
    if x_ptr is not None:
        row = x_ptr + tl.cast(t, tl.int64) * D
        for d in range(0, D, BD):
            columns = d + tl.arange(0, BD)  # [BD]
            tl.store(row + columns, tl.zeros([BD], x_ptr.dtype.element_ty), mask=columns < D)
