"""silu(gate) * x in one Triton kernel. PyTorch takes two, which counts in a decoding step. Imports Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit
def _kernel(gate, x, y, width, gate_stride, x_stride, BLOCK: tl.constexpr):
    # gate, x [rows, width], rows gate_stride and x_stride apart; y [rows, width] contiguous
    row, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    g = tl.load(gate + row * gate_stride + columns, mask=inside, other=0.0).to(tl.float32)  # [BLOCK]
    factor = tl.load(x + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)  # [BLOCK]
    tl.store(y + row * width + columns, (g * tl.sigmoid(g) * factor).to(y.dtype.element_ty), mask=inside)


def gated(gate: Tensor, x: Tensor) -> Tensor:
    """Returns silu(gate) * x for gate and x [..., width] of one dtype, rounded once.

    The rows may be any equal distance apart.
    """
    width = gate.shape[-1]
    y = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    rows, factors = gate.flatten(0, -2), x.flatten(0, -2)  # views of slices of a product [..., n]
    grid = (len(rows), triton.cdiv(width, BLOCK))
    if len(rows):
        strides = (rows.stride(0), factors.stride(0))
        _kernel[grid](rows, factors, y, width, *strides, BLOCK)  # pyright: ignore[reportArgumentType]
    return y
