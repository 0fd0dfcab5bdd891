"""Computes gradients of gated linear attention on Hopper for value heads in groups, and for wide heads.

States are computed first, then chunks. A block then has all values of a head, and many value heads that share q and k,
where backward_head.py would write partial results. There is one gate for each value head; it is 0 in calls without
gates. For a chunk of C tokens and a value head, let S be the entering state, P the gradient of the leaving state, b_t
the sum of the log gates of the chunk through t, and f the factors of v (1 if there are none). With sums over the value
heads of a group,

    A_ts  = scale * q_t k_s exp(b_t - b_s)           dA_ts = scale * f_s do_t v_s exp(b_t - b_s)    for s <= t, else 0
    dq^S_t = scale * exp(b_t) do_t S^T               dk^S_s = f_s exp(b_C - b_s) v_s P^T

    dq = sum of dq^S + (sum of dA) k                 dk = sum of dk^S + (sum of dA)^T q
    w_s = exp(b_C - b_s) k_s P + (A^T do)_s          dv_s = f_s w_s + skip do_s

so q k^T and the last products of dq and dk are computed once for all heads of a group. P is in memory, and the chunks
are independent of each other:

    forward_head.py      goes backwards through segments, and writes P of every chunk
    this file            computes all chunks, in any order; each block sums dq and dk over the heads of a group
    ../shared/gate_gradients.py   computes the gradients of gates, of factors and of the skip from sums of products

Of each token, this kernel writes the sums over s and over t of A_ts (do_t v_s) for s < t, v_t do_t, A_tt (v_t do_t),
q_t dq^S_t and k_s dk^S_s / f_s, and for each key the sum of exp(b_C) S * P over values; see backward_head.py for the
gradient of a gate.

P is rounded to bfloat16, and sums of few tokens show it. In the last chunk of a sequence, P is the gradient of the
final state, whose rounding error is known. dk^S is then computed with the error as well.

B batch   T tokens   H key heads   Hv value heads   R = Hv / H value heads of a key head   HEADS value heads of a block
K, V key and value width   C tokens of a chunk   D = 64 columns of a tile
PARTS parts of 64 keys of a block   n rows of states, one for each chunk
tiles   of 64 values of a head   HALVES = tiles if there are one or two, which are in shared memory together, else None
SLOTS pipeline stages of v, do, S and P   slot   a stage in shared memory: the tiles of 64 values of a head
LINES pipeline stages of the sums of gates of a head   X vectors of `dots` of a chunk and head; see gate_gradients.py

The grid has one block per chunk, key head, HEADS of its value heads, and 64 PARTS keys. Results are sums over blocks.
The warps of a block are specialised. They communicate over barriers in shared memory; common.py gives the rules.

    load       one warp: copies q and k, then v, do, S and P of the next heads, to shared memory by TMA
    gate       one warp: sums the gates of the next heads
    sum        one warp: sums A_ts (do_t v_s) over s. The score warps would need many exchanges of registers for this.
    score      a warpgroup: computes A^T, dv, and the sum of dA^T
    gradient   PARTS warpgroups: each computes dq and dk of 64 keys

Sources: Yang et al., "Gated Linear Attention Transformers with Hardware-Efficient Training" (arXiv 2312.06635); Dao and
Gu, "Transformers are SSMs" (arXiv 2405.21060), for one gate per head.
"""

# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportAssignmentType=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
# pyright: reportUnboundVariable=false, reportPossiblyUnboundVariable=false, reportIndexIssue=false
from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma_wait

from gla_core.dispatch.backend import CHUNK
from gla_core.dispatch.tensors import ceil_div
from gla_triton_kernels.chunks import partials
from gla_triton_kernels.chunks.kernel import GradientParameters
from gla_triton_kernels.chunks.segments import Segments, cut, state_strides
from gla_triton_kernels.gla.shared.gate_gradients import launch_gate_gradients, rows_of_dots
from gla_triton_kernels.gla.sm90.common import (
    as_float32,
    clear_rows,
    gate_strides,
    gates_of,
    in_state,
    keep_apart,
    logits_of,
    plus,
    row_sums,
    segment_at,
    write,
)
from gla_triton_kernels.gla.sm90.common_backward import LAYOUT, LEFT, WIDTH, C, D, product, tile_arguments
from gla_triton_kernels.gla.sm90.forward_head import launch_state_gradients
from gla_triton_kernels.gla.sm90.shares import launch_clear
from gla_triton_kernels.gla.tensors import BackwardTensors
from gla_triton_runtime.arithmetic import LOG2E
from gla_triton_runtime.launch import Launch
from gla_triton_runtime.tma import shared_tiles, state_tiles

LINES = gl.constexpr(4)  # pipeline stages of the sums of gates
SUMS = gl.constexpr(3)  # vectors [C] of a head: b, exp(b_C - b), and the factors of v
LINE = gl.constexpr(gl.BlockedLayout([C.value // 32], [32], [1], [0]))  # of the tokens of a chunk, in one warp
ONE = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))  # of one number, in one warp
GRID = gl.constexpr(gl.BlockedLayout([1, 4], [2, 16], [1, 1], [1, 0]))  # of some rows of A_ts (do_t v_s), in one warp
ROWS = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))  # a thread holds 16 bytes of a row


