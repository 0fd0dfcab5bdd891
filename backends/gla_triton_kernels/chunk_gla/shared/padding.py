"""Clears padding: writes 0 to the rows of packed tensors that belong to no sequence.

    x[t] = 0    for t < cu_seqlens[0] and for t >= cu_seqlens[N]

The offsets are known only on the device, so every program looks for its share of these rows. Most programs find none.

B batch   T tokens   N sequences   D numbers of a row of each tensor   BD numbers written at once
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from gla_core.dispatch.tensors import ceil_div
from gla_triton_kernels.runtime.launch import Launch

ROWS = 64
"""The launch has one program for each 64 rows."""
BLOCK = 1024
"""The number of elements that a program writes at once."""
MOST = 4
"""The maximum number of tensors that one launch clears: a call has at most four gradients with a token axis."""


def clear_padding(tensors: Sequence[Tensor], cu_seqlens: Tensor) -> list[Launch]:
    """Returns the launch that clears the padding of up to `MOST` contiguous tensors [1, T, ...]."""
    T, N = tensors[0].shape[1], len(cu_seqlens) - 1
    missing = MOST - len(tensors)
    given = [*tensors, *[None] * missing]
    widths = [x.numel() // T for x in tensors] + [0] * missing
    arguments = {
        **{f"x{i}_ptr": x for i, x in enumerate(given)},
        "cu_seqlens_ptr": cu_seqlens,
        "T": T,
        "N": N,
        **{f"D{i}": width for i, width in enumerate(widths)},
        "BD": BLOCK,
    }
    return [Launch(_clear_padding_kernel, (ceil_div(T, ROWS), 1, 1), arguments, {"num_warps": 4})]


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
    BD: tl.constexpr,
):
    """Clears this program's share of the padding of each tensor."""
    first = tl.load(cu_seqlens_ptr)
    last = tl.load(cu_seqlens_ptr + N)
    clear_rows(x0_ptr, D0, first, last, T, BD)
    if x1_ptr is not None:
        clear_rows(x1_ptr, D1, first, last, T, BD)
    if x2_ptr is not None:
        clear_rows(x2_ptr, D2, first, last, T, BD)
    if x3_ptr is not None:
        clear_rows(x3_ptr, D3, first, last, T, BD)


@triton.jit
def clear_rows(x_ptr, D, first, last, T, BD: tl.constexpr):
    """Writes 0 to this program's share of the rows of x [T, D] before row `first` and from row `last` on."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    for t in range(program, first, programs):
        _clear_row(x_ptr, t, D, BD)
    for t in range(last + program, T, programs):
        _clear_row(x_ptr, t, D, BD)


@triton.jit
def _clear_row(x_ptr, t, D, BD: tl.constexpr):
    """Writes 0 to row t of x [T, D]."""
    row = x_ptr + tl.cast(t, tl.int64) * D
    for d in range(0, D, BD):
        columns = d + tl.arange(0, BD)  # [BD]
        tl.store(row + columns, tl.zeros([BD], x_ptr.dtype.element_ty), mask=columns < D)
