"""The sum of partial results, of which every program of another kernel wrote one: always in the same order.

    out = parts[0] + parts[1] + ..

P partial results   D numbers of one   BD numbers of a program
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import triton
import triton.language as tl
from torch import Tensor

from gla_triton_kernels.runtime.launch import Launch, launch


def parts_of(y: Tensor | None, blocks: int) -> Tensor | None:
    """Where so many blocks write what is to be summed to y: y itself if there is one."""
    return y if y is None or blocks == 1 else torch.empty(blocks, *y.shape, dtype=torch.float32, device=y.device)


def sums(written: Iterable[Tensor | None], results: Iterable[Tensor | None]) -> list[Launch]:
    """Sum what `parts_of` has given to results where it is not themselves, and return what was launched."""
    pairs = zip(written, results, strict=True)
    return [run(parts, y) for parts, y in pairs if parts is not None and y is not None and parts is not y]


def run(parts: Tensor, out: Tensor) -> Launch:
    """Write the sum of parts [P, *shape] to out [*shape], both contiguous."""
    P, D, BD = parts.shape[0], out.numel(), 1024
    return launch(_sum_kernel, (-(-D // BD), 1, 1), (parts, out), (), (D, P, BD), num_warps=4)


@triton.jit
def _sum_kernel(
    parts_ptr,  # [P, D]
    out_ptr,  # [D]
    D,
    P: tl.constexpr,
    BD: tl.constexpr,
):
    d = tl.program_id(0).to(tl.int64) * BD + tl.arange(0, BD)  # [BD]
    total = tl.zeros([BD], tl.float32)
    for p in tl.static_range(P):
        total += tl.load(parts_ptr + tl.cast(D, tl.int64) * p + d, mask=d < D, other=0.0)
    tl.store(out_ptr + d, total.to(out_ptr.dtype.element_ty), mask=d < D)
