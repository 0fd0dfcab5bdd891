"""Rows of a packed tensor that belong to no sequence are made 0: those before the first offset and behind the last.

Which they are is known on the device alone, so every program looks at rows of its own, and mostly has nothing to do.

T tokens   N sequences   D numbers of a row   R rows of a program   BD numbers written at once
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from gla_triton_kernels.runtime.launch import Launch

ROWS = 64


def clear_padding(x: Tensor, cu_seqlens: Tensor) -> list[Launch]:
    """The launch that writes 0 to the rows of x [1, T, ...], contiguous, that belong to no sequence."""
    T, N = x.shape[1], len(cu_seqlens) - 1
    integers = (T, N, x.numel() // T, ROWS, 1024)
    return [Launch(_clear_padding_kernel, (-(-T // ROWS), 1, 1), (x, cu_seqlens), (), integers, {"num_warps": 4})]


@triton.jit(do_not_specialize=["T", "N", "D"])
def _clear_padding_kernel(
    x_ptr,  # [T, D]
    cu_seqlens_ptr,  # [N+1]
    T,
    N,
    D,
    R: tl.constexpr,
    BD: tl.constexpr,
):
    first = tl.load(cu_seqlens_ptr)
    last = tl.load(cu_seqlens_ptr + N)
    begin = tl.program_id(0) * R
    for t in range(begin, tl.minimum(begin + R, T)):
        if (t < first) | (t >= last):
            row = x_ptr + tl.cast(t, tl.int64) * D
            for d in range(0, D, BD):
                columns = d + tl.arange(0, BD)  # [BD]
                tl.store(row + columns, tl.zeros([BD], x_ptr.dtype.element_ty), mask=columns < D)
