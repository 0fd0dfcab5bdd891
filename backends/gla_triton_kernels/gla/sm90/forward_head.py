"""Computes chunked gated linear attention on Hopper in one pass, with one gate for each head or without gates.

Let b_t be the sum of the log gates of a chunk through token t, S the state that enters the chunk, and S' the state that
leaves it. Then

    A_ts = q_t k_s exp(b_t - b_s)   for s <= t, else 0
    o_t  = scale * (exp(b_t) q_t S + sum over s of A_ts v_s)
    S'   = exp(b_C) S + k^T u        u_s = exp(b_C - b_s) v_s

If v has factors f, as in Mamba-2's scan, A_ts and u_s have the factor f_s as well: A_ts has exp(b_t - (b_s - log f_s)).
o_t has the term skip v_t. If the skip is one number, it joins the diagonal of A, divided by the scale. With an output
gate z, o_t is then multiplied by silu(z_t).

No exponent is above 0, so one path handles gates of any strength. A gate below `LEAST_GATE`, whose exp is 0 in float32,
counts as `LEAST_GATE`. The sums b are computed in float64 and rounded once. The error of the difference of two sums is
then at most 7e-4 after the strongest gates, a fifth of the rounding of bfloat16, and 1e-6 if no gate is strong.

B batch   T tokens   N sequences   I segments, by default the N sequences   P slots of a pool
H key heads   Hq query heads   Hv value heads, of v, g and S   Ho = max(Hq, Hv) heads of o
R = Ho / Hq heads of o that share a head of q   K, V key and value width
C tokens of a chunk   BK keys of a tile   SLICES slices of BK keys of a head   n rows of checkpoints
W columns of v of a warpgroup   GROUPS state warpgroups of a block   HEADS value heads of a block, 1 or 2
STAGES pipeline stages of v and u   SLOTS pipeline stages of slices of q and k   TURNS gate warpgroups, 1 or 2
slot   a pipeline stage in shared memory

The grid has one block per segment, head of o and GROUPS W columns of v. If V is at most W and an even number of value
heads shares a key head, a block has two value heads, one for each state warpgroup, and both read the same q and k. If
this would leave many multiprocessors idle in the last wave of blocks, as many blocks as there are multiprocessors share
the chunks of whole sequences evenly; see shares.py. If query heads share a state, each of their blocks computes it, and
the first writes it. The warps of a block are specialised. They communicate over barriers in shared memory; common.py
gives the rules.

    load    one warp: copies q, k, v of the next chunks to shared memory by TMA
    gate    TURNS warpgroups, which take turns: each sums the gates and computes u of every TURNS-th chunk, while the
            state warps process earlier chunks. A stage always belongs to the same warpgroup, which has therefore waited
            for the phase before; see the last rule of common.py.
    state   one or two warpgroups, each with W columns of S, v and o. S stays in their registers, and each of them
            computes A. The tile that holds S as an operand is also the source of checkpoints. The tile from which TMA
            copies o holds z before it; a warpgroup loads its z itself, once the previous o has been copied.

A backward needs the states that enter chunks, but no outputs. If there is no o, the kernel leaves out q, A and o, and u
takes the place of v.

The gradients of states obey the same recurrence from the last chunk to the first. With BACKWARDS, k and v are q and do,
and the checkpoints hold P, the gradients of the states that leave chunks:

    P' = exp(b_C) P + q^T u        u_t = scale * exp(b_t) do_t

A head with K above 128 has several slices of keys. q S and the scores are sums over slices, and the slices of S are
independent of each other. The more slices there are, the fewer columns fit into the registers of a warpgroup.

Sources: Yang et al., "Gated Linear Attention Transformers with Hardware-Efficient Training" (arXiv 2312.06635), for
the chunked form; Dao and Gu, "Transformers are SSMs" (arXiv 2405.21060), for one gate per head.
"""

# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportAssignmentType=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
# pyright: reportUnboundVariable=false, reportPossiblyUnboundVariable=false
from __future__ import annotations

from dataclasses import replace

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

from gla_core.dispatch.backend import CHUNK
from gla_core.dispatch.tensors import ceil_div
from gla_triton_kernels.chunks.kernel import ForwardPlan, GradientParameters, Parameters
from gla_triton_kernels.chunks.segments import Segments
from gla_triton_kernels.gla.sm90 import fastest_division, jobs_of_heads, second_warpgroup, warpgroup_columns
from gla_triton_kernels.gla.sm90.common import (
    chunk_of,
    clear_rows,
    first_state,
    gate_strides,
    gates_of,
    in_units,
    logits_of,
    next_checkpoint,
    plus,
    silu,
    store_state,
    tokens_of,
    unit_at,
    unit_of_slices,
    wait_for_predecessor,
    write,
    write_last_state,
    write_slot,
    write_state,
)
from gla_triton_kernels.gla.sm90.forward import launch_kernel
from gla_triton_kernels.gla.sm90.shares import first_of_part, hand_over, part_of, parts_of, share_of_block, taken_over
from gla_triton_kernels.gla.tensors import BackwardTensors, Tensors
from gla_triton_runtime.arithmetic import LOG2E
from gla_triton_runtime.launch import Launch
from gla_triton_runtime.tma import shared_tiles

MOST_SLOTS = 5
"""The most slots of slices of q and k that fit into shared memory beside v, u, S and o."""