def launch_gradients(
    kernel: GradientParameters,
    x: BackwardTensors,
    entering: Tensor,
    leaving: Tensor | None,
    segments: Segments,
    scale: float,
    normalizer: int | None = None,
) -> list[Launch]:
    """Returns the launches that fill the gradients in x; entering is bfloat16, and x.dq and x.dk have H heads.

    See `launch_gradients` of general/backward.py for the other arguments.
    """
    B, T, H, K = x.k.shape
    Hv, V = x.v.shape[2:]
    cleared = []
    if x.g is None:
        zeros = x.v.new_empty(Hv, dtype=torch.float32)
        x, cleared = x._replace(g=zeros), [launch_clear(zeros)]
    P, before = launch_state_gradients(kernel, x, entering, leaving, segments, scale, normalizer)
    chunks = cut(B, T, CHUNK, CHUNK, x.cu_seqlens, longest_first=False)
    blocks_k, pieces = ceil_div(K, kernel.BK), ceil_div(Hv // H, kernel.heads)
    dq, dk = (partials.parts_of(y, pieces) for y in (x.dq, x.dk))
    dv, parts = partials.parts_of(x.dv, blocks_k), kernel.BK // WIDTH
    rows, halves = entering.numel() // (Hv * K * V), ceil_div(V, WIDTH)
    dots = x.v.new_empty(rows, Hv, blocks_k, rows_of_dots(parts), CHUNK, dtype=torch.float32)
    arguments = {
        **tile_arguments(x, ("q", "k", "v", "do")),
        "s_desc": state_tiles(entering, WIDTH, WIDTH),
        "p_desc": state_tiles(P, WIDTH, WIDTH),
        "dq_desc": shared_tiles(dq, CHUNK, WIDTH) if dq is x.dq else None,
        "dk_desc": shared_tiles(dk, CHUNK, WIDTH) if dk is x.dk else None,
        "dv_desc": shared_tiles(dv, CHUNK, WIDTH) if dv is x.dv else None,
        "dq_ptr": dq,
        "dk_ptr": dk,
        "dv_ptr": dv,
        "dots_ptr": dots,
        "g_ptr": x.g,
        "f_ptr": x.v_factor,
        "skip_ptr": x.skip,
        "dstate": x.dstate,
        "order": chunks.order,
        "scale": scale,
        **gate_strides(x.g),
        "skip_h": 0 if x.skip is None else x.skip.stride(0),
        **state_strides("state_", x.dstate),
        "T": T,
        "H": H,
        "R": Hv // H,
        "heads": kernel.heads,
        "pieces": pieces,
        "K": K,
        "V": V,
        "B": B,
        "PARTS": parts,
        "HALVES": halves if halves <= 2 else None,
        "X": rows_of_dots(parts),
        "SLOTS": 5 if parts == 1 else 3 if halves > 1 else 2,  # 5 and 3 are the most that fit; 2 took less time
        "NORMALIZER": normalizer,
    }
    grid = (blocks_k * pieces * H * rows, 1, 1)
    options = {"num_warps": kernel.warps, "maxnreg": 168 if parts == 1 else 128}
    computed = Launch(_gla_backward_group_kernel, grid, arguments, options)
    gates = [] if x.dg is None else launch_gate_gradients(x, dots, chunks, normalizer)
    sums = partials.launch_partial_sums((dq, dk, dv), (x.dq, x.dk, x.dv))
    return [*cleared, *before, *chunks.launches, computed, *sums, *gates]


@gluon.jit
def _load_warp(args, PARTS: gl.constexpr, SLOTS: gl.constexpr):
    """Loads q and k of the chunk, then v, do, S and P of each head, as far ahead as there are slots."""
    descriptors, smem, barriers, place = args
    q_desc, k_desc, v_desc, do_desc, s_desc, p_desc = descriptors
    q_tiles, k_tiles, v_tiles, do_tiles, s_tiles, p_tiles = smem
    qk_full, full, empty = barriers
    row, b, key_head, h, heads, key, t, tiles = place
    TILE: gl.constexpr = q_desc.block_type.nbytes
    mbarrier.expect(qk_full, 2 * PARTS * TILE)
    for p in gl.static_range(PARTS):
        tma.async_copy_global_to_shared(q_desc, [b, key_head, t, key + p * D], qk_full, q_tiles.index(p))
        tma.async_copy_global_to_shared(k_desc, [b, key_head, t, key + p * D], qk_full, k_tiles.index(p))
    for i in range(heads * tiles):
        slot = i % SLOTS
        head, column = h + i // tiles, i % tiles * D
        bar = full.index(slot)
        mbarrier.wait(empty.index(slot), (i // SLOTS & 1) ^ 1)
        mbarrier.expect(bar, 2 * (PARTS + 1) * TILE)
        tma.async_copy_global_to_shared(v_desc, [b, head, t, column], bar, v_tiles.index(slot))
        tma.async_copy_global_to_shared(do_desc, [b, head, t, column], bar, do_tiles.index(slot))
        for p in gl.static_range(PARTS):
            at = PARTS * slot + p
            tma.async_copy_global_to_shared(s_desc, [row, head, key + p * D, column], bar, s_tiles.index(at))
            tma.async_copy_global_to_shared(p_desc, [row, head, key + p * D, column], bar, p_tiles.index(at))


@gluon.jit
def _gate_warp(args, gates, factors, NORMALIZER: gl.constexpr):
    """Sums the gates of each head.

    Args:
        gates, factors: a pointer to the gates or factors of the block's first head at token 0, and the strides of
            tokens and heads; factors may be None.
    """
    sums, decays, summed, released, heads, t, rows = args
    g_ptr, g_t, g_h = gates
    token = gl.arange(0, C, LINE)  # [C]
    g_next = gates_of((g_ptr, g_t), t, rows, token, NORMALIZER)  # [C]
    if factors is not None:
        f_ptr, f_t, f_h = factors
        f_next = logits_of((f_ptr, f_t), t, rows, token)  # [C]
    for m in range(heads):
        line = m % LINES
        wide = g_next.to(gl.float64) * LOG2E  # [C]
        ahead = gl.where(m + 1 < heads, rows, 0)
        g_next = gates_of((g_ptr + (m + 1) * g_h, g_t), t, ahead, token, NORMALIZER)  # loaded during this head
        total = gl.associative_scan(wide, 0, plus)  # [C], b
        end = gl.sum(wide, 0)  # b_C
        mbarrier.wait(released.index(line), (m // LINES & 1) ^ 1)
        sums.index(SUMS * line).store(total.to(gl.float32))
        sums.index(SUMS * line + 1).store(gl.exp2((end - total).to(gl.float32)))
        if factors is not None:
            sums.index(SUMS * line + 2).store(f_next)
            f_next = logits_of((f_ptr + (m + 1) * f_h, f_t), t, ahead, token)
        decays.index(line).store(gl.full([1], gl.exp2(end.to(gl.float32)), gl.float32, ONE))
        mbarrier.arrive(summed.index(line), count=1)


@gluon.jit
def _sum_warp(args):
    """Sums A_ts (do_t v_s) over s for each head."""
    pair_tile, paired, summed, dots_ptr, heads, head_dots = args
    t = gl.arange(0, C, gl.SliceLayout(0, GRID))  # [C]
    for m in range(heads):
        mbarrier.wait(paired, m & 1)
        sums = gl.zeros([C // 8, C], gl.float32, GRID)
        for i in gl.static_range(8):
            sums += pair_tile.slice(i * (C // 8), C // 8).load(GRID)
        fence_async_shared()
        mbarrier.arrive(summed, count=1)
        gl.store(dots_ptr + m * head_dots + t, gl.sum(sums, 0))


@gluon.jit
def _scores(q_tiles, k_tiles, below, PARTS: gl.constexpr):
    """Returns k q^T [C, C], where `below` is true; the scores are transposed, so s is the row."""
    scores = gl.zeros([C, C], gl.float32, LAYOUT)
    for p in gl.static_range(PARTS):
        q_tile = q_tiles.index(p).reshape([C, D])
        scores = product(k_tiles.index(p).reshape([C, D]), q_tile.permute([1, 0]), scores)
    return gl.where(below, warpgroup_mma_wait(0, [scores]), 0.0)


@gluon.jit
def _next_da(v_tiles, do_tiles, item, daT, full, cleared, rows, SLOTS: gl.constexpr, PACKED: gl.constexpr):
    """Waits for tiles of v and do, and starts the sum of their v do^T and daT [C, C]."""
    slot = item % SLOTS
    do_tile = do_tiles.index(slot).reshape([C, D])
    mbarrier.wait(full.index(slot), item // SLOTS & 1)
    if PACKED:
        clear_rows(do_tile, rows, ROWS)
        fence_async_shared()
        mbarrier.arrive(cleared.index(slot), count=1)
    return product(v_tiles.index(slot).reshape([C, D]), do_tile.permute([1, 0]), daT)


@gluon.jit
def _write_dv(
    aT,
    read,
    outputs,
    item,
    value,
    where,
    factors,
    PARTS: gl.constexpr,
    SLOTS: gl.constexpr,
    HAS_FACTOR: gl.constexpr,
    HAS_SKIP: gl.constexpr,
    PACKED: gl.constexpr,
):
    """Computes and writes D columns of dv, and releases the tiles of these values.

    Args:
        aT: A^T [C, C], a left operand of wgmma.
        item: the number of tiles of values before this one.
        factors: exp(b_C - b) [C] in shared memory; the factors of v [C, 1], and the skip.
    """
    k_tiles, do_tiles, p_tiles, out_tiles, empty = read
    leave, f, skip = factors
    b, h, t0, T, Hv, V, rows = where
    dv_desc, dv_ptr = outputs
    slot = item % SLOTS
    do_tile = do_tiles.index(slot).reshape([C, D])
    dv = gl.zeros([C, D], gl.float32, LAYOUT)
    for p in gl.static_range(PARTS):
        dv = product(k_tiles.index(p).reshape([C, D]), p_tiles.index(PARTS * slot + p).reshape([D, D]), dv)
    dv = warpgroup_mma_wait(0, [dv]) * leave.load(gl.SliceLayout(1, LAYOUT))[:, None]
    dv = warpgroup_mma_wait(0, [product(aT, do_tile, dv)])
    if HAS_FACTOR:
        dv = dv * f
    if HAS_SKIP:
        dv += as_float32(do_tile.load(LAYOUT)) * skip
        fence_async_shared()  # do has been loaded to registers; TMA overwrites the tile
    mbarrier.arrive(empty.index(slot), count=1)
    tma.store_wait(1)  # dv of the tile before the previous one has left this tile
    out_tile = out_tiles.index(item % 2).reshape([C, D])
    write(dv_desc, dv_ptr, out_tile, dv, value, V, (b, h, t0, T, Hv), rows, PACKED)


@gluon.jit
def _score_warps(
    args,
    scale,
    PARTS: gl.constexpr,
    HALVES: gl.constexpr,
    SLOTS: gl.constexpr,
    HAS_FACTOR: gl.constexpr,
    PACKED: gl.constexpr,
):
    """Computes A^T and dv of each head, the sum of dA^T, and sums of products of tokens."""
    smem, barriers, outputs, skips, dots_ptr, place, sizes = args
    q_tiles, k_tiles, v_tiles, do_tiles, p_tiles, out_tiles, sums, pair_tile = smem
    qk_full, qk_ready, full, empty, cleared, summed, released, da_ready, paired, pairs_summed = barriers
    skip_ptr, skip_h, first_block = skips
    b, h, heads, t0, rows, tiles = place
    T, Hv, V, head_dots = sizes
    dtype: gl.constexpr = q_tiles.dtype
    s = gl.arange(0, C, gl.SliceLayout(1, LAYOUT))  # [C]
    t = gl.arange(0, C, gl.SliceLayout(0, LAYOUT))  # [C]
    none = gl.zeros([C, C], gl.float32, LAYOUT)  # also for [C, D], since C = D
    mbarrier.wait(qk_full, 0)
    if PACKED:
        for p in gl.static_range(PARTS):
            clear_rows(q_tiles.index(p).reshape([C, D]), rows, ROWS)
            clear_rows(k_tiles.index(p).reshape([C, D]), rows, ROWS)
        fence_async_shared()  # wgmma reads the cleared rows
        mbarrier.arrive(qk_ready, count=1)
    below = (t[None, :] >= s[:, None]) & (t < rows)[None, :]  # [C, C]
    above = (t[None, :] > s[:, None]) & (t < rows)[None, :]
    diagonal = t[None, :] == s[:, None]
    scores = _scores(q_tiles, k_tiles, below, PARTS)  # [C, C]
    diagonal_scores = gl.sum(gl.where(diagonal, scores, 0.0), 1) * scale  # [C], A_ss
    da = none  # [C, C], the sum of dA^T
    for m in range(heads):
        line = m % LINES
        daT = none  # [C, C], v do^T
        if HALVES is not None:
            for j in gl.static_range(HALVES):
                daT = _next_da(v_tiles, do_tiles, HALVES * m + j, daT, full, cleared, rows, SLOTS, PACKED)
        mbarrier.wait(summed.index(line), m // LINES & 1)
        b_rows = sums.index(SUMS * line).load(gl.SliceLayout(1, LAYOUT))[:, None]  # [C, 1], b_s
        b_columns = sums.index(SUMS * line).load(gl.SliceLayout(0, LAYOUT))[None, :]  # [1, C], b_t
        between = gl.exp2(gl.where(below, b_columns - b_rows, 0.0)) * scale  # [C, C]
        f = 1.0
        if HAS_FACTOR:
            f = sums.index(SUMS * line + 2).load(gl.SliceLayout(1, LAYOUT))[:, None]  # [C, 1]
        skip = 0.0
        if skip_ptr is not None:
            skip = gl.load(skip_ptr + (h + m) * skip_h).to(gl.float32) * gl.where(first_block, 1.0, 0.0)
        factors = (sums.index(SUMS * line + 1), f, skip)
        HAS_SKIP: gl.constexpr = skip_ptr is not None
        read = (k_tiles, do_tiles, p_tiles, out_tiles, empty)
        where = (b, h + m, t0, T, Hv, V, rows)
        if HALVES is None:
            # the left operand of wgmma may stay in registers
            aT = gl.convert_layout((scores * between).to(dtype), LEFT)  # [C, C]
            for j in range(tiles):
                item = tiles * m + j
                daT = _next_da(v_tiles, do_tiles, item, daT, full, cleared, rows, SLOTS, PACKED)
                daT = warpgroup_mma_wait(0, [daT])
                _write_dv(aT, read, outputs, item, j * D, where, factors, PARTS, SLOTS, HAS_FACTOR, HAS_SKIP, PACKED)
            # Registers do not hold these numbers during the loop.
            between = gl.exp2(gl.where(below, b_columns - b_rows, 0.0)) * scale
            scores = _scores(q_tiles, k_tiles, below, PARTS)
        daT = warpgroup_mma_wait(0, [daT])
        a = scores * between  # [C, C], A^T
        daT = gl.where(below, daT, 0.0)  # rows of the next sequence may hold anything
        pairs = gl.where(above, a * daT, 0.0)  # [C, C]; between t and s = t there is no gate
        da += daT * between * f
        to = dots_ptr + m * head_dots
        mbarrier.wait(pairs_summed, (m & 1) ^ 1)
        pair_tile.store(pairs * f)
        mbarrier.arrive(paired, count=1)
        gl.store(to + C + s, row_sums(pairs))
        if HAS_FACTOR or skip_ptr is not None:
            d = gl.sum(gl.where(diagonal, daT, 0.0), 1)  # [C], v_t do_t
            gl.store(to + 2 * C + s, d)
            gl.store(to + 3 * C + s, d * diagonal_scores)
        if HALVES is not None:
            aT = gl.convert_layout(a.to(dtype), LEFT)  # [C, C]
            for j in gl.static_range(HALVES):
                item = HALVES * m + j
                _write_dv(aT, read, outputs, item, j * D, where, factors, PARTS, SLOTS, HAS_FACTOR, HAS_SKIP, PACKED)
        mbarrier.arrive(released.index(line), count=1)
    tma.store_wait(0)
    out_tiles.index(0).reshape([C, C]).store(da.to(dtype))
    fence_async_shared()  # the sum of dA^T has been stored from registers; wgmma reads it
    mbarrier.arrive(da_ready, count=1)


@gluon.jit
def _add_tile(
    read, item, dq_m, dk_m, through, part: gl.constexpr, PARTS: gl.constexpr, SLOTS: gl.constexpr, PACKED: gl.constexpr
):
    """Waits for a tile of values, starts its products for dq and dk [C, D], and adds S * P to `through` [D]."""
    v_tiles, do_tiles, s_tiles, p_tiles, full, cleared = read
    slot = item % SLOTS
    s_tile = s_tiles.index(PARTS * slot + part).reshape([D, D])
    p_tile = p_tiles.index(PARTS * slot + part).reshape([D, D])
    mbarrier.wait(full.index(slot), item // SLOTS & 1)
    if PACKED:
        mbarrier.wait(cleared.index(slot), item // SLOTS & 1)
    dq_m = product(do_tiles.index(slot).reshape([C, D]), s_tile.permute([1, 0]), dq_m)
    dk_m = product(v_tiles.index(slot).reshape([C, D]), p_tile.permute([1, 0]), dk_m)
    return dq_m, dk_m, through + row_sums(as_float32(s_tile.load(LAYOUT)) * as_float32(p_tile.load(LAYOUT)))


@gluon.jit
def _add_rounding_error(read, item, dk_m, final, value, part: gl.constexpr, PARTS: gl.constexpr, SLOTS: gl.constexpr):
    """Returns dk_m + v (dstate - P)^T [C, D], for a tile of P that holds dstate in bfloat16; see `in_state`."""
    v_tiles, _, s_tiles, p_tiles, _, _ = read
    dstate, strides, sequence, h, key, K, V = final
    state_n, state_h, state_k, state_v = strides
    slot = item % SLOTS
    p_tile = p_tiles.index(PARTS * slot + part).reshape([D, D])
    error_tile = s_tiles.index(PARTS * slot + part).reshape([D, D])  # S has been read
    keys = key + gl.arange(0, D, gl.SliceLayout(1, LAYOUT))[:, None]  # [D, 1]
    values = value + gl.arange(0, D, gl.SliceLayout(0, LAYOUT))[None, :]  # [1, D]
    head = dstate + sequence.to(gl.int64) * state_n + h.to(gl.int64) * state_h
    x = gl.load(head + in_state(keys, values, state_k, state_v), (keys < K) & (values < V), 0.0)  # [D, D]
    error_tile.store((x - as_float32(p_tile.load(LAYOUT))).to(p_tile.dtype))
    fence_async_shared()  # the error has been stored from registers; wgmma reads it
    v_tile = v_tiles.index(slot).reshape([C, D])
    return warpgroup_mma_wait(0, [product(v_tile, error_tile.permute([1, 0]), dk_m)])


@gluon.jit
def _gradient_warps(
    args,
    scale,
    part: gl.constexpr,
    PARTS: gl.constexpr,
    HALVES: gl.constexpr,
    SLOTS: gl.constexpr,
    HAS_FACTOR: gl.constexpr,
    PACKED: gl.constexpr,
):
    """Computes dq and dk of D keys.

    Args:
        part: the number of this gradient warpgroup.
    """
    smem, barriers, outputs, final, dots_ptr, place, sizes = args
    q_tiles, k_tiles, v_tiles, do_tiles, s_tiles, p_tiles, out_tiles, sums, decays = smem
    qk_ready, full, empty, cleared, summed, released, da_ready = barriers
    dq_desc, dk_desc, dq_ptr, dk_ptr = outputs
    dstate, strides, sequence, is_last = final
    b, key_head, h, heads, key, t0, rows, tiles = place
    T, H, K, V, head_dots = sizes
    key += part * D
    s = gl.arange(0, C, gl.SliceLayout(1, LAYOUT))  # [C]
    none = gl.zeros([C, D], gl.float32, LAYOUT)
    q_tile, k_tile = q_tiles.index(part).reshape([C, D]), k_tiles.index(part).reshape([C, D])
    dq, dk = none, none
    mbarrier.wait(qk_ready, 0)
    for m in range(heads):
        line = m % LINES
        dq_m, dk_m = none, none  # [C, D], do S^T and v P^T
        through = gl.zeros([D], gl.float32, gl.SliceLayout(1, LAYOUT))  # sums of S * P over values
        head_final = (dstate, strides, sequence, h + m, key, K, V)
        read = (v_tiles, do_tiles, s_tiles, p_tiles, full, cleared)
        if HALVES is not None:
            for j in gl.static_range(HALVES):
                dq_m, dk_m, through = _add_tile(read, HALVES * m + j, dq_m, dk_m, through, part, PARTS, SLOTS, PACKED)
        else:
            for j in range(tiles):
                item = tiles * m + j
                dq_m, dk_m, through = _add_tile(read, item, dq_m, dk_m, through, part, PARTS, SLOTS, PACKED)
                dq_m, dk_m = warpgroup_mma_wait(0, [dq_m, dk_m])
                if dstate is not None:  # noqa: SIM102 -- known when this is compiled
                    if is_last:
                        dk_m = _add_rounding_error(read, item, dk_m, head_final, j * D, part, PARTS, SLOTS)
                fence_async_shared()  # S and P have been loaded to registers; TMA overwrites the tiles
                mbarrier.arrive(empty.index(item % SLOTS), count=1)
        mbarrier.wait(summed.index(line), m // LINES & 1)
        enter = gl.exp2(sums.index(SUMS * line).load(gl.SliceLayout(1, LAYOUT))) * scale  # [C]
        leave = sums.index(SUMS * line + 1).load(gl.SliceLayout(1, LAYOUT))  # [C], exp(b_C - b)
        decay = gl.max(decays.index(line).load(gl.SliceLayout(1, LAYOUT)), 0)  # exp(b_C)
        if HALVES is not None:
            dq_m, dk_m = warpgroup_mma_wait(0, [dq_m, dk_m])
            if dstate is not None:  # noqa: SIM102 -- known when this is compiled
                if is_last:
                    for j in gl.static_range(HALVES):
                        item = HALVES * m + j
                        dk_m = _add_rounding_error(read, item, dk_m, head_final, j * D, part, PARTS, SLOTS)
            fence_async_shared()  # S and P have been loaded to registers; TMA overwrites the tiles
            for j in gl.static_range(HALVES):
                mbarrier.arrive(empty.index((HALVES * m + j) % SLOTS), count=1)
        dq_m *= enter[:, None]
        dk_m *= leave[:, None]
        to = dots_ptr + m * head_dots + (4 + 3 * part) * C
        gl.store(to + s, row_sums(as_float32(q_tile.load(LAYOUT)) * dq_m))
        gl.store(to + C + s, row_sums(as_float32(k_tile.load(LAYOUT)) * dk_m))
        gl.store(to + 2 * C + s, through * decay)
        if HAS_FACTOR:
            dk_m *= sums.index(SUMS * line + 2).load(gl.SliceLayout(1, LAYOUT))[:, None]
        dq += dq_m
        dk += dk_m
        mbarrier.arrive(released.index(line), count=1)
    mbarrier.wait(da_ready, 0)
    da_tile = out_tiles.index(0).reshape([C, C])
    dq = product(da_tile.permute([1, 0]), k_tile, dq)
    dk = product(da_tile, q_tile, dk)
    dq, dk = warpgroup_mma_wait(0, [dq, dk])
    where = (b, key_head, t0, T, H)
    write(dq_desc, dq_ptr, q_tile, dq, key, K, where, rows, PACKED)
    write(dk_desc, dk_ptr, k_tile, dk, key, K, where, rows, PACKED)
    tma.store_wait(0)
    keep_apart(part)


@gluon.jit(do_not_specialize=["scale", "g_b", "g_t", "g_h", "skip_h", "T", "H", "R", "heads", "pieces", "B"])
def _gla_backward_group_kernel(
    q_desc,  # [B, H, T, K], tiles [C, D]
    k_desc,  # [B, H, T, K], tiles [C, D]
    v_desc,  # [B, Hv, T, V], tiles [C, D]
    do_desc,  # [B, Hv, T, V], tiles [C, D]
    s_desc,  # S, [n, Hv, K, V], tiles [D, D]
    p_desc,  # P, [n, Hv, K, V], tiles [D, D]
    dq_desc,  # [B, H, T, K], tiles [C, D]; None if there are several blocks of heads
    dk_desc,  # like dq_desc
    dv_desc,  # [B, Hv, T, V], tiles [C, D]; None if there are several blocks of keys
    dq_ptr,  # [blocks of heads, B, T, H, K]
    dk_ptr,  # [blocks of heads, B, T, H, K]
    dv_ptr,  # [blocks of keys, B, T, Hv, V]
    dots_ptr,  # [n, Hv, blocks of keys, X, C]
    g_ptr,  # [B, T, Hv], or [Hv] with g_b = g_t = 0
    f_ptr,  # factors of v, [B, T, Hv], contiguous, or None
    skip_ptr,  # [Hv] or None
    dstate,  # gradients of final states, [N, Hv, K, V] or None
    order,  # [n, 5], the chunks as segments, or None for a batch
    scale,
    g_b,  # strides of g
    g_t,
    g_h,
    skip_h,  # the stride of skip
    state_n,  # strides of dstate; see `in_state`
    state_h,
    state_k,
    state_v,
    T,
    H,
    R,
    heads,  # HEADS
    pieces,  # blocks of heads of a group
    K,
    V,
    B,
    PARTS: gl.constexpr,
    HALVES: gl.constexpr,
    X: gl.constexpr,
    SLOTS: gl.constexpr,
    NORMALIZER: gl.constexpr,
):
    """Computes the gradients of a chunk, for HEADS value heads that share a key head, and a block of keys."""
    HAS_FACTOR: gl.constexpr = f_ptr is not None
    PACKED: gl.constexpr = order is not None
    tiles_of_head = gl.to_tensor(HALVES) if HALVES is not None else gl.cdiv(V, D)
    blocks_k = gl.cdiv(K, PARTS * D)
    pid = gl.program_id(0)  # neighbouring blocks read the same v and do, or the same q and k
    block_k = pid % blocks_k
    piece = pid // blocks_k % pieces
    key_head = pid // (blocks_k * pieces) % H
    row = pid // (blocks_k * pieces * H)
    if PACKED:
        b = gl.to_tensor(0)
        row, t0, rows, _, end = segment_at(order, row)
        if rows == 0:
            return
        sequence = row - t0 // C  # see segments.py
    else:
        chunks = gl.cdiv(T, C)
        b = row // chunks
        t0 = row % chunks * C
        rows = gl.minimum(T - t0, C)
        sequence, end = b, T
    Hv = H * R
    h = key_head * R + piece * heads  # the first head
    heads = gl.minimum(heads, R - piece * heads)
    key = block_k * (PARTS * D)
    tokens = B.to(gl.int64) * T
    dq_ptr += piece * (tokens * H * K)
    dk_ptr += piece * (tokens * H * K)
    dv_ptr += block_k * (tokens * Hv * V)
    head_dots = blocks_k * (X * C)
    dots_ptr += (row * Hv + h).to(gl.int64) * head_dots + block_k * (X * C)
    gates = (g_ptr + b.to(gl.int64) * g_b + h.to(gl.int64) * g_h, g_t, g_h)
    factors: gl.constexpr = None
    if HAS_FACTOR:
        factors = (f_ptr + b.to(gl.int64) * T * Hv + h, Hv, 1)

    dtype: gl.constexpr = q_desc.dtype
    row_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q_tiles = gl.allocate_shared_memory(dtype, [PARTS, 1, 1, C, D], q_desc.layout)
    k_tiles = gl.allocate_shared_memory(dtype, [PARTS, 1, 1, C, D], k_desc.layout)
    v_tiles = gl.allocate_shared_memory(dtype, [SLOTS, 1, 1, C, D], v_desc.layout)
    do_tiles = gl.allocate_shared_memory(dtype, [SLOTS, 1, 1, C, D], do_desc.layout)
    s_tiles = gl.allocate_shared_memory(dtype, [SLOTS * PARTS, 1, 1, D, D], s_desc.layout)
    p_tiles = gl.allocate_shared_memory(dtype, [SLOTS * PARTS, 1, 1, D, D], p_desc.layout)
    out_tiles = gl.allocate_shared_memory(dtype, [2, 1, 1, C, D], v_desc.layout)  # dv, in turns; at the end dA^T
    # f_s A_ts (do_t v_s) of one head. Rows of accumulators and of GRID have few bank conflicts.
    pair_tile = gl.allocate_shared_memory(gl.float32, [C, C], gl.SwizzledSharedLayout(2, 1, 8, [1, 0]))
    sums = gl.allocate_shared_memory(gl.float32, [LINES * SUMS, C], row_layout)
    decays = gl.allocate_shared_memory(gl.float32, [LINES, 1], row_layout)  # exp(b_C)
    bars: gl.constexpr = mbarrier.MBarrierLayout()
    qk_full = gl.allocate_shared_memory(gl.int64, [1], bars)  # q and k have been loaded
    # q and k can be read: they have been loaded, and rows of the next sequence cleared.
    qk_ready = gl.allocate_shared_memory(gl.int64, [1], bars) if PACKED else qk_full
    da_ready = gl.allocate_shared_memory(gl.int64, [1], bars)  # the sum of dA^T has been written
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], bars)  # v, do, S and P have been loaded
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], bars)  # they have been read
    cleared = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], bars)  # rows of do of the next sequence have been cleared
    summed = gl.allocate_shared_memory(gl.int64, [LINES, 1], bars)  # the sums of gates have been written
    released = gl.allocate_shared_memory(gl.int64, [LINES, 1], bars)  # and read
    paired = gl.allocate_shared_memory(gl.int64, [1], bars)  # the products of pairs of tokens have been written
    pairs_summed = gl.allocate_shared_memory(gl.int64, [1], bars)  # and read
    mbarrier.init(qk_full, count=1)
    if PACKED:
        mbarrier.init(qk_ready, count=1)
    mbarrier.init(da_ready, count=1)
    mbarrier.init(paired, count=1)
    mbarrier.init(pairs_summed, count=1)
    for i in gl.static_range(SLOTS):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=PARTS + 1)  # the gradient warpgroups and the score warpgroup
        mbarrier.init(cleared.index(i), count=1)
    for i in gl.static_range(LINES):
        mbarrier.init(summed.index(i), count=1)
        mbarrier.init(released.index(i), count=PARTS + 1)

    descriptors = (q_desc, k_desc, v_desc, do_desc, s_desc, p_desc)
    load_tiles = (q_tiles, k_tiles, v_tiles, do_tiles, s_tiles, p_tiles)
    load_place = (row, b, key_head, h, heads, key, t0, tiles_of_head)
    load = (descriptors, load_tiles, (qk_full, full, empty), load_place)
    gate = (sums, decays, summed, released, heads, t0, rows)
    pair_sums = (pair_tile, paired, pairs_summed, dots_ptr, heads, head_dots)
    score_tiles = (q_tiles, k_tiles, v_tiles, do_tiles, p_tiles, out_tiles, sums, pair_tile)
    score_barriers = (qk_full, qk_ready, full, empty, cleared, summed, released, da_ready, paired, pairs_summed)
    skips = (skip_ptr, skip_h, block_k == 0)
    score_place = (b, h, heads, t0, rows, tiles_of_head)
    score = (score_tiles, score_barriers, (dv_desc, dv_ptr), skips, dots_ptr, score_place, (T, Hv, V, head_dots))
    tiles = (q_tiles, k_tiles, v_tiles, do_tiles, s_tiles, p_tiles, out_tiles, sums, decays)
    barriers = (qk_ready, full, empty, cleared, summed, released, da_ready)
    outputs = (dq_desc, dk_desc, dq_ptr, dk_ptr)
    place = (b, key_head, h, heads, key, t0, rows, tiles_of_head)
    final = (dstate, (state_n, state_h, state_k, state_v), sequence, t0 + rows == end)
    gradient = (tiles, barriers, outputs, final, dots_ptr, place, (T, H, K, V, head_dots))
    # Registers of a thread. The score warps have the remaining registers.
    if PARTS == 1:
        gl.warp_specialize(
            [
                (_score_warps, (score, scale, PARTS, HALVES, SLOTS, HAS_FACTOR, PACKED)),
                (_gradient_warps, (gradient, scale, 0, PARTS, HALVES, SLOTS, HAS_FACTOR, PACKED)),
                (_load_warp, (load, PARTS, SLOTS)),
                (_gate_warp, (gate, gates, factors, NORMALIZER)),
                (_sum_warp, (pair_sums,)),
            ],
            [4, 1, 1, 1],
            [208, 48, 48, 48],
        )
    else:
        gl.warp_specialize(
            [
                (_score_warps, (score, scale, PARTS, HALVES, SLOTS, HAS_FACTOR, PACKED)),
                (_gradient_warps, (gradient, scale, 0, PARTS, HALVES, SLOTS, HAS_FACTOR, PACKED)),
                (_gradient_warps, (gradient, scale, 1, PARTS, HALVES, SLOTS, HAS_FACTOR, PACKED)),
                (_load_warp, (load, PARTS, SLOTS)),
                (_gate_warp, (gate, gates, factors, NORMALIZER)),
                (_sum_warp, (pair_sums,)),
            ],
            [4, 4, 1, 1, 1],
            [160, 160, 32, 32, 32],
        )
