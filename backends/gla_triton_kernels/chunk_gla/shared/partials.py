"""Sums partial results that the programs of another kernel have written, always in the same order.

    out[o] = parts[o, 0] + parts[o, 1] + .. + parts[o, P - 1]

A partial result comes from one block of a head, or from one query head or value head of a group. If all tokens of a
head share a gate, a partial result of dg comes from one block of one segment.

B batch   T tokens   N sequences   H key heads   Hq query heads   Hv value heads   K, V key and value width
O outer indices   P partial results   D numbers of a partial result   BD numbers of a program
BP partial results that a program adds at once
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import triton
import triton.language as tl
from torch import Tensor

from gla_core.dispatch.tensors import ceil_div
from gla_triton_kernels.chunk_gla.tensors import BackwardTensors
from gla_triton_kernels.runtime.launch import Launch
from gla_triton_kernels.runtime.sizes import power_of_two

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


def for_query_heads(x: BackwardTensors) -> BackwardTensors:
    """Returns x with new memory for dk, dv, dg and dinitial_state, with Hq heads each; x itself if H is Hq."""
    heads = x.q.shape[2]
    if heads == x.k.shape[2]:
        return x
    dk, dv = (_with_heads(y, 2, heads) for y in (x.dk, x.dv))
    dg = None if x.dg is None else _with_heads(x.dg, min(2, x.dg.ndim - 1), heads)  # constant gates are [Hv]
    return x._replace(dk=dk, dv=dv, dg=dg, dinitial_state=_with_heads(x.dinitial_state, 1, heads))


def for_value_heads(x: BackwardTensors) -> BackwardTensors:
    """Returns x with new memory for dq and dk, with Hv heads each; x itself if k has as many heads as v."""
    heads = x.v.shape[2]
    if heads == x.k.shape[2]:
        return x
    return x._replace(dq=_with_heads(x.dq, 2, heads), dk=_with_heads(x.dk, 2, heads))


def _with_heads(y: Tensor | None, dim: int, heads: int) -> Tensor | None:
    return None if y is None else y.new_empty(*y.shape[:dim], heads, *y.shape[dim + 1 :])


def launch_sums_over_groups(each: BackwardTensors, x: BackwardTensors) -> list[Launch]:
    """Returns the launches that sum the gradients in `each` over groups of heads to the gradients in x.

    Args:
        each: the result of `for_query_heads` or `for_value_heads`.
    """
    written = (
        *((each.dq, x.dq, 3), (each.dk, x.dk, 3), (each.dv, x.dv, 3), (each.dg, x.dg, 3)),
        (each.dinitial_state, x.dinitial_state, 2),
    )
    return [
        launch
        for parts, y, dims in written
        if parts is not None and y is not None and parts is not y
        for launch in launch_sum(parts, y, math.prod(y.shape[:dims]))
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
    first = i // D * (P * D) + i % D  # [BD]
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
