"""Computes softmax attention on Hopper, over blocks of keys, with a running maximum m, sum z and output o on chip.

    s = scale * q k_j^T        m' = max(m, rowmax s)        p = exp(s - m')
    z' = exp(m - m') z + rowsum p                           o' = exp(m - m') o + p v_j
    o = o / z        lse = m + log z

Exponentials have base 2: the kernel multiplies the scale by log2 e, and m is a maximum of log2 e * s.

A block has 128 queries of one head. Its warps are specialised. They communicate over barriers in shared memory;
gla/sm90/common.py gives the rules.

    load     one warp: copies the queries, then up to STAGES blocks of keys and values ahead, by TMA
    attend   two warpgroups with 64 queries each: compute scores and softmax. While the tensor cores multiply the
             weights p of one block of keys by its values, a warpgroup computes the softmax of the next block.

The kernel goes from the last block of keys to the first, so that only the first steps need a mask.

B batch   Tq, Tk queries and keys   H key/value heads   Hq query heads   G query heads of a group
K, V key and value width   BR queries of a warpgroup   BT keys of a block   BK, BV key and value width, rounded up
STAGES pipeline stages   slot   a pipeline stage in shared memory: the tiles of one block of keys or values

Sources: Dao et al., "FlashAttention" (arXiv 2205.14135); Shah et al., "FlashAttention-3" (arXiv 2407.08608), for the
overlap of products and softmax.
"""

# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportAssignmentType=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from gla_core.dispatch.tensors import ceil_div
from gla_triton_kernels.softmax_attention.kernel import Plan
from gla_triton_runtime.launch import Launch
from gla_triton_runtime.tma import shared_tiles

LOG2_E = gl.constexpr(1.4426950408889634)
LN_2 = gl.constexpr(0.6931471805599453)


def launch_attention(
    plan: Plan, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, o: Tensor, lse: Tensor
) -> list[Launch]:
    """Returns the launch that writes o [B, Tq, H * G, V] and lse [B, Tq, H * G]; scale is at least 0."""
    B, Tq, Hq, _ = q.shape
    _, Tk, H, _ = v.shape
    BR, BT, BK, BV = plan.BR, plan.BT, plan.BK, plan.BV
    arguments = {
        "q_desc": shared_tiles(q, BR, BK),
        "k_desc": shared_tiles(k, BT, BK),
        "v_desc": shared_tiles(v, BT, BV),
        "o_desc": shared_tiles(o, BR, BV),
        "lse_ptr": lse,
        "scale": scale,
        "Tq": Tq,
        "Tk": Tk,
        "Hq": Hq,
        "G": Hq // H,
        "CAUSAL": causal,
        "STAGES": plan.stages,
    }
    grid = (ceil_div(Tq, 2 * BR) * B * Hq, 1, 1)
    return [Launch(_attention, grid, arguments, {"num_warps": plan.warps, "maxnreg": plan.registers})]


