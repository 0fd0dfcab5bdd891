"""States of all segments from zero on Hopper: specialised warps, the states in registers.

    S = sum over the tokens s of a segment of diag(exp(sum of g after s)) k_s^T v_s,      D = exp(sum of g)

A segment is gone through backwards, so that the gates after a token are known when it is met, and S is a plain sum:

    kg_s = k_s exp(R + b_C - b_s)      S += kg^T v      R += b_C          R = 0 at the end of the segment
    b_t = g_1 + .. + g_t               within a chunk

No exponent is above 0 and no state is decayed, so there is one path for gates of any strength.

B batch   T time   H heads   K, V key and value width of a head   C rows of a chunk
BV columns of v that a block holds; the keys of a head in parts of PART

One block per segment, head and BV columns of v; two kinds of warps talk over barriers in shared memory:

    load    one warp: copies k, v, g of the next chunks by TMA
    state   a warpgroup for each part of the keys: turns its k into kg where it lies and adds kg^T v to its rows of S;
            the product runs while the next chunk's k is decayed. The warpgroups need nothing of each other.

Sources: Yang et al., "Gated Linear Attention Transformers with Hardware-Efficient Training" (arXiv 2312.06635).
"""

# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportAssignmentType=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
# pyright: reportUnboundVariable=false, reportPossiblyUnboundVariable=false
from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from gla_triton_kernels.chunk_gla.call import Tensors
from gla_triton_kernels.chunk_gla.common_sm90 import clear_rows, let_dependents_start, plus
from gla_triton_kernels.chunk_gla.limits import LEAST_GATE, LOG2E
from gla_triton_kernels.chunk_gla.plan import SegmentPlan
from gla_triton_kernels.chunk_gla.segments import Segments
from gla_triton_kernels.runtime.launch import Launch, launch
from gla_triton_kernels.runtime.tma import shared_tiles


