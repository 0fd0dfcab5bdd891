"""Kernels of `gla_transformers.gated`, forward and backward. Imports Triton.

    gated       y = f(g) x                  dx = f(g) dy                    dg = f'(g) x dy
    normed      y = f(g) n w                dx = r (u - n mean(u n))        dg = f'(g) n w dy       dw = sum f(g) n dy
      of f(g) x y = n w                     dx = f(g) r (u - n mean(u n))   dg = f'(g) x r (u - n mean(u n))

    forgetting  y = f(q)                    k = (1 - c) sigma(-z)           g = log alpha, for logits z and a bound c
                dq = f'(q) dy               dz = (1 - c) sigma(z) e             dc = sum e

    f(g) = g sigma(g)       r = 1 / sqrt(mean(x^2) + eps)       n = r x       u = f(g) w dy
    alpha = 1 - k = c + (1 - c) sigma(z)                        e = sigma(-z) (dg / alpha - dk)

Without a gate f = 1, and without a weight w = 1. If the gate comes first, the norm is that of f(g) x: then this stands
for x in r and n, u = w dy, and dw = sum n dy.

Each kernel reads its inputs once, computes in float32, and rounds each result once. A sum over rows is made of the sums
of programs in a fixed order.

N rows, which are tokens or heads of tokens   H heads of a token   G rows of w: 1 or H   V width of a row
ALL V rounded up to a power of two   BN rows of a tile   P programs
"""

# pyright: reportGeneralTypeIssues=false, reportArgumentType=false
from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from gla_core.dispatch.tensors import ceil_div
from gla_triton_runtime.architecture import gpu_of
from gla_triton_runtime.launch import Launch
from gla_triton_runtime.prepared import launches_for
from gla_triton_runtime.sizes import power_of_two

BLOCK = 1024
"""The number of values of a row that a program of `gated` computes."""
TILE = 2048
"""The number of values of a tile of `normed`: 16 for each thread."""
WARP = 1024
"""The greatest number of values of a row that a warp computes: 32 for each thread."""
PROGRAMS, GATE_PROGRAMS = 4, 8
"""The number of programs of a multiprocessor that sum over rows, about as many as run at the same time: in the backward
of `normed`, and in that of `forgetting`."""

Grid = tuple[int, int, int]


def gated(gate: Tensor, x: Tensor) -> Tensor:
    """Returns silu(gate) * x for gate and x [..., V] of one dtype. Their rows may be any equal distance apart."""
    y = _like(x)
    gates, factors = _rows(gate), _rows(x)
    _start(_gated, _blocks(x), (gates, factors, y), (), gates.stride(0), factors.stride(0), x.shape[-1], BLOCK)
    return y


