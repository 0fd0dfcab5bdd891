"""Computes, for all chunks in parallel, what the scan of backward.py needs beside the gradient of the state.

For tokens t, s of a chunk of C tokens, b_t the sum of its log gates through token t, and B = diag(beta),

    kin_t = k_t exp(b_t)      qin_t = scale q_t exp(b_t)      kout_s = k_s exp(b_C - b_s)      decay = exp(b_C)
    A_ts = scale sum over d of q_td k_sd exp(b_td - b_sd)   for s <= t
    M_ts = sum over d of k_td k_sd exp(b_td - b_sd)   for s < t          G = (I + M B)^-1 M

**Blocks.** With a gate for each key, a block i of 16 tokens has an anchor a_i, half of the decay of the block, and the
rows and columns of its tokens are decayed relative to it: q_t exp(b_t - a_i), k_t exp(b_t - a_i), k_s exp(a_i - b_s).
The columns of earlier blocks j are decayed further by exp(a_i - a_j), at most 1, for each later block.

If some key of the chunk decays in a block by more than MILD_DECAY_SM90, the chunk is strong, and another launch
computes it again. There the anchor of rows is the start of a block and that of columns its end, so that no exponent is
above 0, and the pairs within blocks come from `pairs_by_halving`.

If the keys of a head share a gate, q k^T and k k^T are multiplied by exp(b_t - b_s), and kin and kout are k with
factors of its rows.

A is a sum of two numbers of bfloat16, and the rows of G are float16 in units, because Y of backward.py is what a
difference of their products leaves.

B batch   T tokens   J chunks   H heads of q and k   Hv heads of values, gates and beta   R = Hv / H
K key width   C tokens of a chunk   TILES tiles of up to 128 keys: 1, or 2 if the keys of a head share a gate
"""

# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportAssignmentType=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
# pyright: reportUnboundVariable=false, reportPossiblyUnboundVariable=false
from __future__ import annotations

import functools
from typing import NamedTuple

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
from gla_triton_kernels.chunks.segments import Segments, cut
from gla_triton_kernels.delta.sm90.common_backward import (
    LINE,
    MOST,
    NUMBERS,
    PLAIN,
    SCORES,
    WIDTH,
    C,
    bounded,
    is_strong,
    pairs_by_halving,
    rounded_apart,
    size_arguments,
    solve_chunk,
    table_row,
    token_arguments,
    unit_of_rows,
)
from gla_triton_kernels.delta.tensors import BackwardTensors
from gla_triton_kernels.gla.sm90.common import as_float32, clear_rows, gates_of, plus, tile_of_gates, tokens_of
from gla_triton_runtime.arithmetic import LOG2E
from gla_triton_runtime.launch import Launch
from gla_triton_runtime.tma import row_tiles, shared_tiles

STRONG_PROGRAMS = 264
"""The most programs that look for strong chunks."""


class Chunks(NamedTuple):
    """The tensors that this kernel writes for J chunks of Hv value heads.

    Attributes:
        segments: the chunks, as segments of `CHUNK` tokens.
        qin: [J Hv, C, K].
        kin, kout: as qin; None if the keys of a head share a gate, so that they are k with factors of their rows.
        A: what A is rounded to, and the rest, [2, J Hv, C, C].
        G: [J Hv, C, C]; each row is divided by its unit.
        units: the units of the rows of G [J Hv, C].
        decay: [J Hv, K].
        factors: exp(b_t) and exp(b_C - b_t) [J Hv, 2, C]; None if each key has a gate.
        strong: whether chunks are strong [J Hv], int32; None unless each key has a gate.
    """

    segments: Segments
    kin: Tensor | None
    qin: Tensor
    kout: Tensor | None
    A: Tensor
    G: Tensor
    units: Tensor
    decay: Tensor
    factors: Tensor | None
    strong: Tensor | None


