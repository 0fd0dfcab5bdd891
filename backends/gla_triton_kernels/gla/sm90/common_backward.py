"""Functions shared by the backward kernels for SM90: gates and decays of a chunk, and gradients of leaving states.

backward.py of this folder gives the mathematics. Gates and exponents of this file are in units of log 2.

B batch   T tokens   I segments   H key/value heads   K, V key and value width   C tokens of a chunk
D = 64 columns of a tile
"""

# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportAssignmentType=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma

from gla_core.dispatch.backend import CHUNK
from gla_triton_kernels.chunks.kernel import GradientParameters
from gla_triton_kernels.chunks.segments import Segments, lengths_of, state_strides
from gla_triton_kernels.gla.shared.limits import LEAST_GATE
from gla_triton_kernels.gla.sm90.common import (
    as_float32,
    bounded_gates,
    chunk_of,
    in_state,
    log_gates_of_tile,
    plus,
    tile_of_gates,
    tokens_of,
)
from gla_triton_kernels.gla.tensors import BackwardTensors
from gla_triton_runtime.arithmetic import LOG2E
from gla_triton_runtime.tma import shared_tiles, state_tiles

WIDTH = 64
C = gl.constexpr(CHUNK)
D = gl.constexpr(WIDTH)
LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))  # of accumulators [64, 64]
LEFT = gl.constexpr(gl.DotOperandLayout(0, LAYOUT.value, 2))  # of a left operand of wgmma in registers
# A warp holds all rows of 16 columns, so it sums over rows without other warps. A thread holds runs of 4 rows, for
# which bank conflicts in shared memory are rare.
RUNS = gl.constexpr(gl.BlockedLayout([4, 2], [4, 8], [1, 4], [1, 0]))


def logits_strides(g: Tensor | None, normalizer: int | None) -> dict[str, int]:
    """Returns the strides of logits [B, T, H, K], as arguments of a kernel; 0 if g is None or holds log gates."""
    b, t, h = (0, 0, 0) if g is None or normalizer is None else g.stride()[:3]
    return {"g_b": b, "g_t": t, "g_h": h}


def tile_arguments(x: BackwardTensors, names: Iterable[str]) -> dict[str, Any]:
    """Returns descriptors of tensors of x, as arguments such as "q_desc"; in tiles [CHUNK, WIDTH]."""
    return {f"{name}_desc": shared_tiles(getattr(x, name), CHUNK, WIDTH) for name in names}


def gradient_arguments(
    kernel: GradientParameters,
    x: BackwardTensors,
    entering: Tensor,
    leaving: Tensor | None,
    segments: Segments,
    scale: float,
    converted: bool,
) -> dict[str, Any]:
    """Returns the arguments that the kernels of backward.py and backward_head.py share.

    Results that are not sums of partial results are written by TMA, unless inputs were converted to float16.
    """
    K, V = x.q.shape[3], x.v.shape[3]
    by_keys, by_values = K <= kernel.BK and not converted, V <= kernel.BV and not converted
    return {
        **tile_arguments(x, ("q", "k", "v", "do")),
        "s_desc": state_tiles(entering, WIDTH, WIDTH),
        "dq_desc": shared_tiles(x.dq, CHUNK, WIDTH) if by_values else None,
        "dk_desc": shared_tiles(x.dk, CHUNK, WIDTH) if by_values else None,
        "dv_desc": shared_tiles(x.dv, CHUNK, WIDTH) if by_keys else None,
        "leaving": leaving,
        "dinitial": x.dinitial_state,
        "order": segments.order,
        "scale": scale,
        **state_strides("state_", leaving),
        **lengths_of(x.q.shape[1], segments),
        "K": K,
        "V": V,
        "B": len(x.q),
        "PARTS": kernel.BK // WIDTH,
        "HALVES": kernel.BV // WIDTH,
        "LAST_LEAVE_NONE": x.last_leave_none,
    }