def gated_backward(gate: Tensor, x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the gradients of gate and x from that of y [..., V]."""
    dgate, dx = _like(x), _like(x)
    gates, factors = _rows(gate), _rows(x)
    tensors, strides = (gates, factors, dy.contiguous(), dgate, dx), (gates.stride(0), factors.stride(0))
    _start(_gated_backward, _blocks(x), tensors, (), *strides, x.shape[-1], BLOCK)
    return dgate, dx


def forgetting(q: Tensor, f: Tensor, bound: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Returns silu(q), 1 - alpha and, in float32, log alpha for alpha = bound + (1 - bound) sigma(f).

    Args:
        q, f: [..., V] of one dtype. Their rows may be any equal distance apart.
        bound: [V], from 0 to below 1; None for 0.
    """
    y, k, g = _like(q), _like(q), torch.empty(q.shape, dtype=torch.float32, device=q.device)
    queries, logits = _rows(q), _rows(f)
    tensors, strides = (queries, logits, bound, y, k, g), (queries.stride(0), logits.stride(0))
    _start(_forgetting, _blocks(q), tensors, (), *strides, q.shape[-1], BLOCK)
    return y, k, g


def forgetting_backward(
    q: Tensor, f: Tensor, bound: Tensor | None, dy: Tensor, dk: Tensor, dg: Tensor, with_bound: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns the gradients of q, f and, if `with_bound`, bound, from the gradients dy, dk and dg of `forgetting`."""
    dq, df = _like(q), _like(q)
    queries, logits = _rows(q), _rows(f)
    rows, blocks, _ = _blocks(q)
    programs, sums = rows, None
    if with_bound:
        programs = min(rows, ceil_div(GATE_PROGRAMS * gpu_of(q.device).multiprocessors, max(1, blocks)))
        sums = q.new_empty(programs, q.shape[-1], dtype=torch.float32)
    tensors = (queries, logits, bound, dy.contiguous(), dk.contiguous(), dg.contiguous(), dq, df, sums)
    strides = (queries.stride(0), logits.stride(0))
    _start(_forgetting_backward, (programs, blocks, 1), tensors, (), *strides, rows, q.shape[-1], BLOCK)
    return dq, df, None if bound is None or sums is None else sums.sum(0).to(bound.dtype)


def _blocks(x: Tensor) -> Grid:
    V = x.shape[-1]
    return x.numel() // max(1, V), ceil_div(V, BLOCK), 1


def normed(x: Tensor, weight: Tensor | None, gate: Tensor | None, eps: float, gate_first: bool = False) -> Tensor:
    """Returns x / sqrt(mean(x^2) + eps) * weight * silu(gate) for x and gate [..., H, V] of one dtype.

    Without a gate its factor is 1. The tokens of gate may be any equal distance apart.

    Args:
        weight: [V] or [H, V].
        gate_first: whether x * silu(gate) is normed.
    """
    x, gates, y = x.contiguous(), _token_offsets(gate), _like(x)
    sizes = _sizes(x, weight, gates, gate_first)
    _start(_normed, (ceil_div(sizes.N, sizes.BN), 1, 1), (x, weight, gates, y), (eps,), *sizes)
    return y


def normed_backward(
    x: Tensor, weight: Tensor | None, gate: Tensor | None, dy: Tensor, eps: float, gate_first: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Returns the gradients of x, weight and gate from that of y [..., H, V]."""
    x, gates, dy = x.contiguous(), _token_offsets(gate), dy.contiguous()
    sizes = _sizes(x, weight, gates, gate_first)
    groups = ceil_div(min(ceil_div(sizes.N, sizes.BN), PROGRAMS * gpu_of(x.device).multiprocessors), sizes.G)
    programs = groups * sizes.G  # row i of each tile of a program then has the same row of w
    dx, dgate = _like(x), None if gates is None else _like(x)
    parts = groups if sizes.G == 1 else groups * sizes.BN
    sums = None if weight is None else x.new_empty(parts, sizes.G, sizes.V, dtype=torch.float32)
    tensors = (x, weight, gates, dy, dx, dgate, sums)
    _start(_normed_backward, (programs, 1, 1), tensors, (eps,), *sizes)
    dw = None if weight is None or sums is None else sums.sum(0).view(weight.shape).to(weight.dtype)
    return dx, dw, dgate


def _like(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _rows(x: Tensor) -> Tensor:
    """Returns x [..., V] as [N, V] with contiguous rows: a view of a slice of a product [..., n]."""
    rows = x.flatten(0, -2)
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _token_offsets(gate: Tensor | None) -> Tensor | None:
    """Returns a gate [..., H, V] as [tokens, H, V] whose heads lie behind one another."""
    if gate is None:
        return None
    gates = gate.flatten(0, -3)
    _, H, V = gates.shape
    return gates if gates.stride(2) == 1 and (H == 1 or gates.stride(1) == V) else gates.contiguous()


class _Sizes(NamedTuple):
    """The last parameters of the kernels of norms, in order."""

    gate_stride: int
    N: int
    H: int
    G: int
    V: int
    BN: int
    ALL: int
    GATE_FIRST: bool


def _sizes(x: Tensor, weight: Tensor | None, gates: Tensor | None, gate_first: bool) -> _Sizes:
    """Returns the sizes of a norm of x [..., V] with a weight [V] or [H, V] and gates [tokens, H, V]."""
    V = x.shape[-1]
    ALL = power_of_two(V)
    G = 1 if weight is None or weight.ndim == 1 else len(weight)
    stride, H = (0, 1) if gates is None else (gates.stride(0), gates.shape[1])
    return _Sizes(stride, x.numel() // V, H, G, V, max(1, TILE // ALL), ALL, gate_first and gates is not None)


def _start(kernel: Any, grid: Grid, tensors: tuple[Any, ...], floats: tuple[float, ...], *rest: int) -> None:
    """Launches a kernel, whose parameters are tensors, floats and the rest, in this order; nothing for no rows."""
    if grid[0]:
        dtypes = tuple(None if x is None else x.dtype for x in tensors)
        launched = launches_for(tensors[0].device, kernel, grid, dtypes, rest)
        if unrecorded := launched.replay(tensors, *floats):
            arguments = dict(zip(kernel.arg_names, (*tensors, *floats, *rest), strict=True))
            options = {"num_warps": max(4, arguments.get("ALL", 0) // WARP)}
            unrecorded.start([Launch(kernel, grid, arguments, options)])


@triton.jit
def _gated(
    gate_ptr,  # [N, V], rows gate_stride apart
    x_ptr,  # [N, V], rows x_stride apart
    y_ptr,  # [N, V], contiguous
    gate_stride,
    x_stride,
    V,
    BLOCK: tl.constexpr,
):
    """Computes a block of one row of y."""
    n = tl.program_id(0).to(tl.int64)
    gate, x, places, inside = _block(gate_ptr, x_ptr, gate_stride, x_stride, n, V, BLOCK)
    tl.store(y_ptr + places, (gate * tl.sigmoid(gate) * x).to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _gated_backward(
    gate_ptr,  # [N, V], rows gate_stride apart
    x_ptr,  # [N, V], rows x_stride apart
    dy_ptr,  # [N, V], contiguous
    dgate_ptr,  # [N, V], contiguous
    dx_ptr,  # [N, V], contiguous
    gate_stride,
    x_stride,
    V,
    BLOCK: tl.constexpr,
):
    """Computes a block of one row of dg and dx."""
    dtype = dx_ptr.dtype.element_ty
    n = tl.program_id(0).to(tl.int64)
    gate, x, places, inside = _block(gate_ptr, x_ptr, gate_stride, x_stride, n, V, BLOCK)
    dy = tl.load(dy_ptr + places, mask=inside, other=0.0).to(tl.float32)  # [BLOCK]
    f, slope = _silu(gate)
    tl.store(dgate_ptr + places, (slope * x * dy).to(dtype), mask=inside)
    tl.store(dx_ptr + places, (f * dy).to(dtype), mask=inside)


@triton.jit
def _forgetting(
    q_ptr,  # [N, V], rows q_stride apart
    f_ptr,  # [N, V], rows f_stride apart
    bound_ptr,  # [V] or None
    y_ptr,  # [N, V], contiguous
    k_ptr,  # [N, V], contiguous
    g_ptr,  # [N, V], contiguous
    q_stride,
    f_stride,
    V,
    BLOCK: tl.constexpr,
):
    """Computes a block of one row of silu(q), of keys and of log gates."""
    n = tl.program_id(0).to(tl.int64)
    q, f, places, inside = _block(q_ptr, f_ptr, q_stride, f_stride, n, V, BLOCK)
    bound = _bound(bound_ptr, V, BLOCK)  # [BLOCK], or 0
    up, down = _logistic(f)
    both = up + down
    k, alpha = (1.0 - bound) * (down / both), bound + (1.0 - bound) * (up / both)
    # log(1 - k) for small k, by the quotient of log(rounded 1 - k) and its rounded argument
    near = 1.0 - k
    few = tl.where(near == 1.0, -k, tl.log(near) * (k / tl.where(near == 1.0, 1.0, 1.0 - near)))
    g = tl.where(k < 0.5, few, tl.where(bound == 0.0, tl.minimum(f, 0.0) - tl.log(both), tl.log(alpha)))
    tl.store(y_ptr + places, (q * tl.sigmoid(q)).to(y_ptr.dtype.element_ty), mask=inside)
    tl.store(k_ptr + places, k.to(k_ptr.dtype.element_ty), mask=inside)
    tl.store(g_ptr + places, g, mask=inside)


@triton.jit
def _forgetting_backward(
    q_ptr,  # [N, V], rows q_stride apart
    f_ptr,  # [N, V], rows f_stride apart
    bound_ptr,  # [V] or None
    dy_ptr,  # [N, V], contiguous
    dk_ptr,  # [N, V], contiguous
    dg_ptr,  # [N, V], contiguous
    dq_ptr,  # [N, V], contiguous
    df_ptr,  # [N, V], contiguous
    sums_ptr,  # [P, V], contiguous, or None: the sums of each program for the gradient of the bound
    q_stride,
    f_stride,
    N,
    V,
    BLOCK: tl.constexpr,
):
    """Computes a block of every P-th row of dq and df."""
    dtype = dq_ptr.dtype.element_ty
    bound = _bound(bound_ptr, V, BLOCK)  # [BLOCK], or 0
    total = tl.zeros([BLOCK], tl.float32)
    for row in range(tl.program_id(0), N, tl.num_programs(0)):
        q, f, places, inside = _block(q_ptr, f_ptr, q_stride, f_stride, tl.cast(row, tl.int64), V, BLOCK)
        dy = tl.load(dy_ptr + places, mask=inside, other=0.0).to(tl.float32)  # [BLOCK]
        dk = tl.load(dk_ptr + places, mask=inside, other=0.0).to(tl.float32)  # [BLOCK]
        dg = tl.load(dg_ptr + places, mask=inside, other=0.0)  # [BLOCK]
        _, slope = _silu(q)
        tl.store(dq_ptr + places, (slope * dy).to(dtype), mask=inside)
        up, down = _logistic(f)
        up = tl.maximum(up, 1e-30)  # not 0, because up / alpha is 1 where the bound is 0
        both, alpha = up + down, up + bound * down  # sigma(f), sigma(-f) and alpha are up, down and alpha over both
        # Without cancellation where alpha is near 0 or 1; up / alpha is at most 1, and dg / alpha may be inf.
        df = (1.0 - bound) * (down / both) * ((up / alpha) * dg - (up / both) * dk)  # [BLOCK]
        tl.store(df_ptr + places, df.to(dtype), mask=inside)
        if sums_ptr is not None:
            total += down * (dg / alpha - dk / both)
    if sums_ptr is not None:
        columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
        tl.store(sums_ptr + tl.program_id(0) * V + columns, total, mask=columns < V)


@triton.jit
def _block(a_ptr, b_ptr, a_stride, b_stride, n, V, BLOCK: tl.constexpr):
    """Returns a block [BLOCK] of row n of two matrices [N, V], its places in a contiguous matrix, and which of its
    columns are inside.
    """
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < V
    a = tl.load(a_ptr + n * a_stride + columns, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + n * b_stride + columns, mask=inside, other=0.0).to(tl.float32)
    return a, b, n * V + columns, inside


@triton.jit
def _bound(bound_ptr, V, BLOCK: tl.constexpr):
    """Returns a block [BLOCK] of a bound [V]; 0 for None."""
    bound = 0.0
    if bound_ptr is not None:
        columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        bound = tl.load(bound_ptr + columns, mask=columns < V, other=0.0).to(tl.float32)
    return bound


@triton.jit
def _logistic(f):
    """Returns a and b for which sigma(f) is a / (a + b) and sigma(-f) is b / (a + b). The larger one is 1."""
    small = tl.exp(-tl.abs(f))
    return tl.where(f >= 0.0, 1.0, small), tl.where(f >= 0.0, small, 1.0)


@triton.jit
def _normed(
    x_ptr,  # [N, V], contiguous
    weight_ptr,  # [G, V] or None
    gate_ptr,  # [N / H, H, V], tokens gate_stride apart, or None
    y_ptr,  # [N, V], contiguous
    eps,
    gate_stride,
    N,
    H: tl.constexpr,
    G: tl.constexpr,
    V: tl.constexpr,
    BN: tl.constexpr,
    ALL: tl.constexpr,
    GATE_FIRST: tl.constexpr,
):
    """Computes a tile of BN rows of y."""
    rows = (tl.program_id(0) * BN + tl.arange(0, BN)).to(tl.int64)  # [BN]
    columns = tl.arange(0, ALL)  # [ALL]
    n, _, weight, _, f, _, inside = _tile(
        x_ptr, weight_ptr, gate_ptr, eps, gate_stride, rows, columns, N, H, G, V, GATE_FIRST
    )
    y = n * weight if GATE_FIRST else n * weight * f  # [BN, ALL]
    tl.store(y_ptr + rows[:, None] * V + columns[None, :], y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _normed_backward(
    x_ptr,  # [N, V], contiguous
    weight_ptr,  # [G, V] or None
    gate_ptr,  # [N / H, H, V], tokens gate_stride apart, or None
    dy_ptr,  # [N, V], contiguous
    dx_ptr,  # [N, V], contiguous
    dgate_ptr,  # [N, V], contiguous, or None
    sums_ptr,  # [P, V], or [P, BN, V] if G > 1, contiguous, or None: the sums of each program for dw
    eps,
    gate_stride,
    N,
    H: tl.constexpr,
    G: tl.constexpr,
    V: tl.constexpr,
    BN: tl.constexpr,
    ALL: tl.constexpr,
    GATE_FIRST: tl.constexpr,
):
    """Computes every P-th tile of BN rows of dx and dg."""
    dtype = dx_ptr.dtype.element_ty
    columns = tl.arange(0, ALL)  # [ALL]
    total = tl.zeros([BN, ALL], tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(N, BN), tl.num_programs(0)):
        rows = (tile * BN + tl.arange(0, BN)).to(tl.int64)  # [BN]
        n, r, weight, x, f, slope, inside = _tile(
            x_ptr, weight_ptr, gate_ptr, eps, gate_stride, rows, columns, N, H, G, V, GATE_FIRST
        )
        places = rows[:, None] * V + columns[None, :]  # [BN, ALL]
        dy = tl.load(dy_ptr + places, mask=inside, other=0.0).to(tl.float32)  # [BN, ALL]
        dn = weight * dy if GATE_FIRST else f * weight * dy
        du = r * (dn - n * (tl.sum(dn * n, axis=1) / V)[:, None])  # of what is normed
        tl.store(dx_ptr + places, (du * f if GATE_FIRST else du).to(dtype), mask=inside)
        if gate_ptr is not None:
            dgate = slope * x * du if GATE_FIRST else slope * n * weight * dy
            tl.store(dgate_ptr + places, dgate.to(dtype), mask=inside)
        total += n * dy if GATE_FIRST else f * n * dy
    if sums_ptr is not None:
        if G == 1:
            tl.store(sums_ptr + tl.program_id(0) * V + columns, tl.sum(total, axis=0), mask=columns < V)
        else:
            rows = tl.program_id(0) * BN + tl.arange(0, BN)  # [BN]
            tl.store(sums_ptr + rows[:, None] * V + columns[None, :], total, mask=(columns < V)[None, :])


@triton.jit
def _tile(
    x_ptr,
    weight_ptr,
    gate_ptr,
    eps,
    gate_stride,
    rows,
    columns,
    N,
    H: tl.constexpr,
    G: tl.constexpr,
    V: tl.constexpr,
    GATE_FIRST: tl.constexpr,
):
    """Returns n [BN, ALL], r [BN, 1], w [1 or BN, ALL], x, f(g) and f'(g) [BN, ALL] of a tile, and where it is inside
    of the matrix.
    """
    inside = (rows < N)[:, None] & (columns < V)[None, :]  # [BN, ALL]
    x = tl.load(x_ptr + rows[:, None] * V + columns[None, :], mask=inside, other=0.0).to(tl.float32)  # [BN, ALL]
    weight, f, slope = 1.0, 1.0, 0.0
    if weight_ptr is not None:
        if G == 1:
            weight = tl.load(weight_ptr + columns, mask=columns < V, other=0.0).to(tl.float32)[None, :]
        else:
            weight_rows = weight_ptr + rows % G * V  # [BN]
            weight = tl.load(weight_rows[:, None] + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    if gate_ptr is not None:
        gate_rows = gate_ptr + rows // H * gate_stride + rows % H * V  # [BN]
        gate = tl.load(gate_rows[:, None] + columns[None, :], mask=inside, other=0.0).to(tl.float32)
        f, slope = _silu(gate)
    u = x * f if GATE_FIRST else x
    r = tl.rsqrt(tl.sum(u * u, axis=1) / V + eps)[:, None]
    return u * r, r, weight, x, f, slope, inside


@triton.jit
def _silu(gate):
    """Returns silu(gate) and its derivative."""
    sigma = tl.sigmoid(gate)
    f = gate * sigma
    return f, sigma + f * (1.0 - sigma)