def launch_pairs(x: BackwardTensors, scale: float, normalizer: int | None = None) -> tuple[Chunks, list[Launch]]:
    """Returns what other kernels read of chunks, and the launches that fill it. It is undefined for empty chunks.

    Args:
        normalizer: the number by which log sigma is divided if x.g holds logits of heads; None if it holds log gates.
    """
    (B, T, _, K), Hv = x.k.shape, x.v.shape[2]
    segments = cut(B, T, CHUNK, CHUNK, x.cu_seqlens)
    places, by_key = segments.count * Hv, x.g is not None and x.g.ndim == 4
    new = functools.partial(x.v.new_empty, dtype=torch.float32)
    kin, qin, kout = (new(places, CHUNK, K, dtype=torch.bfloat16) if by_key or i == 1 else None for i in range(3))
    A, G = new(2, places, CHUNK, CHUNK, dtype=torch.bfloat16), new(places, CHUNK, CHUNK, dtype=torch.float16)
    strong = new(places, dtype=torch.int32) if by_key else None
    factors = None if by_key else new(places, 2, CHUNK)
    chunks = Chunks(segments, kin, qin, kout, A, G, new(places, CHUNK), new(places, K), factors, strong)
    arguments = {
        "q_desc": shared_tiles(x.q, CHUNK, MOST),
        "k_desc": shared_tiles(x.k, CHUNK, MOST),
        "g_desc": shared_tiles(x.g, CHUNK, MOST) if x.g is not None and by_key else None,
        "kin_desc": None if kin is None else row_tiles(kin, CHUNK, MOST),
        "qin_desc": row_tiles(qin, CHUNK, MOST),
        "kout_desc": None if kout is None else row_tiles(kout, CHUNK, MOST),
        "A_desc": row_tiles(A, CHUNK, CHUNK),
        "G_desc": row_tiles(G, CHUNK, CHUNK),
        "units_ptr": chunks.units,
        "decay_ptr": chunks.decay,
        "factors_ptr": factors,
        "strong_ptr": strong,
        **token_arguments(x, segments),
        "scale": scale,
        **size_arguments(x, segments),
        "places": places,
        "NORMALIZER": normalizer,
        "TILES": ceil_div(K, MOST),
        "STRONG": False,
    }
    launches = [*segments.launches, Launch(_pairs_kernel, (places, 1, 1), arguments, {"num_warps": 4})]
    if by_key:
        programs = min(places, STRONG_PROGRAMS)
        launches.append(Launch(_pairs_kernel, (programs, 1, 1), {**arguments, "STRONG": True}, {"num_warps": 4}))
    return chunks, launches


FEW = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 16, 16]))  # of the transposed pairs of a block
RUNS = gl.constexpr(gl.BlockedLayout([16, 4], [1, 32], [4, 1], [1, 0]))  # a warp has a block, a thread its tokens
CUBES = gl.constexpr(gl.BlockedLayout([1, 16, 4], [1, 1, 32], [4, 1, 1], [2, 1, 0]))  # the same as [C / 16, 16, K]
BLOCK_SUMS = gl.constexpr(gl.SliceLayout(1, CUBES.value))  # [C / 16, K]
ROW = gl.constexpr(gl.SliceLayout(0, BLOCK_SUMS.value))  # [K]


