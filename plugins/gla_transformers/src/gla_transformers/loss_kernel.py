"""Kernels of `gla_transformers.loss`, forward and backward. Imports Triton.

    m = max_d x_d        s = sum_d exp(x_d - m)        z = m + log s        loss = m - x_t + log s
    dx_d = (exp(x_d - z) - [d = t]) dloss

The forward reads the logits x once, with a running maximum and a running sum in each lane, and rescales the sum when
the maximum grows. The backward reads them once more and writes dx once. Both compute in float32. m - x_t keeps
digits that z loses for large logits. A row whose label is ignored is not read: loss, z and dx are 0.

Source: Milakov and Gimelshein, "Online normalizer calculation for softmax" (arXiv 1805.02867).

n rows, which are tokens   D words: columns of a row   t label of a row: its target   BLOCK columns of a tile
VECTOR columns of a lane in a tile, all in one thread: as many as 16 bytes hold   LANES = BLOCK / VECTOR
"""

# pyright: reportGeneralTypeIssues=false, reportArgumentType=false
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gla_core.dispatch.tensors import ceil_div
from gla_triton_runtime.launch import Launch
from gla_triton_runtime.prepared import launches_for
from gla_triton_runtime.sizes import power_of_two

WIDEST = 4096
"""The greatest number of columns of a tile."""
WARP = 512
"""The number of columns of a tile that a warp computes: 16 for each thread."""


def losses(logits: Tensor, targets: Tensor, ignored: int) -> tuple[Tensor, Tensor]:
    """Returns the losses and the normalizers z [n], in float32. The loss of a label out of range is NaN.

    Args:
        logits: [n, D]. Columns are contiguous, and rows may be any equal distance apart.
        targets: [n], int64.
    """
    losses_out, normalizers = (torch.empty(len(logits), dtype=torch.float32, device=logits.device) for _ in range(2))
    _start(_losses, (len(logits), 1, 1), (logits, targets.contiguous(), losses_out, normalizers), ignored)
    return losses_out, normalizers


def gradient(logits: Tensor, targets: Tensor, normalizers: Tensor, dloss: Tensor, ignored: int) -> Tensor:
    """Returns the gradient of the logits [n, D] from dloss [], that of the sum. It is NaN for a label out of range."""
    n, D = logits.shape
    dx = torch.empty(n, D, dtype=logits.dtype, device=logits.device)
    grid = (n, ceil_div(D, _columns(D)), 1)
    _start(_gradient, grid, (logits, targets.contiguous(), normalizers, dloss, dx), ignored)
    return dx


def _columns(D: int) -> int:
    return min(WIDEST, power_of_two(D, 16))


def _start(kernel: Any, grid: tuple[int, int, int], tensors: tuple[Tensor, ...], ignored: int) -> None:
    """Makes the launch of a kernel, whose first tensor is the logits; none for no logits."""
    logits = tensors[0]
    if logits.numel():
        sizes = logits.stride(0), logits.shape[1], ignored
        launched = launches_for(logits.device, kernel, grid, logits.dtype, *sizes)
        if unrecorded := launched.replay(tensors):
            unrecorded.start([launch(kernel, grid, tensors, *sizes)])


def launch(kernel: Any, grid: tuple[int, int, int], tensors: tuple[Tensor, ...], *sizes: int) -> Launch:
    """Returns the launch of a kernel on its tensors. The sizes are the logits' stride, D and the ignored label."""
    stride, D, _ = sizes
    BLOCK = _columns(D)
    constants = (16 // tensors[0].element_size(), stride % 16 == D % 16 == 0) if kernel is _losses else ()
    arguments = dict(zip(kernel.arg_names, (*tensors, *sizes, BLOCK, *constants), strict=True))
    return Launch(kernel, grid, arguments, {"num_warps": max(1, BLOCK // WARP)})


@triton.jit(do_not_specialize_on_alignment=["targets_ptr"])
def _losses(
    logits_ptr,  # [n, D], rows stride apart
    targets_ptr,  # [n]
    losses_ptr,  # [n]
    normalizers_ptr,  # [n]
    stride,
    D,
    ignored,
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Computes the loss and the normalizer of one row."""
    n = tl.program_id(0).to(tl.int64)
    target = tl.load(targets_ptr + n)
    counts = target != ignored
    logits_ptr += n * stride
    LANES: tl.constexpr = BLOCK // VECTOR
    lanes, vector = tl.arange(0, LANES)[:, None], tl.arange(0, VECTOR)[None, :]
    # a thread reads the columns of a lane at once if rows are aligned; otherwise neighbours read neighbouring columns
    columns = lanes * VECTOR + vector if ALIGNED else lanes + vector * LANES  # [LANES, VECTOR]
    m = tl.full([LANES], -float("inf"), tl.float32)  # [LANES]
    s = tl.zeros([LANES], tl.float32)  # [LANES]
    for start in range(0, tl.where(counts, D, 0), BLOCK):
        x = tl.load(logits_ptr + start + columns, mask=start + columns < D, other=-float("inf"))  # [LANES, VECTOR]
        x = x.to(tl.float32)
        most = tl.maximum(m, tl.max(x, axis=1))  # [LANES]
        base = _finite(most)
        s = s * tl.exp(m - base) + tl.sum(tl.exp(x - base[:, None]), axis=1)
        m = most
    most = tl.max(m, axis=0)
    log = tl.log(tl.sum(s * tl.exp(m - _finite(most)), axis=0))
    known = (target >= 0) & (target < D)
    chosen = tl.load(logits_ptr + target, mask=known, other=float("nan")).to(tl.float32)
    tl.store(losses_ptr + n, tl.where(counts, most - chosen + log, 0.0))
    tl.store(normalizers_ptr + n, tl.where(counts, most + log, 0.0))


@triton.jit(do_not_specialize_on_alignment=["targets_ptr", "dloss_ptr"])
def _gradient(
    logits_ptr,  # [n, D], rows stride apart
    targets_ptr,  # [n]
    normalizers_ptr,  # [n]
    dloss_ptr,  # []
    dlogits_ptr,  # [n, D], contiguous
    stride,
    D,
    ignored,
    BLOCK: tl.constexpr,
):
    """Computes a tile of one row of dx."""
    n = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    inside = columns < D
    target = tl.load(targets_ptr + n)
    counts, known = target != ignored, (target >= 0) & (target < D)
    x = tl.load(logits_ptr + n * stride + columns, mask=inside & counts, other=0.0).to(tl.float32)  # [BLOCK]
    slope = tl.where(known, tl.load(dloss_ptr), float("nan"))
    y = tl.exp(x - tl.load(normalizers_ptr + n)) - (columns == target).to(tl.float32)  # [BLOCK]
    dx = y * tl.where(counts, slope, 0.0)
    tl.store(dlogits_ptr + n * D + columns, dx.to(dlogits_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _finite(m):
    """Returns m with 0 in place of -inf, so that -inf - m is -inf and not NaN."""
    return tl.where(m == -float("inf"), 0.0, m)