@gluon.jit
def _load_warp(q_desc, k_desc, v_desc, tiles, barriers, work, G, STAGES: gl.constexpr):
    """Loads the queries, then keys and values from the last block to the first."""
    q_tiles, k_tiles, v_tiles = tiles
    q_full, k_full, k_empty, v_full, v_empty = barriers
    b, h, first, blocks, _full_blocks = work
    BR: gl.constexpr = q_desc.block_type.shape[2]
    BT: gl.constexpr = k_desc.block_type.shape[2]
    mbarrier.expect(q_full, 2 * q_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(q_desc, [b, h, first, 0], q_full, q_tiles.index(0))
    tma.async_copy_global_to_shared(q_desc, [b, h, first + BR, 0], q_full, q_tiles.index(1))
    for i in range(blocks):
        slot = i % STAGES
        phase = (i // STAGES) & 1
        j = (blocks - 1 - i) * BT
        mbarrier.wait(k_empty.index(slot), phase ^ 1)
        mbarrier.expect(k_full.index(slot), k_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(k_desc, [b, h // G, j, 0], k_full.index(slot), k_tiles.index(slot))
        mbarrier.wait(v_empty.index(slot), phase ^ 1)
        mbarrier.expect(v_full.index(slot), v_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(v_desc, [b, h // G, j, 0], v_full.index(slot), v_tiles.index(slot))


@gluon.jit
def _scores(q_tile, k_tiles, slot, layout: gl.constexpr):
    """Starts the product q k^T [BR, BT] and returns it; the caller has to wait for it with `warpgroup_mma_wait`."""
    BR: gl.constexpr = q_tile.shape[0]
    BT: gl.constexpr = k_tiles.type.shape[3]
    BK: gl.constexpr = k_tiles.type.shape[4]
    k_tile = k_tiles.index(slot).reshape([BT, BK])
    s = gl.zeros([BR, BT], gl.float32, layout)
    return warpgroup_mma(q_tile, k_tile.permute([1, 0]), s, use_acc=False, is_async=True)


@gluon.jit
def _softmax(s, m, z, scale, j, last_key, MASKED: gl.constexpr):
    """Returns the weights p [BR, BT] of a block of keys, the new m and z [BR], and the factor of earlier sums [BR].

    Args:
        s: products q k^T [BR, BT].
        j: the first key of the block.
        last_key: the last key that a query attends to, [BR].
    """
    BT: gl.constexpr = s.shape[1]
    if MASKED:
        key = j + gl.arange(0, BT, gl.SliceLayout(0, s.type.layout))  # [BT]
        s = gl.where(key[None, :] <= last_key[:, None], s * scale, float("-inf"))
        m_new = gl.maximum(m, gl.max(s, 1))
    else:
        m_new = gl.maximum(m, gl.max(s, 1) * scale)
    # If a row has seen no key yet, the exponential is exp(-inf - 0) = 0, and not exp(-inf + inf) = NaN.
    base = gl.where(m_new == float("-inf"), 0.0, m_new)
    p = gl.exp2(s - base[:, None]) if MASKED else gl.exp2(s * scale - base[:, None])
    rescale = gl.exp2(m - base)
    return p, m_new, z * rescale + gl.sum(p, 1), rescale


@gluon.jit
def _step(
    i,
    blocks,
    q_tile,  # [BR, BK]
    k_tiles,
    v_tiles,
    barriers,
    p,  # [BR, BT], weights of block i - 1
    m,  # [BR]
    z,  # [BR]
    o,  # [BR, BV]
    scale,
    last_key,  # [BR]
    STAGES: gl.constexpr,
    MASKED: gl.constexpr,
):
    """Computes scores and softmax of block i, counted from the last block, while tensor cores add block i - 1 to o."""
    _q_full, k_full, k_empty, v_full, v_empty = barriers
    BT: gl.constexpr = v_tiles.type.shape[3]
    BV: gl.constexpr = v_tiles.type.shape[4]
    layout: gl.constexpr = p.type.layout
    slot = i % STAGES
    before = (i - 1) % STAGES
    mbarrier.wait(k_full.index(slot), (i // STAGES) & 1)
    s = _scores(q_tile, k_tiles, slot, layout)
    mbarrier.wait(v_full.index(before), ((i - 1) // STAGES) & 1)
    weights = gl.convert_layout(p.to(v_tiles.dtype), gl.DotOperandLayout(0, o.type.layout, 2))
    o = warpgroup_mma(weights, v_tiles.index(before).reshape([BT, BV]), o, is_async=True)
    s = warpgroup_mma_wait(1, [s])  # the scores are complete; the product with values may still run
    mbarrier.arrive(k_empty.index(slot), count=1)
    p, m, z, rescale = _softmax(s, m, z, scale, (blocks - 1 - i) * BT, last_key, MASKED)
    o, weights, p = warpgroup_mma_wait(0, [o, weights, p])
    mbarrier.arrive(v_empty.index(before), count=1)
    o_rescale = gl.convert_layout(rescale, gl.SliceLayout(1, o.type.layout))
    return p, m, z, o * o_rescale[:, None]


@gluon.jit
def _attend_warps(
    o_desc,
    lse_ptr,
    tiles,
    barriers,
    work,
    sizes,
    scale,
    WARPGROUP: gl.constexpr,
    CAUSAL: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Computes attention of BR queries, from query first + WARPGROUP * BR on.

    Args:
        work: batch, head, first query of the block, number of blocks of keys, and the number of blocks without a mask.
    """
    q_tiles, k_tiles, v_tiles = tiles
    q_full, k_full, k_empty, v_full, _v_empty = barriers
    b, h, first, blocks, full_blocks = work
    Tq, Tk, Hq = sizes
    BR: gl.constexpr = q_tiles.type.shape[3]
    BK: gl.constexpr = q_tiles.type.shape[4]
    BT: gl.constexpr = k_tiles.type.shape[3]
    BV: gl.constexpr = v_tiles.type.shape[4]
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BT, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BV, 16])
    t = first + WARPGROUP * BR + gl.arange(0, BR, gl.SliceLayout(1, s_layout))  # [BR]
    last_key = gl.minimum(t + Tk - Tq, Tk - 1) if CAUSAL else gl.zeros_like(t) + Tk - 1  # [BR]
    scale *= LOG2_E
    q_tile = q_tiles.index(WARPGROUP).reshape([BR, BK])
    m = gl.full([BR], float("-inf"), gl.float32, gl.SliceLayout(1, s_layout))
    z = gl.zeros([BR], gl.float32, gl.SliceLayout(1, s_layout))
    o = gl.zeros([BR, BV], gl.float32, o_layout)

    mbarrier.wait(q_full, 0)
    mbarrier.wait(k_full.index(0), 0)
    s = warpgroup_mma_wait(0, [_scores(q_tile, k_tiles, 0, s_layout)])
    mbarrier.arrive(k_empty.index(0), count=1)
    p, m, z, _rescale = _softmax(s, m, z, scale, (blocks - 1) * BT, last_key, True)
    masked = gl.maximum(blocks - full_blocks, 1)
    for i in range(1, masked):
        p, m, z, o = _step(i, blocks, q_tile, k_tiles, v_tiles, barriers, p, m, z, o, scale, last_key, STAGES, True)
    for i in range(masked, blocks):
        p, m, z, o = _step(i, blocks, q_tile, k_tiles, v_tiles, barriers, p, m, z, o, scale, last_key, STAGES, False)
    slot = (blocks - 1) % STAGES
    mbarrier.wait(v_full.index(slot), ((blocks - 1) // STAGES) & 1)
    weights = gl.convert_layout(p.to(v_tiles.dtype), gl.DotOperandLayout(0, o_layout, 2))
    o = warpgroup_mma(weights, v_tiles.index(slot).reshape([BT, BV]), o, is_async=True)
    o, weights = warpgroup_mma_wait(0, [o, weights])

    # If a row sees no key, o = 0 / 0 = NaN and lse = -inf + log 0 = -inf.
    gl.store(lse_ptr + (b.to(gl.int64) * Tq + t) * Hq + h, (m + gl.log2(z)) * LN_2, t < Tq)
    o = o / gl.convert_layout(z, gl.SliceLayout(1, o_layout))[:, None]
    o_tile = q_tiles.index(WARPGROUP)._reinterpret(o_desc.dtype, [1, 1, BR, BV], o_desc.layout)
    o_tile.reshape([BR, BV]).store(o.to(o_desc.dtype))
    fence_async_shared()  # o has been stored from registers; TMA reads it
    tma.async_copy_shared_to_global(o_desc, [b, h, first + WARPGROUP * BR, 0], o_tile)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["scale", "Tq", "Tk", "Hq", "G"])
def _attention(
    q_desc,  # [B, H * G, Tq, K], tiles [BR, BK]
    k_desc,  # [B, H, Tk, K], tiles [BT, BK]
    v_desc,  # [B, H, Tk, V], tiles [BT, BV]
    o_desc,  # [B, H * G, Tq, V], tiles [BR, BV]
    lse_ptr,  # [B, Tq, H * G]
    scale,
    Tq,
    Tk,
    Hq,
    G,
    CAUSAL: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Computes attention of 2 BR queries of one head."""
    BR: gl.constexpr = q_desc.block_type.shape[2]
    BK: gl.constexpr = q_desc.block_type.shape[3]
    BT: gl.constexpr = k_desc.block_type.shape[2]
    BV: gl.constexpr = v_desc.block_type.shape[3]
    dtype: gl.constexpr = q_desc.dtype
    # The tiles of a head start together, so that its keys stay in the cache. Tiles with most keys start first.
    tiles_per_head = gl.cdiv(Tq, 2 * BR)
    first = (tiles_per_head - 1 - gl.program_id(0) % tiles_per_head) * 2 * BR
    b = gl.program_id(0) // tiles_per_head // Hq
    h = gl.program_id(0) // tiles_per_head % Hq
    if CAUSAL:
        blocks = gl.cdiv(gl.minimum(first + 2 * BR + Tk - Tq, Tk), BT)
        full_blocks = gl.maximum(first + 1 + Tk - Tq, 0) // BT  # every query attends to all keys of these blocks
    else:
        blocks = gl.cdiv(Tk, BT)
        full_blocks = Tk // BT
    blocks = gl.maximum(blocks, 1)

    q_tiles = gl.allocate_shared_memory(dtype, [2, 1, 1, BR, BK], q_desc.layout)  # q, finally o
    k_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BT, BK], k_desc.layout)
    v_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BT, BV], v_desc.layout)
    bars: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [1], bars)  # q has been loaded
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bars)  # a block of k has been loaded
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bars)  # both warpgroups have read it
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bars)  # a block of v has been loaded
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bars)  # both warpgroups have read it
    mbarrier.init(q_full, count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)  # both attend warpgroups arrive
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=2)

    tiles = (q_tiles, k_tiles, v_tiles)
    barriers = (q_full, k_full, k_empty, v_full, v_empty)
    work = (b, h, first, blocks, full_blocks)
    sizes = (Tq, Tk, Hq)
    gl.warp_specialize(
        [
            (_attend_warps, (o_desc, lse_ptr, tiles, barriers, work, sizes, scale, 0, CAUSAL, STAGES)),
            (_attend_warps, (o_desc, lse_ptr, tiles, barriers, work, sizes, scale, 1, CAUSAL, STAGES)),
            (_load_warp, (q_desc, k_desc, v_desc, tiles, barriers, work, G, STAGES)),
        ],
        [4, 1],
        [240, 24],
    )
