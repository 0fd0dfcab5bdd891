"""Matrix products for a few rows, each in one kernel with the norm before it and what follows it. Imports Triton.

    y = x W^T + bias + residual        y = silu(x W_gate^T) * (x W_up^T)        with rms_norm(x) in place of x

Such a product takes the time of reading W. Up to `FEW` rows of x, a program is one warp that reads BN rows of W and
multiplies them with one row of x after the other, which it norms by itself. The bits of a row of y do not depend on the
other rows then. More rows are multiplied by tensor cores, tile by tile, after a kernel that norms them. If K is long,
several programs share a tile, each with a split of K, and a kernel adds their products. Sums are float32, and values
are rounded where layers apart would round them.

x and the residual may be float32 though W is not. Then x is rounded to the dtype of W before its norm, and the product
is rounded before the residual is added.

Before it waits for the kernel that writes x, a program asks for its rows of W to be brought into the L2 cache. It reads
them after the wait, so it finds what earlier kernels wrote to W.

M rows of x   K width of x   N width of y   BM rows of a program   BN values of y of a program   BK part of K
SPLITS programs that share a tile
"""

# pyright: reportGeneralTypeIssues=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from gla_core.dispatch.tensors import ceil_div
from gla_triton_runtime.architecture import gpu_of
from gla_triton_runtime.launch import Launch, overlapping
from gla_triton_runtime.prepared import launches_for
from gla_triton_runtime.sizes import power_of_two

ALIGNMENT = 16
"""The alignment of weights in bytes."""
MOST_PARTS = 64
"""The most parts of K, which are unrolled."""
WIDE = 2048
"""The width of y from which programs compute more of it."""
SHARED = 96 * 1024
"""Bytes of shared memory for parts of x and W that are on their way: consumer cards have 99 KiB."""
ROWS_OF_WGMMA = 64
"""The rows of the left operand of wgmma."""
LONG = 2048
"""The width of x from which K is split."""
SUMS = 256
"""The values of y of a program that adds the products with splits of K."""
FEW, MOST = 2, 64
"""The most rows that are multiplied one after the other, and the most rows at all."""

Tensors = tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor]
"""x, weight, norm_weight, bias, residual and y, which is written."""


def is_served(weight: Tensor, M: int) -> bool:
    """Returns whether `product` takes a weight [E, K] for M rows."""
    dtype, K = weight.dtype, weight.shape[1]
    return (
        0 < M <= MOST
        and (dtype in (torch.bfloat16, torch.float16) or (dtype == torch.float32 and M <= FEW))
        and weight.data_ptr() % ALIGNMENT == 0
        and K % 16 == 0
        and K // _part(K) <= MOST_PARTS
    )


def product(
    x: Tensor,
    weight: Tensor,
    *,
    norm_weight: Tensor | None = None,
    norm_eps: float = 0.0,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    gated: bool = False,
) -> Tensor:
    """Returns y [M, N] for a few rows x [M, K]; see the module docstring. It has the dtype of residual, else of weight.

    Args:
        x: its last dimension is contiguous. It has the dtype of weight; if it is normed, it may be float32.
        weight: [N, K], contiguous; if `gated`, [2N, K], with W_gate first. `is_served` says whether it can be.
        norm_weight: [K], weight of the RMS norm of x; None if x is not normed.
        bias: [N].
        residual: [M, N], contiguous; of the dtype of weight, or float32.
    """
    M, K = x.shape
    N = len(weight) // 2 if gated else len(weight)
    y = weight.new_empty(M, N) if residual is None else residual.new_empty(M, N)
    dtypes = (x.dtype, weight.dtype, y.dtype)
    form = (M, K, N, x.stride(0), gated, norm_weight is None, bias is None, residual is None)
    launched, tensors = launches_for(x.device, launches, dtypes, *form), (x, weight, norm_weight, bias, residual, y)
    if unrecorded := launched.replay(tensors, norm_eps):
        unrecorded.start(launches(tensors, norm_eps, gated, gpu_of(x.device).facts.overlaps_kernels))
    return y


