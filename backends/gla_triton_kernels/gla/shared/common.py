"""Loads, stores and rounding that the general kernels of chunk_gla share.

A kernel receives a tensor [B, T, heads, D] as tiles, which TMA moves, or as a pointer to its batch entry b with two
strides. Gates come in three forms, which `GATE` names: "key" [B, T, Hv, K], "head" [B, T, Hv] and "constant" [Hv].
They are never expanded in memory. If the keys of a head share a gate, all sums and exponentials of gates have one
column, which is broadcast to the keys.

B batch   T tokens   Hv value heads   K key width   I segments   C rows of a tile, tokens of a chunk
D width of a head   BD columns of a tile
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gla_triton_kernels.gla.seen import form_of
from gla_triton_runtime.arithmetic import nearest_tf32
from gla_triton_runtime.gates import log_gates

OPERANDS = {torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}
"""The operand dtypes of plans, and the same dtypes for kernels."""


def gate_arguments(g: Tensor | None, normalizer: int | None) -> dict[str, int | str | None]:
    """Returns the strides and the form of gates as arguments of a kernel; an axis that g lacks has the stride 0.

    Args:
        g: [B, T, Hv, K], [B, T, Hv] or [Hv]; None if there are no gates.
        normalizer: see `log_gates`.
    """
    b, t, h = (0, 0, 0) if g is None else (0, 0, g.stride(0)) if g.ndim == 1 else g.stride()[:3]
    form = None if g is None else form_of(g.shape)
    return {"stride_gb": b, "stride_gt": t, "stride_gh": h, "GATE": form, "NORMALIZER": normalizer}


@triton.jit
def operand(x, dtype: tl.constexpr):
    """Rounds x to the operand type of the matrix units: `dtype`, or TF32 if `dtype` is float32."""
    x = x.to(dtype)
    return nearest_tf32(x) if dtype == tl.float32 else x


@triton.jit
def load_tile(
    tiles, ptr, stride_t, stride_h, b, t, head, column, end, D: tl.constexpr, C: tl.constexpr, BD: tl.constexpr
):
    """Loads the tile [C, BD] of one head from row t and `column` on; it is 0 from row `end` on and from column D on."""
    if tiles is not None:
        return tiles.load([b, head, t, column]).reshape(C, BD)
    else:  # noqa: RET505 -- one branch is compiled
        offsets = _offsets(stride_t, stride_h, t, head, column, C, BD)  # [C, BD]
        return tl.load(ptr + offsets, mask=_inside(t, column, end, D, C, BD), other=0.0)


@triton.jit
def store_tile(
    tiles, ptr, stride_t, stride_h, b, t, head, column, end, x, D: tl.constexpr, C: tl.constexpr, BD: tl.constexpr
):
    """Writes x [C, BD] to the elements that `load_tile` loads."""
    x = x.to(ptr.dtype.element_ty)
    if tiles is not None:
        tiles.store([b, head, t, column], x.reshape(1, 1, C, BD))
    else:
        offsets = _offsets(stride_t, stride_h, t, head, column, C, BD)  # [C, BD]
        tl.store(ptr + offsets, x, mask=_inside(t, column, end, D, C, BD))


@triton.jit
def load_gates(
    tiles,
    ptr,
    stride_t,
    stride_h,
    b,
    t,
    head,
    column,
    end,
    GATE: tl.constexpr,
    NORMALIZER: tl.constexpr,
    D: tl.constexpr,
    C: tl.constexpr,
    BD: tl.constexpr,
):
    """Loads the log gates of C rows from row t on in float32; they are 0 from row `end` on.

    The result is [C, BD] if each key has a gate, else [C, 1].
    """
    x = load_given_gates(tiles, ptr, stride_t, stride_h, b, t, head, column, end, GATE, D, C, BD)
    if GATE == "constant" or NORMALIZER is not None:
        return tl.where((t + tl.arange(0, C) < end)[:, None], log_gates(x, NORMALIZER), 0.0)
    else:  # noqa: RET505 -- one branch is compiled
        return x.to(tl.float32)


@triton.jit
def load_given_gates(
    tiles,
    ptr,
    stride_t,
    stride_h,
    b,
    t,
    head,
    column,
    end,
    GATE: tl.constexpr,
    D: tl.constexpr,
    C: tl.constexpr,
    BD: tl.constexpr,
):
    """Loads gates or logits of C rows from row t on as they are given: [C, BD] if each key has a gate, else [C, 1]."""
    if GATE == "key":
        return load_tile(tiles, ptr, stride_t, stride_h, b, t, head, column, end, D, C, BD)
    elif GATE == "head":  # noqa: RET505 -- one branch is compiled
        return load_tile(None, ptr, stride_t, stride_h, b, t, head, 0, end, 1, C, 1)
    else:
        return tl.zeros([C, 1], tl.float32) + tl.load(ptr + tl.cast(head, tl.int64) * stride_h)


@triton.jit
def load_gate(
    ptr,
    stride_t,
    stride_h,
    t,
    head,
    column,
    GATE: tl.constexpr,
    NORMALIZER: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
):
    """Loads the log gates of row t in float32: [BD] if each key has a gate, else [1]; see `load_row`."""
    if GATE == "key":
        return log_gates(load_row(ptr, stride_t, stride_h, t, head, column, D, BD), NORMALIZER)
    else:  # noqa: RET505 -- one branch is compiled; the stride of a constant gate is 0
        return log_gates(load_row(ptr, stride_t, stride_h, t, head, 0, 1, 1), NORMALIZER)


@triton.jit
def sums_of_gates(chosen, x):
    """Returns, for each row of `chosen` [C, C], the sum of the elements of x [C, 1] that the row selects: [C, 1]."""
    return tl.sum(tl.where(chosen, tl.trans(x), 0.0), 1)[:, None]


@triton.jit
def _offsets(stride_t, stride_h, t, head, column, C: tl.constexpr, BD: tl.constexpr):
    """Returns the offsets of a tile [C, BD]."""
    rows = (t + tl.arange(0, C)).to(tl.int64)[:, None]  # [C, 1]
    return tl.cast(head, tl.int64) * stride_h + rows * stride_t + (column + tl.arange(0, BD))[None, :]


@triton.jit
def _inside(t, column, end, D: tl.constexpr, C: tl.constexpr, BD: tl.constexpr):
    """Returns the mask of the elements of a tile [C, BD] that lie before row `end` and column D."""
    rows = (t + tl.arange(0, C) < end)[:, None]  # [C, 1]
    if D % BD == 0:
        return rows
    else:  # noqa: RET505 -- one branch is compiled
        return rows & (column + tl.arange(0, BD) < D)[None, :]  # [C, BD]


@triton.jit
def load_row(ptr, stride_t, stride_h, t, head, column, D: tl.constexpr, BD: tl.constexpr):
    """Loads BD numbers of row t of one head from `column` on, in float32; they are 0 from column D on."""
    columns = column + tl.arange(0, BD)  # [BD]
    row = ptr + tl.cast(t, tl.int64) * stride_t + tl.cast(head, tl.int64) * stride_h
    return tl.load(row + columns, mask=columns < D, other=0.0).to(tl.float32)
