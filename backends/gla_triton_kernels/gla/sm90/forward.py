"""Computes chunked gated linear attention on Hopper in one pass.

Let S be the state that enters a chunk, and S' the state that leaves it. common.py defines qg, kg, A, r and b_C. Then

    mild chunk         o = scale (qg (exp(r) S) + A v)        S' = exp(r) (exp(r) S + kg^T v)
    any other chunk    o = scale (qg S + A v)                 S' = exp(b_C) S + kg^T v

The outer exp(r) of S' waits for the next chunk, which multiplies the state by a factor anyway (`waiting`).

B batch   T tokens   N sequences   I segments, by default the N sequences   P slots of a pool
H key heads   Hq query heads   Hv value heads, of v, g and S   Ho = max(Hq, Hv) heads of o
K, V key and value width   C tokens of a chunk   BK keys of a tile, K rounded up   n rows of checkpoints
W columns of v of a warpgroup   GROUPS state warpgroups of a block   STAGES pipeline stages
slot   a pipeline stage in shared memory: the tiles of one chunk

The grid has one block per segment, head of o and GROUPS W columns of v, or as many blocks as there are multiprocessors,
which share the chunks of whole sequences evenly (shares.py). If query heads share a state, each of their blocks
computes it, and the block of the first one writes it. The warps of a block are specialised. They communicate over
barriers in shared memory; common.py gives the rules.

    load    one warp: copies q, k, v, g of the next chunks to shared memory by TMA
    gate    a warpgroup: sums g and replaces q, k by qg, kg in shared memory, while the state warps process earlier
            chunks
    state   one or two warpgroups, each with W columns of S, v and o. S stays in their registers, and each of them
            computes A. TMA writes checkpoints from the tile that holds S as an operand, because it needs no registers
            for addresses.

A backward needs the states that enter chunks, but no outputs. If there is no o, the kernel leaves out q, A and o.

Sources: Yang et al., "Gated Linear Attention Transformers with Hardware-Efficient Training" (arXiv 2312.06635), for
the chunked form.
"""

# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportAssignmentType=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
# pyright: reportUnboundVariable=false, reportPossiblyUnboundVariable=false
from __future__ import annotations

from typing import Any

import torch
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
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from gla_core.dispatch.tensors import ceil_div
from gla_triton_kernels.chunks.kernel import ForwardPlan
from gla_triton_kernels.chunks.segments import Segments, lengths_of, state_strides
from gla_triton_kernels.gla.shared.limits import MILD_DECAY_HALF, MILD_DECAY_SM90
from gla_triton_kernels.gla.sm90.common import (
    chunk_of,
    clear_rows,
    decay_any_chunk,
    decay_any_keys,
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
    store_state,
    tile_of_gates,
    tokens_of,
    unit_at,
    wait_for_predecessor,
    write,
    write_last_state,
    write_slot,
    write_state,
)
from gla_triton_kernels.gla.sm90.half import in_half
from gla_triton_kernels.gla.sm90.shares import (
    part_of,
    parts_of,
    publish,
    share_jobs,
    share_of_block,
    wait_for_published,
)
from gla_triton_kernels.gla.tensors import Tensors
from gla_triton_runtime.launch import Launch
from gla_triton_runtime.tma import shared_tiles

COLUMNS = 64
"""W of this kernel."""


def launch_outputs(
    plan: ForwardPlan, x: Tensors, segments: Segments, scale: float, every: int | None, normalizer: int | None = None
) -> list[Launch]:
    """Returns the launch that fills o, and final_state and checkpoints if x has them.

    See `launch_outputs` of general/forward.py for the arguments. If the kernels overlap (`plan.segments.overlap`), this
    kernel loads q, k, v, g and the order without waiting for its predecessor. The predecessor may therefore write
    nothing that this kernel reads except the entering states.
    """
    g_desc = None if x.g is None else shared_tiles(x.g, plan.parameters.C, plan.parameters.BK)
    arguments = {"g_desc": g_desc, **heads_of_outputs(x)}
    return launch_kernel(_gla_forward_kernel, arguments, plan, x, segments, scale, every, normalizer)


