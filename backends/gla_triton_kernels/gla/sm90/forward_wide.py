"""Computes chunked gated linear attention on Hopper for heads with K from 129 to 256: first the gates, then the state.

Let S be the state that enters a chunk, and S' the state that leaves it. common.py defines qg, kg, r, b_C and the terms
of A. K is divided into two slices of BK = 128 keys, and each slice of a chunk is mild or not, independently of the
other. A is the sum of the scores of both slices, and for each slice

    o  = scale (qg (after S) + A v)          with both slices in qg S
    S' = after (before S + kg^T v)

    mild slice         before = exp(r)       after = exp(r)
    any other slice    before = exp(b_C)     after = 1

With K this large, a few columns of a state fill the registers, so several blocks share a head. If each block summed the
gates, this would take most of the time. So the gates have a kernel of their own:

    _gate_kernel     one block per chunk and head of o: writes qg, kg, A, before and after to memory
    _state_kernel    one block per segment, head of o and 2 W columns of v. A load warp copies the next slices by TMA;
                     two state warpgroups carry W columns of S each. common.py gives the rules of barriers.

The kernel refuses calls without gates. In qg, kg and A, every chunk has C rows of its own, even the last chunk of a
sequence. Chunks are numbered like segments of C tokens (segments.py). If query heads share a state, each of their
blocks computes it, and the block of the first one writes it.

B batch   T tokens   N sequences   I segments, by default the N sequences   M chunks   P slots of a pool
H key heads   Hq query heads   Hv value heads, of v, g and S   Ho = max(Hq, Hv) heads of o
K, V key and value width   C tokens of a chunk   BK keys of a slice   W columns of v of a warpgroup
n rows of checkpoints   STAGES pipeline stages   slot   a pipeline stage in shared memory, or a state of a pool
"""

# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportAssignmentType=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
from __future__ import annotations

import torch
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
from gla_triton_kernels.chunks.kernel import ForwardPlan
from gla_triton_kernels.chunks.segments import Segments, cut, lengths_of
from gla_triton_kernels.gla.shared.limits import MILD_DECAY_SM90
from gla_triton_kernels.gla.sm90.common import (
    clear_rows,
    decay_any_chunk,
    decay_mild_chunk,
    exponents_of_mild_chunk,
    in_state,
    layout_of_columns,
    layout_of_runs,
    log_gates_of_tile,
    next_checkpoint,
    read_slot,
    segment_at,
    slots_at,
    tokens_of,
    write,
    write_slot,
)
from gla_triton_kernels.gla.sm90.forward import checkpoint_tiles, heads_of_outputs, state_arguments
from gla_triton_kernels.gla.tensors import Tensors
from gla_triton_runtime.launch import Launch
from gla_triton_runtime.tma import shared_tiles

STAGES = gl.constexpr(4)  # pipeline stages of slices of qg and kg: two chunks, as many as of A and v


