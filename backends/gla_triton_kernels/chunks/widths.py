"""Pads heads to a width that TMA can move: copies inputs to wider heads with zeros, and copies results back.

TMA moves rows of a multiple of 16 bytes. The zeros do not change the results: keys and queries of 0 add nothing to any
product, values of 0 give outputs of 0, and gates of 0 decay nothing. If the keys of a head share a gate, g has no key
axis and is not copied. A copy computes

    to[i0, i1, i2, i3] = source[i0, i1, i2, i3]    if source has these indices, else 0

K, V key and value width   A0, A1, A2, A3 dimensions of `to`   A2_SOURCE, A3_SOURCE last dimensions of `source`
R rows of A3 numbers of a program   BD A3 rounded up to a power of two
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Set

import torch
import triton
import triton.language as tl
from torch import Tensor

from gla_core.dispatch.tensors import ceil_div
from gla_triton_kernels.chunks.results import AnyTensors
from gla_triton_runtime.launch import Launch
from gla_triton_runtime.sizes import power_of_two


def widened(
    x: AnyTensors, shape_of: Callable[[str, tuple[int, ...]], tuple[int, ...]], results: Set[str]
) -> tuple[AnyTensors, list[Launch], list[Launch]]:
    """Returns the tensors with wider heads, and two lists of launches.

    The first list fills the wide inputs from x and runs before the kernels. The second list copies the wide results to
    x and runs after the kernels. Both lists are empty if no tensor changes its shape.

    Args:
        x: the tensors of a call by name, results included; None for each that the call lacks.
        shape_of: takes the name and the shape of a tensor, and returns the shape that kernels receive.
        results: the names of the tensors that kernels write.
    """
    tensors = {name: y for name, y in x._asdict().items() if y is not None}
    shapes = {name: shape_of(name, tuple(y.shape)) for name, y in tensors.items()}
    wide = {
        name: torch.empty(shapes[name], dtype=y.dtype, device=y.device)
        for name, y in tensors.items()
        if shapes[name] != y.shape
    }
    read = [launch_copy(tensors[name], y) for name, y in wide.items() if name not in results and y.numel() > 0]
    back = [launch_copy(y, tensors[name]) for name, y in wide.items() if name in results and y.numel() > 0]
    return x._replace(**wide), list(itertools.chain(*read)), list(itertools.chain(*back))


def launch_copy(source: Tensor, to: Tensor) -> list[Launch]:
    """Returns the launch that copies `source` to `to`. Elements of `to` beyond the edges of `source` become 0.

    Args:
        source: [.., A2_SOURCE, A3_SOURCE], contiguous if there are more than 4 dimensions.
        to: [.., A2, A3], contiguous.
    """
    A3, A3_SOURCE = to.shape[-1], source.shape[-1]
    if source.is_contiguous() and source.shape[:-1] == to.shape[:-1]:  # all rows are one dimension
        A1, A2, A2_SOURCE, strides = to.numel() // A3, 1, 1, (0, A3_SOURCE, 0, 1)
    else:
        A1, A2, A2_SOURCE, strides = *to.shape[-3:-1], source.shape[-2], source.stride()[-4:]
    BD = power_of_two(A3, 16)
    R = max(1, 4096 // BD)
    blocks = ceil_div(A1, R)
    arguments = {
        "source_ptr": source,
        "to_ptr": to,
        **{f"stride_{i}": stride for i, stride in enumerate(strides)},
        "A1": A1,
        "A2_SOURCE": A2_SOURCE,
        "A2": A2,
        "blocks": blocks,
        "A3_SOURCE": A3_SOURCE,
        "A3": A3,
        "R": R,
        "BD": BD,
    }
    grid = (to.numel() // (A1 * A2 * A3) * blocks, A2, 1)
    return [Launch(_copy_kernel, grid, arguments, {"num_warps": 4})]


@triton.jit
def _copy_kernel(
    source_ptr,  # [A0, A1, A2_SOURCE, A3_SOURCE]
    to_ptr,  # [A0, A1, A2, A3]
    stride_0,
    stride_1,
    stride_2,
    stride_3,
    A1,
    A2_SOURCE,
    A2,
    blocks,  # number of blocks of R rows along A1
    A3_SOURCE: tl.constexpr,
    A3: tl.constexpr,
    R: tl.constexpr,
    BD: tl.constexpr,
):
    """Copies R rows along A1, at one index of A0 and one index of A2."""
    i_0 = (tl.program_id(0) // blocks).to(tl.int64)
    i_1 = tl.program_id(0) % blocks * R + tl.arange(0, R)  # [R]
    i_2 = tl.program_id(1).to(tl.int64)
    column = tl.arange(0, BD)[None, :]  # [1, BD]
    inside = (i_1 < A1)[:, None]  # [R, 1]
    there = inside & (column < A3_SOURCE) & (i_2 < A2_SOURCE)  # [R, BD]
    first = i_0 * stride_0 + i_1.to(tl.int64) * stride_1 + i_2 * stride_2  # [R]
    x = tl.load(source_ptr + first[:, None] + column.to(tl.int64) * stride_3, mask=there, other=0.0)  # [R, BD]
    row = (i_0 * A1 + i_1) * A2 + i_2  # [R]
    tl.store(to_ptr + row[:, None] * A3 + column, x, mask=inside & (column < A3))
