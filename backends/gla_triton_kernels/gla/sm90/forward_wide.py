"""Computes chunked gated linear attention on Hopper for heads with K above 128: first the gates, then the state.

Let S be the state that enters a chunk, and S' the state that leaves it. common.py defines qg, kg, r, b_C and the terms
of A. K is divided into slices of BK = 128 keys, and each slice of a chunk is mild or not, independently of the
others. A is the sum of the scores of all slices, and for each slice

    o  = scale (qg (after S) + A v)          with the sum over all slices in qg S
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
K, V key and value width   C tokens of a chunk   BK keys of a slice   SLICES slices   W columns of v of a warpgroup
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
from gla_triton_kernels.gla.shared.limits import MILD_DECAY_HALF, MILD_DECAY_SM90
from gla_triton_kernels.gla.sm90.common import (
    chunk_of,
    clear_rows,
    decay_any_chunk,
    decay_mild_chunk,
    exponents_of_mild_chunk,
    first_state,
    fit_mild_chunk,
    in_units,
    layout_of_columns,
    layout_of_runs,
    log_gates_of_tile,
    magnitudes,
    next_checkpoint,
    segment_at,
    tile_of_gates,
    tokens_of,
    unit_at,
    unit_of_slices,
    write,
    write_last_state,
    write_slot,
    write_state,
)
from gla_triton_kernels.gla.sm90.forward import checkpoint_tiles, heads_of_outputs, state_arguments
from gla_triton_kernels.gla.sm90.half import in_half
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
    x, units, converted = in_half(x, ("q", "k", "v"), x.cu_seqlens)
    assert x.g is not None
    assert x.o is not None
    B, T, Ho, V = x.o.shape
    K, heads = x.k.shape[3], heads_of_outputs(x)
    C, BK, BV, W = plan.parameters.C, plan.parameters.BK, plan.parameters.BV, plan.parameters.BV // 2
    slices = ceil_div(K, BK)
    chunks = cut(B, T, C, C, x.cu_seqlens, longest_first=False)
    qg, kg = (x.q.new_empty(1, chunks.count * C, Ho, K) for _ in range(2))
    scores = x.q.new_empty(1, chunks.count * C, Ho, C)
    decays = x.q.new_empty(Ho, chunks.count, 2, slices * BK, dtype=torch.float32)  # `before` and `after` of all slices
    a_units = x.q.new_empty(Ho, chunks.count, dtype=torch.float32) if x.q.dtype == torch.float16 else None
    arguments = {
        "q_desc": shared_tiles(x.q, C, BK),
        "k_desc": shared_tiles(x.k, C, BK),
        "g_desc": shared_tiles(x.g, C, BK),
        "qg_desc": shared_tiles(qg, C, BK),
        "kg_desc": shared_tiles(kg, C, BK),
        "a_desc": shared_tiles(scores, C, C),
        "order": chunks.order,
        "decays": decays,
        "a_units": a_units,
        "chunks": chunks.per_sequence,
        "T": T,
        "per_q": heads["per_q"],
        "PER_V": heads["PER_V"],
        "NORMALIZER": normalizer,
        "SLICES": slices,
    }
    gates = Launch(_gate_kernel, (chunks.count, Ho, 1), arguments, {"num_warps": plan.parameters.warps})
    s_desc = checkpoint_tiles(x.checkpoints, BK, W) if x.pool is None else None
    arguments = {
        "q_desc": shared_tiles(qg, C, BK),
        "k_desc": shared_tiles(kg, C, BK),
        "a_desc": shared_tiles(scores, C, C),
        "v_desc": shared_tiles(x.v, C, W),
        "o_desc": shared_tiles(x.o, C, W) if not converted else None,
        "s_desc": s_desc,
        "checkpoints": None if s_desc is not None else x.checkpoints,
        "decays": decays,
        "a_units": a_units,
        **units,
        "scale": scale,
        **state_arguments(x, segments, every),
        **lengths_of(T, segments),
        "rows": 0 if x.checkpoints is None else x.checkpoints.shape[1],
        "chunks": chunks.count,
        "Ho": Ho,
        "per_q": heads["per_q"],
        "K": K,
        "V": V,
        "SLICES": slices,
        "PER_V": heads["PER_V"],
    }
    grid = (ceil_div(V, BV) * segments.count * Ho, 1, 1)
    state = Launch(_state_kernel, grid, arguments, {"num_warps": plan.parameters.warps, "maxnreg": 168})
    return [*converted, *chunks.launches, gates, state]


@gluon.jit
def _write_decays(ptr, before, after, SLICES: gl.constexpr):
    """Writes the factors `before` and `after` [BK] of a slice of the state."""
    BK: gl.constexpr = before.shape[0]
    key = gl.arange(0, BK, before.type.layout)  # [BK]
    gl.store(ptr + key, before)
    gl.store(ptr + SLICES * BK + key, after)


@gluon.jit(do_not_specialize=["chunks", "T", "per_q"])
def _gate_kernel(
    q_desc,  # [B, Hq, T, K], tiles [C, BK]
    k_desc,  # [B, H, T, K], tiles [C, BK]
    g_desc,  # [B, Hv, T, K], tiles [C, BK]
    qg_desc,  # [1, Ho, M * C, K], tiles [C, BK]
    kg_desc,  # [1, Ho, M * C, K], tiles [C, BK]
    a_desc,  # [1, Ho, M * C, C], tiles [C, C]
    order,  # [M, 5] of packed sequences, or None
    decays,  # [Ho, M, 2, SLICES * BK]
    a_units,  # [Ho, M], or None for bfloat16
    chunks,  # number of chunks of a sequence, if order is None
    T,
    per_q,  # heads of o that share a head of q
    PER_V: gl.constexpr,  # heads of o that share a head of v; 1 unless per_q is 1
    NORMALIZER: gl.constexpr,
    SLICES: gl.constexpr,
):
    """Computes qg, kg, A and the factors of the state of one chunk and head of o."""
    PACKED: gl.constexpr = order is not None
    C: gl.constexpr = q_desc.block_type.shape[2]
    BK: gl.constexpr = q_desc.block_type.shape[3]
    dtype: gl.constexpr = q_desc.dtype
    HALF: gl.constexpr = dtype == gl.float16
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
    g_box = tile_of_gates(scratch, g_desc)
    q_tile = q_box.reshape([C, BK])
    k_tile = k_box.reshape([C, BK])
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=1)
    t = gl.arange(0, C, gl.SliceLayout(1, scores))[:, None]  # [C, 1]
    s = gl.arange(0, C, gl.SliceLayout(0, scores))[None, :]  # [1, C]
    number = h * gl.num_programs(0) + i  # of the chunk and head
    decays += number.to(gl.int64) * (2 * SLICES * BK)
    A = gl.zeros([C, C], gl.float32, scores)
    for j in range(SLICES):
        tma.store_wait(0)  # qg and kg of the previous slice have left the tiles
        mbarrier.expect(full, 2 * q_desc.block_type.nbytes + g_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(q_desc, [b, q_head, first, j * BK], full, q_box)
        tma.async_copy_global_to_shared(k_desc, [b, k_head, first, j * BK], full, k_box)
        tma.async_copy_global_to_shared(g_desc, [b, v_head, first, j * BK], full, g_box)
        mbarrier.wait(full, j & 1)
        g_tile = g_box.reshape([C, BK])
        g = log_gates_of_tile(g_tile, rows, runs, NORMALIZER, PACKED)  # [C, BK]
        if PACKED:
            clear_rows(k_tile, rows, runs)
        if HALF and PACKED:  # rows of the next sequence would count in the largest number of the chunk
            clear_rows(q_tile, rows, runs)
        x, end = exponents_of_mild_chunk(g, NORMALIZER)  # [C, BK], [BK]
        mild = gl.min(end, 0) > (-MILD_DECAY_HALF if HALF else -MILD_DECAY_SM90)
        if HALF:
            mild = mild & fit_mild_chunk(magnitudes(q_tile, k_tile, runs))
        if mild:
            outer = decay_mild_chunk(q_tile, k_tile, x, end)  # [BK], exp(r)
            _write_decays(decays + j * BK, outer, outer, SLICES)
            fence_async_shared()  # qg and kg have been stored from registers; wgmma and TMA read them
            product = gl.zeros([C, C], gl.float32, scores)
            product = warpgroup_mma(q_tile, k_tile.permute([1, 0]), product, use_acc=False, is_async=True)
            A += gl.where(t >= s, warpgroup_mma_wait(0, [product]), 0.0)
        else:
            again = log_gates_of_tile(g_tile, rows, columns, NORMALIZER, False)  # [C, BK]
            decay, a = decay_any_chunk(q_tile, k_tile, scratch, again, NORMALIZER)  # [BK], exp(b_C)
            _write_decays(decays + j * BK, decay, gl.full_like(decay, 1.0), SLICES)
            A += a
            fence_async_shared()  # as above
        tma.async_copy_shared_to_global(qg_desc, [0, h, i * C, j * BK], q_box)
        tma.async_copy_shared_to_global(kg_desc, [0, h, i * C, j * BK], k_box)
    A, unit = in_units(A, dtype)
    if HALF:
        gl.store(a_units + number, unit)
    a_box.reshape([C, C]).store(A)
    fence_async_shared()
    tma.async_copy_shared_to_global(a_desc, [0, h, i * C, 0], a_box)
    tma.store_wait(0)


@gluon.jit
def _load_warp(descriptors, tiles, barriers, place, PER_V: gl.constexpr, SLICES: gl.constexpr):
    """Loads slices of qg and kg, and A and v of chunks, ahead of the state warps."""
    q_desc, k_desc, a_desc, v_desc = descriptors
    q_tiles, k_tiles, a_tiles, v_tiles = tiles
    full, empty, v_full, v_empty = barriers
    b, h, column, start, row, chunks = place
    C: gl.constexpr = q_desc.block_type.shape[2]
    BK: gl.constexpr = q_desc.block_type.shape[3]
    W: gl.constexpr = v_desc.block_type.shape[3]
    for step in range(SLICES * chunks):
        i = step // SLICES
        key = step % SLICES * BK
        slot = step % STAGES
        mbarrier.wait(empty.index(slot), (step // STAGES & 1) ^ 1)
        mbarrier.expect(full.index(slot), 2 * q_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(q_desc, [0, h, row + i * C, key], full.index(slot), q_tiles.index(slot))
        tma.async_copy_global_to_shared(k_desc, [0, h, row + i * C, key], full.index(slot), k_tiles.index(slot))
        if key == 0:
            slot = i % 2
            t = start + i * C
            mbarrier.wait(v_empty.index(slot), (i // 2 & 1) ^ 1)
            mbarrier.expect(v_full.index(slot), a_desc.block_type.nbytes + 2 * v_desc.block_type.nbytes)
            bar = v_full.index(slot)
            tma.async_copy_global_to_shared(v_desc, [b, h // PER_V, t, column], bar, v_tiles.index(2 * slot))
            tma.async_copy_global_to_shared(v_desc, [b, h // PER_V, t, column + W], bar, v_tiles.index(2 * slot + 1))
            tma.async_copy_global_to_shared(a_desc, [0, h, row + i * C, 0], bar, a_tiles.index(slot))


@gluon.jit
def _state_warps(args, WARPGROUP: gl.constexpr, PER_V: gl.constexpr, PACKED: gl.constexpr, SLICES: gl.constexpr):
    """Carries W columns of the state, in slices, through the segment, and writes the outputs.

    Args:
        args: see `_state_warps` of forward.py.
        WARPGROUP: the number of this state warpgroup.
    """
    tiles, barriers, outputs, scale, decays, a_units, states, units, kept, place, sizes = args
    q_tiles, k_tiles, a_tiles, v_tiles, s_tiles, o_tiles = tiles
    full, empty, v_full, v_empty = barriers
    o_desc, o_ptr = outputs
    _, strides, _, _, pool, _ = states
    q_units, k_units, v_units, chunk = units
    s_desc, checkpoints, n_rows, checkpoint, left, every = kept
    b, h, n, sequence, column, start, length, is_first = place
    T, Ho, per_q, K, V = sizes
    Hq, Hv = Ho // per_q, Ho // PER_V
    q_head, v_head = h // per_q, h // PER_V
    C: gl.constexpr = q_tiles.type.shape[3]
    BK: gl.constexpr = q_tiles.type.shape[4]
    W: gl.constexpr = v_tiles.type.shape[4]
    HALF: gl.constexpr = q_tiles.dtype == gl.float16
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, W, 16])
    s_block = s_tiles.index(WARPGROUP)  # [1, 1, 1, BK, W], a slice of S as an operand or as the source of a checkpoint
    s_tile = s_block.reshape([BK, W])
    o_tile = None if o_desc is None else o_tiles.index(WARPGROUP).reshape([C, W])
    first = column + WARPGROUP * W
    key = gl.arange(0, BK, gl.SliceLayout(1, layout))  # [BK]
    keys = key[:, None]  # [BK, 1]
    value = first + gl.arange(0, W, gl.SliceLayout(0, layout))[None, :]  # [1, W]
    none = gl.zeros([BK, W], gl.float32, layout)
    S = ()  # [BK, W] for each slice
    for j in gl.static_range(SLICES):
        S += (first_state(none, states, n, sequence, v_head, is_first, keys + j * BK, value, (Hv, K, V)),)
    decays += key
    outer = 1.0  # the unit of S, which is the unit of kg^T v in the previous chunk
    if q_units is not None:
        outer = gl.to_tensor(1.0)
    for i in range(gl.cdiv(length, C)):
        if s_desc is not None or checkpoints is not None:
            if left == 0:  # this chunk begins at a checkpoint
                for j in gl.static_range(SLICES):
                    if s_desc is not None:
                        _write_slice(s_desc, [b, checkpoint, v_head, j * BK, first], s_block, S[j])
                    elif pool is not None:
                        write_slot(pool, strides, checkpoint, v_head, S[j] * outer, keys + j * BK, value, (K, V))
                    else:
                        number = (b * n_rows + checkpoint) * Hv + v_head
                        write_state(checkpoints, number, S[j] * outer, keys + j * BK, value, (K, V))
                checkpoint += 1
                left = every  # 0 with a pool, so that no other checkpoint follows
            left -= C
        slot = i % 2
        rows = length - i * C
        v_tile = v_tiles.index(2 * slot + WARPGROUP).reshape([C, W])
        unit, inverse = 1.0, 1.0  # the unit of S as an operand, and the factor of S that divides by it
        if HALF:
            unit, inverse = unit_of_slices(S, outer, SLICES)
        q_unit = unit_at(q_units, chunk + i, Hq, q_head)
        kv_unit = unit_at(k_units, chunk + i, Hq // PER_V, q_head // PER_V) * unit_at(v_units, chunk + i, Hv, v_head)
        change = 1.0  # the factor of S that puts it into the unit of kg^T v
        if q_units is not None:
            change = outer / kv_unit
            outer = kv_unit
        mbarrier.wait(v_full.index(slot), i // 2 & 1)
        if PACKED:
            clear_rows(v_tile, rows, layout)
        o = gl.zeros([C, W], gl.float32, layout)
        stepped = ()
        for j in gl.static_range(SLICES):
            number = SLICES * i + j
            o, leaving = _step(
                o, S[j], inverse, change, q_tiles, k_tiles, v_tile, s_tile, full, empty, decays + j * BK, number, SLICES
            )
            stepped += (leaving,)
        S = stepped
        a_unit = 1.0
        if HALF:
            a_unit = gl.load(a_units + i)
            o = o * (unit / (a_unit * kv_unit))  # in the units of A v
        o = warpgroup_mma(a_tiles.index(slot).reshape([C, C]), v_tile, o, is_async=True)
        o = warpgroup_mma_wait(0, [o])
        mbarrier.arrive(v_empty.index(slot), count=1)
        decays += 2 * SLICES * BK
        tma.store_wait(0)  # the copy has read o_tile
        o_factor = scale * a_unit * (q_unit * kv_unit)  # factor of o
        write(o_desc, o_ptr, o_tile, o * o_factor, first, V, (b, h, start + i * C, T, Ho), rows, PACKED)
    if h % PER_V == 0:  # the first query head that shares the state
        for j in gl.static_range(SLICES):
            write_last_state(S[j] * outer, states, n, sequence, v_head, keys + j * BK, value, (Hv, K, V))
    tma.store_wait(0)


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
def _step(o, S, inverse, change, q_tiles, k_tiles, v_tile, s_tile, full, empty, decays, step, SLICES: gl.constexpr):
    """Adds qg (after S) of a slice to o [C, W], and returns o and the state S' [BK, W] that leaves the chunk.

    Args:
        inverse: the factor of S as an operand, 1 for bfloat16.
        change: the factor of S before kg^T v is added.
        decays: pointers [BK] to `before` of the slice.
        step: the number of the slice, counted from the start of the segment.
    """
    C: gl.constexpr = q_tiles.type.shape[3]
    BK: gl.constexpr = q_tiles.type.shape[4]
    before = gl.load(decays)[:, None]  # [BK, 1]
    after = gl.load(decays + SLICES * BK)[:, None]  # [BK, 1]
    slot = step % STAGES
    q_tile = q_tiles.index(slot).reshape([C, BK])
    k_tile = k_tiles.index(slot).reshape([C, BK])
    s_tile.store((S * (after * inverse)).to(s_tile.dtype))
    fence_async_shared()  # S has been stored from registers; wgmma reads it
    mbarrier.wait(full.index(slot), step // STAGES & 1)
    o = warpgroup_mma(q_tile, s_tile, o, is_async=True)
    S = warpgroup_mma(k_tile.permute([1, 0]), v_tile, S * (before * change), is_async=True)
    o, S = warpgroup_mma_wait(0, [o, S])
    mbarrier.arrive(empty.index(slot), count=1)
    return o, S * after


@gluon.jit(
    do_not_specialize=[
        *("state_n", "state_h", "state_k", "scale", "T", "segment", "segments", "rows"),
        *("chunks", "every", "Ho", "per_q", "K", "V"),
    ]
)  # fmt: skip
def _state_kernel(
    q_desc,  # qg, [1, Ho, M * C, K], tiles [C, BK]
    k_desc,  # kg, [1, Ho, M * C, K], tiles [C, BK]
    a_desc,  # [1, Ho, M * C, C], tiles [C, C]
    v_desc,  # [B, Hv, T, V], tiles [C, W]
    o_desc,  # [B, Ho, T, V], tiles [C, W]
    s_desc,  # checkpoints [B, n, Hv, K, V] in bfloat16, tiles [BK, W], or None
    checkpoints,  # [B, n, Hv, K, V] in float32, or the pool, or None
    o_ptr,  # [B, T, Ho, V]
    decays,  # [Ho, M, 2, SLICES * BK]
    a_units,  # [Ho, M], or None for bfloat16
    q_units,  # [chunks, Hq] if q, k and v were float32, else None
    k_units,  # [chunks, H] or None
    v_units,  # [chunks, Hv] or None
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
    rows,  # n
    Ho,
    per_q,  # heads of o that share a head of q
    K,
    V,
    SLICES: gl.constexpr,
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
    if s_desc is not None or checkpoints is not None:
        checkpoint, left = next_checkpoint(start, sequence, origin, every, slots, PACKED)
        left = gl.where(h % PER_V == 0, left, -1)  # only the first query head that shares a state writes it
    first_chunk = chunk_of(sequence, start, T, C, PACKED)
    q_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, C, BK], q_desc.layout)
    k_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, C, BK], k_desc.layout)
    a_tiles = gl.allocate_shared_memory(dtype, [2, 1, 1, C, C], a_desc.layout)
    v_tiles = gl.allocate_shared_memory(dtype, [4, 1, 1, C, W], v_desc.layout)
    state_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([1, 1, 1, BK, W], dtype)
    s_tiles = gl.allocate_shared_memory(dtype, [2, 1, 1, 1, BK, W], state_layout)
    o_tiles = s_tiles if o_desc is None else gl.allocate_shared_memory(dtype, [2, 1, 1, C, W], o_desc.layout)
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
    kept = (s_desc, checkpoints, rows, checkpoint, left, every)
    place = (b, h, n, sequence, column, start, length, start == origin)
    load_place = (b, h, column, start, first_chunk * C, gl.cdiv(length, C))
    number = h * chunks + first_chunk  # of the head and the segment's first chunk
    decays += number.to(gl.int64) * (2 * SLICES * BK)
    if a_units is not None:
        a_units += number
    units = (q_units, k_units, v_units, first_chunk)
    outputs = (o_desc, o_ptr)
    sizes = (T, Ho, per_q, K, V)
    state = (tiles, barriers, outputs, scale, decays, a_units, states, units, kept, place, sizes)
    gl.warp_specialize(
        [
            (_state_warps, (state, 0, PER_V, PACKED, SLICES)),
            (_state_warps, (state, 1, PER_V, PACKED, SLICES)),
            (_load_warp, ((q_desc, k_desc, a_desc, v_desc), load_tiles, barriers, load_place, PER_V, SLICES)),
        ],
        [4, 1],
        [232, 24],
    )