def launch_outputs(
    plan: ForwardPlan, x: Tensors, segments: Segments, scale: float, every: int | None, normalizer: int | None = None
) -> list[Launch]:
    """Returns the launches that fill o, and final_state and checkpoints if x has them.

    See `launch_outputs` of general/forward.py for the arguments.
    """
    assert x.g is not None
    B, T, Ho, V = x.o.shape
    K, heads = x.k.shape[3], heads_of_outputs(x)
    C, BK, BV, W = plan.parameters.C, plan.parameters.BK, plan.parameters.BV, plan.parameters.BV // 2
    chunks = cut(B, T, C, C, x.cu_seqlens, longest_first=False)
    qg, kg = (x.q.new_empty(1, chunks.count * C, Ho, K) for _ in range(2))
    scores = x.q.new_empty(1, chunks.count * C, Ho, C)
    decays = x.q.new_empty(Ho, chunks.count, 2, 2 * BK, dtype=torch.float32)  # `before` and `after` of both slices
    arguments = {
        "q_desc": shared_tiles(x.q, C, BK),
        "k_desc": shared_tiles(x.k, C, BK),
        "g_desc": shared_tiles(x.g, C, BK),
        "qg_desc": shared_tiles(qg, C, BK),
        "kg_desc": shared_tiles(kg, C, BK),
        "a_desc": shared_tiles(scores, C, C),
        "order": chunks.order,
        "decays": decays,
        "chunks": chunks.per_sequence,
        "T": T,
        "per_q": heads["per_q"],
        "PER_V": heads["PER_V"],
        "NORMALIZER": normalizer,
    }
    gates = Launch(_gate_kernel, (chunks.count, Ho, 1), arguments, {"num_warps": plan.parameters.warps})
    arguments = {
        "q_desc": shared_tiles(qg, C, BK),
        "k_desc": shared_tiles(kg, C, BK),
        "a_desc": shared_tiles(scores, C, C),
        "v_desc": shared_tiles(x.v, C, W),
        "o_desc": shared_tiles(x.o, C, W),
        "s_desc": checkpoint_tiles(x.checkpoints, BK, W) if x.pool is None else None,
        "decays": decays,
        "scale": scale,
        **state_arguments(x, segments, every),
        **lengths_of(T, segments),
        "chunks": chunks.count,
        "HAS_CHECKPOINTS": x.checkpoints is not None,
        "Ho": Ho,
        "K": K,
        "V": V,
        "PER_V": heads["PER_V"],
    }
    grid = (ceil_div(V, BV) * segments.count * Ho, 1, 1)
    state = Launch(_state_kernel, grid, arguments, {"num_warps": plan.parameters.warps, "maxnreg": 168})
    return [*chunks.launches, gates, state]


@gluon.jit
def _write_decays(ptr, before, after):
    """Writes the factors `before` and `after` [BK] of a slice of the state."""
    BK: gl.constexpr = before.shape[0]
    key = gl.arange(0, BK, before.type.layout)  # [BK]
    gl.store(ptr + key, before)
    gl.store(ptr + 2 * BK + key, after)


