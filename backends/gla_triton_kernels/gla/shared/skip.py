"""Adds what a skip with a number for each channel gives to the gradient of x, and computes the gradient of the skip.

The skip adds D x_t to o_t [V], so with a sum over all tokens

    dx_t += D do_t        dD = sum x_t do_t

A skip with one number for each head is a part of the kernel that computes dx; see sm90/backward_group.py.

B batch   T tokens   N sequences   Hv value heads   V value width   BT tokens that a program reads at once
STEPS times that it does so   BV values of a program
"""

# pyright: reportGeneralTypeIssues=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gla_core.dispatch.tensors import ceil_div
from gla_triton_kernels.chunks.partials import launch_sum_of_rows
from gla_triton_runtime.launch import Launch


def launch_skip_gradients(
    x: Tensor, D: Tensor, cu_seqlens: Tensor | None, do: Tensor, dx: Tensor, dD: Tensor
) -> list[Launch]:
    """Returns the launches that add to dx and fill dD.

    Args:
        x, do: [B, T, Hv, V], with V contiguous.
        D: [Hv, V].
        cu_seqlens: offsets of packed sequences [N+1], or None. Tokens of no sequence count in no sum, and nothing is
            added to their dx.
        dx, dD: as x and D, contiguous.
    """
    (B, T, Hv, V), BT, STEPS, BV = x.shape, 64, 4, 64
    rows = ceil_div(B * T, BT * STEPS)
    sums = dD.new_empty(rows, Hv, V, dtype=torch.float32)
    arguments = {
        "x_ptr": x,
        "D_ptr": D,
        "cu_seqlens_ptr": cu_seqlens,
        "do_ptr": do,
        "dx_ptr": dx,
        "dD_ptr": sums,
        **dict(zip(("x_b", "x_t", "x_h"), x.stride()[:3], strict=True)),
        **dict(zip(("do_b", "do_t", "do_h"), do.stride()[:3], strict=True)),
        **dict(zip(("D_h", "D_v"), D.stride(), strict=True)),
        "tokens": B * T,
        "T": T,
        "N": 0 if cu_seqlens is None else len(cu_seqlens) - 1,
        "Hv": Hv,
        "V": V,
        "BT": BT,
        "STEPS": STEPS,
        "BV": BV,
    }
    grid = (rows, Hv, ceil_div(V, BV))
    return [Launch(_skip_gradients_kernel, grid, arguments, {"num_warps": 4}), launch_sum_of_rows(sums, dD)]


@triton.jit(
    do_not_specialize=["D_h", "D_v", "tokens", "T", "N"], do_not_specialize_on_alignment=["D_ptr", "cu_seqlens_ptr"]
)
def _skip_gradients_kernel(
    x_ptr,  # [B, T, Hv, V]
    D_ptr,  # [Hv, V]
    cu_seqlens_ptr,  # [N+1] or None
    do_ptr,  # [B, T, Hv, V]
    dx_ptr,  # [B, T, Hv, V], contiguous
    dD_ptr,  # sums of each BT STEPS tokens, [programs, Hv, V]
    x_b,
    x_t,
    x_h,
    do_b,
    do_t,
    do_h,
    D_h,
    D_v,
    tokens,  # B * T
    T,
    N,
    Hv: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    STEPS: tl.constexpr,
    BV: tl.constexpr,
):
    """Adds to dx of BT STEPS tokens, a head and BV values, and computes their sum."""
    row, h = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    v = tl.program_id(2) * BV + tl.arange(0, BV)  # [BV]
    first, last = 0, tokens
    if cu_seqlens_ptr is not None:
        first, last = tl.load(cu_seqlens_ptr), tl.load(cu_seqlens_ptr + N)
    D = tl.load(D_ptr + h * D_h + v * D_v, mask=v < V, other=0.0).to(tl.float32)  # [BV]
    total = tl.zeros([BT, BV], tl.float32)
    for step in range(STEPS):
        token = (row * STEPS + step) * BT + tl.arange(0, BT)  # [BT]
        counts = ((token >= first) & (token < last))[:, None] & (v < V)[None, :]  # [BT, BV]
        b, t = token // T, token % T
        x = tl.load(x_ptr + (b * x_b + t * x_t + h * x_h)[:, None] + v[None, :], mask=counts, other=0.0)
        do = tl.load(do_ptr + (b * do_b + t * do_t + h * do_h)[:, None] + v[None, :], mask=counts, other=0.0)
        do = do.to(tl.float32)  # [BT, BV]
        at = dx_ptr + ((token * Hv + h) * V)[:, None] + v[None, :]  # [BT, BV]
        dx = tl.load(at, mask=counts, other=0.0).to(tl.float32) + D[None, :] * do
        tl.store(at, dx.to(dx_ptr.dtype.element_ty), mask=counts)
        total += x.to(tl.float32) * do
    tl.store(dD_ptr + (row * Hv + h) * V + v, tl.sum(total, 0), mask=v < V)
