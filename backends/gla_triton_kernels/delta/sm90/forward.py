"""Computes the delta rule on Hopper in one pass, with a gate for each key, a gate for each head, or no gates.

For a block of BT tokens that the state S enters and S' leaves, with kin, qin, kout, decay, A and L of common.py,

    X = V - kin S        U = L X        o = scale (qin S + A U)        S' = diag(decay) S + kout^T U

X is what the entering state leaves to be explained. With one gate for each head, kin is diag(exp b) k, and likewise
qin and kout, so the rows of products have factors, and q and k stay as they are.

All of it is computed transposed: S^T [W, K], X^T, U^T and o^T [W, BT] are results of products and left operands of
others, and stay in registers. A block waits for the one before, and a longer block takes less time per token. So blocks
have 32 tokens. They have 16 if each key has a gate, because products in one piece limit the decay through a block.

**Segments.** If sequences are cut, one launch computes the summary of each segment but the last: the state that it
reaches from 0, and its transition, which is the state that values of 0 reach from the identity. A scan then computes
the states that enter segments (chunks/scan.py), from which another launch computes the outputs.

**Wide keys.** More than 128 keys are two parts, each with a state warpgroup. Both have the same W columns, and exchange
kin S and qin S of their keys, whose sums they need, through shared memory. One gate for each head only.

B batch   T tokens   N sequences   I segments, or the N sequences   H heads of q and k
Hv heads of values, states, gates and beta   R = Hv / H   K, V key and value width   n rows of checkpoints
C tokens of a chunk, which TMA moves at once   BT tokens of a block, 16 or 32   BK keys of a tile, K rounded up
W columns of v of a warpgroup   GROUPS state warpgroups of a block of warps   TURNS preparing warpgroups
PARTS tiles of keys of a head   STAGES pipeline stages   P slots of a pool
slot   a pipeline stage in shared memory: the tiles of one chunk

The grid has one block of warps per segment, value head and GROUPS W / PARTS columns of v, or of a transition. Its warps
are specialised. They communicate over barriers in shared memory; gla/sm90/common.py gives the rules.

    load       one warp: copies q, k, v, and the gates of keys, of the next chunks to shared memory by TMA
    prepare    one warpgroup, or two which take turns: sums gates, replaces q, k by qin, kin in shared memory, and
               computes kout, A and L of the blocks of a chunk, while the state warps process earlier chunks
    state      one or two warpgroups, each with W columns of S, v and o, or with a part of the keys

Sources: Yang et al., "Gated Delta Networks" (arXiv 2412.06464); Kimi Team, "Kimi Linear" (arXiv 2510.26692).
"""

# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportAssignmentType=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
# pyright: reportUnboundVariable=false, reportPossiblyUnboundVariable=false
from __future__ import annotations

import math

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

from gla_core.dispatch.backend import CHUNK
from gla_core.dispatch.tensors import ceil_div
from gla_triton_kernels.chunks.scan import launch_scan
from gla_triton_kernels.chunks.segments import Recurrence, Segments, are_cut, lengths_of, state_strides
from gla_triton_kernels.delta.sm90 import COLUMNS, Parameters
from gla_triton_kernels.delta.sm90.common import (
    are_above,
    by_blocks,
    decay_rows,
    decays_from_start,
    decays_to_end,
    in_log2,
    minus_of_blocks,
    pairs_by_halving,
    store_a,
    store_l,
    store_products,
    sums_of_blocks,
    tf32_operand,
    updates,
    upper_half,
)
from gla_triton_kernels.delta.tensors import Tensors
from gla_triton_kernels.gla.shared.limits import LEAST_NORMAL, MILD_DECAY_SM90
from gla_triton_kernels.gla.sm90.common import (
    as_float32,
    bounded_gates,
    clear_rows,
    first_state,
    gate_strides,
    gates_of,
    levels_that_count,
    log_gates_of_tile,
    next_checkpoint,
    opaque_zero,
    plus,
    tile_of_gates,
    tokens_of,
    write_last_state,
    write_rows,
    write_slot,
    write_state,
)
from gla_triton_runtime.arithmetic import LOG2E
from gla_triton_runtime.launch import Launch
from gla_triton_runtime.tma import shared_tiles, state_tiles

LEAST_MILD = gl.constexpr(math.exp(-MILD_DECAY_SM90.value))
"""The least decay of a key through a mild block."""


def launch_outputs(
    kernel: Parameters,
    x: Tensors,
    segments: Segments,
    scale: float,
    every: int | None,
    normalizer: int | None = None,
) -> list[Launch]:
    """Returns the launches that fill o, final_state and checkpoints, of which x may lack some.

    Args:
        segments: the segments, of a multiple of `CHUNK` tokens; a sequence that stays whole is one segment.
        every: tokens between checkpoints.
        normalizer: the number by which log sigma is divided if x.g holds logits; None if it holds log gates.
    """
    before = []
    if are_cut(x.k.shape[1], segments):
        entering, before = _launch_entering(kernel, x, segments, normalizer)
        x = x._replace(entering=entering)
    blocks = segments.count * x.v.shape[2] * ceil_div(x.v.shape[3], kernel.columns)
    return [*before, _launch(kernel, x, segments, blocks, scale, every, normalizer)]


