"""Layouts, descriptors and functions shared by the backward kernels of the delta rule for SM90.

All of them compute chunks of C = 64 tokens in four blocks of 16, which is the height of a warp's part of a product. So
a warp holds the rows of one block, and sums of gates of a block are sums of one thread.

C tokens of a chunk   K, V key and value width, or the columns of a tile   J chunks
"""

# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportAssignmentType=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
from __future__ import annotations

from typing import Any

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from gla_core.dispatch.backend import CHUNK
from gla_triton_kernels.chunks.segments import Segments, lengths_of
from gla_triton_kernels.delta.sm90.common import nearest_tf32
from gla_triton_kernels.delta.tensors import BackwardTensors
from gla_triton_kernels.gla.shared.limits import LEAST_GATE, MILD_DECAY_SM90
from gla_triton_kernels.gla.sm90.common import gate_strides, relative_to_middle
from gla_triton_runtime.arithmetic import LOG2E

NUMBERS = ["beta_b", "beta_t", "beta_h", "g_b", "g_t", "g_h", "T", "segment", "segments", "Hv", "R"]
"""Names of arguments of `size_arguments` for which a kernel is not compiled anew."""
C = gl.constexpr(CHUNK)
MOST = 128
WIDTH = gl.constexpr(MOST)  # the columns of a tile: K or V, and zeros
SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))  # of a product [64, 64]
TF32 = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 8]))  # the same, of float32
TF32_LEFT = gl.constexpr(gl.DotOperandLayout(0, TF32.value, 1))
PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
LINE = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
LEAST_ROW = gl.constexpr(2.0**-100)


def token_arguments(x: BackwardTensors, segments: Segments) -> dict[str, Any]:
    """Returns the tensors that all kernels share, as arguments: beta, gates of heads, and the order of segments.

    There are no gates of heads if each key has a gate.
    """
    return {"beta_ptr": x.beta, "g_ptr": _head_gates(x), "order": segments.order}


def size_arguments(x: BackwardTensors, segments: Segments) -> dict[str, Any]:
    """Returns the numbers that all kernels share, as arguments: strides of the above, lengths, and heads."""
    beta_b, beta_t, beta_h = x.beta.stride()
    return {
        "beta_b": beta_b,
        "beta_t": beta_t,
        "beta_h": beta_h,
        **gate_strides(_head_gates(x)),
        **lengths_of(x.k.shape[1], segments),
        "Hv": x.v.shape[2],
        "K": x.k.shape[3],
        "R": x.v.shape[2] // x.k.shape[2],
    }


def _head_gates(x: BackwardTensors) -> Tensor | None:
    return x.g if x.g is not None and x.g.ndim != 4 else None


@gluon.jit
def bounded(g):
    """Returns log gates in units of log 2; a gate whose exp is 0 in float32 counts as `LEAST_GATE`."""
    return gl.maximum(g.to(gl.float32), LEAST_GATE) * LOG2E


@gluon.jit
def rounded_apart(x):
    """Returns x in bfloat16, and what is left of it after this rounding, in bfloat16."""
    y = x.to(gl.bfloat16)
    return y, (x - y.to(gl.float32)).to(gl.bfloat16)


@gluon.jit
def unit_of_rows(x):
    """Returns the units [rows] of the rows of x [rows, columns], powers of two, and their inverses."""
    most = gl.maximum(gl.max(gl.abs(x), 1), LEAST_ROW)
    bits = (most.to(gl.int32, bitcast=True) & 0x7F800000) - (14 << 23)
    return bits.to(gl.float32, bitcast=True), ((254 << 23) - bits).to(gl.float32, bitcast=True)


@gluon.jit
def table_row(table, i, layout: gl.constexpr):
    """Returns row i of a table [C / 16, K] in shared memory."""
    return table.slice(i * WIDTH, WIDTH).load(layout)


@gluon.jit
def is_strong(total):
    """Returns whether some key decays in some block by more than the limit, for the sums of gates [C / 16, K]."""
    return gl.min(gl.min(total, 1), 0) < -MILD_DECAY_SM90 * LOG2E


@gluon.jit
def pairs_by_halving(q_tile, k_tile, q_decayed, k_decayed, b):
    """Returns A and M [C, C] within blocks of 16 tokens, for gates of any strength; other elements are undefined.

    For every pair s < t there is one m of 8, 4, 2, 1 such that t is in the second half of a block of 2 m tokens, and s
    in the first. Both are decayed to the last token of the first half, with exponents that are not above 0.

    Args:
        q_tile, k_tile: [C, K], not decayed.
        q_decayed, k_decayed: shared memory [C, K].
        b: sums of gates within blocks of 16 tokens [C, K], in units of log 2.
    """
    t = gl.arange(0, C, gl.SliceLayout(1, SCORES))[:, None]
    s = gl.arange(0, C, gl.SliceLayout(0, SCORES))[None, :]
    layout: gl.constexpr = b.type.layout
    A = gl.zeros([C, C], gl.float32, SCORES)
    A = warpgroup_mma(q_tile, k_tile.permute([1, 0]), A, use_acc=False, is_async=True)
    A = warpgroup_mma_wait(0, [A])  # its diagonal has no decay
    M = A
    for level in gl.static_range(4):
        second = (gl.arange(0, C, gl.SliceLayout(1, layout))[:, None] & (8 >> level)) != 0  # [C, 1]
        decay = gl.exp2(gl.where(second, 1.0, -1.0) * relative_to_middle(b, 8 >> level))  # [C, K]
        q, k = q_tile.load(layout).to(gl.float32), k_tile.load(layout).to(gl.float32)
        q_decayed.store((q * decay).to(gl.bfloat16))
        k_decayed.store((k * decay).to(gl.bfloat16))
        fence_async_shared()
        # Each product has an accumulator of its own: the assembler drops a product whose registers the next one clears.
        a, m = gl.zeros([C, C], gl.float32, SCORES), gl.zeros([C, C], gl.float32, SCORES)
        a = warpgroup_mma(q_decayed, k_decayed.permute([1, 0]), a, use_acc=False, is_async=True)
        m = warpgroup_mma(k_decayed, k_decayed.permute([1, 0]), m, use_acc=False, is_async=True)
        a, m = warpgroup_mma_wait(0, [a, m])
        across = ((t ^ s) & -(8 >> level)) == 8 >> level
        A, M = gl.where(across, a, A), gl.where(across, m, M)
    return A, M