def launch_outputs(
    plan: ForwardPlan,
    x: Tensors,
    segments: Segments,
    scale: float,
    every: int | None,
    normalizer: int | None = None,
    backwards: bool = False,
    last_leave_none: bool = False,
) -> list[Launch]:
    """Returns the launch that fills o, and final_state and checkpoints if x has them.

    See `launch_outputs` of general/forward.py for the arguments, and `launch_outputs` of sm90/forward.py for the
    overlap of kernels.

    Args:
        backwards: whether to go from the last chunk to the first; see `launch_state_gradients`.
        last_leave_none: backwards, whether x.entering holds nothing for the last segments of sequences.
    """
    Hq, K, (Hv, V) = x.q.shape[2], x.k.shape[3], x.v.shape[2:]
    slices, W = ceil_div(K, plan.parameters.BK), warpgroup_columns(K)
    heads = plan.parameters.BV // W if V <= W else 1
    slots = plan.parameters.stages if slices == 1 else min(slices + 1, MOST_SLOTS)
    # Outputs of several slices leave no registers for a second gate warpgroup. Packed slices use slots in any order.
    can_turn = slices == 1 or (x.o is None and segments.order is None)
    turns = 2 if x.g is not None and plan.parameters.stages % 2 == 0 and can_turn else 1
    arguments = {
        "g_ptr": x.g,
        **gate_strides(x.g),
        "Hv": Hv,
        "R": max(Hv // Hq, 1),
        "PER_V": max(Hq // Hv, 1),
        "v_factor": x.v_factor,
        "skip": x.skip,
        "skip_h": 0 if x.skip is None else x.skip.stride(0),
        "skip_v": None if x.skip is None or x.skip.ndim == 1 else x.skip.stride(1),
        "z_desc": None if x.z is None else shared_tiles(x.z, plan.parameters.C, W),
        "HEADS": heads,
        "SLICES": slices,
        "SLOTS": slots,
        "BACKWARDS": backwards,
        "LAST_LEAVE_NONE": last_leave_none,
        "TURNS": turns,
    }
    kernel = _gla_forward_head_kernel
    *before, launch = launch_kernel(kernel, arguments, plan, x, segments, scale, every, normalizer, heads, W)
    most = 96 if turns * plan.parameters.BV > 2 * W else 128  # the kernel has one warpgroup more than otherwise
    return [*before, replace(launch, options={**launch.options, "maxnreg": most})]


def launch_state_gradients(
    kernel: GradientParameters,
    x: BackwardTensors,
    entering: Tensor,
    leaving: Tensor | None,
    segments: Segments,
    scale: float,
    normalizer: int | None,
) -> tuple[Tensor, list[Launch]]:
    """Returns P, the gradients of the states that leave chunks, in the shape of checkpoints; and the launches.

    See `launch_gradients` of general/backward.py for the arguments; entering is bfloat16, and there are gates.
    """
    B, (H, K), (Hv, V) = len(x.k), x.k.shape[2:], x.v.shape[2:]
    W = warpgroup_columns(K)
    P = entering.new_empty(B, entering.numel() // (B * Hv * K * V), Hv, K, V)
    is_whole = leaving is x.dstate
    before, after, inside = (leaving, x.dinitial_state, None) if is_whole else (None, None, leaving)
    y = Tensors(x.q, x.q, x.do, x.g, before, x.cu_seqlens, None, after, P, inside)
    jobs = jobs_of_heads(segments.count * Hv, K, V, Hv // H % 2 == 0)
    may_share = is_whole and segments.order is None
    division = fastest_division(jobs, second_warpgroup(K), ceil_div(x.k.shape[1], CHUNK), kernel.programs, may_share)
    stages = 2 if K > 128 else 4  # without q and o, this many fit into shared memory
    BK, BV = 64 if K <= 64 else 128, division.warpgroups * W
    parameters = Parameters(C=CHUNK, BK=BK, BV=BV, stages=stages, tma=True, programs=division.programs)
    plan = ForwardPlan(None, parameters)  # pyright: ignore[reportArgumentType]
    *converted, launch = launch_outputs(plan, y, segments, scale, CHUNK, normalizer, True, x.last_leave_none)
    options = {name: option for name, option in launch.options.items() if name != "launch_pdl"}
    return P, [*converted, replace(launch, options=options)]


@gluon.jit
def _load_warp(
    args,
    PER_V: gl.constexpr,
    HAS_O: gl.constexpr,
    HEADS: gl.constexpr,
    SLICES: gl.constexpr,
    STAGES: gl.constexpr,
    BACKWARDS: gl.constexpr,
):
    """Loads q, k and v of all chunks, as far ahead of the other warps as there are slots.

    The tiles of v of a chunk have no barrier `empty`: their slot is free once that of the chunk's last slice is.
    """
    descriptors, tiles, barriers, work, R = args
    q_desc, k_desc, v_desc = descriptors
    q_tiles, k_tiles, v_tiles = tiles
    full, v_full, empty = barriers
    C: gl.constexpr = q_desc.block_type.shape[2]
    BK: gl.constexpr = q_desc.block_type.shape[3]
    W: gl.constexpr = v_desc.block_type.shape[3]
    GROUPS: gl.constexpr = v_tiles.type.shape[0] // STAGES
    SLOTS: gl.constexpr = k_tiles.type.shape[0]
    TILES: gl.constexpr = (2 if HAS_O else 1) * k_desc.block_type.nbytes
    COLUMNS: gl.constexpr = GROUPS * v_desc.block_type.nbytes
    for part in range(parts_of(work)):
        place, chunks = part_of(work, part, C)
        b, h, _, _, column, start, _, _, _ = place
        passed, stop, n_chunks, done = chunks
        q_head, v_head = h // R, h // PER_V
        for i in range(done, done + stop - passed):
            stage = i % STAGES
            c = passed + i - done
            t = start + (n_chunks - 1 - c if BACKWARDS else c) * C
            for j in gl.static_range(SLICES):
                step = SLICES * i + j
                slot = step % SLOTS
                # This returns at once for the first SLOTS slices.
                mbarrier.wait(empty.index(slot), ((step // SLOTS) & 1) ^ 1)
                mbarrier.expect(full.index(slot), TILES + COLUMNS if SLICES == 1 else TILES)
                if HAS_O:
                    tma.async_copy_global_to_shared(
                        q_desc, [b, q_head, t, j * BK], full.index(slot), q_tiles.index(slot)
                    )
                tma.async_copy_global_to_shared(
                    k_desc, [b, q_head // PER_V, t, j * BK], full.index(slot), k_tiles.index(slot)
                )
                if j == 0:
                    if SLICES > 1:
                        mbarrier.expect(v_full.index(stage), COLUMNS)
                    for w in gl.static_range(GROUPS):
                        v_tile = v_tiles.index(GROUPS * stage + w)
                        at = [b, v_head + w, t, 0] if HEADS > 1 else [b, v_head, t, column + w * W]
                        tma.async_copy_global_to_shared(v_desc, at, v_full.index(stage), v_tile)


@gluon.jit
def _gate_warps(
    gates,
    factors,
    args,
    turn: gl.constexpr,
    TURNS: gl.constexpr,
    PER_V: gl.constexpr,
    HAS_O: gl.constexpr,
    HEADS: gl.constexpr,
    SLICES: gl.constexpr,
    NORMALIZER: gl.constexpr,
    PACKED: gl.constexpr,
    STAGES: gl.constexpr,
    BACKWARDS: gl.constexpr,
):
    """Sums the gates and computes u in every TURNS-th chunk from `turn` on, and clears the rows of the next sequence.

    Args:
        gates: pointer to gates, and their strides; None without gates. The pointer is that of `first_of_part`.
        factors: the same pointer to factors of v; None without factors.
    """
    tiles, barriers, work, sizes, scale = args
    q_tiles, k_tiles, v_tiles, u_tiles, sums, decays = tiles
    full, v_full, ready, gated = barriers
    T, Hv = sizes
    C: gl.constexpr = v_tiles.type.shape[3]
    BK: gl.constexpr = k_tiles.type.shape[4]
    W: gl.constexpr = v_tiles.type.shape[4]
    GROUPS: gl.constexpr = v_tiles.type.shape[0] // STAGES
    SLOTS: gl.constexpr = q_tiles.type.shape[0]
    HAS_GATE: gl.constexpr = gates is not None
    line: gl.constexpr = gl.BlockedLayout([C // 32], [32], [4], [0])  # every warp holds all tokens
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    token = gl.arange(0, C, line)  # [C]
    NUMBERS: gl.constexpr = sums.type.shape[0] // (STAGES * HEADS)  # vectors [C] of a head and stage
    for part in range(parts_of(work)):
        place, chunks = part_of(work, part, C)
        batch, h, _, _, _, start, length, _, _ = place
        passed, stop, n_chunks, done = chunks
        v_head = h // PER_V
        begin = done + (turn + TURNS - done % TURNS) % TURNS  # the first chunk of this warpgroup
        if HAS_GATE:
            g_ptr, g_b, g_t, g_h = gates
            g_ptr = first_of_part(g_ptr, batch.to(gl.int64) * g_b + v_head.to(gl.int64) * g_h, work)
            f_ptr = factors
            if factors is not None:
                f_ptr = first_of_part(factors, batch.to(gl.int64) * T * Hv + v_head, work)
            g_next = ()  # the gates of the next chunk, [C] for each head
            f_next = ()  # the factors of v of the next chunk
            c = passed + begin - done
            at = gl.maximum(n_chunks - 1 - c, 0) * C if BACKWARDS else c * C
            for j in gl.static_range(HEADS):
                gate = (g_ptr + j * g_h, g_t)
                g_next += (gates_of(gate, start + at, length - at, token, NORMALIZER),)  # [C]
                if factors is not None:
                    factor = (f_ptr + j, Hv)
                    f_next += (logits_of(factor, start + at, length - at, token),)  # [C]
        for i in range(begin, done + stop - passed, TURNS):
            stage = i % STAGES
            c = passed + i - done
            c = n_chunks - 1 - c if BACKWARDS else c
            rows = length - c * C
            after = (c - TURNS if BACKWARDS else c + TURNS) * C
            ahead = gl.where(c >= TURNS, C, 0) if BACKWARDS else rows - TURNS * C
            sums_of_heads = ()  # b [C] and b_C of each head
            arriving = ()
            f = f_next if factors is not None else ()
            f_next = ()
            if HAS_GATE:
                for j in gl.static_range(HEADS):
                    g = g_next[j].to(gl.float64) * LOG2E  # [C]
                    # The loads of the next gates run during this chunk.
                    gate = (g_ptr + j * g_h, g_t)
                    arriving += (gates_of(gate, start + after, ahead, token, NORMALIZER),)
                    if factors is not None:
                        factor = (f_ptr + j, Hv)
                        f_next += (logits_of(factor, start + after, ahead, token),)
                    b = gl.associative_scan(g, 0, plus)  # [C]
                    sums_of_heads += ((b, gl.sum(g, 0)),)
                g_next = arriving
            mbarrier.wait(v_full.index(stage), (i // STAGES) & 1)
            if HAS_GATE:
                # The load warp has waited until the state warps have read the slot, so its sums may be replaced too.
                for j in gl.static_range(HEADS):
                    at = HEADS * stage + j
                    b, b_end = sums_of_heads[j]
                    # [C], exp(b_C - b), or scale * exp(b)
                    leave = gl.exp2(b.to(gl.float32)) * scale if BACKWARDS else gl.exp2((b_end - b).to(gl.float32))
                    sums.index(NUMBERS * at).store(b.to(gl.float32))
                    if factors is not None:
                        leave *= f[j]
                        sums.index(NUMBERS * at + 2).store((b - gl.log2(f[j]).to(gl.float64)).to(gl.float32))
                    sums.index(NUMBERS * at + 1).store(leave)
                    decay = gl.exp2(b_end.to(gl.float32))
                    decays.index(at).store(gl.full([1], decay, gl.float32, gl.SliceLayout(1, layout)))
            if PACKED and SLICES == 1:
                clear_rows(k_tiles.index(stage).reshape([C, BK]), rows, layout)
                if HAS_O and q_tiles.dtype == gl.float16:  # rows of the next sequence would count in the largest score
                    clear_rows(q_tiles.index(stage).reshape([C, BK]), rows, layout)
            for w in gl.static_range(GROUPS):
                v_tile = v_tiles.index(GROUPS * stage + w).reshape([C, W])
                if PACKED:
                    clear_rows(v_tile, rows, layout)
                if HAS_GATE:
                    at = HEADS * stage + (w if HEADS > 1 else 0)
                    leaving = sums.index(NUMBERS * at + 1).load(gl.SliceLayout(1, layout))[
                        :, None
                    ]  # [C, 1], f exp(b_C - b)
                    u_tile = u_tiles.index(GROUPS * stage + w).reshape([C, W])
                    u_tile.store((v_tile.load(layout).to(gl.float32) * leaving).to(v_tile.dtype))
            fence_async_shared()  # u has been stored, and rows cleared, from registers; wgmma reads them
            mbarrier.arrive(gated.index(stage), count=1)
            if PACKED and SLICES > 1:
                for j in gl.static_range(SLICES):
                    step = SLICES * i + j
                    slot = step % SLOTS
                    mbarrier.wait(full.index(slot), (step // SLOTS) & 1)
                    clear_rows(k_tiles.index(slot).reshape([C, BK]), rows, layout)
                    if HAS_O and q_tiles.dtype == gl.float16:  # as above
                        clear_rows(q_tiles.index(slot).reshape([C, BK]), rows, layout)
                    fence_async_shared()
                    mbarrier.arrive(ready.index(slot), count=1)


@gluon.jit
def _state_warps(
    args,
    WARPGROUP: gl.constexpr,
    PER_V: gl.constexpr,
    HAS_O: gl.constexpr,
    HEADS: gl.constexpr,
    SLICES: gl.constexpr,
    HAS_GATE: gl.constexpr,
    PACKED: gl.constexpr,
    STAGES: gl.constexpr,
    BACKWARDS: gl.constexpr,
):
    """Carries W columns of the state through the segment, and writes W columns of the outputs.

    If there is one slice, its product k^T u runs beside A v. If there are several, each of them runs beside q S of the
    same slice, so that the slot of the slice is soon free.

    Args:
        args: see `_state_warps` of forward.py.
        WARPGROUP: the number of this state warpgroup.
    """
    tiles, barriers, outputs, states, units, kept, work, sizes, handed, flags = args
    q_tiles, k_tiles, v_tiles, u_tiles, sums, decays, s_tiles, o_tiles = tiles
    ready, gated, empty, z_full = barriers
    o_desc, o_ptr, scale, skip, skip_v, z_desc = outputs
    _, strides, _, _, pool, slots = states
    q_units, k_units, v_units = units
    s_desc, checkpoints, n_rows, every = kept
    T, Hv, R, K, V = sizes
    C: gl.constexpr = q_tiles.type.shape[3]
    BK: gl.constexpr = q_tiles.type.shape[4]
    W: gl.constexpr = v_tiles.type.shape[4]
    GROUPS: gl.constexpr = v_tiles.type.shape[0] // STAGES
    COPIES: gl.constexpr = s_tiles.type.shape[0] // GROUPS
    SLOTS: gl.constexpr = q_tiles.type.shape[0]
    HAS_CHECKPOINTS: gl.constexpr = s_desc is not None or checkpoints is not None
    NUMBERS: gl.constexpr = sums.type.shape[0] // (STAGES * HEADS)
    HALF: gl.constexpr = q_tiles.dtype == gl.float16
    ON_DIAGONAL: gl.constexpr = skip is not None and skip_v is None
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, W, 16])
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    t = gl.arange(0, C, gl.SliceLayout(1, scores))[:, None]  # [C, 1]
    s = gl.arange(0, C, gl.SliceLayout(0, scores))[None, :]  # [1, C]
    o_tile = None if o_desc is None else o_tiles.index(WARPGROUP).reshape([C, W])
    HEAD: gl.constexpr = WARPGROUP if HEADS > 1 else 0  # the number of the warpgroup's head in the block
    Ho = Hv * PER_V
    keys = gl.arange(0, BK, gl.SliceLayout(1, layout))[:, None]  # [BK, 1]
    columns = gl.arange(0, W, gl.SliceLayout(0, layout))[None, :]  # [1, W]
    number = gl.program_id(0) * GROUPS + WARPGROUP  # of the state that this warpgroup hands over
    wait_for_predecessor()  # it writes `entering`
    for part in range(parts_of(work)):
        place, chunks = part_of(work, part, C)
        b, h, n, sequence, column, start, length, origin, is_first = place
        passed, stop, n_chunks, done = chunks
        h += HEAD
        v_head = h // PER_V
        first = column + (0 if HEADS > 1 else WARPGROUP * W)
        value = first + columns  # [1, W]
        chunk = chunk_of(sequence, start, T, C, PACKED)
        if HAS_CHECKPOINTS:
            # the row of the next checkpoint, and the number of tokens until it
            at = start if BACKWARDS else start + passed * C
            checkpoint, left = next_checkpoint(at, sequence, origin, every, slots, PACKED)
            left = gl.where(h % PER_V == 0, left, -1)  # only the first query head that shares a state writes it
            if BACKWARDS:
                checkpoint += n_chunks - 1 - passed
        if skip is not None:
            skip_ptr, skip_h = skip
            if ON_DIAGONAL:  # a number, which joins the diagonal of A
                skips = gl.load(skip_ptr + v_head * skip_h).to(gl.float32) / scale
            else:
                skips = gl.load(skip_ptr + v_head * skip_h + value * skip_v, value < V, 0.0).to(gl.float32)  # [1, W]
        S = gl.zeros([BK, W], gl.float32, layout)
        leaving = ()  # [BK, W] for each slice, the state that leaves the previous chunk
        for j in gl.static_range(SLICES):
            key = keys + j * BK
            entered = first_state(S, states, n, sequence, v_head, is_first & (passed == 0), key, value, (Hv, K, V))
            if handed is not None:  # noqa: SIM102 -- known when this is compiled
                if passed > 0:
                    entered = taken_over(handed, flags, number - GROUPS, j, SLICES, keys * W + columns)
            leaving += (entered,)
        outer = 1.0  # the unit of S, which is the unit of k^T u in the previous chunk
        if q_units is not None:
            outer = gl.to_tensor(1.0)
        for i in range(done, done + stop - passed):
            stage = i % STAGES
            c = passed + i - done
            c = n_chunks - 1 - c if BACKWARDS else c
            phase = (i // STAGES) & 1
            v_tile = v_tiles.index(GROUPS * stage + WARPGROUP).reshape([C, W])
            u_tile = u_tiles.index(GROUPS * stage + WARPGROUP).reshape([C, W])
            at = HEADS * stage + HEAD
            rows = length - c * C
            if SLICES > 1:
                q_unit = unit_at(q_units, chunk + c, Ho // R, h // R)
                kv_unit = unit_at(k_units, chunk + c, Hv // R, h // R // PER_V) * unit_at(
                    v_units, chunk + c, Hv, v_head
                )
                if HALF:
                    s_unit, inverse = unit_of_slices(leaving, outer, SLICES)
            a = gl.zeros([C, C], gl.float32, scores)
            o = gl.zeros([C, W], gl.float32, layout)
            updated = ()
            for j in gl.static_range(SLICES):
                step = SLICES * i + j
                slot = step % SLOTS
                S = leaving[j]
                q_tile = q_tiles.index(slot).reshape([C, BK])
                k_tile = k_tiles.index(slot).reshape([C, BK])
                # [1, 1, 1, BK, W], S as an operand, and the source of a checkpoint
                s_block = s_tiles.index(COPIES * WARPGROUP + step % COPIES)
                s_tile = s_block.reshape([BK, W])
                if s_desc is not None:
                    # The copy of the checkpoint has read s_tile. Later copies, of o or of the other s_tile, may go on.
                    tma.store_wait(1 if SLICES == 1 or not HAS_O else 0)
                if SLICES > 1 and HALF:
                    s_tile.store((S * inverse).to(s_tile.dtype))
                elif HAS_O or s_desc is not None:
                    s_unit = store_state(s_tile, S, None, outer)
                fence_async_shared()  # wgmma and TMA read S from the tile
                if HAS_CHECKPOINTS:
                    if left == 0:  # this chunk begins at a checkpoint
                        key = keys + j * BK
                        if s_desc is not None:
                            tma.async_copy_shared_to_global(s_desc, [b, checkpoint, v_head, j * BK, first], s_block)
                        elif pool is not None:
                            write_slot(pool, strides, checkpoint, v_head, S * outer, key, value, (K, V))
                        else:
                            write_state(
                                checkpoints, (b * n_rows + checkpoint) * Hv + v_head, S * outer, key, value, (K, V)
                            )
                        if j == SLICES - 1:
                            checkpoint += -1 if BACKWARDS else 1
                            left = every  # 0 with a pool, so that no other checkpoint follows
                    if j == SLICES - 1:
                        left -= C
                mbarrier.wait(ready.index(slot), (step // SLOTS) & 1)
                if PACKED and SLICES == 1:  # noqa: SIM102 -- known when this is compiled
                    if rows < C:
                        mbarrier.wait(gated.index(stage), phase)  # rows of the next sequence have been cleared
                if HAS_O:
                    a = warpgroup_mma(q_tile, k_tile.permute([1, 0]), a, use_acc=j > 0, is_async=True)
                    o = warpgroup_mma(q_tile, s_tile, o, use_acc=j > 0, is_async=True)
                if j == 0:
                    mbarrier.wait(gated.index(stage), phase)
                    if z_desc is not None:  # z arrives while S and A are multiplied
                        tma.store_wait(0)  # the copy of o has read o_tile
                        arrived = z_full.index(WARPGROUP)
                        mbarrier.expect(arrived, z_desc.block_type.nbytes)
                        z_place = [b, h, start + c * C, first]
                        tma.async_copy_global_to_shared(z_desc, z_place, arrived, o_tiles.index(WARPGROUP))
                if SLICES > 1:
                    if HAS_GATE:
                        S = S * gl.max(decays.index(at).load(gl.SliceLayout(1, layout)), 0)
                    if q_units is not None:
                        S = S * (outer / kv_unit)
                    S = warpgroup_mma(k_tile.permute([1, 0]), u_tile, S, is_async=True)
                    if HAS_O:
                        a, o, S = warpgroup_mma_wait(0, [a, o, S])
                    else:
                        S = warpgroup_mma_wait(0, [S])
                    updated += (S,)
                    if j < SLICES - 1:
                        mbarrier.arrive(empty.index(slot), count=1)
            if HAS_GATE and HAS_O:
                b_t = sums.index(NUMBERS * at).load(gl.SliceLayout(1, scores))[:, None]  # [C, 1]
                # [1, C], b_s, less log2 f_s if v has factors
                b_s = sums.index(NUMBERS * at + (2 if NUMBERS > 2 else 0)).load(gl.SliceLayout(0, scores))[None, :]
                between = gl.exp2(b_t - b_s)  # [C, C], undefined for t < s
            if HAS_GATE and SLICES == 1:
                decay = gl.max(decays.index(at).load(gl.SliceLayout(1, layout)), 0)
            if HAS_O and SLICES == 1:
                a, o = warpgroup_mma_wait(0, [a, o])
            if HAS_O:
                a = gl.where(t >= s, a * between if HAS_GATE else a, 0.0)  # [C, C]
                if ON_DIAGONAL:
                    a = gl.where(t == s, a + skips, a)
            if HAS_GATE and HAS_O:
                o = o * gl.exp2(sums.index(NUMBERS * at).load(gl.SliceLayout(1, layout)))[:, None]  # [C, W]
            if HAS_GATE and SLICES == 1:
                S = S * decay
            if HAS_O:
                a, a_unit = in_units(a, q_tile.dtype)
            if SLICES == 1:
                q_unit = unit_at(q_units, chunk + c, Ho // R, h // R)
                kv_unit = unit_at(k_units, chunk + c, Hv // R, h // R // PER_V) * unit_at(
                    v_units, chunk + c, Hv, v_head
                )
                if q_units is not None:
                    S = S * (outer / kv_unit)
            if q_units is not None:
                outer = kv_unit
            if HAS_O:
                if HALF:
                    o = o * (s_unit / (a_unit * kv_unit))  # in the units of A v
                a = gl.convert_layout(a, operand)  # the left operand of wgmma may stay in registers
                o = warpgroup_mma(a, v_tile, o, is_async=True)
            if SLICES == 1:
                S = warpgroup_mma(k_tile.permute([1, 0]), u_tile, S, is_async=True)
                if HAS_O:
                    o, S = warpgroup_mma_wait(0, [o, S])
                else:
                    S = warpgroup_mma_wait(0, [S])
                leaving = (S,)
            else:
                if HAS_O:
                    o = warpgroup_mma_wait(0, [o])
                leaving = updated
            if HAS_O:
                o_factor = scale * a_unit * (q_unit * kv_unit)  # factor of o
            if skip is not None and not ON_DIAGONAL:
                o = o * o_factor + v_tile.load(layout).to(gl.float32) * skips
                o_factor = 1.0
                fence_async_shared()  # v has been loaded to registers; TMA overwrites the tile
            mbarrier.arrive(empty.index(slot), count=1)
            if z_desc is not None:
                mbarrier.wait(z_full.index(WARPGROUP), i & 1)
                o = o * (o_factor * silu(o_tiles.index(WARPGROUP).reshape([C, W]).load(layout).to(gl.float32)))
                o_factor = 1.0
            if HAS_O:
                tma.store_wait(0)  # the copy has read o_tile
                write(o_desc, o_ptr, o_tile, o * o_factor, first, V, (b, h, start + c * C, T, Ho), rows, PACKED)
        if handed is not None:  # noqa: SIM102 -- known when this is compiled
            if stop < n_chunks:
                states_of_slices = ()
                for j in gl.static_range(SLICES):
                    states_of_slices += (leaving[j] * outer,)
                hand_over(handed, flags, number, states_of_slices, keys * W + columns)
        if (h % PER_V == 0) & (stop == n_chunks):  # the first query head that shares the state
            for j in gl.static_range(SLICES):
                write_last_state(leaving[j] * outer, states, n, sequence, v_head, keys + j * BK, value, (Hv, K, V))
    tma.store_wait(0)


# V and strides are specialised: if they are multiples of 16, a thread moves two elements of a state at once.
@gluon.jit(
    do_not_specialize=[
        *("scale", "g_b", "g_t", "g_h", "skip_h", "T", "segment", "segments", "every", "rows", "jobs", "Hv", "R", "K")
    ]
)
def _gla_forward_head_kernel(
    q_desc,  # [B, Hq, T, K], tiles [C, BK]
    k_desc,  # [B, H, T, K], tiles [C, BK]
    v_desc,  # [B, Hv, T, V], tiles [C, W]
    o_desc,  # [B, Ho, T, V], tiles [C, W]
    s_desc,  # checkpoints [B, n, Hv, K, V] in bfloat16, tiles [BK, W], or None
    checkpoints,  # [B, n, Hv, K, V] in float32, or the pool, or None
    g_ptr,  # [B, T, Hv], or [Hv] with g_b = g_t = 0, or None
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
    v_factor,  # [B, T, Hv], contiguous, or None; only with gates
    skip,  # [Hv] or [Hv, V], or None
    z_desc,  # [B, Hv, T, V], tiles [C, W], or None; only with o_desc
    handed,  # room for states [blocks, GROUPS, SLICES BK, W], or None if there is a block for each job
    flags,  # [blocks, GROUPS] or None
    scale,
    g_b,  # strides of g
    g_t,
    g_h,
    skip_h,  # strides of skip
    skip_v,  # None if the skip of a head is one number
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
    Hv,
    R,
    K,
    V,
    PER_V: gl.constexpr,  # heads of o that share a head of v; 1 unless R is 1
    NORMALIZER: gl.constexpr,
    STAGES: gl.constexpr,
    GROUPS: gl.constexpr,
    HEADS: gl.constexpr,
    SLICES: gl.constexpr,
    SLOTS: gl.constexpr,
    BACKWARDS: gl.constexpr,
    LAST_LEAVE_NONE: gl.constexpr,
    TURNS: gl.constexpr,
):
    """Computes GROUPS W columns of the outputs of one head of o of one segment, or of two heads."""
    C: gl.constexpr = q_desc.block_type.shape[2]
    BK: gl.constexpr = q_desc.block_type.shape[3]
    W: gl.constexpr = v_desc.block_type.shape[3]
    HAS_GATE: gl.constexpr = g_ptr is not None
    HAS_O: gl.constexpr = o_ptr is not None
    PACKED: gl.constexpr = order is not None
    dtype: gl.constexpr = q_desc.dtype
    columns, heads = gl.cdiv(V, GROUPS * W), Hv * PER_V // HEADS
    if handed is not None:
        share = share_of_block(jobs, gl.cdiv(T, C))
        work = (None, share, (columns, heads, HEADS, GROUPS * W, T))
    else:
        if PACKED and entering is None:
            wait_for_predecessor()  # the predecessor writes the order
        n = gl.program_id(0) // columns // heads
        n, b, start, length, sequence, origin, end = tokens_of(n, T, segment, segments, order)
        if PACKED and entering is not None:  # noqa: SIM102 -- known when this is compiled
            if length == 0:
                return
        # Whether this is the first segment of its sequence. Backwards, whether `entering` holds nothing for it.
        is_first = start == origin
        if BACKWARDS:
            is_first = (start + length == end) & (entering is None or LAST_LEAVE_NONE)
        h, column = gl.program_id(0) // columns % heads * HEADS, gl.program_id(0) % columns * GROUPS * W
        work = ((b, h, n, sequence, column, start, length, origin, is_first), None, None)
        v_head = h // PER_V
        if HAS_GATE:
            g_ptr += b.to(gl.int64) * g_b + v_head.to(gl.int64) * g_h  # see `first_of_part`
        if v_factor is not None:
            v_factor += b.to(gl.int64) * T * Hv + v_head

    state_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([1, 1, 1, BK, W], dtype)
    value_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, W], dtype)
    row_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    k_tiles = gl.allocate_shared_memory(dtype, [SLOTS, 1, 1, C, BK], k_desc.layout)
    q_tiles = gl.allocate_shared_memory(dtype, [SLOTS, 1, 1, C, BK], q_desc.layout) if HAS_O else k_tiles
    v_tiles = gl.allocate_shared_memory(dtype, [GROUPS * STAGES, 1, 1, C, W], v_desc.layout)
    u_tiles = v_tiles
    if HAS_GATE and HAS_O:
        u_tiles = gl.allocate_shared_memory(dtype, [GROUPS * STAGES, C, W], value_layout)
    COPIES: gl.constexpr = 1 if HAS_O else 2  # tiles of S of a warpgroup
    s_tiles = gl.allocate_shared_memory(dtype, [GROUPS * COPIES, 1, 1, 1, BK, W], state_layout)
    o_tiles = s_tiles if o_desc is None else gl.allocate_shared_memory(dtype, [GROUPS, 1, 1, C, W], o_desc.layout)
    # b and f exp(b_C - b); then b - log2 f, if v has factors
    NUMBERS: gl.constexpr = 2 if v_factor is None else 3
    sums = gl.allocate_shared_memory(gl.float32, [NUMBERS * STAGES * HEADS, C], row_layout)
    decays = gl.allocate_shared_memory(gl.float32, [STAGES * HEADS, 1], row_layout)  # exp(b_C)
    bars: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], bars)  # q and k have been loaded
    gated = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bars)  # b and u have been computed
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], bars)  # the state warpgroups have read a slice
    # v has been loaded. If there is one slice, v and the slice are loaded together.
    v_full = full if SLICES == 1 else gl.allocate_shared_memory(gl.int64, [STAGES, 1], bars)
    # q and k can be read: they have been loaded, and rows of the next sequence cleared if there are several slices.
    ready = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], bars) if PACKED and SLICES > 1 else full
    z_full = full if z_desc is None else gl.allocate_shared_memory(gl.int64, [GROUPS, 1], bars)  # z has been loaded
    for i in gl.static_range(SLOTS):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=GROUPS)  # each state warpgroup arrives once
        if PACKED and SLICES > 1:
            mbarrier.init(ready.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(gated.index(i), count=1)
        if SLICES > 1:
            mbarrier.init(v_full.index(i), count=1)
    if z_desc is not None:
        for i in gl.static_range(GROUPS):
            mbarrier.init(z_full.index(i), count=1)

    gates: gl.constexpr = None
    if HAS_GATE:
        gates = (g_ptr, g_b, g_t, g_h)
    skips: gl.constexpr = None
    if skip is not None:
        skips = (skip, skip_h)
    load = ((q_desc, k_desc, v_desc), (q_tiles, k_tiles, v_tiles), (full, v_full, empty), work, R)
    gate_tiles = (q_tiles, k_tiles, v_tiles, u_tiles, sums, decays)
    gate = (gate_tiles, (full, v_full, ready, gated), work, (T, Hv), scale)
    tiles = (q_tiles, k_tiles, v_tiles, u_tiles, sums, decays, s_tiles, o_tiles)
    states = (initial_state, (state_n, state_h, state_k, state_v), entering, final_state, pool, slots)
    kept = (s_desc, checkpoints, rows, every)
    units = (q_units, k_units, v_units)
    outputs = (o_desc, o_ptr, scale, skips, skip_v, z_desc)
    barriers = (ready, gated, empty, z_full)
    state_args = (tiles, barriers, outputs, states, units, kept, work, (T, Hv, R, K, V), handed, flags)
    # Registers of a thread of the state warps. The gate warps have the remaining registers.
    STATE: gl.constexpr = 168 if TURNS * GROUPS == 4 else 208 if SLICES == 1 else 224
    GATE: gl.constexpr = 56 if GROUPS == 2 else 96
    if GROUPS == 1 and TURNS == 1:
        gl.warp_specialize(
            [
                (
                    _gate_warps,
                    (gates, v_factor, gate, 0, 1, PER_V, HAS_O, HEADS, SLICES, NORMALIZER, PACKED, STAGES, BACKWARDS),
                ),
                (_state_warps, (state_args, 0, PER_V, HAS_O, HEADS, SLICES, HAS_GATE, PACKED, STAGES, BACKWARDS)),
                (_load_warp, (load, PER_V, HAS_O, HEADS, SLICES, STAGES, BACKWARDS)),
            ],
            [4, 1],
            [STATE, 24],
        )
    elif GROUPS == 1:
        gl.warp_specialize(
            [
                (
                    _gate_warps,
                    (gates, v_factor, gate, 0, 2, PER_V, HAS_O, HEADS, SLICES, NORMALIZER, PACKED, STAGES, BACKWARDS),
                ),
                (
                    _gate_warps,
                    (gates, v_factor, gate, 1, 2, PER_V, HAS_O, HEADS, SLICES, NORMALIZER, PACKED, STAGES, BACKWARDS),
                ),
                (_state_warps, (state_args, 0, PER_V, HAS_O, HEADS, SLICES, HAS_GATE, PACKED, STAGES, BACKWARDS)),
                (_load_warp, (load, PER_V, HAS_O, HEADS, SLICES, STAGES, BACKWARDS)),
            ],
            [4, 4, 1],
            [GATE, STATE, 24],
        )
    elif TURNS == 1:
        gl.warp_specialize(
            [
                (
                    _gate_warps,
                    (gates, v_factor, gate, 0, 1, PER_V, HAS_O, HEADS, SLICES, NORMALIZER, PACKED, STAGES, BACKWARDS),
                ),
                (_state_warps, (state_args, 0, PER_V, HAS_O, HEADS, SLICES, HAS_GATE, PACKED, STAGES, BACKWARDS)),
                (_state_warps, (state_args, 1, PER_V, HAS_O, HEADS, SLICES, HAS_GATE, PACKED, STAGES, BACKWARDS)),
                (_load_warp, (load, PER_V, HAS_O, HEADS, SLICES, STAGES, BACKWARDS)),
            ],
            [4, 4, 1],
            [STATE, STATE, 24],
        )
    else:
        gl.warp_specialize(
            [
                (
                    _gate_warps,
                    (gates, v_factor, gate, 0, 2, PER_V, HAS_O, HEADS, SLICES, NORMALIZER, PACKED, STAGES, BACKWARDS),
                ),
                (
                    _gate_warps,
                    (gates, v_factor, gate, 1, 2, PER_V, HAS_O, HEADS, SLICES, NORMALIZER, PACKED, STAGES, BACKWARDS),
                ),
                (_state_warps, (state_args, 0, PER_V, HAS_O, HEADS, SLICES, HAS_GATE, PACKED, STAGES, BACKWARDS)),
                (_state_warps, (state_args, 1, PER_V, HAS_O, HEADS, SLICES, HAS_GATE, PACKED, STAGES, BACKWARDS)),
                (_load_warp, (load, PER_V, HAS_O, HEADS, SLICES, STAGES, BACKWARDS)),
            ],
            [4, 4, 4, 1],
            [GATE, STATE, STATE, 24],
        )
