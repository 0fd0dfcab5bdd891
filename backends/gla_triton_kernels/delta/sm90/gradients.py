"""Computes dq, dk, dg and dbeta of the delta rule on Hopper, for all chunks in parallel.

S is the state that enters a chunk, dS' the gradient of the state that leaves it, b_t the sum of the log gates through
token t, and D_ts = exp(b_t - b_s). With kin, G and B of backward_pairs.py and dV of backward.py,

    X = V - kin S        E = X - G (B X)        dA = scale tril(dO E^T)        dM = - stril(dV E^T)
    dq_t = exp(b_t) scale dO_t S^T + sum over s <= t of D_ts dA_ts beta_s k_s
    dr_t = - exp(b_t) dV_t S^T     + sum over s < t of D_ts dM_ts beta_s k_s                         k_t as a row
    dc_s = exp(b_C - b_s) E_s dS'^T + sum over t >= s of D_ts dA_ts q_t + sum over t > s of D_ts dM_ts k_t
    dk = dr + B dc        dbeta_s = (dV_s . E_s) / beta_s = k_s . dc_s
    dg_u = sum over V of S * dS - sum over t < u of (q dq + k dr - beta k dc)_t

dV is beta times the gradient of E, so dbeta is as exact as dV. Where beta is 0, dbeta is k . dc. The sum of S * dS is
that of S * dS' times exp(b_C), and what S contributes to q dq + k dr.

**Blocks.** With a gate for each key, the rows and columns of a block of 16 tokens are decayed relative to an anchor;
see backward_pairs.py. dq and dr go through the blocks j of columns from the first to the last, dc from the last to the
first. From one to the next, what has been summed is multiplied by the decay between anchors. A warp has the rows of one
block, so it multiplies from its own block on. In a strong chunk, the pairs of tokens of the same block are left to
backward_blocks.py.

**Precision.** dg is a difference of large sums. With a gate for each key, these multiply dq, dr and dc by the operands
of their products, so that the roundings of what cancels are the same, and dA and dM are sums of two numbers of
bfloat16.
If the keys of a head share a gate, the pairs of dg are products of dA, dM and scores in float32.

**Overlap.** A block of warps computes one chunk after the other, and loads the tiles of the next one as soon as those
of this one have been read.

B batch   T tokens   J chunks   H heads of q and k   Hv heads of values   R = Hv / H   K, V key and value width
C tokens of a chunk
"""

# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportAssignmentType=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
# pyright: reportUnboundVariable=false, reportPossiblyUnboundVariable=false
from __future__ import annotations

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
from gla_triton_kernels.chunks import partials
from gla_triton_kernels.delta.sm90.backward_blocks import launch_blocks
from gla_triton_kernels.delta.sm90.backward_pairs import Chunks
from gla_triton_kernels.delta.sm90.common_backward import (
    LINE,
    MOST,
    NUMBERS,
    WIDTH,
    C,
    bounded,
    rounded_apart,
    size_arguments,
    table_row,
    token_arguments,
    unit_of_rows,
)
from gla_triton_kernels.delta.tensors import BackwardTensors
from gla_triton_kernels.gla.shared.limits import LEAST_GATE
from gla_triton_kernels.gla.sm90.common import (
    as_float32,
    clear_rows,
    opaque_zero,
    plus,
    tile_of_gates,
    tokens_of,
    write,
)
from gla_triton_runtime.arithmetic import LOG2E
from gla_triton_runtime.launch import Launch
from gla_triton_runtime.tma import row_tiles, shared_tiles, state_tiles

PAIRS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 32, 16]))  # of a product [C, C]
KEYS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 64, 16]))  # of a product [C, K]
VALUES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [8, 1], [16, 64, 16]))  # of a product [V, C]
LEFT = gl.constexpr(gl.DotOperandLayout(0, VALUES.value, 2))
RUNS = gl.constexpr(gl.BlockedLayout([16, 2], [1, 32], [4, 2], [1, 0]))  # a warp has tokens of a block
CUBES = gl.constexpr(gl.BlockedLayout([1, 16, 2], [1, 1, 32], [4, 1, 2], [2, 1, 0]))  # the same as [C / 16, 16, K]
BLOCK_SUMS = gl.constexpr(gl.SliceLayout(1, CUBES.value))  # [C / 16, K]
ROW = gl.constexpr(gl.SliceLayout(0, BLOCK_SUMS.value))  # [K]
STATE = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [8, 1], [1, 0]))  # of a state [K, V]


