"""What the kernels for SM90 that compute gradients have in common: gates and decays of a chunk, writing a gradient.

The mathematics is that of backward_sm90.py.

C rows of a chunk   D = 64 columns of a tile
"""

# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportAssignmentType=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma, warpgroup_mma

from gla_triton_kernels.chunk_gla.common_sm90 import clear_rows, opaque_zero, plus
from gla_triton_kernels.chunk_gla.limits import LEAST_GATE, LOG2E
from gla_triton_kernels.chunk_gla.plan_backward import CHUNK

WIDTH = 64
C = gl.constexpr(CHUNK)
D = gl.constexpr(WIDTH)
LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))  # of sums of products [64, 64]
LEFT = gl.constexpr(gl.DotOperandLayout(0, LAYOUT.value, 2))
# A warp holds all rows of 16 columns, so that sums over rows need no other; a thread holds runs of 4 rows, so that
# threads seldom meet in shared memory's banks.
RUNS = gl.constexpr(gl.BlockedLayout([4, 2], [4, 8], [1, 4], [1, 0]))


@gluon.jit
def product(a, b, acc):
    """The sum acc + a b, under way."""
    return warpgroup_mma(a, b, acc, is_async=True)


@gluon.jit
def gate_tile(g_desc, x_tiles, i):
    """Where the i-th tile of g arrives, to be replaced by the exponents of queries."""
    return x_tiles.index(i)._reinterpret(g_desc.dtype, g_desc.block_type.shape, g_desc.layout)


@gluon.jit
def keys_that_leave(i, start, length, segment, leaving, ends, K):
    """Keys of a state's gradient that `leaving` holds for segment i of a packed sequence: K, or 0 where that is 0.

    Args:
        ends: offsets of sequences whose last segments leave none, or None. segment: tokens of one.
    """
    keys = K
    if leaving is not None:  # noqa: SIM102 -- known when this is compiled
        if ends is not None:
            n = i - start // segment
            last = start + length == gl.load(ends + n + 1, mask=length > 0, other=0)
            keys = gl.where(last, 0, K)
    return keys


@gluon.jit
def gates(block, rows, PACKED: gl.constexpr):
    """The gates [C, D] of a chunk of `rows` rows in a block [1, 1, C, D], in units of log 2."""
    tile = block.reshape([C, D])
    if PACKED:
        clear_rows(tile, rows, RUNS)
    return gl.maximum(tile.load(RUNS).to(gl.float32), LEAST_GATE) * LOG2E  # [C, D]


@gluon.jit
def exponents(g, mild):
    """The exponents b - r [C, D] of queries, and b_C [D], of gates g [C, D]."""
    end = gl.sum(g, 0)  # [D]
    return gl.associative_scan(g, 0, plus) - gl.where(mild, 0.5 * end, 0.0)[None, :], end


@gluon.jit
def decay(q_tile, k_tile, x, end, mild, scale):
    """Turn tiles q, k [C, D] into qg, kg, by what `exponents` has found."""
    q_tile.store((q_tile.load(RUNS).to(gl.float32) * (gl.exp2(x) * scale)).to(gl.bfloat16))
    y = gl.where(mild, 0.0, end)[None, :] - x  # [C, D], the exponents of keys
    k_tile.store((k_tile.load(RUNS).to(gl.float32) * gl.exp2(y)).to(gl.bfloat16))


@gluon.jit
def write_rows(ptr, x, column, width, where, rows):
    """Write the first `rows` rows of x [C, K] to a gradient [B, T, H, width] from registers.

    where: batch, head, first token, T and H. column: of the gradient, where x begins.
    """
    b, h, t, T, H = where
    row = (gl.arange(0, x.shape[0], gl.SliceLayout(1, x.type.layout)) + opaque_zero())[:, None]  # [C, 1]
    columns = (gl.arange(0, x.shape[1], gl.SliceLayout(0, x.type.layout)) + opaque_zero())[None, :]  # [1, K]
    first = ptr + ((b.to(gl.int64) * T + t) * H + h) * width + column
    offsets = row.to(gl.int64) * (H * width) + columns  # [C, K]
    gl.store(first + offsets, x.to(ptr.dtype.element_ty), (row < rows) & (columns < width - column))


@gluon.jit
def write(desc, ptr, tile, x, column, width, where, rows, PACKED: gl.constexpr):
    """Write x [C, K] to a gradient, by way of a tile in shared memory unless rows behind it are another sequence's.

    The arguments are as of `write_rows`. desc: of the gradient; None where there are several partial results.
    """
    b, h, t, _, _ = where
    if desc is None:  # noqa: SIM114 -- known when this is compiled
        write_rows(ptr, x, column, width, where, rows)
    elif PACKED and rows < x.shape[0]:
        write_rows(ptr, x, column, width, where, rows)
    else:
        tile.store(x.to(gl.bfloat16))
        fence_async_shared()
        tma.async_copy_shared_to_global(desc, [b, h, t, column], tile.reshape([1, 1, x.shape[0], x.shape[1]]))
