"""Clears padding: writes 0 to the rows of packed tensors that belong to no sequence, and to unused checkpoints.

    x[t] = 0              for t < cu_seqlens[0] and for t >= cu_seqlens[N]
    checkpoints[r] = 0    for each row r that is not i + cu_seqlens[i] // L + j for a checkpoint j of a sequence i

The offsets are known only on the device, so every program looks for its share of these rows. Most programs find none.

B batch   T tokens   N sequences   L tokens between checkpoints   n rows of checkpoints
D numbers of a row of each tensor   BD numbers written at once
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from gla_core.dispatch.tensors import ceil_div
from gla_triton_runtime.launch import Launch

ROWS = 64
"""The launch has one program for each 64 rows."""
BLOCK = 1024
"""The number of elements that a program writes at once."""
MOST = 4
"""The maximum number of tensors that one launch clears: most calls have at most four gradients with a token axis."""
BLOCKS = 8
"""The number of blocks of a row of checkpoints that a program clears."""


def clear_padding(tensors: Sequence[Tensor], cu_seqlens: Tensor) -> list[Launch]:
    """Returns the launches that clear the padding of contiguous tensors [1, T, ...]."""
    return [_clear_some(tensors[i : i + MOST], cu_seqlens) for i in range(0, len(tensors), MOST)]


def _clear_some(tensors: Sequence[Tensor], cu_seqlens: Tensor) -> Launch:
    """Returns the launch that clears the padding of up to `MOST` tensors."""
    T, N = tensors[0].shape[1], len(cu_seqlens) - 1
    missing = MOST - len(tensors)
    padded = [*tensors, *[None] * missing]
    widths = [x.numel() // T for x in tensors] + [0] * missing
    arguments = {
        **{f"x{i}_ptr": x for i, x in enumerate(padded)},
        "cu_seqlens_ptr": cu_seqlens,
        "T": T,
        "N": N,
        **{f"D{i}": width for i, width in enumerate(widths)},
        "BD": BLOCK,
    }
    return Launch(_clear_padding_kernel, (ceil_div(T, ROWS), 1, 1), arguments, {"num_warps": 4})


def clear_unused_checkpoints(checkpoints: Tensor, cu_seqlens: Tensor, every: int) -> list[Launch]:
    """Returns the launch that clears the rows of contiguous checkpoints [1, n, ...] in which no state is stored.

    Args:
        every: tokens between checkpoints.
    """
    n, N = checkpoints.shape[1], len(cu_seqlens) - 1
    D = checkpoints.numel() // n
    arguments = {
        "checkpoints_ptr": checkpoints,
        "cu_seqlens_ptr": cu_seqlens,
        "n": n,
        "N": N,
        "every": every,
        "D": D,
        "BD": BLOCK,
    }
    return [Launch(_clear_unused_kernel, (N + 1, ceil_div(D, BLOCKS * BLOCK), 1), arguments, {"num_warps": 4})]


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


@triton.jit(do_not_specialize=["n", "N", "every", "D"])
def _clear_unused_kernel(
    checkpoints_ptr,  # [n, D]
    cu_seqlens_ptr,  # [N+1]
    n,
    N,
    every,
    D,
    BD: tl.constexpr,
):
    """Clears a share of the rows between the checkpoints of sequence i - 1 and those of sequence i."""
    i = tl.program_id(0)
    start = tl.load(cu_seqlens_ptr + i - 1, mask=i > 0, other=0).to(tl.int32)
    end = tl.load(cu_seqlens_ptr + i).to(tl.int32)
    first = tl.where(i > 0, i - 1 + start // every + tl.cdiv(end - start, every), 0)
    last = tl.where(i < N, i + end // every, n)
    for row in range(first, last):
        there = checkpoints_ptr + tl.cast(row, tl.int64) * D
        for d in range(tl.program_id(1) * BD, D, tl.num_programs(1) * BD):
            columns = d + tl.arange(0, BD)  # [BD]
            tl.store(there + columns, tl.zeros([BD], checkpoints_ptr.dtype.element_ty), mask=columns < D)