def _launch_entering(
    kernel: Parameters, x: Tensors, segments: Segments, normalizer: int | None
) -> tuple[Tensor, list[Launch]]:
    """Returns the states that enter segments [I, Hv, K, V], except first ones, and the launches that compute them."""
    (Hv, V), K = x.v.shape[2:], x.k.shape[3]
    states, transitions = (x.v.new_empty(segments.count, Hv, K, n, dtype=torch.float32) for n in (V, K))
    if segments.order is not None and segments.most == 0:
        return states, []
    y = x._replace(initial_state=None, final_state=states, checkpoints=None, entering=None)
    summaries = launch_summaries(kernel, y, segments, transitions, False, normalizer)
    recurrence = Recurrence(x.k, x.v, x.g, x.initial_state, None)
    scan = launch_scan(False, recurrence, segments, states, transitions, states, skip_first=True)
    return states, [summaries, *scan]


def launch_summaries(
    kernel: Parameters, x: Tensors, segments: Segments, transitions: Tensor, every_one: bool, normalizer: int | None
) -> Launch:
    """Returns the launch that fills the summaries of segments: x.final_state [I, Hv, K, V] and `transitions`.

    Args:
        transitions: [I, Hv, K, K].
        every_one: whether the summaries of last segments are filled too; they are undefined otherwise.
        normalizer: as in `launch_outputs`.
    """
    (Hv, V), K = x.v.shape[2:], x.k.shape[3]
    # Followed segments come first in the order.
    places = segments.count if every_one or segments.order is None else segments.most
    blocks = places * Hv * (ceil_div(V, kernel.columns) + ceil_div(K, kernel.columns))
    return _launch(kernel, x, segments, blocks, 1.0, None, normalizer, transitions, every_one)


def _launch(
    kernel: Parameters,
    x: Tensors,
    segments: Segments,
    blocks: int,
    scale: float,
    every: int | None,
    normalizer: int | None,
    transitions: Tensor | None = None,
    every_one: bool = False,
) -> Launch:
    """Returns a launch of `blocks` blocks of warps, for summaries if `transitions` is not None."""
    (T, H, K), (Hv, V) = x.k.shape[1:], x.v.shape[2:]
    by_key = x.g is not None and x.g.ndim == 4
    b, t, h = x.beta.stride()
    kept = x.checkpoints if x.pool is None else None  # otherwise the checkpoints are in the pool
    o = x.o if transitions is None else None
    arguments = {
        "q_desc": shared_tiles(x.q, CHUNK, kernel.BK),
        "k_desc": shared_tiles(x.k, CHUNK, kernel.BK),
        "v_desc": shared_tiles(x.v, CHUNK, COLUMNS),
        "g_desc": shared_tiles(x.g, CHUNK, kernel.BK) if by_key else None,
        "o_desc": None if o is None else shared_tiles(o, CHUNK, COLUMNS),
        "s_desc": None if kept is None else state_tiles(kept, kernel.BK, COLUMNS),
        "g_ptr": None if by_key else x.g,
        "beta_ptr": x.beta,
        "o_ptr": o,
        "initial_state": x.initial_state,
        "entering": x.entering,
        "final_state": x.final_state,
        "transitions": transitions,
        "pool": x.pool,
        "slots": segments.slots,
        "order": segments.order,
        "scale": scale,
        **gate_strides(None if by_key else x.g),
        "beta_b": b,
        "beta_t": t,
        "beta_h": h,
        **state_strides("state_", x.initial_state if x.pool is None else x.pool),
        **lengths_of(T, segments),
        "every": every or 0,
        "rows": 0 if kept is None else kept.shape[1],
        "Hv": Hv,
        "R": Hv // H,
        "K": K,
        "V": V,
        "NORMALIZER": normalizer,
        "GROUPS": kernel.groups,
        "PARTS": kernel.parts,
        "BT": kernel.BT,
        "TURNS": kernel.turns,
        "STAGES": kernel.stages_of_states if o is None else kernel.stages,
        "KEEPS": kept is None and x.checkpoints is not None,
        "EVERY_ONE": every_one,
    }
    return Launch(_chunk_delta_fwd_kernel, (blocks, 1, 1), arguments, {"num_warps": 4, "maxnreg": 128})


@gluon.jit
def _scratch_tile(scratch, slot, number: gl.constexpr):
    """Returns a tile [C, BK] of a slot of the scratch tiles. Tile 0 holds kout."""
    C: gl.constexpr = scratch.type.shape[3]
    K: gl.constexpr = scratch.type.shape[4]
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, K], scratch.dtype)
    return scratch.index(slot)._reinterpret(scratch.dtype, [2, C, K], layout).index(number)


@gluon.jit
def _in_slot(matrices, slot):
    """Returns the tiles of A, L and L_21 of a slot; see `store_l`."""
    a_tiles, l_tiles, below_tiles = matrices
    return a_tiles.index(slot), l_tiles.index(slot), below_tiles.index(slot)


