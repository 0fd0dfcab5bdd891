"""Computes what forward_head.py computes in chunks of 128 tokens, for heads of 128 keys and 128 values in bfloat16.

The formulas, and the letters that are not explained here, are those of forward_head.py. Half as many chunks need half
as many waits, and a product has twice as many columns, so that it reads fewer operands from shared memory.

C = 128 tokens of a chunk   K = 128 keys   V = 128 values   D = 64 rows of a state warpgroup

The grid has one block per segment and value head. Both state warpgroups share all tiles, and divide their rows:

    load    one warp: copies q, k, v of the next chunks by TMA
    gate    a warpgroup: sums the gates, while the state warps process earlier chunks
    state   two warpgroups. Each has D tokens of q, of the scores and of o, and D keys of S, which never leaves its
            registers. S passes to the other warpgroup as an operand, through one tile. The first D tokens read only
            the first D keys and values of a chunk.

The tiles of two chunks and of S take 224 KB of shared memory, so there is no tile for u and none for o. In place of u,
exp(b_C - b_s) multiplies k_s, on the way to registers, from which k^T is an operand. o leaves through the tile of q.

The sums b are exact to 1.4e-3 after the strongest gates, since a chunk has twice as many.
"""

# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportAssignmentType=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
# pyright: reportUnboundVariable=false, reportPossiblyUnboundVariable=false
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from gla_triton_kernels.chunk_gla.kernel import ForwardPlan
from gla_triton_kernels.chunk_gla.shared.limits import LOG2E
from gla_triton_kernels.chunk_gla.shared.segments import Segments
from gla_triton_kernels.chunk_gla.sm90.common import (
    as_float32,
    clear_rows,
    first_state,
    gates_of,
    opaque_zero,
    plus,
    tokens_of,
    wait_for_predecessor,
    write,
    write_last_state,
)
from gla_triton_kernels.chunk_gla.sm90.forward_head import common_arguments, overlaps, store_sums
from gla_triton_kernels.chunk_gla.tensors import Tensors
from gla_triton_kernels.runtime.launch import Launch, overlapping
from gla_triton_kernels.runtime.tma import shared_tiles

D = gl.constexpr(64)
CLEARED = gl.constexpr(16)  # rows of a tile that are cleared at once; more would not fit into the registers


def launch_outputs(
    plan: ForwardPlan, x: Tensors, segments: Segments, scale: float, every: int | None, normalizer: int | None = None
) -> list[Launch]:
    """Returns the launch that fills o, and final_state if x has it. There are no checkpoints, so `every` is None.

    See `launch_outputs` of general/forward.py for the arguments.
    """
    C, rows = plan.parameters.C, D.value
    arguments = {
        "q_desc": shared_tiles(x.q, rows, C),
        "k_desc": shared_tiles(x.k, C, C),
        "v_desc": shared_tiles(x.v, C, C),
        "o_desc": shared_tiles(x.o, rows, C),
        **common_arguments(x, segments, scale, normalizer),
        "SHARED_CHUNKS": segments.order is not None or (segments.per_sequence > 1 and segments.length % C != 0),
        "STAGES": plan.parameters.stages,
    }
    options = {"num_warps": 4, "maxnreg": 128, **overlapping(overlaps(plan, segments))}
    return [Launch(_chunk_gla_fwd_head_128_kernel, (segments.count * x.v.shape[2], 1, 1), arguments, options)]


