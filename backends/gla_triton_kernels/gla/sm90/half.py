"""Converts float32 tensors to float16, in which the kernels for SM90 compute float32 under matmul precision "high".

A float16 number has as many bits of precision as a TF32 operand, but a smaller range. So the tile x [C, W] of a chunk
and head is divided by its unit:

    y = x / unit        unit = the power of two for which 64 <= max |y| < 128

Kernels multiply products of such tiles by the units. Because they also divide states by the units of other chunks, a
unit is at least LEAST, and 1 if the tile is 0.

B batch   T tokens   N sequences   Hx heads of x   W width of a head   C tokens of a chunk   D columns read at once
"""

# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gla_core.dispatch.backend import CHUNK
from gla_core.dispatch.tensors import ceil_div
from gla_triton_kernels.chunks.results import AnyTensors
from gla_triton_runtime.launch import Launch, strides_of
from gla_triton_runtime.sizes import power_of_two

LEAST = 2.0**-20
LEAST_OF_GRADIENTS = 2.0**-60
"""The least unit of do, because the gradients of a mean over many tokens are small."""


def in_half(
    x: AnyTensors, names: tuple[str, ...], cu_seqlens: Tensor | None
) -> tuple[AnyTensors, dict[str, Tensor | None], list[Launch]]:
    """Converts float32 tensors of x to float16.

    Args:
        names: names of the tensors [B, T, Hx, W] of x, all of the same dtype. If it is not float32, nothing is
            converted.

    Returns:
        x with the converted tensors; the units as arguments of a kernel, by names such as "q_units"; and the launches
        that fill both. Units are [rows, Hx] in float32, or None if nothing is converted. Rows are numbered like
        checkpoints every `CHUNK` tokens.
    """
    tensors: dict[str, Tensor] = {name: getattr(x, name) for name in names}
    if tensors[names[0]].dtype != torch.float32:
        return x, {f"{name}_units": None for name in names}, []
    halves = {name: torch.empty(y.shape, dtype=torch.float16, device=y.device) for name, y in tensors.items()}
    units, launches = {}, []
    for name, y in tensors.items():
        B, T, H, _ = y.shape
        rows = B * ceil_div(T, CHUNK) if cu_seqlens is None else len(cu_seqlens) - 1 + T // CHUNK
        units[f"{name}_units"] = unit = y.new_empty(rows, H)
        launches.append(_conversion(y, halves[name], unit, cu_seqlens, LEAST_OF_GRADIENTS if name == "do" else LEAST))
    return x._replace(**halves), units, launches


def _conversion(x: Tensor, y: Tensor, units: Tensor, cu_seqlens: Tensor | None, least: float) -> Launch:
    T, H, W = x.shape[1:]
    arguments = {
        "x_ptr": x,
        "y_ptr": y,
        "units_ptr": units,
        "cu_seqlens_ptr": cu_seqlens,
        **strides_of("", x),
        "T": T,
        "N": 0 if cu_seqlens is None else len(cu_seqlens) - 1,
        "H": H,
        "W": W,
        "LEAST": torch.tensor(least, device="cpu").view(torch.int32).item() >> 23,
        "C": CHUNK,
        "D": min(128, power_of_two(W, 16)),
    }
    return Launch(_to_half_kernel, (units.numel(), 1, 1), arguments, {"num_warps": 4})


@triton.jit(do_not_specialize=["T", "N", "H"], do_not_specialize_on_alignment=["cu_seqlens_ptr"])
def _to_half_kernel(
    x_ptr,  # [B, T, Hx, W]
    y_ptr,  # [B, T, Hx, W], contiguous
    units_ptr,  # [rows, Hx]
    cu_seqlens_ptr,  # [N+1] or None
    stride_b,
    stride_t,
    stride_h,
    T,
    N,
    H,
    W,
    LEAST: tl.constexpr,  # the exponent of the least unit, as its bits
    C: tl.constexpr,
    D: tl.constexpr,
):
    """Converts the tile of one chunk and head, and writes its unit."""
    row, h = tl.program_id(0) // H, tl.program_id(0) % H
    if cu_seqlens_ptr is None:
        chunks = tl.cdiv(T, C)
        b, t, end = row // chunks, row % chunks * C, T
    else:
        n = _sequence_of(row, cu_seqlens_ptr, N, C)
        start = tl.load(cu_seqlens_ptr + n).to(tl.int32)
        b, t = 0, start + (row - n - start // C) * C
        end = tl.load(cu_seqlens_ptr + n + 1).to(tl.int32)
        end = tl.where(t < start, t, end)  # rows before the first sequence have no chunk
    token = (t + tl.arange(0, C))[:, None]  # [C, 1]
    column = tl.arange(0, D)[None, :]  # [1, D]
    x_at = x_ptr + tl.cast(b, tl.int64) * stride_b + token.to(tl.int64) * stride_t + tl.cast(h, tl.int64) * stride_h
    y_at = y_ptr + ((tl.cast(b, tl.int64) * T + token) * H + h) * W  # [C, 1]
    most = 0.0  # the largest absolute value of the tile
    for first in range(0, W, D):
        inside = (token < end) & (column < W - first)  # [C, D]
        most = tl.maximum(most, tl.max(tl.abs(tl.load(x_at + (first + column), mask=inside, other=0.0))))
    # The biased exponent of `most`, less 6: then max |y| is at least 2^6 = 64.
    exponent = tl.maximum((most.to(tl.int32, bitcast=True) >> 23) - 6, LEAST)
    exponent = tl.where(most == 0.0, 127, exponent)
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    for first in range(0, W, D):
        inside = (token < end) & (column < W - first)  # [C, D]
        x = tl.load(x_at + (first + column), mask=inside, other=0.0)
        tl.store(y_at + (first + column), (x * inverse).to(tl.float16), mask=inside)
    tl.store(units_ptr + tl.program_id(0), (exponent << 23).to(tl.float32, bitcast=True))


@triton.jit
def _sequence_of(row, cu_seqlens_ptr, N, C: tl.constexpr):
    """Returns the last of N sequences whose chunks begin at or before this row; 0 if there is none."""
    n, above = 0, N
    while above - n > 1:
        middle = (n + above) // 2
        first = middle + tl.load(cu_seqlens_ptr + middle).to(tl.int32) // C  # the row of its first chunk
        n = tl.where(first <= row, middle, n)
        above = tl.where(first <= row, above, middle)
    return n