def launch_gradients(
    x: BackwardTensors, chunks: Chunks, entering: Tensor, leaving: Tensor, scale: float, programs: int
) -> list[Launch]:
    """Returns the launches that fill dq, dk, dg and dbeta.

    Args:
        entering, leaving: the states that enter chunks, and the gradients of those that leave them, [J, Hv, K, V].
        programs: the blocks of warps that run at once.
    """
    (B, T, H, K), Hv, segments = x.k.shape, x.v.shape[2], chunks.segments
    R, by_key = Hv // H, chunks.strong is not None
    # backward_blocks.py adds to dq and dk, so bfloat16 would round partial results twice.
    dtype, by_tma = (torch.float32, R == 1) if by_key else (torch.bfloat16, True)
    dq, dk = (z if R == 1 else z.new_empty(B, T, Hv, K, dtype=dtype) for z in (x.dq, x.dk))
    blocks = x.v.new_empty(segments.count * Hv, 2, CHUNK, 16, dtype=torch.float32) if by_key else None
    tiles = {name: getattr(x, name) for name in ("q", "k", "v", "do", "dv")}
    arguments = {
        **{f"{name}_desc": shared_tiles(each, CHUNK, MOST) for name, each in tiles.items()},
        "g_desc": shared_tiles(x.g, CHUNK, MOST) if x.g is not None and by_key else None,
        "s_desc": state_tiles(entering, MOST, MOST),
        "ds_desc": state_tiles(leaving, MOST, MOST),
        "G_desc": row_tiles(chunks.G, CHUNK, CHUNK),
        "dq_desc": shared_tiles(dq, CHUNK, MOST) if by_tma else None,
        "dk_desc": shared_tiles(dk, CHUNK, MOST) if by_tma else None,
        "dg_desc": shared_tiles(x.dg, CHUNK, MOST) if x.dg is not None and by_key else None,
        "dq_ptr": dq,
        "dk_ptr": dk,
        "dg_ptr": x.dg,
        "dbeta_ptr": x.dbeta,
        "units_ptr": chunks.units,
        "strong_ptr": chunks.strong,
        "blocks_ptr": blocks,
        **token_arguments(x, segments),
        "scale": scale,
        **size_arguments(x, segments),
        "places": segments.count * Hv,
        "PRECISE": True,
    }
    launches = [Launch(_gradients_kernel, (min(programs, segments.count * Hv), 1, 1), arguments, {"num_warps": 8})]
    if blocks is not None:
        launches.append(launch_blocks(x, chunks, blocks, dq, dk))
    for each, total in ((dq, x.dq), (dk, x.dk)):
        if each is not total:
            launches += partials.launch_sum(each, total, B * T * H)
    return launches


@gluon.jit
def _in_blocks(x):
    """Returns x [C, K] as [C / 16, 16, K]."""
    return x.reshape([4, 16, x.shape[1]])


@gluon.jit
def _decayed(x, table, j, strong, down: gl.constexpr):
    """Multiplies the rows of blocks from j on, or up to j if `down`, by row j of a table of decays [C / 16, K].

    Args:
        x: [C, K], in the layout KEYS.
        strong: 1 if the rows of block j are at their anchor already, else 0.
    """
    cubes = _in_blocks(x)
    layout: gl.constexpr = gl.SliceLayout(1, cubes.type.layout)
    block = gl.arange(0, 4, gl.SliceLayout(1, layout))[:, None]
    decay = table_row(table, j, gl.SliceLayout(0, layout))[None, :]
    decay = gl.where(block <= j - strong if down else block >= j + strong, decay, 1.0)  # [C / 16, K]
    return gl.convert_layout((cubes * decay[:, None, :]).reshape([C, WIDTH]), KEYS, assert_trivial=True)


