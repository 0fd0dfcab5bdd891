"""Folds the gradient of the log-sum-exp into o, for a backward that takes no dlse.

Such a backward computes delta = rowsum(do * o) from tensors of 16 bits, and uses o for nothing else. This kernel writes
an o' with

    rowsum(do * o') = rowsum(do * o) - dlse

With i and j the columns of a row with the largest and the second largest |do|,

    o'_i = o_i - dlse / do_i        o'_j = o_j - rest / do_j        rest = dlse - (o_i - o'_i) do_i

o'_i is rounded, and o'_j makes up for that. What the rounding of o'_j leaves is no more than what the rounding of o_j
leaves in delta. If do is 0 in a row, `TINY` takes the place of do_i. bfloat16 has room for all these numbers; float16
does not.

B batch   Tq queries   Hq query heads   V value width   R = B * Tq * Hq rows
BR rows of a tile   BV the width V, rounded up to a power of two
"""

# pyright: reportGeneralTypeIssues=false
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from gla_core.dispatch.tensors import ceil_div
from gla_triton_runtime.launch import Launch, strides_of
from gla_triton_runtime.sizes import power_of_two

TINY = tl.constexpr(2.0**-64)


def launch_fold(o: Tensor, do: Tensor, dlse: Tensor, folded_o: Tensor, folded_do: Tensor) -> list[Launch]:
    """Returns the launch that writes o' and do', which are contiguous."""
    B, Tq, Hq, V = o.shape
    BV = power_of_two(V, 16)
    BR = max(1, 4096 // BV)
    arguments = {
        "o_ptr": o,
        "do_ptr": do,
        "dlse_ptr": dlse,
        "folded_o_ptr": folded_o,
        "folded_do_ptr": folded_do,
        "R": B * Tq * Hq,
        "Tq": Tq,
        "Hq": Hq,
        **strides_of("o", o),
        **strides_of("d", do),
        **strides_of("l", dlse),
        "V": V,
        "BR": BR,
        "BV": BV,
    }
    return [Launch(_fold, (ceil_div(B * Tq * Hq, BR), 1, 1), arguments, {"num_warps": 4})]


@triton.jit(do_not_specialize=["R", "Tq"])
def _fold(
    o_ptr,  # [B, Tq, Hq, V]
    do_ptr,  # [B, Tq, Hq, V]
    dlse_ptr,  # [B, Tq, Hq]
    folded_o_ptr,  # [B, Tq, Hq, V], contiguous
    folded_do_ptr,  # [B, Tq, Hq, V], contiguous
    R,
    Tq,
    Hq,
    stride_ob,
    stride_ot,
    stride_oh,
    stride_db,
    stride_dt,
    stride_dh,
    stride_lb,
    stride_lt,
    stride_lh,
    V: tl.constexpr,
    BR: tl.constexpr,
    BV: tl.constexpr,
):
    """Folds dlse into BR rows of o."""
    r = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)  # [BR]
    there = r < R  # [BR]
    b, t, h = r // Hq // Tq, r // Hq % Tq, r % Hq  # [BR]
    i = tl.arange(0, BV)[None, :]  # [1, BV]
    here = there[:, None] & (i < V)  # [BR, BV]
    o_rows = o_ptr + b * stride_ob + t * stride_ot + h * stride_oh  # [BR]
    do_rows = do_ptr + b * stride_db + t * stride_dt + h * stride_dh  # [BR]
    o = tl.load(o_rows[:, None] + i, mask=here, other=0.0).to(tl.float32)  # [BR, BV]
    do = tl.load(do_rows[:, None] + i, mask=here, other=0.0).to(tl.float32)  # [BR, BV]
    dlse = tl.load(dlse_ptr + b * stride_lb + t * stride_lt + h * stride_lh, mask=there, other=0.0)  # [BR]

    size = tl.where(i < V, tl.abs(do), -1.0)  # [BR, BV]
    largest = i == tl.argmax(size, 1)[:, None]  # [BR, BV]
    do = tl.where(largest & (size < TINY), TINY, do)
    o_i, do_i = tl.sum(tl.where(largest, o, 0.0), 1), tl.sum(tl.where(largest, do, 0.0), 1)  # [BR]
    folded_i = (o_i - dlse / do_i).to(folded_o_ptr.dtype.element_ty).to(tl.float32)  # [BR]
    rest = dlse - (o_i - folded_i) * do_i  # [BR]
    size = tl.where(largest, -1.0, size)
    second = (i == tl.argmax(size, 1)[:, None]) & (size >= TINY)  # [BR, BV]
    o = tl.where(largest, folded_i[:, None], tl.where(second, o - rest[:, None] / do, o))
    at = r[:, None] * V + i  # [BR, BV]
    tl.store(folded_o_ptr + at, o.to(folded_o_ptr.dtype.element_ty), mask=here)
    tl.store(folded_do_ptr + at, do.to(folded_do_ptr.dtype.element_ty), mask=here)