@gluon.jit
def solve_blocks(m_tile, beta_tile):
    """Replaces M by G = (I + M B)^-1 M in blocks [C / 16, 16, 16], by substitution of rows.

    x_t = m_t - sum over s < t of m_ts beta_s x_s
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 1, 1], [2, 1, 16], [4, 1, 1], [2, 1, 0])
    beta = beta_tile.reshape([4, 16, 1])
    x = ()
    for t in gl.static_range(16):
        y = m_tile.slice(t, 1, 1).load(layout)  # [4, 1, 16]
        for s in gl.static_range(t):
            y = y - (m_tile.slice(t, 1, 1).slice(s, 1, 2).load(layout) * beta.slice(s, 1, 1).load(layout)) * x[s]
        x = x + (y,)  # noqa: RUF005 -- Triton compiles no stars
    for t in gl.static_range(16):
        m_tile.slice(t, 1, 1).store(x[t])


@gluon.jit
def tf32_left(x):
    """Returns an accumulator x [C, C] as the left operand of a product in TF32, with its columns in another order.

    A thread has columns 2t and 2t + 1 of each 8 columns of an accumulator, and columns t and t + 4 of an operand. In
    this order, accumulators become operands in place. The rows of the right operand need the same order; see
    `tf32_rows`.
    """
    x = nearest_tf32(x).reshape([C, C // 8, 4, 2]).permute([0, 1, 3, 2]).reshape([C, C])
    return gl.convert_layout(x, TF32_LEFT, assert_trivial=True)


@gluon.jit
def tf32_rows(x):
    """Returns the right operand x [C, C] of a product in TF32, with its rows in the order of `tf32_left`."""
    return nearest_tf32(x).reshape([C // 8, 4, 2, C]).permute([0, 2, 1, 3]).reshape([C, C])


@gluon.jit
def solve_chunk(M, beta, beta_tile, blocks, m_tile, g_tile):
    """Returns G = (I + M B)^-1 M [C, C] for M [C, C] and the numbers B [C].

    The diagonal blocks of 16 tokens are solved by substitution. With G_1, G_2 of two halves and M_21 between them,
    G_21 = (I - G_2 B_2) M_21 (I - B_1 G_1), for halves of 16 and of 32 tokens.

    Args:
        beta: B, in the layout of the columns of M; beta_tile holds it as well.
        blocks, m_tile, g_tile: shared memory [C, 16], [C, C] and [C, C] of float32.
    """
    t = gl.arange(0, C, gl.SliceLayout(1, SCORES))[:, None]
    s = gl.arange(0, C, gl.SliceLayout(0, SCORES))[None, :]
    cubes: gl.constexpr = M.reshape([C, 4, 16]).type.layout
    same = t // 16 == s // 16
    blocks.store(gl.sum(gl.where(same, M, 0.0).reshape([C, 4, 16]), 1))
    m_tile.permute([1, 0]).store(tf32_rows(M))
    solve_blocks(blocks.reshape([4, 16, 16]), beta_tile)
    G = gl.zeros([C, 4, 16], gl.float32, cubes) + blocks.load(gl.SliceLayout(1, cubes))[:, None, :]
    G = gl.where(same, gl.convert_layout(G.reshape([C, C]), SCORES, assert_trivial=True), 0.0)
    beta_rows = beta_tile.load(gl.SliceLayout(1, SCORES))[:, None]
    for level in gl.static_range(2):
        half = 16 << level
        g_tile.permute([1, 0]).store(tf32_rows(beta_rows * G))
        fence_async_shared()
        left = tf32_left(G * beta[None, :])
        P = gl.zeros([C, C], gl.float32, TF32)
        P = warpgroup_mma(left, m_tile.permute([1, 0]), P, use_acc=False, is_async=True)
        P = gl.convert_layout(warpgroup_mma_wait(0, [P]), SCORES, assert_trivial=True)
        P = gl.where(((t ^ s) & -half == half) & (s < t), M - P, 0.0)
        R = gl.zeros([C, C], gl.float32, TF32)
        R = warpgroup_mma(tf32_left(P), g_tile.permute([1, 0]), R, use_acc=False, is_async=True)
        R = gl.convert_layout(warpgroup_mma_wait(0, [R]), SCORES, assert_trivial=True)
        G += P - R
    return G