def heads_of_outputs(x: Tensors) -> dict[str, int]:
    """Returns arguments of a kernel: the number of heads of o, and how many of them share a head of q and of v."""
    Ho = max(x.q.shape[2], x.v.shape[2])
    return {"Ho": Ho, "per_q": Ho // x.q.shape[2], "PER_V": Ho // x.v.shape[2]}


def launch_kernel(
    function: Any,
    arguments: dict[str, Any],
    plan: ForwardPlan,
    x: Tensors,
    segments: Segments,
    scale: float,
    every: int | None,
    normalizer: int | None,
    heads: int = 1,
    W: int = COLUMNS,
) -> list[Launch]:
    """Returns the launches of a kernel whose state warpgroups have W columns of v each; see `launch_outputs`.

    Args:
        function: the kernel, here or in forward_head.py.
        arguments: the arguments that only this kernel has.
        heads: number of heads of o of a block.
        W: columns of v of a state warpgroup.
    """
    x, units, before = in_half(x, ("q", "k", "v"), x.cu_seqlens)
    T, K, V, Ho, kernel = x.k.shape[1], x.k.shape[3], x.v.shape[3], max(x.q.shape[2], x.v.shape[2]), plan.parameters
    jobs, groups = ceil_div(V, kernel.BV) * segments.count * (Ho // heads), kernel.BV // W
    size = ceil_div(K, kernel.BK) * kernel.BK * (W + 1)  # forward.py hands over a factor for each key, too
    shares, blocks, clears = share_jobs(jobs, ceil_div(T, kernel.C), kernel.programs, groups, size, x.k.device)
    s_desc = checkpoint_tiles(x.checkpoints, kernel.BK, W) if x.pool is None else None
    arguments = {
        **arguments,
        **shares,
        "q_desc": shared_tiles(x.q, kernel.C, kernel.BK),
        "k_desc": shared_tiles(x.k, kernel.C, kernel.BK),
        "v_desc": shared_tiles(x.v, kernel.C, W),
        "o_desc": shared_tiles(x.o, kernel.C, W) if x.o is not None and not before else None,
        "s_desc": s_desc,
        "checkpoints": None if s_desc is not None else x.checkpoints,
        **state_arguments(x, segments, every),
        **units,
        "scale": scale,
        **lengths_of(T, segments),
        "rows": 0 if x.checkpoints is None else x.checkpoints.shape[1],
        "K": K,
        "V": V,
        "NORMALIZER": normalizer,
        "STAGES": kernel.stages,
        "GROUPS": groups,
    }
    options = {"num_warps": kernel.warps, "maxnreg": 128}
    overlaps = segments.order is not None if plan.segments is None else plan.segments.overlap
    if overlaps and not before:  # otherwise the kernel waits until q, k and v have been converted
        options["launch_pdl"] = True
    return [*before, *clears, Launch(function, (blocks, 1, 1), arguments, options)]


def state_arguments(x: Tensors, segments: Segments, every: int | None) -> dict[str, Any]:
    """Returns the arguments of kernels for SM90 that say where o, states and checkpoints are."""
    return {
        "o_ptr": x.o,
        "initial_state": x.initial_state,
        "entering": x.entering,
        "final_state": x.final_state,
        "order": segments.order,
        "pool": x.pool,
        "slots": segments.slots,
        **state_strides("state_", x.initial_state if x.pool is None else x.pool),
        "every": every or 0,
    }


def checkpoint_tiles(x: Tensor | None, keys: int, values: int) -> TensorDescriptor | None:
    """Returns a descriptor of checkpoints [B, n, H, K, V] in blocks [1, 1, 1, keys, values], in the layout of wgmma.

    Returns None if there are no checkpoints, or if they are float32. The kernel writes the latter from registers.
    """
    if x is None or x.dtype != torch.bfloat16:
        return None
    block = [1, 1, 1, keys, values]
    layout = gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16)
    return TensorDescriptor(x, [*x.shape], [*x.stride()], block, layout)


@gluon.jit
def _load_warp(args, PER_V: gl.constexpr, HAS_O: gl.constexpr, HAS_GATE: gl.constexpr, STAGES: gl.constexpr):
    """Loads q, k, v and g of all chunks, up to STAGES chunks ahead of the other warps."""
    descriptors, tiles, barriers, work, per_q = args
    q_desc, k_desc, v_desc, g_desc = descriptors
    q_tiles, k_tiles, v_tiles, scratch_tiles = tiles
    g_full, g_empty, full, empty = barriers
    C: gl.constexpr = q_desc.block_type.shape[2]
    W: gl.constexpr = v_desc.block_type.shape[3]
    GROUPS: gl.constexpr = v_tiles.type.shape[0] // STAGES
    SIZE: gl.constexpr = (2 if HAS_O else 1) * k_desc.block_type.nbytes + GROUPS * v_desc.block_type.nbytes
    for part in range(parts_of(work)):
        place, chunks = part_of(work, part, C)
        b, h, _, _, column, start, _, _, _ = place
        passed, stop, _, done = chunks
        q_head, v_head = h // per_q, h // PER_V
        k_head = q_head // PER_V
        for i in range(done, done + stop - passed):
            slot = i % STAGES
            phase = (i // STAGES) & 1
            t = start + (passed + i - done) * C
            if HAS_GATE:
                mbarrier.wait(g_empty.index(slot), phase ^ 1)  # returns at once for the first STAGES chunks
                mbarrier.expect(g_full.index(slot), g_desc.block_type.nbytes)
                tma.async_copy_global_to_shared(
                    g_desc, [b, v_head, t, 0], g_full.index(slot), tile_of_gates(scratch_tiles.index(slot), g_desc)
                )
            mbarrier.wait(empty.index(slot), phase ^ 1)
            mbarrier.expect(full.index(slot), SIZE)
            if HAS_O:
                tma.async_copy_global_to_shared(q_desc, [b, q_head, t, 0], full.index(slot), q_tiles.index(slot))
            tma.async_copy_global_to_shared(k_desc, [b, k_head, t, 0], full.index(slot), k_tiles.index(slot))
            for w in gl.static_range(GROUPS):
                v_tile = v_tiles.index(GROUPS * slot + w)
                tma.async_copy_global_to_shared(v_desc, [b, v_head, t, column + w * W], full.index(slot), v_tile)


@gluon.jit
def _gate_warps(
    args,
    HAS_O: gl.constexpr,
    HAS_GATE: gl.constexpr,
    NORMALIZER: gl.constexpr,
    PACKED: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Replaces q, k by qg, kg in each chunk, and computes A of chunks that are not mild.

    The gates arrive before q and k, so that they are summed while q and k are still being loaded.
    """
    g_desc, tiles, barriers, work = args
    q_tiles, k_tiles, scratch_tiles, a_tiles, a_units, decays, mild_flags = tiles
    g_full, g_empty, full, gated = barriers
    C: gl.constexpr = k_tiles.type.shape[3]
    K: gl.constexpr = k_tiles.type.shape[4]
    runs: gl.constexpr = layout_of_runs(C, K)
    columns: gl.constexpr = layout_of_columns(C, K)
    HALF: gl.constexpr = k_tiles.dtype == gl.float16
    for part in range(parts_of(work)):
        place, chunks = part_of(work, part, C)
        _, _, _, _, _, _, length, _, _ = place
        passed, stop, _, done = chunks
        for i in range(done, done + stop - passed):
            slot = i % STAGES
            phase = (i // STAGES) & 1
            q_tile = q_tiles.index(slot).reshape([C, K]) if HAS_O else None
            k_tile = k_tiles.index(slot).reshape([C, K])
            rows = length - (passed + i - done) * C
            if HAS_GATE:
                mbarrier.wait(g_full.index(slot), phase)
                g_tile = tile_of_gates(scratch_tiles.index(slot), g_desc).reshape([C, K])
                g = log_gates_of_tile(g_tile, rows, runs, NORMALIZER, PACKED)  # [C, K]
                x, end = exponents_of_mild_chunk(g, NORMALIZER)  # [C, K], [K]
                mild = gl.min(end, 0) > (-MILD_DECAY_HALF if HALF else -MILD_DECAY_SM90)
                # The load warp has waited until the state warps have read the slot, so its decay and A may be replaced
                # too.
                mbarrier.wait(full.index(slot), phase)
                if HALF and PACKED:  # rows of the next sequence would count in the largest number of the chunk
                    if HAS_O:
                        clear_rows(q_tile, rows, runs)
                    clear_rows(k_tile, rows, runs)
                if HALF:
                    mild = mild & fit_mild_chunk(magnitudes(q_tile, k_tile, runs))
                mild_flags.index(slot).store(gl.full([1], mild, gl.int32, gl.SliceLayout(1, runs)))
                if PACKED and not HALF:
                    clear_rows(k_tile, rows, runs)
                if mild:
                    fence_async_shared()  # the tile of g has been accessed from registers; TMA overwrites it next
                    mbarrier.arrive(g_empty.index(slot), count=1)
                    decays.index(slot).store(decay_mild_chunk(q_tile, k_tile, x, end))
                else:
                    again = log_gates_of_tile(g_tile, rows, columns, NORMALIZER, False)  # [C, K]
                    if HAS_O:
                        decay, a = decay_any_chunk(
                            q_tile, k_tile, scratch_tiles.index(slot), again, NORMALIZER
                        )  # [K], [C, C]
                        decays.index(slot).store(decay)
                        a, a_unit = in_units(a, q_tile.dtype)
                        a_tiles.index(slot).store(a)
                        if HALF:
                            a_units.index(slot).store(gl.full([1], a_unit, gl.float32, gl.SliceLayout(1, runs)))
                    else:
                        decays.index(slot).store(decay_any_keys(k_tile, again, NORMALIZER))
                    fence_async_shared()  # as above
                    mbarrier.arrive(g_empty.index(slot), count=1)
            else:
                mbarrier.wait(full.index(slot), phase)
                if PACKED:
                    clear_rows(k_tile, rows, runs)
                if PACKED and HALF and HAS_O:
                    clear_rows(q_tile, rows, runs)
            fence_async_shared()  # qg and kg have been stored from registers; wgmma reads them
            mbarrier.arrive(gated.index(slot), count=1)


@gluon.jit
def _state_warps(
    args,
    WARPGROUP: gl.constexpr,
    PER_V: gl.constexpr,
    HAS_O: gl.constexpr,
    HAS_GATE: gl.constexpr,
    PACKED: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Carries W columns of the state through the segment, and writes W columns of the outputs.

    Args:
        args: the tuples below. `units` holds the units of q, k and v. `kept` is about checkpoints: the descriptor, the
            pointer, the rows of a batch entry, and the tokens between checkpoints. See `part_of` for `work`.
        WARPGROUP: the number of this state warpgroup.
    """
    tiles, barriers, outputs, states, units, kept, work, sizes, handed, flags = args
    q_tiles, k_tiles, v_tiles, a_tiles, a_units, decays, mild_flags, s_tiles, o_tiles = tiles
    full, gated, empty = barriers
    o_desc, o_ptr, scale = outputs
    _, strides, _, _, pool, slots = states
    q_units, k_units, v_units = units
    s_desc, checkpoints, n_rows, every = kept
    T, Ho, per_q, K, V = sizes
    Hv, Hq = Ho // PER_V, Ho // per_q
    C: gl.constexpr = q_tiles.type.shape[3]
    BK: gl.constexpr = q_tiles.type.shape[4]
    W: gl.constexpr = v_tiles.type.shape[4]
    GROUPS: gl.constexpr = s_tiles.type.shape[0]
    HALF: gl.constexpr = q_tiles.dtype == gl.float16
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, W, 16])
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    t = gl.arange(0, C, gl.SliceLayout(1, scores))[:, None]  # [C, 1]
    s = gl.arange(0, C, gl.SliceLayout(0, scores))[None, :]  # [1, C]
    s_block = s_tiles.index(WARPGROUP)  # [1, 1, 1, BK, W], holds S as an operand or as the source of a checkpoint
    s_tile = s_block.reshape([BK, W])
    o_tile = None if o_desc is None else o_tiles.index(WARPGROUP).reshape([C, W])
    key = gl.arange(0, BK, gl.SliceLayout(1, layout))[:, None]  # [BK, 1]
    columns = gl.arange(0, W, gl.SliceLayout(0, layout))[None, :]  # [1, W]
    state_number = gl.program_id(0) * GROUPS + WARPGROUP  # of the state that this warpgroup hands over
    wait_for_predecessor()  # it writes `entering`
    for part in range(parts_of(work)):
        place, chunks = part_of(work, part, C)
        b, h, n, sequence, column, start, length, origin, is_first = place
        passed, stop, n_chunks, done = chunks
        q_head, v_head = h // per_q, h // PER_V
        first = column + WARPGROUP * W
        value = first + columns  # [1, W]
        chunk = chunk_of(sequence, start, T, C, PACKED)
        if s_desc is not None or checkpoints is not None:
            # the row of the next checkpoint, and the number of tokens until it
            checkpoint, left = next_checkpoint(start + passed * C, sequence, origin, every, slots, PACKED)
            left = gl.where(h % PER_V == 0, left, -1)  # only the first query head that shares a state writes it
        S = gl.zeros([BK, W], gl.float32, layout)
        S = first_state(S, states, n, sequence, v_head, is_first & (passed == 0), key, value, (Hv, K, V))
        waiting = gl.full([BK, 1], 1.0, gl.float32, layout)  # the outer exp(r) of the previous chunk
        if handed is not None:  # noqa: SIM102 -- known when this is compiled
            if passed > 0:
                wait_for_published(flags + (state_number - GROUPS))
                state = handed + (state_number - GROUPS).to(gl.int64) * (BK * (W + 1))
                S, waiting = gl.load(state + key * W + columns), gl.load(state + BK * W + key)
        outer = 1.0  # the unit of S, which is the unit of kg^T v in the previous chunk
        if q_units is not None:
            outer = gl.to_tensor(1.0)
        for i in range(done, done + stop - passed):
            c = passed + i - done
            if s_desc is not None or checkpoints is not None:
                if left == 0:  # this chunk begins at a checkpoint
                    if s_desc is not None:
                        if not HAS_O:
                            tma.store_wait(0)  # the copy of the previous checkpoint has read s_tile
                        s_tile.store((S * waiting).to(s_tile.dtype))
                        fence_async_shared()
                        tma.async_copy_shared_to_global(s_desc, [b, checkpoint, v_head, 0, first], s_block)
                    elif pool is not None:
                        write_slot(pool, strides, checkpoint, v_head, S * (waiting * outer), key, value, (K, V))
                    else:
                        number = (b * n_rows + checkpoint) * Hv + v_head
                        write_state(checkpoints, number, S * (waiting * outer), key, value, (K, V))
                    checkpoint += 1
                    left = every  # 0 with a pool, so that no other checkpoint follows
                left -= C
            slot = i % STAGES
            phase = (i // STAGES) & 1
            q_tile = q_tiles.index(slot).reshape([C, BK])
            k_tile = k_tiles.index(slot).reshape([C, BK])
            v_tile = v_tiles.index(GROUPS * slot + WARPGROUP).reshape([C, W])
            rows = length - c * C
            mbarrier.wait(full.index(slot), phase)
            if PACKED:
                clear_rows(v_tile, rows, layout)  # the gate warps clear rows of k
            mbarrier.wait(gated.index(slot), phase)
            if HAS_O:
                a = gl.zeros([C, C], gl.float32, scores)  # computed while S becomes an operand
                a = warpgroup_mma(q_tile, k_tile.permute([1, 0]), a, use_acc=False, is_async=True)
            if s_desc is not None and HAS_O:
                tma.store_wait(0)  # the copy has read s_tile
            if HAS_GATE:
                decay = decays.index(slot).load(gl.SliceLayout(1, layout))[:, None]  # [BK, 1], exp(r) or exp(b_C)
                mild = gl.max(mild_flags.index(slot).load(gl.SliceLayout(1, layout)), 0) != 0
                r = gl.where(mild, decay, 1.0)  # [BK, 1], exp(r)
                if HAS_O:
                    s_unit = store_state(s_tile, S, waiting * r, outer)
                S = S * (waiting * decay)
                waiting = r
            elif HAS_O:
                s_unit = store_state(s_tile, S, None, outer)
            q_unit = unit_at(q_units, chunk + c, Hq, q_head)
            kv_unit = unit_at(k_units, chunk + c, Hq // PER_V, q_head // PER_V) * unit_at(
                v_units, chunk + c, Hv, v_head
            )
            if q_units is not None:
                S = S * (outer / kv_unit)
                outer = kv_unit
            fence_async_shared()  # S, and cleared rows of v, have been stored from registers; wgmma reads them
            if HAS_O:
                a = gl.where(t >= s, warpgroup_mma_wait(0, [a]), 0.0)  # [C, C]
                a, a_unit = in_units(a, q_tile.dtype)
                if HAS_GATE:  # noqa: SIM102 -- known when this is compiled, and mild is not
                    if not mild:  # qg kg^T is not A; the gate warps have computed A
                        a = a_tiles.index(slot).load(scores)
                        if HALF:
                            a_unit = gl.max(a_units.index(slot).load(gl.SliceLayout(1, layout)), 0)
                a = gl.convert_layout(a, operand)  # the left operand of wgmma may stay in registers
                o = gl.zeros([C, W], gl.float32, layout)
                o = warpgroup_mma(q_tile, s_tile, o, use_acc=False, is_async=True)
                if HALF:
                    o = warpgroup_mma_wait(0, [o]) * (s_unit / (a_unit * kv_unit))  # in the units of A v
                o = warpgroup_mma(a, v_tile, o, is_async=True)
            S = warpgroup_mma(k_tile.permute([1, 0]), v_tile, S, is_async=True)
            if HAS_O:
                o, S = warpgroup_mma_wait(0, [o, S])
            else:
                S = warpgroup_mma_wait(0, [S])
            mbarrier.arrive(empty.index(slot), count=1)
            if HAS_O:
                tma.store_wait(0)  # the copy has read o_tile
                o_factor = scale * a_unit * (q_unit * kv_unit)  # factor of o
                write(o_desc, o_ptr, o_tile, o * o_factor, first, V, (b, h, start + c * C, T, Ho), rows, PACKED)
        if handed is not None:  # noqa: SIM102 -- known when this is compiled
            if stop < n_chunks:
                state = handed + state_number.to(gl.int64) * (BK * (W + 1))
                gl.store(state + key * W + columns, S * outer)
                gl.store(state + BK * W + key, waiting)
                publish(flags + state_number)
        if (h % PER_V == 0) & (stop == n_chunks):  # the first query head that shares the state
            write_last_state(S * (waiting * outer), states, n, sequence, v_head, key, value, (Hv, K, V))
    tma.store_wait(0)


# V and strides are specialised: if they are multiples of 16, a thread moves two elements of a state at once.
@gluon.jit(do_not_specialize=["scale", "T", "segment", "segments", "every", "rows", "jobs", "Ho", "per_q", "K"])
def _gla_forward_kernel(
    q_desc,  # [B, Hq, T, K], tiles [C, BK]
    k_desc,  # [B, H, T, K], tiles [C, BK]
    v_desc,  # [B, Hv, T, V], tiles [C, W]
    g_desc,  # [B, Hv, T, K], tiles [C, BK], or None
    o_desc,  # [B, Ho, T, V], tiles [C, W]
    s_desc,  # checkpoints [B, n, Hv, K, V] in bfloat16, tiles [BK, W], or None
    checkpoints,  # [B, n, Hv, K, V] in float32, or the pool, or None
    o_ptr,  # [B, T, Ho, V], contiguous, or None
    initial_state,  # [N, Hv, K, V] or None
    entering,  # [I, Hv, K, V] or None
    final_state,  # [N, Hv, K, V], or None if sequences are cut
    order,  # [I, 5], or None for a batch
    pool,  # [P, Hv, K, V], instead of initial_state and final_state, or None
    slots,  # [N, 4], or None without a pool
    q_units,  # [chunks, Hq] if q, k and v were float32, else None
    k_units,  # [chunks, H] or None
    v_units,  # [chunks, Hv] or None
    handed,  # [blocks, GROUPS, BK, W + 1], S and then `waiting`, or None if there is a block for each job
    flags,  # [blocks, GROUPS] or None
    scale,
    state_n,  # strides of initial_state or of the pool; see `in_state`
    state_h,
    state_k,
    state_v,
    T,
    segment,  # tokens of a segment
    segments,  # segments of a sequence of a batch
    every,  # tokens between checkpoints
    rows,  # n
    jobs,  # see shares.py
    Ho,
    per_q,  # heads of o that share a head of q
    K,
    V,
    PER_V: gl.constexpr,  # heads of o that share a head of v; 1 unless per_q is 1
    NORMALIZER: gl.constexpr,
    STAGES: gl.constexpr,
    GROUPS: gl.constexpr,
):
    """Computes GROUPS W columns of the outputs of one head of o of one segment."""
    C: gl.constexpr = q_desc.block_type.shape[2]
    BK: gl.constexpr = q_desc.block_type.shape[3]
    W: gl.constexpr = v_desc.block_type.shape[3]
    HAS_O: gl.constexpr = o_ptr is not None
    HAS_GATE: gl.constexpr = g_desc is not None
    PACKED: gl.constexpr = order is not None
    dtype: gl.constexpr = q_desc.dtype
    columns = gl.cdiv(V, GROUPS * W)
    if handed is not None:
        work = (None, share_of_block(jobs, gl.cdiv(T, C)), (columns, Ho, 1, GROUPS * W, T))
    else:
        if PACKED and entering is None:
            wait_for_predecessor()  # the predecessor writes the order
        n = gl.program_id(0) // columns // Ho
        n, b, start, length, sequence, origin, _ = tokens_of(n, T, segment, segments, order)
        if PACKED and entering is not None:  # noqa: SIM102 -- known when this is compiled
            if length == 0:
                return
        h, column = gl.program_id(0) // columns % Ho, gl.program_id(0) % columns * GROUPS * W
        work = ((b, h, n, sequence, column, start, length, origin, start == origin), None, None)

    scores_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, C], dtype)
    state_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([1, 1, 1, BK, W], dtype)
    row_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    k_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, C, BK], k_desc.layout)  # k, then kg
    q_tiles = k_tiles
    if HAS_O:
        q_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, C, BK], q_desc.layout)  # q, then qg
    v_tiles = gl.allocate_shared_memory(dtype, [GROUPS * STAGES, 1, 1, C, W], v_desc.layout)
    # Scratch holds g, then the decayed rows of `_scores_by_halving`.
    scratch_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, 2, C, BK], q_desc.layout) if HAS_GATE else q_tiles
    a_tiles = gl.allocate_shared_memory(dtype, [STAGES, C, C], scores_layout)  # A of chunks that are not mild
    s_tiles = gl.allocate_shared_memory(dtype, [GROUPS, 1, 1, 1, BK, W], state_layout)
    o_tiles = s_tiles if o_desc is None else gl.allocate_shared_memory(dtype, [GROUPS, 1, 1, C, W], o_desc.layout)
    decays = gl.allocate_shared_memory(gl.float32, [STAGES, BK], row_layout)  # exp(r) if mild, else exp(b_C)
    mild_flags = gl.allocate_shared_memory(gl.int32, [STAGES, 1], row_layout)
    a_units = gl.allocate_shared_memory(gl.float32, [STAGES, 1], row_layout) if dtype == gl.float16 else decays
    bars: gl.constexpr = mbarrier.MBarrierLayout()
    g_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bars)  # g has been loaded
    g_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bars)  # g has been read
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bars)  # q, k, v have been loaded
    gated = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bars)  # q, k have become qg, kg
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bars)  # the state warpgroups have read qg, kg, v, A
    for i in gl.static_range(STAGES):
        mbarrier.init(g_full.index(i), count=1)
        mbarrier.init(g_empty.index(i), count=1)
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(gated.index(i), count=1)
        mbarrier.init(empty.index(i), count=GROUPS)  # each state warpgroup arrives once

    descriptors = (q_desc, k_desc, v_desc, g_desc)
    load = (descriptors, (q_tiles, k_tiles, v_tiles, scratch_tiles), (g_full, g_empty, full, empty), work, per_q)
    gate_tiles = (q_tiles, k_tiles, scratch_tiles, a_tiles, a_units, decays, mild_flags)
    gate = (g_desc, gate_tiles, (g_full, g_empty, full, gated), work)
    tiles = (q_tiles, k_tiles, v_tiles, a_tiles, a_units, decays, mild_flags, s_tiles, o_tiles)
    kept = (s_desc, checkpoints, rows, every)
    states = (initial_state, (state_n, state_h, state_k, state_v), entering, final_state, pool, slots)
    units = (q_units, k_units, v_units)
    sizes = (T, Ho, per_q, K, V)
    outputs = (o_desc, o_ptr, scale)
    state_args = (tiles, (full, gated, empty), outputs, states, units, kept, work, sizes, handed, flags)
    # Registers of a thread of the state warps. With fewer, the state would spill, and the assembler would then wait
    # after every wgmma. The gate warps have the remaining registers, and spill in chunks that are not mild.
    STATE: gl.constexpr = 152 if PACKED or BK <= 64 else 144
    if GROUPS == 1:
        gl.warp_specialize(
            [
                (_gate_warps, (gate, HAS_O, HAS_GATE, NORMALIZER, PACKED, STAGES)),
                (_state_warps, (state_args, 0, PER_V, HAS_O, HAS_GATE, PACKED, STAGES)),
                (_load_warp, (load, PER_V, HAS_O, HAS_GATE, STAGES)),
            ],
            [4, 1],
            [STATE, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_gate_warps, (gate, HAS_O, HAS_GATE, NORMALIZER, PACKED, STAGES)),
                (_state_warps, (state_args, 0, PER_V, HAS_O, HAS_GATE, PACKED, STAGES)),
                (_state_warps, (state_args, 1, PER_V, HAS_O, HAS_GATE, PACKED, STAGES)),
                (_load_warp, (load, PER_V, HAS_O, HAS_GATE, STAGES)),
            ],
            [4, 4, 1],
            [STATE, STATE, 24],
        )