def launches(tensors: Tensors, norm_eps: float, gated: bool, overlaps: bool) -> list[Launch]:
    """Returns the launches of a product: one, perhaps after that of the norm, or before that of the sum of splits."""
    x, weight, norm_weight, bias, residual, y = tensors
    (M, K), N = x.shape, y.shape[1]
    made, normed, options = [], x, overlapping(overlaps)
    norm = {"x_ptr": x, "norm_ptr": norm_weight, "norm_eps": norm_eps, "x_stride": x.stride(0)}
    if M > FEW and norm_weight is not None:
        normed = weight.new_empty(M, K)
        arguments = norm | {"y_ptr": normed, "K": K, "ALL": power_of_two(K), "OVERLAPS": overlaps}
        made.append(Launch(_norm, (M, 1, 1), arguments, options))
    arguments = {
        "x_ptr": normed,
        "weight_ptr": weight,
        "bias_ptr": bias,
        "residual_ptr": residual,
        "y_ptr": y,
        "M": M,
        "x_stride": normed.stride(0),
        "GATED": gated,
        "N": N,
        "K": K,
        "OVERLAPS": overlaps,
    }
    if M <= FEW:
        BN = _values(N, K, gated)
        arguments |= norm | {"BN": BN, "BK": _part(K)}
        made.append(Launch(_product_row_by_row, (N // BN, 1, 1), arguments, {"num_warps": 1, **options}))
    else:
        BM, BN, BK, splits = _tile(M, N, K, gated)
        part = (BM + (2 * BN if gated else BN)) * BK * weight.element_size()
        x_first = BM >= ROWS_OF_WGMMA
        # wgmma reads a stage until its products are done, so the compiler keeps memory for one stage more.
        stages = min(6, SHARED // part if x_first else 1 + SHARED // part)
        arguments |= {"BM": BM, "BN": BN, "BK": BK, "STAGES": stages, "X_FIRST": x_first, "SPLITS": splits}
        grid = (ceil_div(N, BN), ceil_div(M, BM), splits)
        if splits == 1:
            made.append(Launch(_product_by_tiles, grid, arguments, options))
        else:
            parts = weight.new_empty(splits, M, N, dtype=torch.float32)
            part_args = {"bias_ptr": None, "residual_ptr": None, "y_ptr": parts}
            sum_args = {name: arguments[name] for name in ("weight_ptr", "bias_ptr", "residual_ptr", "y_ptr", "N")}
            sum_args |= {"parts_ptr": parts, "size": M * N, "SPLITS": splits, "BLOCK": SUMS, "OVERLAPS": overlaps}
            made.append(Launch(_product_by_tiles, grid, arguments | part_args, options))
            made.append(Launch(_sum_of_splits, (ceil_div(M * N, SUMS), 1, 1), sum_args, {"num_warps": 1, **options}))
    return made


def _part(K: int) -> int:
    """Returns BK of one warp, which divides K."""
    return min(K & -K, 1024)


def _values(N: int, K: int, gated: bool) -> int:
    """Returns BN of one warp, which divides N.

    More values share the norm of x, and fewer occupy more multiprocessors. Registers hold 8 rows of W up to K = 1024.
    """
    many = N >= WIDE and not (gated and K > 1024)
    return min(N & -N, max(4 if many else 2, 512 // _part(K)))


def _tile(M: int, N: int, K: int, gated: bool) -> tuple[int, int, int, int]:
    """Returns BM, BN and BK of a tile, and the number of splits of K.

    A narrow y is cut into more, smaller tiles, though more of them read x or W. With splits, tiles can be larger.
    """
    BK, splits = 64, 4
    if M > 32 and K >= LONG and K % (splits * BK) == 0 and not gated:
        return ROWS_OF_WGMMA, 64, BK, splits
    BM = 16 if M <= 16 else 32 if M <= 32 or N < WIDE else 64
    return BM, 32 if N >= WIDE else 16, min(K & -K, 128), 1


@triton.jit(do_not_specialize=["norm_eps", "M"])  # one kernel for all M, which therefore rounds alike
def _product_row_by_row(
    x_ptr,  # [M, K]
    weight_ptr,  # [N, K], or [2N, K] if GATED; contiguous
    norm_ptr,  # [K] or None
    bias_ptr,  # [N] or None
    residual_ptr,  # [M, N], contiguous, or None
    y_ptr,  # [M, N], contiguous
    norm_eps,
    M,
    x_stride,
    GATED: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    OVERLAPS: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """Computes BN columns of y, which are in a whole block."""
    dtype = weight_ptr.dtype.element_ty
    first = tl.program_id(0).to(tl.int64) * BN
    values, part = tl.arange(0, BN), tl.arange(0, BK)  # [BN], [BK]
    weight_ptr += first * K
    weight_block = weight_ptr + values[:, None] * K + part[None, :]  # [BN, BK]
    if OVERLAPS:
        _bring_into_cache(weight_ptr, BN * K)
        if GATED:
            _bring_into_cache(weight_ptr + N * K, BN * K)
        gdc_wait()
        gdc_launch_dependents()

    for m in range(M):
        x_block = x_ptr + m * x_stride + part  # [BK]
        x = tl.load(x_block).to(dtype).to(tl.float32)  # [BK]
        weight = tl.load(weight_block)  # [BN, BK]
        up_weight = tl.load(weight_block + N * K) if GATED else weight
        factor = 1.0
        if norm_ptr is not None:
            tl.debug_barrier()  # the compiler would load W after the norm
            squares = x * x
            for k in tl.static_range(BK, K, BK):
                more = tl.load(x_block + k).to(dtype).to(tl.float32)  # [BK]
                squares += more * more
            factor = tl.rsqrt(tl.sum(squares, axis=0) / K + norm_eps)

        x = _normed(x, norm_ptr, part, factor, dtype)
        total = x[None, :] * weight.to(tl.float32)  # [BN, BK]
        up = x[None, :] * up_weight.to(tl.float32)  # [BN, BK]
        for k in tl.static_range(BK, K, BK):
            x = _normed(tl.load(x_block + k).to(dtype).to(tl.float32), norm_ptr, k + part, factor, dtype)
            total += x[None, :] * tl.load(weight_block + k).to(tl.float32)
            if GATED:
                up += x[None, :] * tl.load(weight_block + N * K + k).to(tl.float32)

        y = tl.sum(total, axis=1)  # [BN]
        if GATED:
            gate = y.to(dtype).to(tl.float32)
            y = gate * tl.sigmoid(gate) * tl.sum(up, axis=1).to(dtype).to(tl.float32)
        if bias_ptr is not None:
            y += tl.load(bias_ptr + first + values).to(tl.float32)
        place = m * N + first + values  # [BN]
        if residual_ptr is not None:
            y = _rounded(y, dtype, y_ptr) + tl.load(residual_ptr + place).to(tl.float32)
        tl.store(y_ptr + place, y.to(y_ptr.dtype.element_ty))


@triton.jit
def _normed(x, norm_ptr, part, factor, dtype):
    """Returns a part [BK] of a row of x after the norm, rounded to the dtype of W; x itself if there is no norm."""
    if norm_ptr is not None:
        x = (x * factor * tl.load(norm_ptr + part).to(tl.float32)).to(dtype).to(tl.float32)
    return x


@triton.jit
def _rounded(product, dtype, y_ptr):
    """Returns a product, rounded to the dtype of W if y has another dtype. Otherwise only its sum is rounded."""
    if y_ptr.dtype.element_ty != dtype:
        product = product.to(dtype).to(tl.float32)
    return product


@triton.jit(do_not_specialize=["norm_eps"])
def _norm(
    x_ptr,  # [M, K], rows x_stride apart
    norm_ptr,  # [K]
    y_ptr,  # [M, K], contiguous
    norm_eps,
    x_stride,
    K: tl.constexpr,
    ALL: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Computes the RMS norm of one row of x; ALL is K rounded up to a power of two."""
    m, columns = tl.program_id(0), tl.arange(0, ALL)  # [], [ALL]
    if OVERLAPS:
        gdc_wait()
        gdc_launch_dependents()
    inside = columns < K
    x = tl.load(x_ptr + m * x_stride + columns, mask=inside, other=0.0)  # [ALL]
    x = x.to(y_ptr.dtype.element_ty).to(tl.float32)
    weight = tl.load(norm_ptr + columns, mask=inside, other=0.0).to(tl.float32)  # [ALL]
    y = x * tl.rsqrt(tl.sum(x * x, axis=0) / K + norm_eps) * weight
    tl.store(y_ptr + m * K + columns, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["M"])
def _product_by_tiles(
    x_ptr,  # [M, K], rows x_stride apart
    weight_ptr,  # [N, K], or [2N, K] if GATED; contiguous
    bias_ptr,  # [N] or None
    residual_ptr,  # [M, N], contiguous, or None
    y_ptr,  # [M, N], contiguous
    M,
    x_stride,
    GATED: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    OVERLAPS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
    X_FIRST: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Computes BM rows and BN columns of y, transposed. With several splits, y is their products [SPLITS, M, N].

    Args:
        X_FIRST: whether x is the left operand of the products. With fewer than 64 rows it is the right one, because
            tensor cores take 16 rows of the left operand at least, and 8 columns of the right one.
    """
    dtype = weight_ptr.dtype.element_ty
    first = tl.program_id(0) * BN
    rows = tl.program_id(1) * BM + tl.arange(0, BM)  # [BM]
    values, part = first + tl.arange(0, BN), tl.arange(0, BK)  # [BN], [BK]
    SHARE: tl.constexpr = K // SPLITS
    split = tl.program_id(2) if SPLITS > 1 else 0
    in_m, in_n = rows < M, values < N
    weight_block = weight_ptr + values[:, None].to(tl.int64) * K + part[None, :]  # [BN, BK]
    x_block = x_ptr + rows[:, None] * x_stride + part[None, :]  # [BM, BK]
    if OVERLAPS:
        elements = tl.minimum(BN, N - first) * K
        if SPLITS > 1:
            _bring_each_into_cache(weight_ptr + tl.minimum(values, N - 1).to(tl.int64) * K + split * SHARE, SHARE)
        else:
            _bring_into_cache(weight_ptr + first.to(tl.int64) * K, elements)
        if GATED:
            _bring_into_cache(weight_ptr + (first + N).to(tl.int64) * K, elements)
        gdc_wait()
        gdc_launch_dependents()

    total = tl.zeros([BM, BN] if X_FIRST else [BN, BM], tl.float32)
    up = tl.zeros_like(total)
    for k in tl.range(split * SHARE, split * SHARE + SHARE, BK, num_stages=STAGES):
        x = tl.load(x_block + k, mask=in_m[:, None], other=0.0)  # [BM, BK]
        weight = tl.load(weight_block + k, mask=in_n[:, None], other=0.0)  # [BN, BK]
        total = _added(total, x, weight, X_FIRST)
        if GATED:
            up_weight = tl.load(weight_block + N * K + k, mask=in_n[:, None], other=0.0)  # [BN, BK]
            up = _added(up, x, up_weight, X_FIRST)

    if X_FIRST:
        total, up = tl.trans(total), tl.trans(up)  # [BN, BM]
    if GATED:
        gate = total.to(dtype).to(tl.float32)
        total = gate * tl.sigmoid(gate) * up.to(dtype).to(tl.float32)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + values, mask=in_n, other=0.0).to(tl.float32)[:, None]
    place = split * M * N + rows[None, :] * N + values[:, None]  # [BN, BM]
    inside = in_n[:, None] & in_m[None, :]
    if residual_ptr is not None:
        total = _rounded(total, dtype, y_ptr) + tl.load(residual_ptr + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + place, total.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _added(total, x, weight, X_FIRST: tl.constexpr):
    """Returns total [BM, BN] + x W^T if X_FIRST, else total [BN, BM] + W x^T, for x [BM, BK] and W [BN, BK]."""
    left, right = (x, weight) if X_FIRST else (weight, x)
    return tl.dot(left, tl.trans(right), total, input_precision="ieee")


@triton.jit(do_not_specialize=["size"])
def _sum_of_splits(
    parts_ptr,  # [SPLITS, M, N], contiguous, float32
    weight_ptr,  # only its dtype is used
    bias_ptr,  # [N] or None
    residual_ptr,  # [M, N], contiguous, or None
    y_ptr,  # [M, N], contiguous
    size,  # M * N
    N: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Computes BLOCK values of y from the products with splits of K."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    inside = place < size
    if OVERLAPS:
        gdc_wait()
        gdc_launch_dependents()
    total = tl.load(parts_ptr + place, mask=inside, other=0.0)  # [BLOCK]
    for split in tl.static_range(1, SPLITS):
        total += tl.load(parts_ptr + split * size + place, mask=inside, other=0.0)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + place % N, mask=inside, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        total = _rounded(total, weight_ptr.dtype.element_ty, y_ptr)
        total += tl.load(residual_ptr + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + place, total.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _bring_into_cache(first, number):
    """Asks for a number of values in global memory to be brought into the L2 cache: once a program."""
    tl.inline_asm_elementwise(
        """
        {
        .reg .pred is_first;
        .reg .u32 thread;
        mov.u32 thread, %tid.x;
        setp.eq.u32 is_first, thread, 0;
        @is_first cp.async.bulk.prefetch.L2.global [$1], $2;
        mov.u32 $0, 0;
        }
        """,
        "=r,l,r",
        [first.to(tl.int64), number * (first.dtype.element_ty.primitive_bitwidth // 8)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _bring_each_into_cache(rows, number: tl.constexpr):
    """Asks for a number of values in global memory to be brought into the L2 cache, from each of several pointers."""
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
        "=r,l,r",
        [rows.to(tl.int64), tl.full(rows.shape, number * (rows.dtype.element_ty.primitive_bitwidth // 8), tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