@gluon.jit
def segment_backwards(n, T, segment, segments, order, K, LAST_LEAVE_NONE: gl.constexpr):
    """Returns (number, batch, first token, number of tokens, row, held) of the n-th segment to start.

    `row` is the row of the state that enters the first chunk of the segment. `held` is K if there is a gradient of the
    leaving state, and 0 if there is none.

    Args:
        n, T, segment, segments, order: see `tokens_of`.
        LAST_LEAVE_NONE: whether the last segment of each sequence has no gradient of its leaving state. True is
            allowed for packed sequences only.
    """
    n, b, start, length, sequence, _, end = tokens_of(n, T, segment, segments, order)
    row = chunk_of(sequence, start, T, C, order is not None)
    held = gl.where(start + length == end, 0, K) if LAST_LEAVE_NONE else K
    return n, b, start, length, row, held


@gluon.jit
def leaving_gradient(leaving, strides, n, h, held, adds, keys, values, V, outer, TILES: gl.constexpr):
    """Returns the gradient of the state of head h that leaves segment n, divided by `outer`, as TILES tiles [D, D].

    The tiles are zeros if `leaving` is None.

    Args:
        leaving: gradients of leaving states [I, H, K, V], or None.
        strides: the strides of `leaving`; see `in_state`.
        held: see `segment_backwards`.
        adds: whether this block adds the gradient; only one query head of a group does.
        keys, values: the indices of the keys [D, 1], and of the values [1, D] of the first tile.
        outer: a number, or None to divide by nothing.
    """
    state_n, state_h, state_k, state_v = strides
    started = ()
    for j in gl.static_range(TILES):
        if leaving is not None:
            head = leaving + n.to(gl.int64) * state_n + h.to(gl.int64) * state_h
            inside = (keys < held) & (values + j * D < V) & adds
            x = gl.load(head + in_state(keys, values + j * D, state_k, state_v), inside, 0.0)
            started += (x if outer is None else x / outer,)
        else:
            started += (gl.zeros([D, D], gl.float32, LAYOUT),)
    return started


@gluon.jit
def product(a, b, acc):
    """Starts the product acc + a b and returns it; the caller has to wait for it with `warpgroup_mma_wait`."""
    return warpgroup_mma(a, b, acc, is_async=True)


@gluon.jit
def gate_tile(g_desc, x_tiles, i):
    """Returns the memory where the i-th tile of g arrives; the exponents of queries later replace it."""
    return tile_of_gates(x_tiles.index(i), g_desc)


@gluon.jit
def gates(block, rows, PACKED: gl.constexpr):
    """Returns the gates [C, D] of a chunk of `rows` rows from a block [1, 1, C, D] of log gates, in units of log 2."""
    return bounded_gates(log_gates_of_tile(block.reshape([C, D]), rows, RUNS, None, PACKED), None)  # [C, D]


@gluon.jit
def sums_of_logits(block, rows, NORMALIZER: gl.constexpr):
    """Returns the sums NORMALIZER b [C, D] and b_C [D] for the logits of a chunk of `rows` rows; see `gates`."""
    g = log_gates_of_tile(block.reshape([C, D]), rows, RUNS, NORMALIZER, False)
    b = gl.associative_scan(gl.maximum(g, NORMALIZER * LEAST_GATE * LOG2E), 0, plus)  # [C, D]
    row = gl.arange(0, C, gl.SliceLayout(1, RUNS))[:, None]  # [C, 1]
    return b, gl.sum(gl.where(row == C - 1, b, -0.0), 0) * (1.0 / NORMALIZER)


@gluon.jit
def exponents(g, mild, first):
    """Returns the exponents b - r [C, D] of queries, and b_C [D], for gates g [C, D].

    r is b_C / 2 in a mild chunk, else `first`.
    """
    end = gl.sum(g, 0)  # [D]
    return gl.associative_scan(g, 0, plus) - gl.where(mild, 0.5 * end, first)[None, :], end


@gluon.jit
def decay(q_tile, k_tile, x, end, mild, first, scale):
    """Replaces q, k in the tiles [C, D] by qg, kg.

    Args:
        x, end: the exponents [C, D] of queries and b_C [D], from `exponents`.
    """
    q_tile.store((as_float32(q_tile.load(RUNS)) * (gl.exp2(x) * scale)).to(q_tile.dtype))
    y = gl.where(mild, 0.0, end - first)[None, :] - x  # [C, D], the exponents of keys
    k_tile.store((as_float32(k_tile.load(RUNS)) * gl.exp2(y)).to(k_tile.dtype))