@gluon.jit
def _load_warp(args, STAGES: gl.constexpr, OUTPUTS: gl.constexpr):
    """Loads k, v and the gates of keys of all chunks, and q for outputs, up to STAGES chunks ahead of the other warps.

    They arrive in the order in which the other warps wait for them.
    """
    descriptors, tiles, barriers, place, R = args
    q_desc, k_desc, v_desc, g_desc = descriptors
    q_tiles, k_tiles, v_tiles, scratch = tiles
    g_full, full, v_full, _ready, empty, _summed = barriers
    b, h, column, start, length = place
    PARTS: gl.constexpr = q_tiles.type.shape[0] // STAGES
    BLOCKS: gl.constexpr = v_tiles.type.shape[0] // STAGES  # of W columns
    C: gl.constexpr = q_desc.block_type.shape[2]
    BK: gl.constexpr = q_desc.block_type.shape[3]
    W: gl.constexpr = v_desc.block_type.shape[3]
    for i in range(gl.cdiv(length, C)):
        slot = i % STAGES
        t = start + i * C
        mbarrier.wait(empty.index(slot), (i // STAGES) & 1 ^ 1)  # returns at once for the first STAGES chunks
        if g_desc is not None:
            mbarrier.expect(g_full.index(slot), g_desc.block_type.nbytes)
            g_tile = tile_of_gates(scratch.index(slot), g_desc)
            tma.async_copy_global_to_shared(g_desc, [b, h, t, 0], g_full.index(slot), g_tile)
        mbarrier.expect(full.index(slot), (2 if OUTPUTS else 1) * PARTS * k_desc.block_type.nbytes)
        for p in gl.static_range(PARTS):
            at, tile = [b, h // R, t, p * BK], PARTS * slot + p
            tma.async_copy_global_to_shared(k_desc, at, full.index(slot), k_tiles.index(tile))
            if OUTPUTS:
                tma.async_copy_global_to_shared(q_desc, at, full.index(slot), q_tiles.index(tile))
        mbarrier.expect(v_full.index(slot), BLOCKS * v_desc.block_type.nbytes)
        for w in gl.static_range(BLOCKS):
            v_tile = v_tiles.index(BLOCKS * slot + w)
            tma.async_copy_global_to_shared(v_desc, [b, h, t, column + w * W], v_full.index(slot), v_tile)


@gluon.jit
def _betas(beta, t, rows, token):
    """Returns beta [C] of the chunk that begins at token t; 0 from row `rows` on."""
    ptr, stride = beta
    return gl.load(ptr + (t + token).to(gl.int64) * stride, token < rows, 0.0).to(gl.float32)


@gluon.jit
def _prepare_warps(
    args,
    TURN: gl.constexpr,
    TURNS: gl.constexpr,
    NORMALIZER: gl.constexpr,
    PACKED: gl.constexpr,
    OUTPUTS: gl.constexpr,
):
    """Prepares chunks TURN, TURN + TURNS .. for the state warps."""
    tiles, beta, barriers, place, gates, g_desc = args
    if g_desc is not None:
        _prepare_by_key(tiles, beta, barriers, place, g_desc, NORMALIZER, PACKED, OUTPUTS)
    else:
        _prepare_by_head(tiles, beta, barriers, place, gates, (TURN, TURNS), NORMALIZER, PACKED, OUTPUTS)


@gluon.jit
def _prepare_by_key(
    tiles, beta, barriers, place, g_desc, NORMALIZER: gl.constexpr, PACKED: gl.constexpr, OUTPUTS: gl.constexpr
):
    """Replaces q, k by qin, -kin in each chunk, and computes kout, the decays, A and L of its blocks."""
    q_tiles, k_tiles, scratch, matrices, decays, _within, _after = tiles
    g_full, full, _v_full, ready, _empty, _summed = barriers
    _b, _h, _column, start, length = place
    STAGES: gl.constexpr = q_tiles.type.shape[0]
    C: gl.constexpr = q_tiles.type.shape[3]
    K: gl.constexpr = q_tiles.type.shape[4]
    runs: gl.constexpr = gl.BlockedLayout([16, K // 32], [1, 32], [4, 1], [1, 0])
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    token = gl.arange(0, C, gl.SliceLayout(1, scores))  # [C]
    next_beta = _betas(beta, start, length, token)
    for i in range(gl.cdiv(length, C)):
        slot = i % STAGES
        rows = length - i * C
        betas = next_beta
        next_beta = _betas(beta, start + (i + 1) * C, rows - C, token)
        q_tile, k_tile = q_tiles.index(slot).reshape([C, K]), k_tiles.index(slot).reshape([C, K])
        kout_tile, pair_tile = _scratch_tile(scratch, slot, 0), _scratch_tile(scratch, slot, 1)
        in_slot = _in_slot(matrices, slot)
        phase = (i // STAGES) & 1
        mbarrier.wait(g_full.index(slot), phase)
        g_tile = tile_of_gates(scratch.index(slot), g_desc).reshape([C, K])
        g = log_gates_of_tile(g_tile, rows, runs, NORMALIZER, PACKED)  # [C, K]
        alpha = gl.exp2(in_log2(g, NORMALIZER))  # [C, K]
        after, decay = decays_to_end(alpha)  # [C, K], [C / 16, K]
        mild = are_above(decay, LEAST_MILD)
        mbarrier.wait(full.index(slot), phase)
        if PACKED:
            clear_rows(k_tile, rows, runs)
        if mild:
            decays.index(slot).reshape([C // 16, K]).store(decay)
            kout = as_float32(k_tile.load(runs)) * after
            kout_tile.store(kout.to(kout_tile.dtype))
            pair_tile.store(by_blocks(kout, 1.0 / decay).to(pair_tile.dtype))
            decay_rows(q_tile if OUTPUTS else None, k_tile, decays_from_start(alpha))
            fence_async_shared()
            store_products(in_slot, (q_tile,) if OUTPUTS else (), (k_tile,), (pair_tile,), None, betas, -1.0)
        else:
            # The assembler of Triton 3.6 and 3.7 leaves out descriptors of tiles that both branches multiply.
            again = slot + opaque_zero()
            q_tile, k_tile = q_tiles.index(again).reshape([C, K]), k_tiles.index(again).reshape([C, K])
            g = bounded_gates(log_gates_of_tile(g_tile, rows, runs, NORMALIZER, False), NORMALIZER)
            b, end = sums_of_blocks(g)
            decays.index(slot).reshape([C // 16, K]).store(gl.exp2(end))
            levels = levels_that_count(g, LEAST_NORMAL)
            A, M = pairs_by_halving(q_tile, k_tile, pair_tile, kout_tile, b, levels)
            store_l(in_slot, M, betas)
            store_a(in_slot[0], A)  # without outputs too: the assembler would leave out descriptors of unused products
            kout = as_float32(k_tile.load(runs)) * gl.exp2(minus_of_blocks(end, b))
            kout_tile.store(kout.to(kout_tile.dtype))
            decay_rows(q_tile if OUTPUTS else None, k_tile, gl.exp2(b))
        fence_async_shared()
        mbarrier.arrive(ready.index(slot), count=1)


@gluon.jit
def _prepare_by_head(
    tiles,
    beta,
    barriers,
    place,
    gates,
    turns,
    NORMALIZER: gl.constexpr,
    PACKED: gl.constexpr,
    OUTPUTS: gl.constexpr,
):
    """Computes the decays, A and L of the blocks of chunks; q and k stay as they are.

    Args:
        gates: pointer to gates or None, the offset of those of the head, and the stride of tokens.
        turns: the first chunk, and the number of chunks from one to the next.
    """
    g_ptr, offset, stride = gates
    TURN: gl.constexpr = turns[0]
    TURNS: gl.constexpr = turns[1]
    q_tiles, k_tiles, _scratch, matrices, sums, within, after = tiles
    sums = sums.index(TURN)
    _g_full, full, _v_full, ready, _empty, _summed = barriers
    _b, _h, _column, start, length = place
    STAGES: gl.constexpr = matrices[0].type.shape[0]
    PARTS: gl.constexpr = q_tiles.type.shape[0] // STAGES
    C: gl.constexpr = q_tiles.type.shape[3]
    K: gl.constexpr = q_tiles.type.shape[4]
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    rows_of: gl.constexpr = gl.BlockedLayout([1, 8], [16, 2], [4, 1], [1, 0])
    BT: gl.constexpr = matrices[0].type.shape[2]
    blocks: gl.constexpr = gl.BlockedLayout([1, 1], [32 // BT, BT], [4, 1], [1, 0])  # a thread has a token
    token = gl.arange(0, C, gl.SliceLayout(1, scores))  # [C]
    block_token = (
        gl.arange(0, C // BT, gl.SliceLayout(1, blocks))[:, None] * BT
        + gl.arange(0, BT, gl.SliceLayout(0, blocks))[None, :]
    )  # [C / BT, BT]
    next_beta = _betas(beta, start + TURN * C, length - TURN * C, token)
    if g_ptr is not None:
        gate = (g_ptr + offset, stride)
        next_g = gates_of(gate, start + TURN * C, length - TURN * C, block_token, NORMALIZER)
    for i in range(TURN, gl.cdiv(length, C), TURNS):
        slot = i % STAGES
        rows = length - i * C
        betas = next_beta
        next_beta = _betas(beta, start + (i + TURNS) * C, rows - TURNS * C, token)
        if g_ptr is not None:
            g = next_g * LOG2E
            next_g = gates_of(gate, start + (i + TURNS) * C, rows - TURNS * C, block_token, NORMALIZER)
        q, k = (), ()
        for p in gl.static_range(PARTS):
            if OUTPUTS:
                q = q + (q_tiles.index(PARTS * slot + p).reshape([C, K]),)  # noqa: RUF005 -- Gluon unpacks no tuples
            k = k + (k_tiles.index(PARTS * slot + p).reshape([C, K]),)  # noqa: RUF005
        mbarrier.wait(full.index(slot), (i // STAGES) & 1)
        if g_ptr is not None:  # the load warp has waited until the state warps have read the slot
            b = gl.associative_scan(g, 1, plus)  # [C / BT, BT]
            end = gl.sum(g, 1)[:, None]
            sums.reshape([C // BT, BT]).store(b)
            within.index(slot).reshape([C // BT, BT]).store(gl.exp2(b))
            after.index(slot).reshape([C // BT, BT]).store(gl.exp2(end - b))
        if PACKED:
            for p in gl.static_range(PARTS):
                clear_rows(k[p], rows, rows_of)
            fence_async_shared()
        block_sums = None if g_ptr is None else sums.reshape([C // BT, BT])
        store_products(_in_slot(matrices, slot), q, k, k, block_sums, betas)
        fence_async_shared()
        mbarrier.arrive(ready.index(slot), count=1)


@gluon.jit
def _sum_of_parts(X, o, s_tiles, summed, GROUP: gl.constexpr, phase: gl.constexpr, OUTPUTS: gl.constexpr):
    """Returns X, and for group 0 o, [W, BT], summed over both parts of the keys, of which each group has one.

    Args:
        s_tiles: of each group, in whose second half is room for X; that of group 1 has room for o in its first half.
        summed: [4], barriers at which each group says that it has written what the other one reads, and read it.
        phase: 0 for the first block of a chunk, 1 for the second.
    """
    layout: gl.constexpr = X.type.layout
    W: gl.constexpr = X.shape[0]
    BT: gl.constexpr = X.shape[1]
    lines: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 4, [1, 0])  # four rows of an accumulator use all banks
    mbarrier.wait(summed.index(3 - GROUP), phase ^ 1)
    s_tiles.index(GROUP)._reinterpret(gl.float32, [2, W, BT], lines).index(1).store(X)
    if GROUP == 1 and OUTPUTS:
        s_tiles.index(1)._reinterpret(gl.float32, [2, W, BT], lines).index(0).store(o)
    mbarrier.arrive(summed.index(GROUP), count=1)
    mbarrier.wait(summed.index(1 - GROUP), phase)
    X = X + s_tiles.index(1 - GROUP)._reinterpret(gl.float32, [2, W, BT], lines).index(1).load(layout)
    if GROUP == 0 and OUTPUTS:
        o = o + s_tiles.index(1)._reinterpret(gl.float32, [2, W, BT], lines).index(0).load(layout)
    mbarrier.arrive(summed.index(2 + GROUP), count=1)
    return X, o


@gluon.jit
def _state_warps(args, GROUP: gl.constexpr, GATE: gl.constexpr, KEPT_IN: gl.constexpr, PACKED: gl.constexpr):
    """Computes W columns of the states and outputs of all chunks, or the part GROUP of the keys of these states.

    Args:
        GATE: "key", "head", or "none".
        KEPT_IN: "tensor" or "pool" if there are checkpoints, or "none".
    """
    tiles, barriers, place, outputs, states, transition, checkpoint, sizes = args
    q_tiles, k_tiles, v_tiles, scratch, matrices, decays, within, after, s_tiles = tiles
    _g_full, full, v_full, ready, empty, summed = barriers
    b, h, column, start, length = place
    o_desc, o_ptr, scale = outputs
    s_desc, every, first_row, origin = checkpoint
    _, strides, entering, final_state, pool, slots = states
    n, sequence, is_first, is_last, T, Hv, K, V = sizes
    transitions, first_key = transition
    STAGES: gl.constexpr = matrices[0].type.shape[0]
    PARTS: gl.constexpr = q_tiles.type.shape[0] // STAGES
    BLOCKS: gl.constexpr = v_tiles.type.shape[0] // STAGES  # of W columns
    PART: gl.constexpr = GROUP if PARTS == 2 else 0
    BLOCK: gl.constexpr = 0 if PARTS == 2 else GROUP
    SUMMARIES: gl.constexpr = transitions is not None
    OUTPUTS: gl.constexpr = o_desc is not None
    WRITES: gl.constexpr = PART == 0 and OUTPUTS  # whether the group has the outputs
    C: gl.constexpr = q_tiles.type.shape[3]
    BK: gl.constexpr = q_tiles.type.shape[4]
    W: gl.constexpr = v_tiles.type.shape[4]
    BY_KEY: gl.constexpr = GATE == "key"
    BY_HEAD: gl.constexpr = GATE == "head"
    whole: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BK, 16])
    BT: gl.constexpr = matrices[0].type.shape[2]
    block: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BT, 16])
    block_tf32: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BT, 8])
    left: gl.constexpr = gl.DotOperandLayout(0, block, 2)
    left_whole: gl.constexpr = gl.DotOperandLayout(0, whole, 2)
    lines: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    first = column + BLOCK * W
    value = first + gl.arange(0, W, gl.SliceLayout(1, whole))[:, None]  # [W, 1]
    key = PART * BK + gl.arange(0, BK, gl.SliceLayout(0, whole))[None, :]  # [1, BK]
    s_block = s_tiles.index(GROUP)
    KEPT: gl.constexpr = s_block.type.shape[2]
    o_block, o_tile = s_block, s_block
    if OUTPUTS:
        o_block = s_block._reinterpret(o_desc.dtype, [KEPT // C, 1, 1, C, W], o_desc.layout).index(0)
        o_tile = o_block.reshape([C, W])
    if KEPT_IN != "none":
        # the row or the slot of the next checkpoint, and the number of tokens until it
        row, until = next_checkpoint(start, sequence, origin, every, slots, PACKED)
    o = gl.zeros([W, BT], gl.float32, block_tf32)  # of the previous block
    S = gl.zeros([W, BK], gl.float32, whole)
    S = first_state(S, states, n, sequence, h, is_first, key, value, (Hv, K, V))
    if SUMMARIES:
        S = gl.where((first_key >= 0) & (value - column + first_key == key), 1.0, S)
    for i in range(gl.cdiv(length, C)):
        slot = i % STAGES
        phase = (i // STAGES) & 1
        rows = length - i * C
        part = PARTS * slot + PART
        q_tile, k_tile = q_tiles.index(part).reshape([C, BK]), k_tiles.index(part).reshape([C, BK])
        v_tile = v_tiles.index(BLOCKS * slot + BLOCK).reshape([C, W])
        kout_tile = _scratch_tile(scratch, slot, 0) if BY_KEY else k_tile
        a_tile, l_tile, below_tile = _in_slot(matrices, slot)
        if KEPT_IN == "tensor":
            if until == 0:
                tma.store_wait(0)  # the copy has read o_tile, which is a part of s_block
                if PARTS == 2:
                    mbarrier.wait(summed.index(3 - GROUP), 1)  # and the other group has read X
                s_block.reshape([BK, W]).permute([1, 0]).store(S.to(s_desc.dtype))
                fence_async_shared()
                tma.async_copy_shared_to_global(s_desc, [first_row + row, h, PART * BK, first], s_block)
                row += 1
                until = every
            until -= C
        elif KEPT_IN == "pool":
            if until == 0:
                write_slot(pool, strides, row, h, S, key, value, (K, V))
            until -= C
        mbarrier.wait(full.index(slot), phase)
        mbarrier.wait(v_full.index(slot), phase)
        if PACKED:
            clear_rows(v_tile, rows, lines)  # both groups may; the preparing warps clear rows of k
        mbarrier.wait(ready.index(slot), phase)
        S = warpgroup_mma_wait(0, [S])  # tells the assembler that S is there; it would wait after the first products
        for j in gl.static_range(C // BT):
            kin = k_tile.slice(BT * j, BT).permute([1, 0])  # [BK, BT]
            qin = q_tile.slice(BT * j, BT).permute([1, 0])  # [BK, BT]
            s = gl.convert_layout(S.to(k_tile.dtype), left)
            v = v_tile.slice(BT * j, BT).permute([1, 0]).load(block)  # [W, BT]
            if BY_KEY:  # the tile holds -kin
                X = warpgroup_mma(s, kin, v.to(gl.float32), is_async=True)
            else:
                X = gl.zeros([W, BT], gl.float32, block)
                X = warpgroup_mma(s, kin, X, use_acc=False, is_async=True)
            next_o = gl.zeros([W, BT], gl.float32, block)
            if OUTPUTS:
                next_o = warpgroup_mma(s, qin, next_o, use_acc=False, is_async=True)
            if BY_KEY:
                S = S * decays.index(slot).slice(BK * j, BK).load(gl.SliceLayout(0, whole))[None, :]
            elif BY_HEAD:
                through = within.index(slot).slice(BT * j, BT).load(gl.SliceLayout(0, block))[None, :]
                to_end = after.index(slot).slice(BT * j, BT).load(gl.SliceLayout(0, block_tf32))[None, :]
                S = S * within.index(slot).slice(BT * j + BT - 1, 1).load(gl.SliceLayout(0, whole))[None, :]
            if j == 0:
                tma.store_wait(0)  # the copies of the previous outputs and of the checkpoint have read their tiles
            elif WRITES:  # the previous outputs are stored while the products with S are computed
                o_tile.slice(BT * j - BT, BT).permute([1, 0]).store((o * scale).to(o_desc.dtype))
            if PARTS == 2:
                if OUTPUTS:
                    X, next_o = warpgroup_mma_wait(0, [X, next_o])
                else:
                    X = warpgroup_mma_wait(0, [X])
                X, next_o = _sum_of_parts(X, next_o, s_tiles, summed, PART, j, OUTPUTS)
            else:
                X = warpgroup_mma_wait(1 if OUTPUTS else 0, [X])
            if BY_HEAD:
                X = v.to(gl.float32) - through * X
            elif not BY_KEY:
                X = v.to(gl.float32) - X
            U = updates(X, l_tile, below_tile, j)
            if OUTPUTS:
                next_o = warpgroup_mma_wait(0, [next_o])
            u = U * to_end if BY_HEAD else U
            kout = kout_tile.slice(BT * j, BT)  # [BT, BK]
            if BY_KEY:
                S = warpgroup_mma(gl.convert_layout(u.to(k_tile.dtype), left_whole), kout, S, is_async=True)
            else:  # kout is exact, so what rounding takes from U would be most of the error of S
                high = upper_half(u)
                S = warpgroup_mma(gl.convert_layout(high.to(k_tile.dtype), left_whole), kout, S, is_async=True)
                low = (u - high).to(k_tile.dtype)
                S = warpgroup_mma(gl.convert_layout(low, left_whole), kout, S, is_async=True)
            if WRITES:
                if BY_HEAD:
                    next_o = next_o * through
                next_o = gl.convert_layout(next_o, block_tf32, assert_trivial=True)
                A = a_tile.slice(BT * j, BT).permute([1, 0])  # [BT, BT]
                o = warpgroup_mma(tf32_operand(U), A, next_o, is_async=True)
                o, S = warpgroup_mma_wait(0, [o, S])
            else:
                S = warpgroup_mma_wait(0, [S])
        if WRITES:
            o_tile.slice(C - BT, BT).permute([1, 0]).store((o * scale).to(o_desc.dtype))
        elif not OUTPUTS:
            fence_async_shared()  # no store follows the loads of v, which TMA overwrites
        mbarrier.arrive(empty.index(slot), count=1)
        if not WRITES:
            pass
        elif PACKED and rows < C:  # the rows after these belong to another sequence
            write_rows(o_ptr, o_tile.load(lines), first, V, (b, h, start + i * C, T, Hv), rows)
        else:
            fence_async_shared()
            tma.async_copy_shared_to_global(o_desc, [b, h, start + i * C, first], o_block)
    if SUMMARIES:
        if first_key < 0:
            write_state(final_state, n * Hv + h, S, key, value, (K, V))
        else:
            write_state(transitions, n * Hv + h, S, key, value - column + first_key, (K, K))
    elif entering is None:
        write_last_state(S, states, n, sequence, h, key, value, (Hv, K, V))
    elif final_state is not None:  # noqa: SIM102 -- known when this is compiled
        if is_last:
            write_state(final_state, sequence * Hv + h, S, key, value, (K, V))
    tma.store_wait(0)


# V and strides are specialised: if they are multiples of 16, a thread moves two elements of a state at once.
@gluon.jit(do_not_specialize=["scale", "T", "segment", "segments", "every", "rows", "Hv", "R", "K"])
def _chunk_delta_fwd_kernel(
    q_desc,  # [B, H, T, K], tiles [C, BK]
    k_desc,  # [B, H, T, K], tiles [C, BK]
    v_desc,  # [B, Hv, T, V], tiles [C, W]
    g_desc,  # [B, Hv, T, K], tiles [C, BK], or None
    o_desc,  # [B, Hv, T, V], tiles [C, W], or None if only states are needed
    s_desc,  # checkpoints [B n, Hv, K, V], tiles [BK, W], or None
    g_ptr,  # gates of heads [B, T, Hv] or [Hv], or None
    beta_ptr,  # [B, T, Hv]
    o_ptr,  # [B, T, Hv, V], contiguous, or None
    initial_state,  # [N, Hv, K, V] or None
    entering,  # [I, Hv, K, V], the states that enter segments, or None if sequences are whole
    final_state,  # [N, Hv, K, V] or None; the states that segments reach [I, Hv, K, V] if transitions is not None
    transitions,  # [I, Hv, K, K] for summaries of segments, or None
    pool,  # [P, Hv, K, V], instead of initial_state and final_state, or None
    slots,  # [N, 4], or None without a pool
    order,  # [I, 5], or None for a batch
    scale,
    g_b,  # strides of g_ptr
    g_t,
    g_h,
    beta_b,  # strides of beta_ptr
    beta_t,
    beta_h,
    state_n,  # strides of initial_state or of the pool; see `in_state`
    state_h,
    state_k,
    state_v,
    T,
    segment,  # tokens of a segment
    segments,  # segments of a sequence of a batch
    every,  # tokens between checkpoints
    rows,  # n
    Hv,
    R,  # value heads that share a head of q and k
    K,
    V,
    NORMALIZER: gl.constexpr,
    GROUPS: gl.constexpr,
    PARTS: gl.constexpr,
    STAGES: gl.constexpr,
    BT: gl.constexpr,
    TURNS: gl.constexpr,
    KEEPS: gl.constexpr,  # whether sequences have checkpoints in the pool
    EVERY_ONE: gl.constexpr,  # whether there are summaries of last segments too
):
    """Computes GROUPS W / PARTS columns of the outputs, or of the summary, of one value head of one segment."""
    C: gl.constexpr = q_desc.block_type.shape[2]
    BK: gl.constexpr = q_desc.block_type.shape[3]
    W: gl.constexpr = v_desc.block_type.shape[3]
    BY_KEY: gl.constexpr = g_desc is not None
    KEPT_IN: gl.constexpr = "pool" if KEEPS else "none" if s_desc is None else "tensor"
    GATE: gl.constexpr = "key" if BY_KEY else "none" if g_ptr is None else "head"
    PACKED: gl.constexpr = order is not None
    dtype: gl.constexpr = q_desc.dtype
    BLOCKS: gl.constexpr = GROUPS // PARTS  # of W columns
    values = gl.cdiv(V, BLOCKS * W)
    columns = values
    if transitions is not None:
        columns += gl.cdiv(K, BLOCKS * W)
    tile, h = gl.program_id(0) % columns, gl.program_id(0) // columns % Hv
    n, b, start, length, sequence, origin, end = tokens_of(
        gl.program_id(0) // columns // Hv, T, segment, segments, order
    )
    column = tile * BLOCKS * W  # at least V for a transition, so that TMA fills tiles of v with 0
    is_last = start + length == end
    if transitions is not None:
        if is_last and not EVERY_ONE:
            return
    elif PACKED and entering is not None:  # noqa: SIM102 -- known when this is compiled
        if length == 0:
            return
    place = (b, h, column, start, length)
    OUTPUTS: gl.constexpr = o_desc is not None
    if OUTPUTS:
        q_tiles = gl.allocate_shared_memory(dtype, [PARTS * STAGES, 1, 1, C, BK], q_desc.layout)  # q, then qin
    k_tiles = gl.allocate_shared_memory(dtype, [PARTS * STAGES, 1, 1, C, BK], k_desc.layout)  # k, then -kin
    if not OUTPUTS:
        q_tiles = k_tiles
    v_tiles = gl.allocate_shared_memory(dtype, [BLOCKS * STAGES, 1, 1, C, W], v_desc.layout)
    small: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, BT], gl.float32)
    a_tiles = gl.allocate_shared_memory(gl.float32, [STAGES, C, BT], small)
    squares: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C // 16, 16, 16], gl.float32)
    l_tiles = gl.allocate_shared_memory(gl.float32, [STAGES, C // 16, 16, 16], squares)
    below_tiles = l_tiles
    if BT == 32:
        below_tiles = gl.allocate_shared_memory(gl.float32, [STAGES, C // 32, 16, 16], squares)
    # Outputs, and before them a checkpoint, wait here for TMA, and what parts of the keys exchange.
    KEPT: gl.constexpr = C if s_desc is None and PARTS == 1 else BK
    kept: gl.constexpr = gl.NVMMASharedLayout.get_default_for([1, 1, KEPT, W], dtype)
    s_tiles = gl.allocate_shared_memory(dtype, [GROUPS, 1, 1, KEPT, W], kept)
    line: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    if BY_KEY:
        # Scratch holds g, then kout, and the columns of pairs.
        scratch = gl.allocate_shared_memory(dtype, [STAGES, 1, 2, C, BK], q_desc.layout)
        decays = gl.allocate_shared_memory(gl.float32, [STAGES, C // 16 * BK], line)
        within, after = decays, decays
    else:
        scratch = q_tiles
        decays = gl.allocate_shared_memory(gl.float32, [TURNS, C], line)  # sums of gates
        within = gl.allocate_shared_memory(gl.float32, [STAGES, C], line)
        after = gl.allocate_shared_memory(gl.float32, [STAGES, C], line)
    bars: gl.constexpr = mbarrier.MBarrierLayout()
    g_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bars)  # the gates of keys have been loaded
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bars)  # q and k have been loaded
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bars)  # v has been loaded
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bars)  # they have been prepared
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bars)  # the state warpgroups have read all
    summed = gl.allocate_shared_memory(gl.int64, [4, 1], bars)  # parts of the keys have been exchanged
    for i in gl.static_range(4):
        mbarrier.init(summed.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(g_full.index(i), count=1)
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(empty.index(i), count=GROUPS)

    barriers = (g_full, full, v_full, ready, empty, summed)
    beta = (beta_ptr + b.to(gl.int64) * beta_b + h * beta_h, beta_t)
    matrices = (a_tiles, l_tiles, below_tiles)
    prepared = (q_tiles, k_tiles, scratch, matrices, decays, within, after)
    tiles = (q_tiles, k_tiles, v_tiles, scratch, matrices, decays, within, after, s_tiles)
    states = (initial_state, (state_n, state_h, state_k, state_v), entering, final_state, pool, slots)
    state_args = (
        tiles,
        barriers,
        place,
        (o_desc, o_ptr, scale),
        states,
        (transitions, (tile - values) * BLOCKS * W),  # and the first key of the columns, if they are a transition's
        (s_desc, every, b * rows, origin),
        (n, sequence, start == origin, is_last, T, Hv, K, V),
    )
    # Registers of a thread of the state warps, and of the second preparing warps; the first ones have the rest.
    PREPARE: gl.constexpr = 136
    STATE: gl.constexpr = 152 if BT == 16 else 208 if GROUPS == 1 else 184
    load = ((q_desc, k_desc, v_desc, g_desc), (q_tiles, k_tiles, v_tiles, scratch), barriers, place, R)
    gates = (g_ptr, b.to(gl.int64) * g_b + h * g_h, g_t)
    prepare = (prepared, beta, barriers, place, gates, g_desc)
    if TURNS == 2:
        gl.warp_specialize(
            [
                (_prepare_warps, (prepare, 0, TURNS, NORMALIZER, PACKED, OUTPUTS)),
                (_state_warps, (state_args, 0, GATE, KEPT_IN, PACKED)),
                (_prepare_warps, (prepare, 1, TURNS, NORMALIZER, PACKED, OUTPUTS)),
                (_load_warp, (load, STAGES, OUTPUTS)),
            ],
            [4, 4, 1],
            [STATE, PREPARE, 24],
        )
    elif GROUPS == 1:
        gl.warp_specialize(
            [
                (_prepare_warps, (prepare, 0, TURNS, NORMALIZER, PACKED, OUTPUTS)),
                (_state_warps, (state_args, 0, GATE, KEPT_IN, PACKED)),
                (_load_warp, (load, STAGES, OUTPUTS)),
            ],
            [4, 1],
            [STATE, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_prepare_warps, (prepare, 0, TURNS, NORMALIZER, PACKED, OUTPUTS)),
                (_state_warps, (state_args, 0, GATE, KEPT_IN, PACKED)),
                (_state_warps, (state_args, 1, GATE, KEPT_IN, PACKED)),
                (_load_warp, (load, STAGES, OUTPUTS)),
            ],
            [4, 4, 1],
            [STATE, STATE, 24],
        )