@gluon.jit(do_not_specialize=["chunks", "T", "per_q"])
def _gate_kernel(
    q_desc,  # [B, Hq, T, K], tiles [C, BK]
    k_desc,  # [B, H, T, K], tiles [C, BK]
    g_desc,  # [B, Hv, T, K], tiles [C, BK]
    qg_desc,  # [1, Ho, M * C, K], tiles [C, BK]
    kg_desc,  # [1, Ho, M * C, K], tiles [C, BK]
    a_desc,  # [1, Ho, M * C, C], tiles [C, C]
    order,  # [M, 5] of packed sequences, or None
    decays,  # [Ho, M, 2, 2 * BK]
    chunks,  # number of chunks of a sequence, if order is None
    T,
    per_q,  # heads of o that share a head of q
    PER_V: gl.constexpr,  # heads of o that share a head of v; 1 unless per_q is 1
    NORMALIZER: gl.constexpr,
):
    """Computes qg, kg, A and the factors of the state of one chunk and head of o."""
    PACKED: gl.constexpr = order is not None
    C: gl.constexpr = q_desc.block_type.shape[2]
    BK: gl.constexpr = q_desc.block_type.shape[3]
    dtype: gl.constexpr = q_desc.dtype
    runs: gl.constexpr = layout_of_runs(C, BK)
    columns: gl.constexpr = layout_of_columns(C, BK)
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    i = gl.program_id(0)
    h = gl.program_id(1)
    q_head, k_head, v_head = h // per_q, h // per_q // PER_V, h // PER_V
    if PACKED:
        b = gl.to_tensor(0)
        i, first, rows, _, _ = segment_at(order, i)
        if rows == 0:
            return
    else:
        b, first = i // chunks, i % chunks * C
        rows = gl.minimum(T - first, C)
    q_box = gl.allocate_shared_memory(dtype, [1, 1, C, BK], q_desc.layout)
    k_box = gl.allocate_shared_memory(dtype, [1, 1, C, BK], k_desc.layout)
    scratch = gl.allocate_shared_memory(dtype, [1, 2, C, BK], q_desc.layout)
    a_box = gl.allocate_shared_memory(dtype, [1, 1, C, C], a_desc.layout)
    g_box = scratch._reinterpret(g_desc.dtype, g_desc.block_type.shape, g_desc.layout)
    q_tile = q_box.reshape([C, BK])
    k_tile = k_box.reshape([C, BK])
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=1)
    t = gl.arange(0, C, gl.SliceLayout(1, scores))[:, None]  # [C, 1]
    s = gl.arange(0, C, gl.SliceLayout(0, scores))[None, :]  # [1, C]
    decays += (h * gl.num_programs(0) + i).to(gl.int64) * 4 * BK
    A = gl.zeros([C, C], gl.float32, scores)
    for j in range(2):
        tma.store_wait(0)  # qg and kg of the first slice have left the tiles
        mbarrier.expect(full, 2 * q_desc.block_type.nbytes + g_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(q_desc, [b, q_head, first, j * BK], full, q_box)
        tma.async_copy_global_to_shared(k_desc, [b, k_head, first, j * BK], full, k_box)
        tma.async_copy_global_to_shared(g_desc, [b, v_head, first, j * BK], full, g_box)
        mbarrier.wait(full, j)
        g_tile = g_box.reshape([C, BK])
        g = log_gates_of_tile(g_tile, rows, runs, NORMALIZER, PACKED)  # [C, BK]
        if PACKED:
            clear_rows(k_tile, rows, runs)
        x, end = exponents_of_mild_chunk(g)  # [C, BK], [BK]
        if gl.min(end, 0) > -MILD_DECAY_SM90:
            outer = decay_mild_chunk(q_tile, k_tile, x, end)  # [BK], exp(r)
            _write_decays(decays + j * BK, outer, outer)
            fence_async_shared()  # qg and kg have been stored from registers; wgmma and TMA read them
            product = gl.zeros([C, C], gl.float32, scores)
            product = warpgroup_mma(q_tile, k_tile.permute([1, 0]), product, use_acc=False, is_async=True)
            A += gl.where(t >= s, warpgroup_mma_wait(0, [product]), 0.0)
        else:
            again = log_gates_of_tile(g_tile, rows, columns, NORMALIZER, False)  # [C, BK]
            decay, a = decay_any_chunk(q_tile, k_tile, scratch, again)  # [BK], exp(b_C)
            _write_decays(decays + j * BK, decay, gl.full_like(decay, 1.0))
            A += a
            fence_async_shared()  # as above
        tma.async_copy_shared_to_global(qg_desc, [0, h, i * C, j * BK], q_box)
        tma.async_copy_shared_to_global(kg_desc, [0, h, i * C, j * BK], k_box)
    a_box.reshape([C, C]).store(A.to(dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(a_desc, [0, h, i * C, 0], a_box)
    tma.store_wait(0)


@gluon.jit
def _load_warp(descriptors, tiles, barriers, place, PER_V: gl.constexpr):
    """Loads slices of qg and kg, and A and v of chunks, ahead of the state warps."""
    q_desc, k_desc, a_desc, v_desc = descriptors
    q_tiles, k_tiles, a_tiles, v_tiles = tiles
    full, empty, v_full, v_empty = barriers
    b, h, column, start, row, chunks = place
    C: gl.constexpr = q_desc.block_type.shape[2]
    BK: gl.constexpr = q_desc.block_type.shape[3]
    W: gl.constexpr = v_desc.block_type.shape[3]
    for step in range(2 * chunks):
        t = start + step // 2 * C
        row_t = row + step // 2 * C
        slot = step % STAGES
        mbarrier.wait(empty.index(slot), (step // STAGES & 1) ^ 1)
        mbarrier.expect(full.index(slot), 2 * q_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(q_desc, [0, h, row_t, step % 2 * BK], full.index(slot), q_tiles.index(slot))
        tma.async_copy_global_to_shared(k_desc, [0, h, row_t, step % 2 * BK], full.index(slot), k_tiles.index(slot))
        if step % 2 == 0:
            slot = step // 2 % 2
            mbarrier.wait(v_empty.index(slot), (step // 4 & 1) ^ 1)
            mbarrier.expect(v_full.index(slot), a_desc.block_type.nbytes + 2 * v_desc.block_type.nbytes)
            bar = v_full.index(slot)
            tma.async_copy_global_to_shared(v_desc, [b, h // PER_V, t, column], bar, v_tiles.index(2 * slot))
            tma.async_copy_global_to_shared(v_desc, [b, h // PER_V, t, column + W], bar, v_tiles.index(2 * slot + 1))
            tma.async_copy_global_to_shared(a_desc, [0, h, row_t, 0], v_full.index(slot), a_tiles.index(slot))


@gluon.jit
def _state_warps(
    args, WARPGROUP: gl.constexpr, PER_V: gl.constexpr, PACKED: gl.constexpr, HAS_CHECKPOINTS: gl.constexpr
):
    """Carries W columns of the state, in two slices S0 and S1, through the segment, and writes the outputs.

    Args:
        args: see `_state_warps` of forward.py.
        WARPGROUP: the number of this state warpgroup.
    """
    tiles, barriers, outputs, scale, decays, states, kept, place, sizes = args
    q_tiles, k_tiles, a_tiles, v_tiles, s_tiles, o_tiles = tiles
    full, empty, v_full, v_empty = barriers
    o_desc, o_ptr = outputs
    initial_state, strides, entering, final_state, pool, slots = states
    s_desc, checkpoint, left, every = kept
    b, h, n, sequence, column, start, length, is_first = place
    T, Ho, K, V = sizes
    v_head = h // PER_V
    C: gl.constexpr = q_tiles.type.shape[3]
    BK: gl.constexpr = q_tiles.type.shape[4]
    W: gl.constexpr = v_tiles.type.shape[4]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, W, 16])
    s_block = s_tiles.index(WARPGROUP)  # [1, 1, 1, BK, W], a slice of S as an operand or as the source of a checkpoint
    s_tile = s_block.reshape([BK, W])
    o_tile = o_tiles.index(WARPGROUP).reshape([C, W])
    first = column + WARPGROUP * W
    head = (n * (Ho // PER_V) + v_head).to(gl.int64) * K * V
    key = gl.arange(0, BK, gl.SliceLayout(1, layout))  # [BK]
    value = first + gl.arange(0, W, gl.SliceLayout(0, layout))[None, :]  # [1, W]
    S0 = gl.zeros([BK, W], gl.float32, layout)
    S1 = gl.zeros([BK, W], gl.float32, layout)
    row0, row1 = key[:, None], BK + key[:, None]  # [BK, 1], the keys of the slices
    if entering is not None:
        # With a pool, the scan has written final states, perhaps over initial states; `entering` holds both.
        taken = (start >= 0) if pool is not None else not is_first
        S0 = _load_slice(entering + head, V, None, row0, value, K, V, taken, S0)
        S1 = _load_slice(entering + head, V, None, row1, value, K, V, taken, S1)
    elif pool is not None:
        from_slot, _, _, _ = slots_at(slots, sequence)
        S0 = read_slot(pool, strides, from_slot, v_head, row0, value, (row0 < K) & (value < V))
        S1 = read_slot(pool, strides, from_slot, v_head, row1, value, (row1 < K) & (value < V))
    if initial_state is not None:
        state_n, state_h, state_k, state_v = strides
        states_in = initial_state + sequence.to(gl.int64) * state_n + v_head.to(gl.int64) * state_h
        S0 = _load_slice(states_in, state_k, state_v, row0, value, K, V, is_first, S0)
        S1 = _load_slice(states_in, state_k, state_v, row1, value, K, V, is_first, S1)
    decays += key
    for i in range(gl.cdiv(length, C)):
        if HAS_CHECKPOINTS:
            if left == 0:
                if pool is not None:
                    write_slot(pool, strides, checkpoint, v_head, S0, row0, value, (K, V))
                    write_slot(pool, strides, checkpoint, v_head, S1, row1, value, (K, V))
                else:
                    _write_slice(s_desc, [b, checkpoint, v_head, 0, first], s_block, S0)
                    _write_slice(s_desc, [b, checkpoint, v_head, BK, first], s_block, S1)
                checkpoint += 1
                left = every  # 0 with a pool, so that no other checkpoint follows
            left -= C
        slot = i % 2
        rows = length - i * C
        v_tile = v_tiles.index(2 * slot + WARPGROUP).reshape([C, W])
        mbarrier.wait(v_full.index(slot), i // 2 & 1)
        if PACKED:
            clear_rows(v_tile, rows, layout)
        o = gl.zeros([C, W], gl.float32, layout)
        o, S0 = _step(o, S0, q_tiles, k_tiles, v_tile, s_tile, full, empty, decays, 2 * i)
        o, S1 = _step(o, S1, q_tiles, k_tiles, v_tile, s_tile, full, empty, decays + BK, 2 * i + 1)
        o = warpgroup_mma(a_tiles.index(slot).reshape([C, C]), v_tile, o, is_async=True)
        o = warpgroup_mma_wait(0, [o])
        mbarrier.arrive(v_empty.index(slot), count=1)
        decays += 4 * BK
        tma.store_wait(0)  # the copy has read o_tile
        write(o_desc, o_ptr, o_tile, o * scale, first, V, (b, h, start + i * C, T, Ho), rows, PACKED)
    if final_state is not None:
        rows_out = final_state + head
        writes = h % PER_V == 0  # the first query head that shares the state
        gl.store(rows_out + row0 * V + value, S0, (row0 < K) & (value < V) & writes)
        gl.store(rows_out + row1 * V + value, S1, (row1 < K) & (value < V) & writes)
    elif pool is not None and entering is None:
        _, to_slot, _, _ = slots_at(slots, sequence)
        write_slot(pool, strides, to_slot, v_head, S0, row0, value, (K, V))
        write_slot(pool, strides, to_slot, v_head, S1, row1, value, (K, V))
    tma.store_wait(0)


@gluon.jit
def _load_slice(states_in, state_k, state_v, key, value, K, V, taken, other):
    """Returns keys `key` [BK, 1] and values `value` [1, W] of a state; `other` beyond its edges, or if not `taken`."""
    return gl.load(states_in + in_state(key, value, state_k, state_v), (key < K) & (value < V) & taken, other)


@gluon.jit
def _write_slice(desc, place, s_block, S):
    """Writes S [BK, W] through `s_block` to the checkpoints, at the coordinates `place`."""
    BK: gl.constexpr = S.shape[0]
    W: gl.constexpr = S.shape[1]
    s_block.reshape([BK, W]).store(S.to(desc.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(desc, place, s_block)
    tma.store_wait(0)


@gluon.jit
def _step(o, S, q_tiles, k_tiles, v_tile, s_tile, full, empty, decays, step):
    """Adds qg (after S) of a slice to o [C, W], and returns o and the state S' [BK, W] that leaves the chunk.

    Args:
        decays: pointers [BK] to `before` of the slice.
        step: the number of the slice, counted from the start of the segment.
    """
    C: gl.constexpr = q_tiles.type.shape[3]
    BK: gl.constexpr = q_tiles.type.shape[4]
    before = gl.load(decays)[:, None]  # [BK, 1]
    after = gl.load(decays + 2 * BK)[:, None]  # [BK, 1]
    slot = step % STAGES
    q_tile = q_tiles.index(slot).reshape([C, BK])
    k_tile = k_tiles.index(slot).reshape([C, BK])
    s_tile.store((S * after).to(s_tile.dtype))
    fence_async_shared()  # S has been stored from registers; wgmma reads it
    mbarrier.wait(full.index(slot), step // STAGES & 1)
    o = warpgroup_mma(q_tile, s_tile, o, is_async=True)
    S = warpgroup_mma(k_tile.permute([1, 0]), v_tile, S * before, is_async=True)
    o, S = warpgroup_mma_wait(0, [o, S])
    mbarrier.arrive(empty.index(slot), count=1)
    return o, S * after


@gluon.jit(
    do_not_specialize=[
        "state_n", "state_h", "state_k", "scale", "T", "segment", "segments", "chunks", "every", "Ho", "K", "V"
    ]
)  # fmt: skip
def _state_kernel(
    q_desc,  # qg, [1, Ho, M * C, K], tiles [C, BK]
    k_desc,  # kg, [1, Ho, M * C, K], tiles [C, BK]
    a_desc,  # [1, Ho, M * C, C], tiles [C, C]
    v_desc,  # [B, Hv, T, V], tiles [C, W]
    o_desc,  # [B, Ho, T, V], tiles [C, W]
    s_desc,  # checkpoints [B, n, Hv, K, V], tiles [BK, W], or None
    o_ptr,  # [B, T, Ho, V]
    decays,  # [Ho, M, 2, 2 * BK]
    initial_state,  # [N, Hv, K, V] or None
    entering,  # [I, Hv, K, V] or None
    final_state,  # [N, Hv, K, V], or None if sequences are cut
    order,  # [I, 5], or None for a batch
    pool,  # [P, Hv, K, V], instead of initial_state and final_state, or None
    slots,  # [N, 4], or None without a pool
    scale,
    state_n,  # strides of initial_state or of the pool; see `in_state`
    state_h,
    state_k,
    state_v,
    T,
    segment,  # tokens of a segment
    segments,  # segments of a sequence of a batch
    chunks,  # M
    every,  # tokens between checkpoints
    Ho,
    K,
    V,
    HAS_CHECKPOINTS: gl.constexpr,
    PER_V: gl.constexpr,
):
    """Computes 2 W columns of the outputs of one head of o of one segment."""
    PACKED: gl.constexpr = order is not None
    C: gl.constexpr = q_desc.block_type.shape[2]
    BK: gl.constexpr = q_desc.block_type.shape[3]
    W: gl.constexpr = v_desc.block_type.shape[3]
    dtype: gl.constexpr = q_desc.dtype
    columns = gl.cdiv(V, 2 * W)
    column = gl.program_id(0) % columns * 2 * W
    h = gl.program_id(0) // columns % Ho
    n = gl.program_id(0) // columns // Ho
    n, b, start, length, sequence, origin, _ = tokens_of(n, T, segment, segments, order)
    if PACKED and entering is not None:  # noqa: SIM102 -- known when this is compiled
        if length == 0:
            return
    checkpoint, left = gl.to_tensor(0), gl.to_tensor(0)  # row of the next checkpoint, and number of tokens until it
    if HAS_CHECKPOINTS:
        checkpoint, left = next_checkpoint(start, sequence, origin, every, slots, PACKED)
        left = gl.where(h % PER_V == 0, left, -1)  # only the first query head that shares a state writes it
    first_chunk = start // C + (sequence if PACKED else b * gl.cdiv(T, C))  # number of the segment's first chunk
    q_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, C, BK], q_desc.layout)
    k_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, C, BK], k_desc.layout)
    a_tiles = gl.allocate_shared_memory(dtype, [2, 1, 1, C, C], a_desc.layout)
    v_tiles = gl.allocate_shared_memory(dtype, [4, 1, 1, C, W], v_desc.layout)
    state_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([1, 1, 1, BK, W], dtype)
    s_tiles = gl.allocate_shared_memory(dtype, [2, 1, 1, 1, BK, W], state_layout)
    o_tiles = gl.allocate_shared_memory(dtype, [2, 1, 1, C, W], o_desc.layout)
    bars: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bars)  # a slice of qg and kg has been loaded
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bars)  # both state warpgroups have read it
    v_full = gl.allocate_shared_memory(gl.int64, [2, 1], bars)  # A and v of a chunk have been loaded
    v_empty = gl.allocate_shared_memory(gl.int64, [2, 1], bars)  # both state warpgroups have read them
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    for i in gl.static_range(2):
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=2)

    barriers = (full, empty, v_full, v_empty)
    load_tiles = (q_tiles, k_tiles, a_tiles, v_tiles)
    tiles = (q_tiles, k_tiles, a_tiles, v_tiles, s_tiles, o_tiles)
    states = (initial_state, (state_n, state_h, state_k, state_v), entering, final_state, pool, slots)
    kept = (s_desc, checkpoint, left, every)
    place = (b, h, n, sequence, column, start, length, start == origin)
    load_place = (b, h, column, start, first_chunk * C, gl.cdiv(length, C))
    decays += (h * chunks + first_chunk).to(gl.int64) * 4 * BK
    outputs = (o_desc, o_ptr)
    sizes = (T, Ho, K, V)
    state = (tiles, barriers, outputs, scale, decays, states, kept, place, sizes)
    gl.warp_specialize(
        [
            (_state_warps, (state, 0, PER_V, PACKED, HAS_CHECKPOINTS)),
            (_state_warps, (state, 1, PER_V, PACKED, HAS_CHECKPOINTS)),
            (_load_warp, ((q_desc, k_desc, a_desc, v_desc), load_tiles, barriers, load_place, PER_V)),
        ],
        [4, 1],
        [232, 24],
    )