@gluon.jit(do_not_specialize=["scale", *NUMBERS, "places"])
def _gradients_kernel(
    q_desc,  # [B, H, T, K], tiles [C, K]
    k_desc,
    g_desc,  # [B, Hv, T, K] if each key has a gate, else None
    v_desc,  # [B, Hv, T, V], tiles [C, V]
    do_desc,
    dv_desc,
    s_desc,  # [J, Hv, K, V], tiles [K, V]
    ds_desc,
    G_desc,  # [J Hv C, C], tiles [C, C]
    dq_desc,  # [B, Hv, T, K], tiles [C, K]; None if R > 1 and each key has a gate
    dk_desc,
    dg_desc,  # as g_desc
    dq_ptr,  # [B, T, Hv, K], contiguous, as the next three
    dk_ptr,
    dg_ptr,  # [B, T, Hv, K] or [B, T, Hv], or None
    dbeta_ptr,  # [B, T, Hv]
    units_ptr,  # [J, Hv, C]
    strong_ptr,  # [J, Hv] if each key has a gate, else None
    blocks_ptr,  # receives dA and dM within blocks of strong chunks [J, Hv, 2, C, 16]; None without strong_ptr
    beta_ptr,  # [B, T, Hv]
    g_ptr,  # [B, T, Hv] if the keys of a head share a gate, else None
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
    PRECISE: gl.constexpr,  # whether E, dA and dM are sums of two numbers of bfloat16
):
    """Computes chunks of value heads, one after the other, and loads tiles of the next one as soon as there is room."""
    BY_KEY: gl.constexpr = g_desc is not None
    V: gl.constexpr = WIDTH
    square: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, C], gl.bfloat16)
    wide: gl.constexpr = gl.NVMMASharedLayout.get_default_for([1, 1, C, WIDTH], gl.float32)
    q_block = gl.allocate_shared_memory(gl.bfloat16, [1, 1, 1, C, WIDTH], q_desc.layout)
    k_block = gl.allocate_shared_memory(gl.bfloat16, [1, 1, 1, C, WIDTH], k_desc.layout)
    c_tile = gl.allocate_shared_memory(  # kin, later the columns k
        gl.bfloat16, [1, C, WIDTH], gl.NVMMASharedLayout.get_default_for([C, WIDTH], gl.bfloat16)
    )
    v_block = gl.allocate_shared_memory(gl.bfloat16, [1, 1, 1, C, V], v_desc.layout)  # later E
    d_blocks = gl.allocate_shared_memory(gl.bfloat16, [2, 1, 1, C, V], do_desc.layout)  # dO, dV; later w, and dg
    s_block = gl.allocate_shared_memory(gl.bfloat16, [1, 1, 1, WIDTH, V], s_desc.layout)
    ds_block = gl.allocate_shared_memory(gl.bfloat16, [1, 1, 1, WIDTH, V], ds_desc.layout)  # later dq and dk
    G_tile = gl.allocate_shared_memory(gl.float16, [1, C, C], G_desc.layout)
    pairs = gl.allocate_shared_memory(gl.bfloat16, [2, C, C], square)  # the rest of E; dA^T and dM^T; dA and dM
    betas = gl.allocate_shared_memory(gl.float32, [1, C], LINE)
    bars = gl.allocate_shared_memory(gl.int64, [3, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(3):
        mbarrier.init(bars.index(i), count=1)
    if BY_KEY:
        gates = gl.allocate_shared_memory(gl.float32, [1, 1, 1, C, WIDTH], wide)  # gates, later exponents
        gate_tile = tile_of_gates(gates.index(0), g_desc)
        totals = gl.allocate_shared_memory(gl.float32, [1, 4 * WIDTH], LINE)  # sums of the gates of blocks
        ups = gl.allocate_shared_memory(
            gl.float32, [1, 4 * WIDTH], LINE
        )  # decays to the anchor of the columns of a block
        downs = gl.allocate_shared_memory(gl.float32, [1, 4 * WIDTH], LINE)  # decays from that of the rows
        apart = gl.allocate_shared_memory(gl.float32, [1, 4 * WIDTH], LINE)  # gates between the anchors of a block
        tables = (totals, ups, downs, apart)
    else:
        gates, gate_tile, tables = q_block, None, gl.allocate_shared_memory(gl.float32, [1, C], LINE)
    tiles = (
        q_block,
        k_block,
        c_tile,
        v_block,
        d_blocks,
        s_block,
        ds_block,
        G_tile,
        pairs,
        betas,
        gates,
        tables,
    )
    loads = (
        (q_desc, k_desc, g_desc, q_block.index(0), k_block.index(0), gate_tile),
        (s_desc, v_desc, G_desc, s_block.index(0), v_block.index(0), G_tile.index(0)),
        (do_desc, dv_desc, ds_desc, d_blocks, ds_block.index(0)),
    )
    outputs = (dq_desc, dk_desc, dg_desc, dq_ptr, dk_ptr, dg_ptr, dbeta_ptr)
    inputs = (beta_ptr, (beta_b, beta_t, beta_h), g_ptr, (g_b, g_t, g_h), units_ptr, strong_ptr, blocks_ptr)
    sizes = (T, segment, segments, order, Hv, R, K, places)
    first = gl.program_id(0)
    _, _, _, rows, _, _, _ = tokens_of(first // Hv, T, segment, segments, order)
    if rows > 0:
        _load_rows(loads[0], bars.index(0), first, sizes)
        _load_state(loads[1], bars.index(1), first, sizes)
        _load_gradients(loads[2], bars.index(2), first, sizes)
    for i in range(gl.cdiv(places - first, gl.num_programs(0))):
        place = first + i * gl.num_programs(0)
        _, _, _, rows, _, _, _ = tokens_of(place // Hv, T, segment, segments, order)
        if rows > 0:  # empty chunks are the last
            _compute_chunk(place, i & 1, tiles, bars, loads, inputs, outputs, sizes, scale, BY_KEY, PRECISE)
    tma.store_wait(0)


@gluon.jit
def _load_rows(load, bar, place, sizes):
    """Starts to load q, k and the gates of a chunk."""
    q_desc, k_desc, g_desc, q_block, k_block, gate_tile = load
    T, segment, segments, order, Hv, R, _, _ = sizes
    _, b, t0, _, _, _, _ = tokens_of(place // Hv, T, segment, segments, order)
    h = place % Hv
    if g_desc is not None:
        mbarrier.expect(bar, 2 * q_desc.block_type.nbytes + g_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(g_desc, [b, h, t0, 0], bar, gate_tile)
    else:
        mbarrier.expect(bar, 2 * q_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(k_desc, [b, h // R, t0, 0], bar, k_block)
    tma.async_copy_global_to_shared(q_desc, [b, h // R, t0, 0], bar, q_block)


@gluon.jit
def _load_state(load, bar, place, sizes):
    """Starts to load S, v and G of a chunk."""
    s_desc, v_desc, G_desc, s_block, v_block, G_tile = load
    T, segment, segments, order, Hv, _, _, _ = sizes
    j, b, t0, _, _, _, _ = tokens_of(place // Hv, T, segment, segments, order)
    h = place % Hv
    mbarrier.expect(bar, s_desc.block_type.nbytes + v_desc.block_type.nbytes + G_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(s_desc, [j, h, 0, 0], bar, s_block)
    tma.async_copy_global_to_shared(v_desc, [b, h, t0, 0], bar, v_block)
    tma.async_copy_global_to_shared(G_desc, [(j * Hv + h) * C, 0], bar, G_tile)


@gluon.jit
def _load_gradients(load, bar, place, sizes):
    """Starts to load dO, dV and dS' of a chunk."""
    do_desc, dv_desc, ds_desc, d_blocks, ds_block = load
    T, segment, segments, order, Hv, _, _, _ = sizes
    j, b, t0, _, _, _, _ = tokens_of(place // Hv, T, segment, segments, order)
    h = place % Hv
    mbarrier.expect(bar, 2 * do_desc.block_type.nbytes + ds_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(do_desc, [b, h, t0, 0], bar, d_blocks.index(0))
    tma.async_copy_global_to_shared(dv_desc, [b, h, t0, 0], bar, d_blocks.index(1))
    tma.async_copy_global_to_shared(ds_desc, [j, h, 0, 0], bar, ds_block)


@gluon.jit
def _compute_chunk(
    place, phase, tiles, bars, loads, inputs, outputs, sizes, scale, BY_KEY: gl.constexpr, PRECISE: gl.constexpr
):
    """Computes one chunk of one value head."""
    q_block, k_block, c_tile, v_block, d_blocks, s_block, ds_block, G_tile, pairs, betas, gates, tables = tiles
    beta_ptr, beta_strides, g_ptr, g_strides, units_ptr, strong_ptr, blocks_ptr = inputs
    dq_desc, dk_desc, dg_desc, dq_ptr, dk_ptr, dg_ptr, dbeta_ptr = outputs
    PARTS: gl.constexpr = 2 if BY_KEY or PRECISE else 1  # of dA and dM
    T, segment, segments, order, Hv, _, K, places = sizes
    zero = opaque_zero()
    q_block, k_block, c_tile, v_block = (
        q_block.index(zero),
        k_block.index(zero),
        c_tile.index(zero),
        v_block.index(zero),
    )
    s_block, ds_block = s_block.index(zero), ds_block.index(zero)
    G_tile, a_tile, m_tile, betas = G_tile.index(zero), pairs.index(zero), pairs.index(zero + 1), betas.index(zero)
    PACKED: gl.constexpr = order is not None
    V: gl.constexpr = WIDTH
    square: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, C], gl.bfloat16)
    wide: gl.constexpr = gl.NVMMASharedLayout.get_default_for([1, 1, C, WIDTH], gl.float32)
    q_desc = loads[0][0]
    h = place % Hv
    j, b, t0, rows, _, _, _ = tokens_of(place // Hv, T, segment, segments, order)
    next_place = place + gl.num_programs(0)
    place = j * Hv + h
    has_next = next_place < places
    if PACKED:
        _, _, _, next_rows, _, _, _ = tokens_of(gl.minimum(next_place, places - 1) // Hv, T, segment, segments, order)
        has_next = has_next & (next_rows > 0)
    q_tile, k_tile, e_tile = q_block.reshape([C, WIDTH]), k_block.reshape([C, WIDTH]), v_block.reshape([C, V])
    do_tile, dv_tile = d_blocks.index(0).reshape([C, V]), d_blocks.index(1).reshape([C, V])
    s_tile, ds_tile = s_block.reshape([WIDTH, V]), ds_block.reshape([WIDTH, V])
    few: gl.constexpr = gl.BlockedLayout([1], [32], [8], [0])
    row = gl.arange(0, C, few)
    beta_b, beta_t, beta_h = beta_strides
    head = beta_ptr + b.to(gl.int64) * beta_b + h * beta_h
    betas.store(gl.load(head + (t0 + row).to(gl.int64) * beta_t, row < rows, 0.0).to(gl.float32))
    token = gl.arange(0, C, gl.SliceLayout(0, VALUES))
    unit = gl.load(units_ptr + place.to(gl.int64) * C + token)[None, :]

    # rows and columns
    if BY_KEY:
        gates = gates.index(zero)
        gate_tile = tile_of_gates(gates, dg_desc)
        x_tile = gates.reshape([C, WIDTH])
        totals, ups, downs, apart = tables
        totals, ups, downs, apart = totals.index(zero), ups.index(zero), downs.index(zero), apart.index(zero)
        strong = gl.load(strong_ptr + place)
        share = gl.where(strong != 0, 0.0, 0.5)  # of the decay of a block before the anchor of its rows
        mbarrier.wait(bars.index(0), phase)
        if PACKED:
            clear_rows(gate_tile.reshape([C, WIDTH]), rows, RUNS)
            clear_rows(k_tile, rows, RUNS)
            clear_rows(q_tile, rows, RUNS)
        cube = bounded(gate_tile.reshape([C, WIDTH]).load(RUNS)).reshape([4, 16, WIDTH])
        cube = gl.convert_layout(cube, CUBES, assert_trivial=True)
        total = gl.sum(cube, 1)  # [4, K]
        half = share * total
        totals.reshape([4, WIDTH]).store(total)
        between = total - 2.0 * half
        apart.reshape([4, WIDTH]).store(between)
        cube = gl.associative_scan(cube, 1, plus) - half[:, None, :]
        x = gl.convert_layout(cube.reshape([C, WIDTH]), RUNS, assert_trivial=True)
        block = gl.arange(0, 4, gl.SliceLayout(1, BLOCK_SUMS))[:, None]  # [4, 1]
        through = half  # from the start of the chunk to the anchor of rows
        up, down = total - half, total - half
        for i in gl.static_range(4):
            block_total = table_row(totals, i, ROW)[None, :]
            through += gl.where(block > i, block_total, 0.0)
            up += gl.where(block == i + 1, share * block_total, 0.0)
            down += gl.where(block == i - 1, share * block_total, 0.0)
        ups.reshape([4, WIDTH]).store(gl.exp2(up))
        downs.reshape([4, WIDTH]).store(gl.exp2(down))
        through = gl.exp2(through)  # [4, K]
        x_tile.store(x)
        up = gl.exp2(x)
        q_tile.store((as_float32(q_tile.load(RUNS)) * up).to(gl.bfloat16))
        k = as_float32(k_tile.load(RUNS))
        kin = k * up
        k_tile.store(kin.to(gl.bfloat16))
        kin = gl.convert_layout(_in_blocks(kin), CUBES, assert_trivial=True) * through[:, None, :]
        c_tile.store(gl.convert_layout(kin.reshape([C, WIDTH]), RUNS, assert_trivial=True).to(gl.bfloat16))
        down = gl.exp2(between[:, None, :] - cube)
        down = gl.convert_layout(down.reshape([C, WIDTH]), RUNS, assert_trivial=True)
        column = (k * down).to(gl.bfloat16)
    else:
        sums = tables.index(zero)
        g_b, g_t, g_h = g_strides
        g = gl.zeros([C], gl.float32, few)
        if g_ptr is not None:
            head = g_ptr + b.to(gl.int64) * g_b + h * g_h
            g = bounded(gl.load(head + (t0 + row).to(gl.int64) * g_t, row < rows, 0.0))
        sums.store(gl.associative_scan(g, 0, plus))
        end = gl.sum(g, 0)
        mbarrier.wait(bars.index(0), phase)
        if PACKED:
            clear_rows(k_tile, rows, RUNS)
            clear_rows(q_tile, rows, RUNS)
    fence_async_shared()
    # E
    mbarrier.wait(bars.index(1), phase)
    if PACKED:
        clear_rows(e_tile, rows, RUNS)
    P = gl.zeros([V, C], gl.float32, VALUES)
    P = warpgroup_mma(
        s_tile.permute([1, 0]), (c_tile if BY_KEY else k_tile).permute([1, 0]), P, use_acc=False, is_async=True
    )
    beta = betas.load(gl.SliceLayout(0, VALUES))[None, :]
    X = as_float32(e_tile.permute([1, 0]).load(VALUES))
    P = warpgroup_mma_wait(0, [P])
    if not BY_KEY:
        P *= gl.exp2(sums.load(gl.SliceLayout(0, VALUES)))[None, :]
    X -= P
    Y = X * beta
    row_unit, inverse = unit_of_rows(Y)
    Y = gl.convert_layout((Y * inverse[:, None]).to(gl.float16), LEFT)
    P = warpgroup_mma(Y, G_tile.permute([1, 0]), P, use_acc=False, is_async=True)
    P = warpgroup_mma_wait(0, [P])
    E, rest_of_E = rounded_apart(X - P * row_unit[:, None] * unit)
    rest = pairs._reinterpret(gl.bfloat16, [C, V], gl.NVMMASharedLayout.get_default_for([C, V], gl.bfloat16))
    e_tile.permute([1, 0]).store(E)
    if PRECISE:
        rest.permute([1, 0]).store(rest_of_E)
    # pairs
    mbarrier.wait(bars.index(2), phase)
    if PACKED:
        clear_rows(do_tile, rows, RUNS)
        clear_rows(dv_tile, rows, RUNS)
    if BY_KEY:
        c_tile.store(column)
    else:
        c_tile = k_tile
    fence_async_shared()
    t = gl.arange(0, C, gl.SliceLayout(1, PAIRS))[:, None]
    s = gl.arange(0, C, gl.SliceLayout(0, PAIRS))[None, :]
    dA = gl.zeros([C, C], gl.float32, PAIRS)
    dM = gl.zeros([C, C], gl.float32, PAIRS)
    dA = warpgroup_mma(do_tile, e_tile.permute([1, 0]), dA, use_acc=False, is_async=True)
    dM = warpgroup_mma(dv_tile, e_tile.permute([1, 0]), dM, use_acc=False, is_async=True)
    if PRECISE:
        dA = warpgroup_mma(do_tile, rest.permute([1, 0]), dA, is_async=True)
        dM = warpgroup_mma(dv_tile, rest.permute([1, 0]), dM, is_async=True)
    dq = gl.zeros([C, WIDTH], gl.float32, KEYS)
    dr = gl.zeros([C, WIDTH], gl.float32, KEYS)
    dq = warpgroup_mma(do_tile, s_tile.permute([1, 0]), dq, use_acc=False, is_async=True)
    dr = warpgroup_mma(dv_tile, s_tile.permute([1, 0]), dr, use_acc=False, is_async=True)
    dA, dM, dq, dr = warpgroup_mma_wait(0, [dA, dM, dq, dr])
    dbeta = gl.sum(gl.where(t == s, dM, 0.0), 1)  # beta times the gradient
    dA = gl.where(t >= s, dA * scale, 0.0)
    dM = gl.where(t > s, -1.0 * dM, 0.0)
    if BY_KEY:
        if strong != 0:
            same = t // 16 == s // 16
            to = blocks_ptr + place.to(gl.int64) * (2 * C * 16)
            gl.store(to + (t * 16 + s % 16), dA, same)
            gl.store(to + (t * 16 + s % 16 + C * 16), dM, same)
            dA = gl.where(same, 0.0, dA)
            dM = gl.where(same, 0.0, dM)
    else:
        D = sums.load(gl.SliceLayout(1, PAIRS))[:, None] - sums.load(gl.SliceLayout(0, PAIRS))[None, :]
        D = gl.exp2(gl.where(t >= s, D, 0.0))
        dA *= D
        dM *= D
        # The pairs of tokens in the gradients of gates: what is added to a row, and taken from a column.
        QK = gl.zeros([C, C], gl.float32, PAIRS)
        KK = gl.zeros([C, C], gl.float32, PAIRS)
        QK = warpgroup_mma(q_tile, k_tile.permute([1, 0]), QK, use_acc=False, is_async=True)
        KK = warpgroup_mma(k_tile, k_tile.permute([1, 0]), KK, use_acc=False, is_async=True)
        QK, KK = warpgroup_mma_wait(0, [QK, KK])
        QK = gl.where(t > s, dA * QK + dM * KK, 0.0) * betas.load(gl.SliceLayout(0, PAIRS))[None, :]
        w = gl.convert_layout(gl.sum(QK, 1), few) - gl.convert_layout(gl.sum(QK, 0), few)
    rests = d_blocks._reinterpret(gl.bfloat16, [4, C, C], square)  # of dA and dM; dO has been read
    beta = betas.load(gl.SliceLayout(0, PAIRS))[None, :]
    rounded, rest_of_it = rounded_apart(dA * beta)
    a_tile.permute([1, 0]).store(rounded)
    if PARTS == 2:
        rests.index(0).permute([1, 0]).store(rest_of_it)
    rounded, rest_of_it = rounded_apart(dM * beta)
    m_tile.permute([1, 0]).store(rounded)
    if PARTS == 2:
        rests.index(1).permute([1, 0]).store(rest_of_it)
    fence_async_shared()
    # dq, and dk of rows
    dr *= -1.0
    dq *= scale
    if BY_KEY:
        by_key = as_float32(q_tile.load(KEYS)) * dq + as_float32(k_tile.load(KEYS)) * dr
        totals.reshape([4, WIDTH]).store(gl.sum(_in_blocks(by_key), 1))
        for i in gl.static_range(4):
            dq, dr = _decayed(dq, ups, i, strong, False), _decayed(dr, ups, i, strong, False)
            column_block = c_tile.slice(16 * i, 16)
            dq = warpgroup_mma(a_tile.slice(16 * i, 16).permute([1, 0]), column_block, dq, is_async=True)
            dr = warpgroup_mma(m_tile.slice(16 * i, 16).permute([1, 0]), column_block, dr, is_async=True)
            dq = warpgroup_mma(rests.index(0).slice(16 * i, 16).permute([1, 0]), column_block, dq, is_async=True)
            dr = warpgroup_mma(rests.index(1).slice(16 * i, 16).permute([1, 0]), column_block, dr, is_async=True)
            dq, dr = warpgroup_mma_wait(0, [dq, dr])
    else:
        through = gl.exp2(sums.load(gl.SliceLayout(1, KEYS)))[:, None]
        dq *= through
        dr *= through
        k = as_float32(k_tile.load(KEYS))
        state_part = gl.convert_layout(gl.sum(as_float32(q_tile.load(KEYS)) * dq + k * dr, 1), few)  # [C]
        for each in gl.static_range(PARTS):
            dq = warpgroup_mma((rests.index(0) if each else a_tile).permute([1, 0]), c_tile, dq, is_async=True)
            dr = warpgroup_mma((rests.index(1) if each else m_tile).permute([1, 0]), c_tile, dr, is_async=True)
        dq, dr = warpgroup_mma_wait(0, [dq, dr])
    # dk of columns
    rounded, rest_of_it = rounded_apart(dA)
    a_tile.store(rounded)
    if PARTS == 2:
        rests.index(0).store(rest_of_it)
    rounded, rest_of_it = rounded_apart(dM)
    m_tile.store(rounded)
    if PARTS == 2:
        rests.index(1).store(rest_of_it)
    fence_async_shared()
    dc = gl.zeros([C, WIDTH], gl.float32, KEYS)
    dc = warpgroup_mma(e_tile, ds_tile.permute([1, 0]), dc, use_acc=False, is_async=True)
    crossing = gl.sum(as_float32(s_tile.load(STATE)) * as_float32(ds_tile.load(STATE)), 1)  # [K]
    dc = warpgroup_mma_wait(0, [dc])
    if BY_KEY:
        for i in gl.static_range(3, -1, -1):
            dc = _decayed(dc, downs, i, strong, True)
            for each in gl.static_range(PARTS):
                left = a_tile if each == 0 else rests.index(0)
                dc = warpgroup_mma(left.slice(16 * i, 16).permute([1, 0]), q_tile.slice(16 * i, 16), dc, is_async=True)
                left = m_tile if each == 0 else rests.index(1)
                dc = warpgroup_mma(left.slice(16 * i, 16).permute([1, 0]), k_tile.slice(16 * i, 16), dc, is_async=True)
            dc = warpgroup_mma_wait(0, [dc])
    else:
        dc *= gl.exp2(end - sums.load(gl.SliceLayout(1, KEYS)))[:, None]
        column_part = gl.sum(as_float32(k_tile.load(KEYS)) * dc, 1)
        w += state_part - gl.convert_layout(column_part, few) * betas.load(few)
        for each in gl.static_range(PARTS):
            dc = warpgroup_mma((rests.index(0) if each else a_tile).permute([1, 0]), q_tile, dc, is_async=True)
            dc = warpgroup_mma((rests.index(1) if each else m_tile).permute([1, 0]), k_tile, dc, is_async=True)
        dc = warpgroup_mma_wait(0, [dc])
    fence_async_shared()  # S, v and G have been loaded to registers; TMA overwrites their tiles
    if has_next:
        _load_state(loads[1], bars.index(1), next_place, sizes)
    # results
    beta = betas.load(gl.SliceLayout(1, KEYS))[:, None]
    products = as_float32(c_tile.load(KEYS)) * dc  # k times dc, where both have the decays of columns
    if BY_KEY:
        w = as_float32(q_tile.load(KEYS)) * dq + as_float32(k_tile.load(KEYS)) * dr - beta * products
        x = x_tile.load(KEYS)
        layout: gl.constexpr = gl.SliceLayout(1, _in_blocks(x).type.layout)
        down = apart.reshape([4, WIDTH]).load(layout)[:, None, :] - _in_blocks(x)
        down = gl.exp2(gl.convert_layout(down.reshape([C, WIDTH]), KEYS, assert_trivial=True))
        up = gl.exp2(x)
        dq *= up
        dc *= down
        dk = dr * up + beta * dc
    else:
        dk = dr + beta * dc
    where = (b, h, t0, T, Hv)
    beta = betas.load(gl.SliceLayout(1, KEYS))
    dbeta = gl.convert_layout(dbeta, gl.SliceLayout(1, KEYS))
    dbeta = gl.where(beta != 0.0, dbeta / beta, gl.sum(products, 1))
    token = gl.arange(0, C, gl.SliceLayout(1, KEYS))
    head_row = (b.to(gl.int64) * T + t0) * Hv + h
    gl.store(dbeta_ptr + head_row + token * Hv, dbeta.to(dbeta_ptr.dtype.element_ty), token < rows)
    fence_async_shared()  # likewise q, k and exponents
    if has_next:
        _load_rows(loads[0], bars.index(0), next_place, sizes)
    if BY_KEY:
        w_tile = d_blocks._reinterpret(gl.float32, [1, 1, C, WIDTH], wide).reshape([C, WIDTH])
        w_tile.store(w)
        state_part = totals.reshape([4, WIDTH]).load(BLOCK_SUMS) * through
        end = gl.exp2(gl.sum(total, 0))  # the decay of the chunk
        at = gl.sum(state_part, 0) + gl.convert_layout(crossing, ROW) * end  # the sum over V of S * dS
        cube = gl.convert_layout(_in_blocks(w_tile.load(RUNS)), CUBES, assert_trivial=True)
        downs.reshape([4, WIDTH]).store(gl.sum(cube, 1))
        at = gl.zeros([4, WIDTH], gl.float32, BLOCK_SUMS) + at[None, :]
        for i in gl.static_range(3):
            at -= gl.where(block > i, table_row(downs, i, ROW)[None, :], 0.0)
        dg = at[:, None, :] - (gl.associative_scan(cube, 1, plus) - cube)
        dg = gl.convert_layout(dg.reshape([C, WIDTH]), RUNS, assert_trivial=True)
        dg_tile = tile_of_gates(d_blocks, dg_desc).reshape([C, WIDTH])
        write(dg_desc, dg_ptr, dg_tile, dg, 0, K, where, rows, PACKED)
    elif g_ptr is not None:
        at = gl.sum(state_part, 0) + gl.sum(crossing, 0) * gl.exp2(end)
        dg = gl.where(g > LEAST_GATE * LOG2E, at - (gl.associative_scan(w, 0, plus) - w), 0.0)
        gl.store(dg_ptr + head_row + row * Hv, dg.to(dg_ptr.dtype.element_ty), row < rows)
    written = ds_block._reinterpret(gl.bfloat16, [2, 1, 1, C, WIDTH], q_desc.layout)
    write(dq_desc, dq_ptr, written.index(0).reshape([C, WIDTH]), dq, 0, K, where, rows, PACKED)
    write(dk_desc, dk_ptr, written.index(1).reshape([C, WIDTH]), dk, 0, K, where, rows, PACKED)
    tma.store_wait(0)  # the copies have read their tiles
    fence_async_shared()
    if has_next:
        _load_gradients(loads[2], bars.index(2), next_place, sizes)
