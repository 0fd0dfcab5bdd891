"""Sums partial results that the programs of another kernel have written, always in the same order.

    out[o] = parts[o, 0] + parts[o, 1] + .. + parts[o, P - 1]

A partial result comes from one block of a head, or from one head of a group. If all tokens of a
head share a gate, a partial result of dg comes from one block of one segment.

O outer indices   P partial results   D numbers of a partial result   BD numbers of a program
BP partial results that a program adds at once
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import triton
import triton.language as tl
from torch import Tensor

from gla_core.dispatch.tensors import ceil_div
from gla_triton_runtime.launch import Launch
from gla_triton_runtime.sizes import power_of_two

MOST_UNROLLED = tl.constexpr(16)
"""The maximum number of partial results for which the sum is unrolled. A loop adds more of them and compiles faster."""


def parts_of(y: Tensor | None, blocks: int) -> Tensor | None:
    """Returns memory for the partial results of y from `blocks` blocks; y itself if there is one block."""
    return y if y is None or blocks == 1 else torch.empty(blocks, *y.shape, dtype=torch.float32, device=y.device)


def launch_partial_sums(written: Iterable[Tensor | None], results: Iterable[Tensor | None]) -> list[Launch]:
    """Returns the launches that sum partial results to `results`.

    Args:
        written: memory from `parts_of`, one for each result. Nothing is launched if this is the result itself.
    """
    return [
        launch
        for parts, y in zip(written, results, strict=True)
        if parts is not None and y is not None and parts is not y
        for launch in launch_sum(parts, y, 1)
    ]


def launch_sum_of_rows(parts: Tensor, out: Tensor) -> Launch:
    """Returns the launch that sums any number P of partial results, parts [P, D], to out [D]; both are contiguous."""
    BD = min(32, power_of_two(out.numel()))
    arguments = {
        "parts_ptr": parts,
        "out_ptr": out,
        "P": parts.numel() // out.numel(),
        "D": out.numel(),
        "BP": 1024 // BD,
        "BD": BD,
    }
    return Launch(_sum_of_rows_kernel, (ceil_div(out.numel(), BD), 1, 1), arguments, {"num_warps": 4})


def launch_sum(parts: Tensor, out: Tensor, outer: int) -> list[Launch]:
    """Returns the launch that sums parts [O, P, D] to out [O, D].

    Both are contiguous. They may have other shapes with the same numbers of elements.

    Args:
        outer: O.
    """
    BD = 1024
    arguments = {
        "parts_ptr": parts,
        "out_ptr": out,
        "numbers": out.numel(),
        "D": out.numel() // outer,
        "P": parts.numel() // out.numel(),
        "BD": BD,
    }
    return [Launch(_sum_kernel, (ceil_div(out.numel(), BD), 1, 1), arguments, {"num_warps": 4})]


@triton.jit
def _sum_kernel(
    parts_ptr,  # [O, P, D]
    out_ptr,  # [O, D]
    numbers,  # O * D
    D,
    P: tl.constexpr,
    BD: tl.constexpr,
):
    """Computes BD numbers of the sum over P."""
    i = tl.program_id(0).to(tl.int64) * BD + tl.arange(0, BD)  # [BD]
    first = i // D * (tl.cast(D, tl.int64) * P) + i % D  # [BD]
    total = tl.zeros([BD], tl.float32)
    if P <= MOST_UNROLLED:
        for p in tl.static_range(P):
            total += tl.load(parts_ptr + first + tl.cast(D, tl.int64) * p, mask=i < numbers, other=0.0)
    else:
        for p in range(P):
            total += tl.load(parts_ptr + first + tl.cast(D, tl.int64) * p, mask=i < numbers, other=0.0)
    tl.store(out_ptr + i, total.to(out_ptr.dtype.element_ty), mask=i < numbers)


@triton.jit(do_not_specialize=["P", "D"])
def _sum_of_rows_kernel(
    parts_ptr,  # [P, D]
    out_ptr,  # [D]
    P,
    D,
    BP: tl.constexpr,
    BD: tl.constexpr,
):
    """Computes BD numbers of the sum over P, by adding BP partial results at a time."""
    i = tl.program_id(0) * BD + tl.arange(0, BD)  # [BD]
    total = tl.zeros([BP, BD], tl.float32)
    for first in range(0, P, BP):
        p = first + tl.arange(0, BP)  # [BP]
        parts = parts_ptr + p.to(tl.int64)[:, None] * D + i[None, :]  # [BP, BD]
        total += tl.load(parts, mask=(p < P)[:, None] & (i < D)[None, :], other=0.0)
    tl.store(out_ptr + i, tl.sum(total, 0).to(out_ptr.dtype.element_ty), mask=i < D)
