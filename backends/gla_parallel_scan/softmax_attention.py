"""Softmax attention with the keys in pieces: all pieces at once, then one o and one lse from those of the pieces.

    m = max_p lse_p        w_p = exp(lse_p - m)        z = sum_p w_p
    o = sum_p w_p o_p / z        lse = m + log z

A few rows of queries read keys and values as fast as they come only if all multiprocessors have some of the keys. The
kernel that attends to a piece is that of ../gla_triton_kernels/softmax_attention.py.

B batch   Tq, Tk queries and keys   H key/value heads   G query heads per key/value head   V value width
P pieces   BP pieces that are merged at a time   BV a block of V

Source: Dao et al., "FlashAttention" (arXiv 2205.14135), on the online softmax of arXiv 1805.02867.
"""

# pyright: reportGeneralTypeIssues=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gla_triton_kernels.runtime.architecture import gpu_of
from gla_triton_kernels.runtime.launch import launch, on_device_of
from gla_triton_kernels.runtime.sizes import power_of_two
from gla_triton_kernels.softmax_attention import forward as general

PROGRAMS = 4
"""Programs per multiprocessor: two waves of two."""

FEW_ROWS = 16
"""With so many rows a program waits for its keys alone: another block of them is on its way, and one wave is best."""

FEWEST_BLOCKS = 4
"""Blocks of keys that a piece has at least, so that its o is less to write than its keys are to read."""


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """See gla_core/ops/softmax_attention.py."""
    o = v.new_empty((*q.shape[:3], v.shape[3]))
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    if not lse.numel():
        return o, lse
    if scale < 0:  # the kernel takes the greatest product for the greatest score
        q, scale = -q, -scale
    with on_device_of(q):
        cut = general.blocks(q, v)
        if cut.BR <= FEW_ROWS and q.dtype != torch.float32:
            cut = cut._replace(num_stages=3)
        piece = _piece(q, v, causal, cut)
        pieces = -(-v.shape[1] // piece)
        if pieces <= 1:
            general.run(q, k, v, scale, causal, o, lse, cut)
        else:
            parts = torch.empty((pieces, *o.shape), dtype=torch.float32, device=q.device)
            part_lses = lse.new_empty((pieces, *lse.shape))
            general.run(q, k, v, scale, causal, parts, part_lses, cut, piece)
            _merge(parts, part_lses, o, lse)
    return o, lse


def _piece(q: Tensor, v: Tensor, causal: bool, cut: general.Blocks) -> int:
    """Keys of a piece, for the device to have its fill of programs that see the keys of theirs."""
    (B, Tq, Hq, _), (_, Tk, H, _) = q.shape, v.shape
    tiles = -(-Tq * (Hq // H) // cut.BR) * B * H
    seen = max(1, Tk - min(Tq, Tk) // 2 if causal else Tk)  # by the tiles' rows, on average
    programs = 3 if cut.num_stages == 3 else PROGRAMS  # three share a multiprocessor
    keys = tiles * seen / (programs * gpu_of(q.device).multiprocessors)
    return max(FEWEST_BLOCKS, -(-int(keys) // cut.BT)) * cut.BT


def _merge(parts: Tensor, part_lses: Tensor, o: Tensor, lse: Tensor) -> None:
    """Write o and lse from those of the pieces."""
    P, V = parts.shape[0], o.shape[-1]
    BV = min(power_of_two(V), 64)
    BP = min(power_of_two(P), 64)
    launch(_merge_pieces, (lse.numel(), -(-V // BV), 1), (parts, part_lses, o, lse), (), (P, V, BP, BV), num_warps=4)


@triton.jit(do_not_specialize=["P"])
def _merge_pieces(
    parts_ptr,  # [P, rows, V]
    part_lses_ptr,  # [P, rows]
    o_ptr,  # [rows, V]
    lse_ptr,  # [rows]
    P,
    V: tl.constexpr,
    BP: tl.constexpr,
    BV: tl.constexpr,
):
    """Program: BV columns of a row's output."""
    row, rows = tl.program_id(0).to(tl.int64), tl.num_programs(0).to(tl.int64)
    p, j = tl.arange(0, BP), tl.program_id(1) * BV + tl.arange(0, BV)
    m = tl.full((BP,), -float("inf"), tl.float32)
    for first in range(0, P, BP):
        lses = tl.load(part_lses_ptr + (first + p) * rows + row, mask=first + p < P, other=-float("inf"))  # [BP]
        m = tl.maximum(m, lses)
    m = tl.max(m, 0)
    # Where no piece was seen, exp(-inf - 0) = 0 where exp(-inf + inf) would be NaN; then o = 0 / 0 = NaN.
    base = tl.where(m == -float("inf"), 0.0, m)
    z = tl.zeros((BP,), tl.float32)
    o = tl.zeros((BP, BV), tl.float32)
    for first in range(0, P, BP):
        lses = tl.load(part_lses_ptr + (first + p) * rows + row, mask=first + p < P, other=-float("inf"))  # [BP]
        seen = (lses != -float("inf"))[:, None]  # [BP, 1]; what was not seen has o = NaN
        parts = tl.load(
            parts_ptr + ((first + p) * rows + row)[:, None] * V + j, mask=seen & (j < V), other=0.0
        )  # [BP, BV]
        w = tl.exp(lses - base)  # [BP]
        z += w
        o += w[:, None] * parts
    z = tl.sum(z, 0)
    o = tl.sum(o, 0) / z  # [BV]
    tl.store(o_ptr + row * V + j, o.to(o_ptr.dtype.element_ty), mask=j < V)
    tl.store(lse_ptr + row, m + tl.log(z), mask=tl.program_id(1) == 0)