def run(plan: SegmentPlan, x: Tensors, segments: Segments, S: Tensor, D: Tensor | None) -> list[Launch]:
    """Fill S [count, H, K, V] and D [count, H, K], and return what was launched; D is None without gates.

    Those of empty segments are left as they are. Where no final state is asked for, so are those of the last segment of
    every sequence; where sequences are packed, of those that are known to be last by being short.
    """
    kernel, bounds, skip_last = plan.states, segments.bounds, x.final_state is None
    B, T, H, K = x.k.shape
    V = x.v.shape[3]
    a_sequence = segments.count if bounds is not None else segments.per_sequence
    built = a_sequence - 1 if skip_last and bounds is None else a_sequence
    blocks = (B if bounds is None else 1) * built * H * -(-V // kernel.BV)
    if blocks == 0:
        return []
    moved = ((x.k, kernel.BK), (x.v, kernel.BV), (x.g, kernel.BK))
    maps = [None if y is None else shared_tiles(y, kernel.C, width) for y, width in moved]
    least = segments.length if skip_last else 1
    integers = (T, segments.length, a_sequence, built, least, H, K, V, -(-K // kernel.BK), kernel.stages)
    options = {"num_warps": kernel.warps, "maxnreg": 128}
    return [launch(_build_states_kernel, (blocks, 1, 1), (*maps, S, D, bounds), (), integers, **options)]


@gluon.jit
def chunks_of(length, C: gl.constexpr):
    """Chunks of a segment: at least one, which it has; the loop over them then leaves S where wgmma puts it."""
    return gl.maximum(gl.cdiv(length, C), 1)


@gluon.jit
def _load_warp(descriptors, tiles, barriers, chunks, PARTS: gl.constexpr, STAGES: gl.constexpr):
    """Keep STAGES chunks of k, v and g on their way, the last chunk first."""
    k_desc, v_desc, g_desc = descriptors
    k_tiles, v_tiles, g_tiles = tiles
    full, empty = barriers
    b, h, column, start, n_chunks = chunks
    C: gl.constexpr = k_desc.block_type.shape[2]
    PART: gl.constexpr = k_desc.block_type.shape[3]
    GATE_SIZE: gl.constexpr = 0 if g_desc is None else g_desc.block_type.nbytes
    SIZE: gl.constexpr = PARTS * (k_desc.block_type.nbytes + GATE_SIZE) + v_desc.block_type.nbytes
    for i in range(n_chunks):
        slot = i % STAGES
        t = start + (n_chunks - 1 - i) * C
        bar = full.index(slot)
        mbarrier.wait(empty.index(slot), ((i // STAGES) & 1) ^ 1)
        mbarrier.expect(bar, SIZE)
        for part in gl.static_range(PARTS):
            place = PARTS * slot + part
            if g_desc is not None:
                tma.async_copy_global_to_shared(g_desc, [b, h, t, part * PART], bar, g_tiles.index(place))
            tma.async_copy_global_to_shared(k_desc, [b, h, t, part * PART], bar, k_tiles.index(place))
        tma.async_copy_global_to_shared(v_desc, [b, h, t, column], bar, v_tiles.index(slot))


@gluon.jit
def _state_warps(
    tiles,
    barriers,
    states,
    place,
    sizes,
    part: gl.constexpr,
    PARTS: gl.constexpr,
    PACKED: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Build PART rows of S and of D."""
    k_tiles, v_tiles, g_tiles = tiles
    full, empty = barriers
    S_ptr, D_ptr = states
    n, h, column, length = place
    H, K, V = sizes
    HAS_GATE: gl.constexpr = D_ptr is not None
    C: gl.constexpr = k_tiles.type.shape[3]
    PART: gl.constexpr = k_tiles.type.shape[4]
    BV: gl.constexpr = v_tiles.type.shape[4]
    state_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BV, 16])
    # A thread holds whole runs of rows of two columns, so that sums over rows stay within a few threads.
    layout: gl.constexpr = gl.BlockedLayout([16, 2], [4, 8], [1, 4], [1, 0])
    row = gl.arange(0, C, gl.SliceLayout(1, layout))  # [C]
    R = gl.zeros([PART], gl.float32, gl.SliceLayout(0, layout))  # in units of log 2
    S = warpgroup_mma_init(gl.zeros([PART, BV], gl.float32, state_layout))
    n_chunks = chunks_of(length, C)
    for i in range(n_chunks):
        slot = i % STAGES
        rows = length - (n_chunks - 1 - i) * C
        k_tile = k_tiles.index(PARTS * slot + part).reshape([C, PART])
        v_tile = v_tiles.index(slot).reshape([C, BV])
        mbarrier.wait(full.index(slot), (i // STAGES) & 1)
        if HAS_GATE:
            g = g_tiles.index(PARTS * slot + part).reshape([C, PART]).load(layout).to(gl.float32)  # [C, PART]
            g = gl.maximum(g, LEAST_GATE) * LOG2E
            if PACKED:
                g = gl.where((row < rows)[:, None], g, 0.0)
            b = gl.associative_scan(g, 0, plus)  # [C, PART]
            R += gl.sum(g, 0)
            kg = k_tile.load(layout).to(gl.float32) * gl.exp2(R[None, :] - b)  # [C, PART]
            if PACKED:
                kg = gl.where((row < rows)[:, None], kg, 0.0)
            k_tile.store(kg.to(k_tile.dtype))
        if PACKED:
            if not HAS_GATE:
                clear_rows(k_tile, rows, layout)
            clear_rows(v_tile, rows, layout)
        fence_async_shared()
        S = warpgroup_mma_wait(0, [S])
        mbarrier.arrive(empty.index((i + STAGES - 1) % STAGES), count=1, pred=i > 0)
        S = warpgroup_mma(k_tile.permute([1, 0]), v_tile, warpgroup_mma_init(S), is_async=True)
    S = warpgroup_mma_wait(0, [S])  # [PART, BV]
    state = (n * H + h).to(gl.int64) * K
    key = part * PART + gl.arange(0, PART, gl.SliceLayout(1, state_layout))[:, None]  # [PART, 1]
    value = column + gl.arange(0, BV, gl.SliceLayout(0, state_layout))[None, :]  # [1, BV]
    gl.store(S_ptr + state * V + key * V + value, S, (key < K) & (value < V))
    if HAS_GATE:
        key = part * PART + gl.arange(0, PART, gl.SliceLayout(0, layout))  # [PART]
        gl.store(D_ptr + state + key, gl.exp2(R), (key < K) & (column == 0))


# V is not there: where it is a multiple of 16, two elements of a state are written at once.
@gluon.jit(do_not_specialize=["T", "length", "a_sequence", "built", "least", "H", "K"])
def _build_states_kernel(
    k_desc,  # [B, H, T, K], tiles [C, PART]
    v_desc,  # [B, H, T, V], tiles [C, BV]
    g_desc,  # [B, H, T, K], tiles [C, PART], or None
    S_ptr,  # [count, H, K, V]
    D_ptr,  # [count, H, K], or None as g
    bounds,  # [count + 1] or None
    T,
    length,
    a_sequence,
    built,
    least,
    H,
    K,
    V,
    PARTS: gl.constexpr,
    STAGES: gl.constexpr,
):
    let_dependents_start()
    C: gl.constexpr = k_desc.block_type.shape[2]
    PART: gl.constexpr = k_desc.block_type.shape[3]
    BV: gl.constexpr = v_desc.block_type.shape[3]
    PACKED: gl.constexpr = bounds is not None
    columns = gl.cdiv(V, BV)
    column = gl.program_id(0) % columns * BV
    h = gl.program_id(0) // columns % H
    n = gl.program_id(0) // columns // H
    if PACKED:
        b = gl.to_tensor(0)
        start = gl.load(bounds + n)
        length = gl.load(bounds + n + 1) - start
        if length < least:
            return
    else:
        b = n // built
        start = n % built * length
        length = gl.minimum(length, T - start)
        n = b * a_sequence + n % built

    k_tiles = gl.allocate_shared_memory(k_desc.dtype, [PARTS * STAGES, 1, 1, C, PART], k_desc.layout)
    v_tiles = gl.allocate_shared_memory(v_desc.dtype, [STAGES, 1, 1, C, BV], v_desc.layout)
    g_tiles = (
        k_tiles
        if g_desc is None
        else gl.allocate_shared_memory(g_desc.dtype, [PARTS * STAGES, 1, 1, C, PART], g_desc.layout)
    )
    bars: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bars)  # k, v, g have been loaded
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bars)  # all warpgroups have read them
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=PARTS)

    tiles = (k_tiles, v_tiles, g_tiles)
    barriers = (full, empty)
    states = (S_ptr, D_ptr)
    place = (n, h, column, length)
    sizes = (H, K, V)
    descriptors = (k_desc, v_desc, g_desc)
    chunks = (b, h, column, start, chunks_of(length, C))
    # Registers of a thread: what the load warp leaves is shared out evenly.
    if PARTS == 1:
        gl.warp_specialize(
            [
                (_state_warps, (tiles, barriers, states, place, sizes, 0, PARTS, PACKED, STAGES)),
                (_load_warp, (descriptors, tiles, barriers, chunks, PARTS, STAGES)),
            ],
            [1],
            [24],
        )
    else:
        gl.warp_specialize(
            [
                (_state_warps, (tiles, barriers, states, place, sizes, 0, PARTS, PACKED, STAGES)),
                (_state_warps, (tiles, barriers, states, place, sizes, 1, PARTS, PACKED, STAGES)),
                (_load_warp, (descriptors, tiles, barriers, chunks, PARTS, STAGES)),
            ],
            [4, 1],
            [176, 24],
        )
