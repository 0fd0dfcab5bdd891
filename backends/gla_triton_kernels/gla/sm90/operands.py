"""Converts states and their gradients to operands of matrix products of the backward kernels for SM90.

A state S is a sum over many tokens, which float16 may not hold. So each block [D, V] of D keys of S is divided by its
unit, a power of two, and products with the block are multiplied by the unit:

    operand = S / unit        unit as in common.py: `unit_of`

backward_wide.py reads states tile by tile, so each tile [D, D] has a unit there.

With bfloat16, states are operands as they are, and units are 1.

H heads   K, V key and value width   D = 64 keys or values of a tile
"""

# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportAssignmentType=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
# pyright: reportUnboundVariable=false, reportPossiblyUnboundVariable=false
from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from gla_core.dispatch.tensors import ceil_div
from gla_triton_kernels.gla.sm90.common import divisible_unit_of, largest, unit_of
from gla_triton_runtime.launch import Launch

D = gl.constexpr(64)
W = gl.constexpr(128)  # columns that a block reads at once
LAYOUT = gl.constexpr(gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0]))
TILE_LAYOUT = gl.constexpr(gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0]))
LEAST_FACTOR = gl.constexpr(2.0**-40)


def as_operands(states: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None, list[Launch]]:
    """Returns states [.., H, K, V] as operands in `dtype`, their units, and the launches that fill both.

    The units are [rows, H, ceil(K / 64)] in float32. If dtype is bfloat16, the states are returned, and no units.
    """
    if dtype == torch.bfloat16:
        return states, None, []
    H, K, V = states.shape[-3:]
    rows, blocks = states.numel() // (H * K * V), ceil_div(K, D.value)
    operands = torch.empty_like(states, dtype=dtype)
    units = states.new_empty(rows, H, blocks, dtype=torch.float32)
    arguments = {"x_ptr": states, "y_ptr": operands, "units_ptr": units, "K": K, "V": V}
    return operands, units, [Launch(_to_operands_kernel, (rows * H * blocks, 1, 1), arguments, {"num_warps": 4})]


def tiles_as_operands(states: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None, list[Launch]]:
    """Returns the same as `as_operands`, but each tile [64, 64] has a unit: [rows, H, ceil(K / 64), ceil(V / 64)].

    A tile fits into registers, so the states are read once.
    """
    if dtype == torch.bfloat16:
        return states, None, []
    H, K, V = states.shape[-3:]
    rows, blocks_k, blocks_v = states.numel() // (H * K * V), ceil_div(K, D.value), ceil_div(V, D.value)
    operands = torch.empty_like(states, dtype=dtype)
    units = states.new_empty(rows, H, blocks_k, blocks_v, dtype=torch.float32)
    arguments = {"x_ptr": states, "y_ptr": operands, "units_ptr": units, "K": K, "V": V}
    return operands, units, [Launch(_tiles_to_operands_kernel, (units.numel(), 1, 1), arguments, {"num_warps": 4})]


@gluon.jit
def factors_of(scale, dtype: gl.constexpr):
    """Returns a factor of q and a factor of all gradients, whose product is the scale.

    In float16, q is not multiplied by the scale, to keep its range; the gradients are. Gradients of states are divided
    by the second factor, so it must not be small. If the scale is below LEAST_FACTOR, it multiplies q after all.
    """
    if dtype == gl.float16:
        small = gl.abs(scale) < LEAST_FACTOR
        return gl.where(small, scale, 1.0), gl.where(small, 1.0, scale)
    else:  # noqa: RET505 -- one branch is compiled
        return scale, 1.0


@gluon.jit
def store_operands(tiles, first, P, HALVES: gl.constexpr):
    """Stores HALVES matrices P [D, D] as operands in the tiles from `first` on, and returns their common unit."""
    HALF: gl.constexpr = tiles.dtype == gl.float16
    unit = 1.0
    if HALF:
        most = largest(P[0])
        for j in gl.static_range(1, HALVES):
            most = gl.maximum(most, largest(P[j]))
        unit, inverse = divisible_unit_of(most)
    for j in gl.static_range(HALVES):
        x = P[j] * inverse if HALF else P[j]
        tiles.index(first + j).reshape([D, D]).store(x.to(tiles.dtype))
    return unit


@gluon.jit(do_not_specialize=["K"])
def _to_operands_kernel(
    x_ptr,  # [rows, H, K, V]
    y_ptr,  # [rows, H, K, V]
    units_ptr,  # [rows, H, ceil(K / D)]
    K,
    V,
):
    """Converts D keys of a state, and writes their unit."""
    blocks = gl.cdiv(K, D)
    first = gl.program_id(0) % blocks * D
    state = (gl.program_id(0) // blocks).to(gl.int64) * K * V
    key = first + gl.arange(0, D, gl.SliceLayout(1, LAYOUT))[:, None]  # [D, 1]
    value = gl.arange(0, W, gl.SliceLayout(0, LAYOUT))[None, :]  # [1, W]
    most = gl.to_tensor(0.0)
    for column in range(0, V, W):
        inside = (key < K) & (value < V - column)
        most = gl.maximum(most, largest(gl.load(x_ptr + state + key * V + (column + value), inside, 0.0)))
    unit, inverse = unit_of(most)
    for column in range(0, V, W):
        inside = (key < K) & (value < V - column)
        x = gl.load(x_ptr + state + key * V + (column + value), inside, 0.0)
        gl.store(y_ptr + state + key * V + (column + value), (x * inverse).to(gl.float16), inside)
    gl.store(units_ptr + gl.program_id(0), unit)


@gluon.jit(do_not_specialize=["K"])
def _tiles_to_operands_kernel(
    x_ptr,  # [rows, H, K, V]
    y_ptr,  # [rows, H, K, V]
    units_ptr,  # [rows, H, ceil(K / D), ceil(V / D)]
    K,
    V,
):
    """Converts a tile of D keys and D values of a state, and writes its unit."""
    pid = gl.program_id(0)
    blocks_k, blocks_v = gl.cdiv(K, D), gl.cdiv(V, D)
    key = pid // blocks_v % blocks_k * D + gl.arange(0, D, gl.SliceLayout(1, TILE_LAYOUT))[:, None]  # [D, 1]
    value = pid % blocks_v * D + gl.arange(0, D, gl.SliceLayout(0, TILE_LAYOUT))[None, :]  # [1, D]
    at = (pid // (blocks_k * blocks_v)).to(gl.int64) * K * V + (key * V + value)  # [D, D]
    inside = (key < K) & (value < V)
    x = gl.load(x_ptr + at, inside, 0.0)
    unit, inverse = divisible_unit_of(largest(x))
    gl.store(y_ptr + at, (x * inverse).to(gl.float16), inside)
    gl.store(units_ptr + pid, unit)