@gluon.jit(do_not_specialize=["scale", *NUMBERS, "places"])
def _pairs_kernel(
    q_desc,  # [B, H, T, K], tiles [C, K]
    k_desc,
    g_desc,  # [B, Hv, T, K] if each key has a gate, else None
    kin_desc,  # [J Hv C, K], tiles [C, K], if each key has a gate, else None
    qin_desc,  # [J Hv C, K], tiles [C, K]
    kout_desc,  # as kin_desc
    A_desc,  # [2 J Hv C, C], tiles [C, C]
    G_desc,  # [J Hv C, C], tiles [C, C]
    units_ptr,  # [J, Hv, C]
    decay_ptr,  # [J, Hv, K]
    factors_ptr,  # [J, Hv, 2, C] unless each key has a gate
    strong_ptr,  # [J, Hv] if each key has a gate, else None
    beta_ptr,  # [B, T, Hv]
    g_ptr,  # [B, T, Hv] or [Hv] if the keys of a head share a gate, else None
    order,  # [J, 5], or None for a batch
    scale,
    beta_b,
    beta_t,
    beta_h,
    g_b,
    g_t,
    g_h,
    T,
    segment,  # C
    segments,  # chunks of a sequence of a batch
    Hv,
    K,
    R,
    places,  # J Hv
    NORMALIZER: gl.constexpr,
    TILES: gl.constexpr,
    STRONG: gl.constexpr,
):
    """Computes one chunk of one value head; with STRONG, all strong chunks, which a launch before has marked."""
    KEYS: gl.constexpr = g_desc is not None
    tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, WIDTH], gl.bfloat16)
    wide: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, C], gl.float32)
    q_blocks = gl.allocate_shared_memory(gl.bfloat16, [TILES, 1, 1, C, WIDTH], q_desc.layout)
    k_blocks = gl.allocate_shared_memory(gl.bfloat16, [TILES, 1, 1, C, WIDTH], k_desc.layout)
    columns = k_blocks
    if KEYS:
        columns = gl.allocate_shared_memory(gl.bfloat16, [C, WIDTH], tile)
        room = gl.allocate_shared_memory(gl.float32, [2, C, C], wide)  # for gates, then for M and G
    else:
        room = gl.allocate_shared_memory(gl.float32, [1, C, C], wide)  # M takes the room of k
    a_tiles = gl.allocate_shared_memory(gl.bfloat16, [2, C, C], A_desc.layout)
    g_tile = gl.allocate_shared_memory(gl.float16, [C, C], G_desc.layout)
    betas = gl.allocate_shared_memory(gl.float32, [C], LINE)
    table = gl.allocate_shared_memory(gl.float32, [4 * WIDTH], LINE)  # of gates: their sums in blocks, or over tokens
    exact, spare = room, columns
    if STRONG:
        exact = gl.allocate_shared_memory(gl.float32, [2, C, C], wide)
        spare = gl.allocate_shared_memory(gl.bfloat16, [C, WIDTH], tile)
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=1)
    tiles = (q_blocks, k_blocks, columns, room, a_tiles, g_tile, betas, table, exact, spare, bar)
    inputs = (q_desc, k_desc, g_desc, beta_ptr, (beta_b, beta_t, beta_h), g_ptr, (g_b, g_t, g_h))
    results = (kin_desc, qin_desc, kout_desc, A_desc, G_desc, units_ptr, decay_ptr, factors_ptr, strong_ptr)
    sizes = (T, segment, segments, order, Hv, R, K, places)
    if STRONG:
        phase = 0
        for place in range(gl.program_id(0), places, gl.num_programs(0)):
            j, _, _, length, _, _, _ = tokens_of(gl.to_tensor(place) // Hv, T, segment, segments, order)
            if length > 0:  # noqa: SIM102 -- flags of empty chunks are undefined
                if gl.load(strong_ptr + j * Hv + place % Hv) != 0:
                    _compute_chunk(place, tiles, inputs, results, sizes, scale, phase, KEYS, NORMALIZER, STRONG)
                    phase ^= 1
    else:
        _, _, _, length, _, _, _ = tokens_of(gl.program_id(0) // Hv, T, segment, segments, order)
        if length > 0:
            _compute_chunk(gl.program_id(0), tiles, inputs, results, sizes, scale, 0, KEYS, NORMALIZER, STRONG)


@gluon.jit
def _compute_chunk(
    place,
    tiles,
    inputs,
    results,
    sizes,
    scale,
    phase,
    KEYS: gl.constexpr,
    NORMALIZER: gl.constexpr,
    STRONG: gl.constexpr,
):
    q_blocks, k_blocks, columns, room, a_tiles, g_tile, betas, table, exact, spare, bar = tiles
    TILES: gl.constexpr = q_blocks.type.shape[0]
    q_desc, k_desc, g_desc, beta_ptr, beta_strides, g_ptr, g_strides = inputs
    kin_desc, qin_desc, kout_desc, A_desc, G_desc, units_ptr, decay_ptr, factors_ptr, strong_ptr = results
    T, segment, segments, order, Hv, R, K, places = sizes
    PACKED: gl.constexpr = order is not None
    place = gl.to_tensor(place)
    h = place % Hv
    number, b, t0, rows, _, _, _ = tokens_of(place // Hv, T, segment, segments, order)
    place = number * Hv + h
    if KEYS:
        gate_tile = tile_of_gates(room, g_desc)
        mbarrier.expect(bar, 2 * q_desc.block_type.nbytes + g_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(g_desc, [b, h, t0, 0], bar, gate_tile)
    else:
        mbarrier.expect(bar, 2 * TILES * q_desc.block_type.nbytes)
    for i in gl.static_range(TILES):
        tma.async_copy_global_to_shared(k_desc, [b, h // R, t0, i * WIDTH], bar, k_blocks.index(i))
        tma.async_copy_global_to_shared(q_desc, [b, h // R, t0, i * WIDTH], bar, q_blocks.index(i))
    few: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    row = gl.arange(0, C, few)
    stride_b, stride_t, stride_h = beta_strides
    head = beta_ptr + b.to(gl.int64) * stride_b + h * stride_h
    betas.store(gl.load(head + (t0 + row).to(gl.int64) * stride_t, row < rows, 0.0).to(gl.float32))
    q_tile, k_tile = q_blocks.index(0).reshape([C, WIDTH]), k_blocks.index(0).reshape([C, WIDTH])
    out = place * C
    t = gl.arange(0, C, gl.SliceLayout(1, SCORES))[:, None]
    s = gl.arange(0, C, gl.SliceLayout(0, SCORES))[None, :]
    mbarrier.wait(bar, phase)
    if PACKED:  # the rows after the chunk belong to the next sequence
        for i in gl.static_range(TILES):
            clear_rows(q_blocks.index(i).reshape([C, WIDTH]), rows, RUNS)
            clear_rows(k_blocks.index(i).reshape([C, WIDTH]), rows, RUNS)
        if KEYS:
            clear_rows(gate_tile.reshape([C, WIDTH]), rows, RUNS)
        fence_async_shared()
    if KEYS:
        block = gl.arange(0, 4, gl.SliceLayout(1, BLOCK_SUMS))[:, None]  # [4, 1]
        cube = gl.convert_layout(
            bounded(gate_tile.reshape([C, WIDTH]).load(RUNS)).reshape([4, 16, WIDTH]), CUBES, assert_trivial=True
        )
        total = gl.sum(cube, 1)  # [4, K]
        sums = gl.associative_scan(cube, 1, plus)
        if STRONG:
            row_sums = gl.convert_layout(sums.reshape([C, WIDTH]), RUNS, assert_trivial=True)
            A, M = pairs_by_halving(q_tile, k_tile, columns, spare, row_sums)
            exact.index(0).store(A)
            exact.index(1).store(M)
        else:
            gl.store(strong_ptr + place, is_strong(total).to(gl.int32))
        share: gl.constexpr = 0.0 if STRONG else 0.5  # of the decay of a block before the anchor of its rows
        half = share * total
        table.reshape([4, WIDTH]).store(total)
        x = gl.convert_layout((sums - half[:, None, :]).reshape([C, WIDTH]), RUNS, assert_trivial=True)
        up = gl.exp2(x)
        q_tile.store((as_float32(q_tile.load(RUNS)) * up).to(gl.bfloat16))
        k = as_float32(k_tile.load(RUNS))
        k_tile.store((k * up).to(gl.bfloat16))
        if STRONG:
            x = gl.convert_layout((sums - total[:, None, :]).reshape([C, WIDTH]), RUNS, assert_trivial=True)
        k *= gl.exp2(-1.0 * x)
        through = half  # sums from the start of the chunk to anchors
        for i in gl.static_range(3):
            through += gl.where(block > i, table_row(table, i, ROW)[None, :], 0.0)
        through = gl.exp2(through)[:, None, :]
        s_few = gl.arange(0, C, gl.SliceLayout(1, FEW))[:, None]
        t_few = gl.arange(0, 16, gl.SliceLayout(0, FEW))[None, :]
        for i in gl.static_range(4):
            columns.store(k.to(gl.bfloat16))
            fence_async_shared()
            P = gl.zeros([C, 16], gl.float32, FEW)
            P = warpgroup_mma(columns, k_tile.slice(16 * i, 16).permute([1, 0]), P, use_acc=False, is_async=True)
            Q = gl.zeros([C, 16], gl.float32, FEW)
            Q = warpgroup_mma(columns, q_tile.slice(16 * i, 16).permute([1, 0]), Q, use_acc=False, is_async=True)
            # The columns are decayed to the anchor of the rows of the next block, or to the end.
            decay = share * table_row(table, i, ROW)
            further = (1.0 - share) * table_row(table, i, ROW)
            if i < 3:
                decay += share * table_row(table, i + 1, ROW)
                further += share * table_row(table, i + 1, ROW)
            decay = gl.where(block <= i, gl.exp2(decay)[None, :], 1.0)
            if STRONG:  # the columns of earlier blocks come from the anchor of the rows of this one
                decay = gl.where(block < i, gl.exp2(further)[None, :], decay)
            P, Q = warpgroup_mma_wait(0, [P, Q])
            Q *= scale
            if STRONG:
                same = s_few // 16 == i
                P = gl.where(same, exact.index(1).slice(16 * i, 16).permute([1, 0]).load(FEW), P)
                Q = gl.where(same, exact.index(0).slice(16 * i, 16).permute([1, 0]).load(FEW) * scale, Q)
            Q, rest = rounded_apart(gl.where(s_few <= 16 * i + t_few, Q, 0.0))
            room.index(0).slice(16 * i, 16).permute([1, 0]).store(gl.where(s_few < 16 * i + t_few, P, 0.0))
            a_tiles.index(0).slice(16 * i, 16).permute([1, 0]).store(Q)
            a_tiles.index(1).slice(16 * i, 16).permute([1, 0]).store(rest)
            k = gl.convert_layout(k.reshape([4, 16, WIDTH]), CUBES, assert_trivial=True) * decay[:, None, :]
            k = gl.convert_layout(k.reshape([C, WIDTH]), RUNS, assert_trivial=True)
        columns.store(k.to(gl.bfloat16))
        key = gl.arange(0, WIDTH, ROW)
        gl.store(decay_ptr + place.to(gl.int64) * K + key, gl.exp2(_sum_of_table(table)), key < K)
        M = room.index(0).load(SCORES)
    else:
        A = gl.zeros([C, C], gl.float32, SCORES)
        M = gl.zeros([C, C], gl.float32, SCORES)
        for i in gl.static_range(TILES):
            columns_tile = k_blocks.index(i).reshape([C, WIDTH]).permute([1, 0])  # [K, C]
            M = warpgroup_mma(columns_tile.permute([1, 0]), columns_tile, M, use_acc=i > 0, is_async=True)
            A = warpgroup_mma(q_blocks.index(i).reshape([C, WIDTH]), columns_tile, A, use_acc=i > 0, is_async=True)
        M, A = warpgroup_mma_wait(0, [M, A])
        g = gl.zeros([C], gl.float32, few)
        if g_ptr is not None:
            g_b, g_t, g_h = g_strides
            gates = (g_ptr + b.to(gl.int64) * g_b + h * g_h, g_t)
            g = gates_of(gates, t0, rows, row, NORMALIZER) * LOG2E
        sums = table.slice(0, C)
        sums.store(gl.associative_scan(g, 0, plus))
        end = gl.sum(g, 0)
        D = sums.load(gl.SliceLayout(1, SCORES))[:, None] - sums.load(gl.SliceLayout(0, SCORES))[None, :]
        D = gl.exp2(gl.where(t >= s, D, 0.0))
        M = gl.where(t > s, M * D, 0.0)
        A, rest = rounded_apart(gl.where(t >= s, A * D * scale, 0.0))
        a_tiles.index(0).store(A)
        a_tiles.index(1).store(rest)
        through = gl.exp2(sums.load(gl.SliceLayout(1, RUNS)))[:, None]
        at = factors_ptr + place.to(gl.int64) * (2 * C) + row
        gl.store(at, gl.exp2(sums.load(few)))
        gl.store(at + C, gl.exp2(end - sums.load(few)))
        key = gl.arange(0, TILES * WIDTH, few)
        ones = gl.full([TILES * WIDTH], 1.0, gl.float32, few)
        gl.store(decay_ptr + place.to(gl.int64) * K + key, ones * gl.exp2(end), key < K)
    if KEYS:
        _scale_tile(k_tile, through, 1.0, KEYS)
    for i in gl.static_range(TILES):
        _scale_tile(q_blocks.index(i).reshape([C, WIDTH]), through, scale, KEYS)
    fence_async_shared()
    for i in gl.static_range(TILES):
        tma.async_copy_shared_to_global(qin_desc, [out, i * WIDTH], q_blocks.index(i).reshape([C, WIDTH]))
    if KEYS:
        tma.async_copy_shared_to_global(kin_desc, [out, 0], k_tile)
        tma.async_copy_shared_to_global(kout_desc, [out, 0], columns)
    tma.async_copy_shared_to_global(A_desc, [out, 0], a_tiles.index(0))
    tma.async_copy_shared_to_global(A_desc, [out + places * C, 0], a_tiles.index(1))
    beta = betas.load(gl.SliceLayout(0, SCORES))
    if KEYS:
        m_tile, work = room.index(0), room.index(1)
    else:
        wide: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, C], gl.float32)
        m_tile, work = k_blocks.index(0)._reinterpret(gl.float32, [C, C], wide), room.index(0)
    G = solve_chunk(M, beta, betas, work._reinterpret(gl.float32, [C // 16, C, 16], PLAIN).index(0), m_tile, work)
    unit, inverse = unit_of_rows(G)
    g_tile.store((G * inverse[:, None]).to(gl.float16))
    gl.store(units_ptr + place.to(gl.int64) * C + gl.arange(0, C, gl.SliceLayout(1, SCORES)), unit)
    fence_async_shared()
    tma.async_copy_shared_to_global(G_desc, [out, 0], g_tile)
    tma.store_wait(0)


@gluon.jit
def _sum_of_table(table):
    """Returns the sum [K] of the rows of a table [4, K]."""
    total = table_row(table, 0, ROW)
    for i in gl.static_range(3):
        total += table_row(table, i + 1, ROW)
    return total


@gluon.jit
def _scale_tile(tile, factors, scale, KEYS: gl.constexpr):
    """Multiplies a tile [C, K] by factors [4, 1, K] of its blocks, or [C, 1] of its rows, and by a number."""
    x = as_float32(tile.load(RUNS))
    if KEYS:
        x = gl.convert_layout(x.reshape([4, 16, WIDTH]), CUBES, assert_trivial=True) * (factors * scale)
        x = gl.convert_layout(x.reshape([C, WIDTH]), RUNS, assert_trivial=True)
    else:
        x *= factors * scale
    tile.store(x.to(gl.bfloat16))
