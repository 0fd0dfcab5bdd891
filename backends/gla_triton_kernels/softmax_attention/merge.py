"""Merges the outputs of splits of the keys into the output of softmax attention.

    m = max_p lse_p        w_p = exp(lse_p - m)        z = sum_p w_p
    o = sum_p w_p o_p / z        lse = m + log z

P splits   BP splits that a program merges at a time   V value width   BV values of a block
rows   of o, over batch, queries and heads

Source: Dao et al., "FlashAttention" (arXiv 2205.14135), on the online softmax of arXiv 1805.02867.
"""

# pyright: reportGeneralTypeIssues=false
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from gla_core.dispatch.tensors import ceil_div
from gla_triton_runtime.launch import Launch
from gla_triton_runtime.sizes import power_of_two


def launch_merge(split_o: Tensor, split_lse: Tensor, o: Tensor, lse: Tensor) -> list[Launch]:
    """Returns the launch that merges split_o [P, ..., V] and split_lse [P, ...] into o [..., V] and lse [...]."""
    P, V = split_o.shape[0], o.shape[-1]
    BP, BV = min(power_of_two(P), 64), min(power_of_two(V), 64)
    arguments = {
        "split_o_ptr": split_o,
        "split_lse_ptr": split_lse,
        "o_ptr": o,
        "lse_ptr": lse,
        "P": P,
        "V": V,
        "BP": BP,
        "BV": BV,
    }
    return [Launch(_merge, (lse.numel(), ceil_div(V, BV), 1), arguments, {"num_warps": 4})]


@triton.jit(do_not_specialize=["P"])
def _merge(
    split_o_ptr,  # [P, rows, V]
    split_lse_ptr,  # [P, rows]
    o_ptr,  # [rows, V]
    lse_ptr,  # [rows]
    P,
    V: tl.constexpr,
    BP: tl.constexpr,
    BV: tl.constexpr,
):
    """Merges BV columns of one row of o."""
    row, rows = tl.program_id(0).to(tl.int64), tl.num_programs(0).to(tl.int64)
    p, j = tl.arange(0, BP), tl.program_id(1) * BV + tl.arange(0, BV)  # [BP], [BV]
    m = tl.full((BP,), -float("inf"), tl.float32)
    for first in range(0, P, BP):
        lses = tl.load(split_lse_ptr + (first + p) * rows + row, mask=first + p < P, other=-float("inf"))  # [BP]
        m = tl.maximum(m, lses)
    m = tl.max(m, 0)
    # If the row attends to no key of any split, the weights below are exp(-inf - 0) = 0, so that o = 0 / 0 = NaN and
    # lse = -inf. Weights exp(-inf + inf) would make lse NaN as well.
    base = tl.where(m == -float("inf"), 0.0, m)
    z = tl.zeros((BP,), tl.float32)
    o = tl.zeros((BP, BV), tl.float32)
    for first in range(0, P, BP):
        lses = tl.load(split_lse_ptr + (first + p) * rows + row, mask=first + p < P, other=-float("inf"))  # [BP]
        seen = (lses != -float("inf"))[:, None]  # [BP, 1]; a split to which the row does not attend has o = NaN
        outputs = tl.load(
            split_o_ptr + ((first + p) * rows + row)[:, None] * V + j, mask=seen & (j < V), other=0.0
        )  # [BP, BV]
        w = tl.exp(lses - base)  # [BP]
        z += w
        o += w[:, None] * outputs
    z = tl.sum(z, 0)
    o = tl.sum(o, 0) / z  # [BV]
    tl.store(o_ptr + row * V + j, o.to(o_ptr.dtype.element_ty), mask=j < V)
    tl.store(lse_ptr + row, m + tl.log(z), mask=tl.program_id(1) == 0)