@gluon.jit
def _load_warp(given, STAGES: gl.constexpr):
    """Prefetches STAGES chunks of q, k and v."""
    descriptors, tiles, barriers, place = given
    q_desc, k_desc, v_desc = descriptors
    q_tiles, k_tiles, v_tiles = tiles
    full, empty, sent = barriers
    b, key_head, h, start, n_chunks = place
    C: gl.constexpr = k_desc.block_type.shape[2]
    for i in range(n_chunks):
        slot = i % STAGES
        t = start + i * C
        phase = ((i // STAGES) & 1) ^ 1
        mbarrier.wait(empty.index(slot), phase)
        size: gl.constexpr = 2 * q_desc.block_type.nbytes + k_desc.block_type.nbytes + v_desc.block_type.nbytes
        mbarrier.expect(full.index(slot), size)
        tma.async_copy_global_to_shared(k_desc, [b, key_head, t, 0], full.index(slot), k_tiles.index(slot))
        tma.async_copy_global_to_shared(v_desc, [b, h, t, 0], full.index(slot), v_tiles.index(slot))
        mbarrier.wait(sent.index(slot), phase)
        for half in gl.static_range(2):
            q_tile = q_tiles.index(2 * slot + half)
            tma.async_copy_global_to_shared(q_desc, [b, key_head, t + half * D, 0], full.index(slot), q_tile)


@gluon.jit
def _gate_warps(gates, given, NORMALIZER: gl.constexpr, SHARED_CHUNKS: gl.constexpr, STAGES: gl.constexpr):
    """Sums the gates, and clears rows of the next segment, chunk after chunk."""
    tiles, barriers, start, length = given
    k_tiles, v_tiles, sums, decays = tiles
    full, gated = barriers
    C: gl.constexpr = k_tiles.type.shape[3]
    HAS_GATE: gl.constexpr = gates is not None
    line: gl.constexpr = gl.BlockedLayout([C // 32], [32], [4], [0])  # every warp holds all tokens
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    token = gl.arange(0, C, line)
    if HAS_GATE:
        g_next = gates_of(gates, start, length, token, NORMALIZER)  # [C]
    for i in range(gl.cdiv(length, C)):
        slot = i % STAGES
        rows = length - i * C
        if HAS_GATE:
            g = g_next.to(gl.float64) * LOG2E  # [C]
            g_next = gates_of(gates, start + (i + 1) * C, rows - C, token, NORMALIZER)  # arrives during this chunk
            b = gl.associative_scan(g, 0, plus)  # [C]
            b_end = gl.sum(g, 0)
        mbarrier.wait(full.index(slot), (i // STAGES) & 1)
        if HAS_GATE:  # the load warp has waited until the state warps had read what was in this slot
            store_sums((sums, decays), slot, b, b_end, gl.SliceLayout(1, layout))
        if SHARED_CHUNKS:
            for first in gl.static_range(0, C, CLEARED):
                clear_rows(k_tiles.index(slot).reshape([C, C]).slice(first, CLEARED), rows - first, layout)
                clear_rows(v_tiles.index(slot).reshape([C, C]).slice(first, CLEARED), rows - first, layout)
            fence_async_shared()
        mbarrier.arrive(gated.index(slot), count=1)


@gluon.jit
def _scores(q_tile, k_tile, layout: gl.constexpr):
    """Starts the product q k^T [D, D] of tiles q and k [D, K]."""
    a = gl.zeros([D, D], gl.float32, layout)
    return warpgroup_mma(q_tile, k_tile.permute([1, 0]), a, use_acc=False, is_async=True)


@gluon.jit
def _state_warps(given, HALF: gl.constexpr, HAS_GATE: gl.constexpr, SHARED_CHUNKS: gl.constexpr, STAGES: gl.constexpr):
    """Carries D keys of the state through the segment, and writes the outputs of D tokens of each chunk."""
    tiles, barriers, outputs, states, place, sizes = given
    q_tiles, k_tiles, v_tiles, sums, decays, s_tiles = tiles
    full, gated, empty, sent, stored, read = barriers
    o_desc, o_ptr, scale = outputs
    b, h, n, sequence, origin, start, length = place
    T, Hv = sizes
    C: gl.constexpr = k_tiles.type.shape[3]
    K: gl.constexpr = k_tiles.type.shape[4]
    V: gl.constexpr = v_tiles.type.shape[4]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, V, 16])
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    # The product that runs while scores are masked. Without gates, the assembler would then wait after each product.
    RUNNING: gl.constexpr = 1 if HAS_GATE else 0
    t = gl.arange(0, D, gl.SliceLayout(1, scores))[:, None]  # [D, 1]
    s = gl.arange(0, D, gl.SliceLayout(0, scores))[None, :]  # [1, D]
    key = HALF * D + gl.arange(0, D, gl.SliceLayout(1, layout))[:, None]  # [D, 1]
    value = gl.arange(0, V, gl.SliceLayout(0, layout))[None, :]  # [1, V]
    S = gl.zeros([D, V], gl.float32, layout)
    wait_for_predecessor()
    S = first_state(S, states, n, sequence, h, start == origin, key, value, (Hv, K, V))
    for i in range(gl.cdiv(length, C)):
        slot = i % STAGES
        phase = (i // STAGES) & 1
        rows = length - i * C
        q_tile = q_tiles.index(2 * slot + HALF).reshape([D, K])
        k_tile = k_tiles.index(slot).reshape([C, K])
        v_tile = v_tiles.index(slot).reshape([C, V])
        s_tile = s_tiles.index(opaque_zero())  # otherwise its descriptors occupy registers between chunks
        mbarrier.wait(read, (i & 1) ^ 1)
        s_tile.slice(HALF * D, D).store(S.to(s_tile.dtype))
        fence_async_shared()
        mbarrier.arrive(stored, count=1)
        mbarrier.wait(full.index(slot), phase)
        if SHARED_CHUNKS and rows < C:
            mbarrier.wait(gated.index(slot), phase)  # rows of the next segment have been cleared
        # Scores of the warpgroup's own tokens, and of the tokens of the other one if they come before.
        if HALF == 1:
            a_first = _scores(q_tile, k_tile.slice(0, D), scores)
        a = _scores(q_tile, k_tile.slice(HALF * D, D), scores)
        mbarrier.wait(gated.index(slot), phase)
        if HAS_GATE:
            b_tile = sums.index(2 * slot)
            own = b_tile.slice(HALF * D, D)
            b_t = own.load(gl.SliceLayout(1, scores))[:, None]  # [D, 1]
        if HALF == 1:
            a_first = warpgroup_mma_wait(RUNNING, [a_first])
            if HAS_GATE:
                a_first *= gl.exp2(b_t - b_tile.slice(0, D).load(gl.SliceLayout(0, scores))[None, :])
            a_first = gl.convert_layout(a_first.to(q_tile.dtype), operand)  # [D, D]
        if i > 0:
            tma.store_wait(0)  # the copy of the last o
            mbarrier.arrive(sent.index((i - 1) % STAGES), count=1)
        mbarrier.wait(stored, i & 1)
        o = gl.zeros([D, V], gl.float32, layout)
        o = warpgroup_mma(q_tile, s_tile, o, use_acc=False, is_async=True)
        a = warpgroup_mma_wait(RUNNING, [a])
        if HAS_GATE:
            a *= gl.exp2(b_t - own.load(gl.SliceLayout(0, scores))[None, :])  # undefined for t < s
        a = gl.convert_layout(gl.where(t >= s, a, 0.0).to(q_tile.dtype), operand)  # [D, D]
        k_own = k_tile.slice(HALF * D, D, 1).permute([1, 0])  # [D, C], k^T
        if HAS_GATE:
            leaving = sums.index(2 * slot + 1).load(gl.SliceLayout(0, operand))[None, :]  # [1, C], exp(b_C - b)
            k_own = (as_float32(k_own.load(operand)) * leaving).to(q_tile.dtype)  # [D, C]
            S = S * gl.max(decays.index(slot).load(gl.SliceLayout(1, layout)), 0)
        o = warpgroup_mma_wait(0, [o])
        mbarrier.arrive(read, count=1)
        if HAS_GATE:
            o = o * gl.exp2(own.load(gl.SliceLayout(1, layout)))[:, None]
        if HALF == 1:
            o = warpgroup_mma(a_first, v_tile.slice(0, D), o, is_async=True)
        o = warpgroup_mma(a, v_tile.slice(HALF * D, D), o, is_async=True)
        S = warpgroup_mma(k_own, v_tile, S, is_async=True)
        o, S = warpgroup_mma_wait(0, [o, S])
        mbarrier.arrive(empty.index(slot), count=1)
        where = (b, h, start + i * C + HALF * D, T, Hv)
        write(o_desc, o_ptr, q_tile, o * scale, 0, V, where, rows - HALF * D, SHARED_CHUNKS)
    write_last_state(S, states, n, sequence, h, key, value, (Hv, K, V))
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["scale", "g_b", "g_t", "g_h", "T", "segment", "segments", "Hv", "R"])
def _chunk_gla_fwd_head_128_kernel(
    q_desc,  # [B, H, T, K], tiles [D, K]
    k_desc,  # [B, H, T, K], tiles [C, K]
    v_desc,  # [B, Hv, T, V], tiles [C, V]
    o_desc,  # [B, Hv, T, V], tiles [D, V]
    g_ptr,  # [B, T, Hv], or [Hv] with g_b = g_t = 0, or None
    o_ptr,  # [B, T, Hv, V]
    initial_state,  # [N, Hv, K, V] or None
    entering,  # [I, Hv, K, V] or None
    final_state,  # [N, Hv, K, V], or None if sequences are cut
    order,  # [I, 5] or None
    pool,  # [P, Hv, K, V], instead of initial_state and final_state, or None
    slots,  # [N, 4], or None without a pool
    scale,
    g_b,
    g_t,
    g_h,
    state_n,
    state_h,
    state_k,
    state_v,
    T,
    segment,
    segments,
    Hv,
    R,
    NORMALIZER: gl.constexpr,
    SHARED_CHUNKS: gl.constexpr,  # whether the last chunk of a segment may have tokens of the next segment
    STAGES: gl.constexpr,
):
    C: gl.constexpr = k_desc.block_type.shape[2]
    K: gl.constexpr = k_desc.block_type.shape[3]
    V: gl.constexpr = v_desc.block_type.shape[3]
    HAS_GATE: gl.constexpr = g_ptr is not None
    dtype: gl.constexpr = q_desc.dtype
    h = gl.program_id(0) % Hv
    n = gl.program_id(0) // Hv
    if order is not None and entering is None:
        wait_for_predecessor()  # the predecessor writes the order
    n, b, start, length, sequence, origin, _ = tokens_of(n, T, segment, segments, order)
    if order is not None and entering is not None:  # noqa: SIM102 -- known when this is compiled
        if length == 0:
            return

    state_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([K, V], dtype)
    row_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q_tiles = gl.allocate_shared_memory(dtype, [2 * STAGES, 1, 1, D, K], q_desc.layout)  # of each warpgroup; then o
    k_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, C, K], k_desc.layout)
    v_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, C, V], v_desc.layout)
    s_tiles = gl.allocate_shared_memory(dtype, [1, K, V], state_layout)  # S as an operand
    sums = gl.allocate_shared_memory(gl.float32, [2 * STAGES, C], row_layout)  # b and exp(b_C - b)
    decays = gl.allocate_shared_memory(gl.float32, [STAGES, 1], row_layout)  # exp(b_C)
    bars: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bars)  # q, k, v have been loaded
    gated = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bars)  # the gates have been summed
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bars)  # the state warpgroups have read all of a chunk
    sent = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bars)  # o has left the tiles of q
    stored = gl.allocate_shared_memory(gl.int64, [1], bars)  # both halves of S are in s_tile
    read = gl.allocate_shared_memory(gl.int64, [1], bars)  # both warpgroups have read s_tile
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(gated.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
        mbarrier.init(sent.index(i), count=2)
    mbarrier.init(stored, count=2)
    mbarrier.init(read, count=2)

    gates: gl.constexpr = None
    if HAS_GATE:
        gates = (g_ptr + b.to(gl.int64) * g_b + h.to(gl.int64) * g_h, g_t)
    load_place = (b, h // R, h, start, gl.cdiv(length, C))
    load = ((q_desc, k_desc, v_desc), (q_tiles, k_tiles, v_tiles), (full, empty, sent), load_place)
    gate = ((k_tiles, v_tiles, sums, decays), (full, gated), start, length)
    tiles = (q_tiles, k_tiles, v_tiles, sums, decays, s_tiles)
    states = (initial_state, (state_n, state_h, state_k, state_v), entering, final_state, pool, slots)
    place = (b, h, n, sequence, origin, start, length)
    own = (tiles, (full, gated, empty, sent, stored, read), (o_desc, o_ptr, scale), states, place, (T, Hv))
    STATE: gl.constexpr = 224  # registers of a thread; the gate warps take the rest
    gl.warp_specialize(
        [
            (_gate_warps, (gates, gate, NORMALIZER, SHARED_CHUNKS, STAGES)),
            (_state_warps, (own, 0, HAS_GATE, SHARED_CHUNKS, STAGES)),
            (_state_warps, (own, 1, HAS_GATE, SHARED_CHUNKS, STAGES)),
            (_load_warp, (load, STAGES)),
        ],
        [4, 4, 1],
        [STATE, STATE, 24],
    )
