"""Computes gradients of chunked gated linear attention on Hopper for heads of many keys: states first, then all chunks.

It differs from backward_values.py, which has the reasons, in that K is above 128. There is no room for q, k and g of two
chunks, nor registers for a gate warpgroup, so a block computes one chunk of one query head.

B batch   T tokens   N sequences   H key/value heads, of k, v, g and S   Hq query heads   G query heads of a group
K, V key and value width   C tokens of a chunk   D = 64 values of a tile, and keys of a part
PARTS = 2 parts of a warpgroup, which has half of the keys   n rows of states, one for each chunk
"""

# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportAssignmentType=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
# pyright: reportUnboundVariable=false, reportPossiblyUnboundVariable=false, reportIndexIssue=false
from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma_wait,
)

from gla_core.dispatch.backend import CHUNK
from gla_triton_kernels.chunk_gla.kernel import GradientParameters
from gla_triton_kernels.chunk_gla.shared.segments import Segments, cut
from gla_triton_kernels.chunk_gla.sm90 import pairs
from gla_triton_kernels.chunk_gla.sm90.common import clear_rows, plus, segment_at, slope_of_gates, write, write_rows
from gla_triton_kernels.chunk_gla.sm90.common_backward import (
    LAYOUT,
    LEFT,
    RUNS,
    WIDTH,
    C,
    D,
    decay,
    exponents,
    gate_tile,
    gates,
    logits_strides,
    product,
)
from gla_triton_kernels.chunk_gla.sm90.half import NO_UNITS
from gla_triton_kernels.chunk_gla.sm90.state_gradients import KEYS, launch_state_gradients
from gla_triton_kernels.chunk_gla.tensors import BackwardTensors
from gla_triton_kernels.runtime.launch import Launch
from gla_triton_kernels.runtime.tma import shared_tiles, state_tiles

PARTS = gl.constexpr(2)
SLOTS = gl.constexpr(3)  # tiles of S, P or g that are prefetched
V_SLOTS = gl.constexpr(2)  # tiles of v and do that are prefetched
ROWS = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))  # for sums over columns


def launch_gradients(
    kernel: GradientParameters,
    x: BackwardTensors,
    entering: Tensor,
    leaving: Tensor | None,
    segments: Segments,
    scale: float,
    normalizer: int | None = None,
) -> list[Launch]:
    """Returns the launches that fill the gradients in x; entering is bfloat16.

    See `launch_gradients` of general/backward.py for the other arguments.
    """
    B, T, Hq, K = x.q.shape
    H, V = x.v.shape[2:]
    g, P, marks, found = launch_state_gradients(kernel, x, entering, leaving, segments, scale, normalizer)
    chunks = cut(B, T, CHUNK, CHUNK, x.cu_seqlens, longest_first=False)
    arguments = {
        "q_desc": shared_tiles(x.q, CHUNK, WIDTH),
        "k_desc": shared_tiles(x.k, CHUNK, WIDTH),
        "v_desc": shared_tiles(x.v, CHUNK, WIDTH),
        "do_desc": shared_tiles(x.do, CHUNK, WIDTH),
        "g_desc": None if g is None else shared_tiles(g, CHUNK, WIDTH),
        "dq_desc": shared_tiles(x.dq, CHUNK, WIDTH),
        "dk_desc": shared_tiles(x.dk, CHUNK, WIDTH),
        "dv_desc": shared_tiles(x.dv, CHUNK, WIDTH),
        "s_desc": state_tiles(entering, WIDTH, WIDTH),
        "p_desc": state_tiles(P, WIDTH, WIDTH),
        "dq_ptr": x.dq,
        "dk_ptr": x.dk,
        "dv_ptr": x.dv,
        "dg_ptr": x.dg,
        "g_ptr": x.g if normalizer is not None else None,
        "marks": marks,
        "order": chunks.order,
        "scale": scale,
        "T": T,
        **logits_strides(x.g, normalizer),
        "Hq": Hq,
        "K": K,
        "V": V,
        "G": Hq // H,
        "NORMALIZER": normalizer,
    }
    options = {"num_warps": kernel.warps, "maxnreg": 168}
    gradients = Launch(_gradient_kernel, (len(P) * Hq, 1, 1), arguments, options)
    return [*found, *chunks.launches, gradients, *pairs.launch_pairs(x, NO_UNITS, marks, scale, KEYS, normalizer)]


@gluon.jit
def _load_gates(g_desc, x_tiles, full, empty, item, place, G: gl.constexpr):
    """Loads the gates of the keys of both warpgroups into the next two slots."""
    b, h, t = place
    for i in gl.static_range(2):
        slot = (item + i) % SLOTS
        mbarrier.wait(empty.index(slot), ((item + i) // SLOTS & 1) ^ 1)
        mbarrier.expect(full.index(slot), PARTS * g_desc.block_type.nbytes)
        for p in gl.static_range(PARTS):
            tile = gate_tile(g_desc, x_tiles, slot * PARTS + p)
            tma.async_copy_global_to_shared(g_desc, [b, h // G, t, (i * PARTS + p) * D], full.index(slot), tile)


@gluon.jit
def _load_states(desc, s_tiles, full, empty, item, place):
    """Loads all keys of D values of S or P into the next slot."""
    row, h, value = place
    slot = item % SLOTS
    mbarrier.wait(empty.index(slot), (item // SLOTS & 1) ^ 1)
    mbarrier.expect(full.index(slot), 2 * PARTS * desc.block_type.nbytes)
    for p in gl.static_range(2 * PARTS):
        tile = s_tiles.index(2 * PARTS * slot + p)
        tma.async_copy_global_to_shared(desc, [row, h, p * D, value], full.index(slot), tile)


@gluon.jit
def _load_warp(descriptors, tiles, barriers, place, tiles_v, G: gl.constexpr):
    """Loads q, k and g, then prefetches tiles of v and do, and of S and P in turns; finally loads g once more."""
    q_desc, k_desc, v_desc, do_desc, g_desc, s_desc, p_desc = descriptors
    q_tiles, k_tiles, v_tiles, do_tiles, s_tiles, x_tiles = tiles
    qk_full, full, empty, v_full, v_empty = barriers
    b, h, t, row = place
    first: gl.constexpr = 0 if g_desc is None else 2
    mbarrier.expect(qk_full, 4 * PARTS * q_desc.block_type.nbytes)
    for p in gl.static_range(2 * PARTS):
        tma.async_copy_global_to_shared(q_desc, [b, h, t, p * D], qk_full, q_tiles.index(p))
        tma.async_copy_global_to_shared(k_desc, [b, h // G, t, p * D], qk_full, k_tiles.index(p))
    if g_desc is not None:
        _load_gates(g_desc, x_tiles, full, empty, 0, (b, h, t), G)
    for j in range(tiles_v):
        slot = j % V_SLOTS
        mbarrier.wait(v_empty.index(slot), (j // V_SLOTS & 1) ^ 1)
        mbarrier.expect(v_full.index(slot), 2 * v_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(do_desc, [b, h, t, j * D], v_full.index(slot), do_tiles.index(slot))
        tma.async_copy_global_to_shared(v_desc, [b, h // G, t, j * D], v_full.index(slot), v_tiles.index(slot))
        _load_states(s_desc, s_tiles, full, empty, first + 2 * j, (row, h // G, j * D))
        _load_states(p_desc, s_tiles, full, empty, first + 2 * j + 1, (row, h, j * D))
    if g_desc is not None:
        _load_gates(g_desc, x_tiles, full, empty, first + 2 * tiles_v, (b, h, t), G)


@gluon.jit
def _wait(full, item):
    mbarrier.wait(full.index(item % SLOTS), item // SLOTS & 1)


@gluon.jit
def _release(empty, item):
    mbarrier.arrive(empty.index(item % SLOTS), count=1)


@gluon.jit
def _tile(tiles, i):
    """Returns the i-th of several tiles, as a matrix."""
    return tiles.index(i).reshape([tiles.type.shape[3], tiles.type.shape[4]])


@gluon.jit
def _decay(g_desc, tiles, own, mild, rows, scale, PACKED: gl.constexpr):
    """Replaces q and k of this warpgroup by qg and kg, and stores b_C / 2 [D] of each part."""
    q_tiles, k_tiles, x_tiles, r_tiles = tiles
    for p in range(PARTS):
        q_tile, k_tile = _tile(q_tiles, own + p), _tile(k_tiles, own + p)
        if g_desc is not None:
            g = gates(gate_tile(g_desc, x_tiles, own + p), rows, None, PACKED)  # [C, D]
            x, end = exponents(g, mild, 0.0)  # [C, D], [D]
            r_tiles.index(own + p).store(0.5 * end)
            decay(q_tile, k_tile, x, end, mild, 0.0, scale)
        else:
            q_tile.store((q_tile.load(RUNS).to(gl.float32) * scale).to(gl.bfloat16))
        if PACKED:
            clear_rows(q_tile, rows, RUNS)
            clear_rows(k_tile, rows, RUNS)


@gluon.jit
def _scores(q_tiles, k_tiles, milds):
    """Returns A^T [C, C] as the left operand of a product."""
    row = gl.arange(0, C, gl.SliceLayout(1, LAYOUT))[:, None]  # [C, 1]
    column = gl.arange(0, C, gl.SliceLayout(0, LAYOUT))[None, :]  # [1, C]
    none = gl.zeros([C, C], gl.float32, LAYOUT)
    aT = none
    for i in gl.static_range(2):
        acc = none
        for p in gl.static_range(PARTS):
            q_tile = _tile(q_tiles, i * PARTS + p)
            acc = product(_tile(k_tiles, i * PARTS + p), q_tile.permute([1, 0]), acc)
        aT += gl.where((row <= column) & milds[i], warpgroup_mma_wait(0, [acc]), 0.0)
    return gl.convert_layout(aT.to(gl.bfloat16), LEFT)


@gluon.jit
def _add_crossing(this, other, s_tiles, s_first, p_first):
    """Adds the sum of S * P, over the values of a tile, to the tensor [D] of each part of the keys."""
    for p in range(PARTS):
        S = _tile(s_tiles, s_first + p).load(ROWS).to(gl.float32)  # [D, D]
        P = _tile(s_tiles, p_first + p).load(ROWS).to(gl.float32)  # [D, D]
        this, other = other, this + gl.sum(S * P, 1)
    return this, other


@gluon.jit
def _gradient_warps(
    g_desc,
    tiles,
    barriers,
    outputs,
    marks,
    place,
    sizes,
    scale,
    part: gl.constexpr,
    NORMALIZER: gl.constexpr,
    PACKED: gl.constexpr,
):
    """Computes the gradients of PARTS parts of the keys of a chunk.

    In addition, the first warpgroup computes dA, and the second computes dv. The loops over parts are loops at run
    time, because the code has to fit into the instruction cache.
    """
    q_tiles, k_tiles, v_tiles, do_tiles, s_tiles, x_tiles, da_tiles, dv_tile, r_tiles = tiles
    qk_full, full, empty, v_full, v_empty, gated, ready = barriers
    dq_desc, dk_desc, dv_desc, dq_ptr, dk_ptr, dv_ptr, dg_ptr, logits = outputs
    b, h, t, rows = place
    T, Hq, K, V = sizes
    tiles_v = gl.cdiv(V, D)
    HAS_GATE: gl.constexpr = marks is not None
    own: gl.constexpr = part * PARTS
    first: gl.constexpr = 2 if HAS_GATE else 0
    where = (b, h, t, T, Hq)
    milds = (True, True)
    if HAS_GATE:
        milds = (gl.load(marks) == 0, gl.load(marks + 1) == 0)
    mild = milds[part]
    mbarrier.wait(qk_full, 0)
    if HAS_GATE:
        _wait(full, part)
    _decay(g_desc, (q_tiles, k_tiles, x_tiles, r_tiles), own, mild, rows, scale, PACKED)
    if HAS_GATE:
        _release(empty, 0)
        _release(empty, 1)
    fence_async_shared()
    mbarrier.arrive(gated, count=1)
    mbarrier.wait(gated, 0)

    none = gl.zeros([C, C], gl.float32, LAYOUT)
    square = none  # dA in the first warpgroup, dv in the second
    if part == 1:
        aT = _scores(q_tiles, k_tiles, milds)
    dq0, dq1, dk0, dk1 = none, none, none, none  # dq and dk of each part
    crossing0 = gl.zeros([D], gl.float32, gl.SliceLayout(1, ROWS))
    crossing1 = crossing0
    for j in range(tiles_v):
        item = first + 2 * j
        v_slot = j % V_SLOTS
        v_tile, do_tile = _tile(v_tiles, v_slot), _tile(do_tiles, v_slot)
        S = 2 * PARTS * (item % SLOTS)  # index of the first tile of S
        P = 2 * PARTS * ((item + 1) % SLOTS)  # index of the first tile of P
        mbarrier.wait(v_full.index(v_slot), j // V_SLOTS & 1)
        if PACKED:
            clear_rows(do_tile, rows, RUNS)
            fence_async_shared()
        _wait(full, item)
        dq0 = product(do_tile, _tile(s_tiles, S + own).permute([1, 0]), dq0)
        dq1 = product(do_tile, _tile(s_tiles, S + own + 1).permute([1, 0]), dq1)
        if part == 0:
            square = product(do_tile, v_tile.permute([1, 0]), square)
        _wait(full, item + 1)
        dk0 = product(v_tile, _tile(s_tiles, P + own).permute([1, 0]), dk0)
        dk1 = product(v_tile, _tile(s_tiles, P + own + 1).permute([1, 0]), dk1)
        if part == 1:
            square = product(aT, do_tile, none)  # dv
            for p in gl.static_range(2 * PARTS):
                square = product(_tile(k_tiles, p), _tile(s_tiles, P + p), square)
        if HAS_GATE:
            crossing0, crossing1 = _add_crossing(crossing0, crossing1, s_tiles, S + own, P + own)
        dq0, dq1, dk0, dk1, square = warpgroup_mma_wait(0, [dq0, dq1, dk0, dk1, square])
        _release(empty, item)
        _release(empty, item + 1)
        mbarrier.arrive(v_empty.index(v_slot), count=1)
        if part == 1:
            tma.store_wait(0)
            write(dv_desc, dv_ptr, dv_tile, square, j * D, V, where, rows, PACKED)

    if part == 0:
        row = gl.arange(0, C, gl.SliceLayout(1, LAYOUT))[:, None]  # [C, 1]
        column = gl.arange(0, C, gl.SliceLayout(0, LAYOUT))[None, :]  # [1, C]
        for i in gl.static_range(2):
            da_tiles.index(i).store(gl.where((row >= column) & milds[i], square, 0.0).to(gl.bfloat16))
        fence_async_shared()
    mbarrier.arrive(ready, count=1)
    mbarrier.wait(ready, 0)
    da_tile = da_tiles.index(part)
    last = first + 2 * tiles_v + part
    if HAS_GATE:
        _wait(full, last)
    for p in range(PARTS):
        dq, dk, crossing = dq0, dk0, crossing0
        q_tile, k_tile = _tile(q_tiles, own + p), _tile(k_tiles, own + p)
        key = (own + p) * D
        if HAS_GATE:
            arrived = last % SLOTS * PARTS + p
            x_tile = _tile(x_tiles, arrived)
            g = gates(gate_tile(g_desc, x_tiles, arrived), rows, None, PACKED)  # [C, D]
            x, _ = exponents(g, mild, 0.0)  # [C, D]
            x_tile.store(x)
            r = r_tiles.index(own + p).load(gl.SliceLayout(0, LAYOUT))[None, :]  # [1, D]
            dq *= gl.exp2(gl.where(mild, r, 0.0))
            entered = gl.sum(q_tile.load(LAYOUT).to(gl.float32) * dq, 0)  # [D], the term of queries that read S
        dq = product(da_tile, k_tile, dq)
        dq, dk = warpgroup_mma_wait(0, [dq, product(da_tile.permute([1, 0]), q_tile, dk)])
        if HAS_GATE:
            w = q_tile.load(LAYOUT).to(gl.float32) * dq - k_tile.load(LAYOUT).to(gl.float32) * dk  # [C, D]
            x = x_tile.load(LAYOUT)  # [C, D]
            dq *= gl.exp2(x)
            dk *= gl.exp2(gl.where(mild, 0.0, 2 * r) - x)
            x_tile.store(w)
        # This warpgroup writes through its tiles of q and k: all warps have read these.
        write(dq_desc, dq_ptr, q_tile, dq * scale, key, K, where, rows, PACKED)
        write(dk_desc, dk_ptr, k_tile, dk, key, K, where, rows, PACKED)
        if HAS_GATE:
            r_keys = r_tiles.index(own + p).load(gl.SliceLayout(1, ROWS))  # [D]
            crossing *= gl.exp2(gl.where(mild, r_keys, 2 * r_keys))
            anchor = gl.convert_layout(crossing, gl.SliceLayout(0, RUNS))  # [D]
            anchor += gl.convert_layout(entered, gl.SliceLayout(0, RUNS))
            w = x_tile.load(RUNS)  # [C, D]
            dg = anchor[None, :] - (gl.associative_scan(w, 0, plus) - w)  # [C, D]
            if NORMALIZER is not None:
                g_ptr, g_t = logits
                token = gl.arange(0, C, gl.SliceLayout(1, RUNS))[:, None]  # [C, 1]
                keys = key + gl.arange(0, D, gl.SliceLayout(0, RUNS))[None, :]  # [1, D]
                at = g_ptr + (t + token).to(gl.int64) * g_t + keys
                dg *= slope_of_gates(gl.load(at, (token < rows) & (keys < K), 0.0), NORMALIZER)
            write_rows(dg_ptr, dg, key, K, where, rows)
        dq0, dk0, crossing0 = dq1, dk1, crossing1
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["scale", "T", "g_b", "g_t", "g_h", "Hq", "K", "V"])
def _gradient_kernel(
    q_desc,  # [B, Hq, T, K], tiles [C, D]
    k_desc,  # [B, H, T, K], tiles [C, D]
    v_desc,  # [B, H, T, V], tiles [C, D]
    do_desc,  # [B, Hq, T, V], tiles [C, D]
    g_desc,  # log gates, [B, H, T, K], tiles [C, D], or None
    dq_desc,  # [B, Hq, T, K], tiles [C, D]
    dk_desc,  # [B, Hq, T, K], tiles [C, D]
    dv_desc,  # [B, Hq, T, V], tiles [C, D]
    s_desc,  # S, [n, H, K, V], tiles [D, D]
    p_desc,  # P, [n, Hq, K, V], tiles [D, D]
    dq_ptr,  # [B, T, Hq, K]
    dk_ptr,  # [B, T, Hq, K]
    dv_ptr,  # [B, T, Hq, V]
    dg_ptr,  # [B, T, Hq, K] or None
    g_ptr,  # logits, [B, T, H, K], if NORMALIZER is given, else None
    marks,  # [n, Hq, blocks of keys]; None if g is None
    order,  # [n, 5] or None
    scale,
    T,
    g_b,
    g_t,
    g_h,
    Hq,
    K,
    V,
    G: gl.constexpr,
    NORMALIZER: gl.constexpr,
):
    """Computes one chunk of one head, with two warpgroups of PARTS parts of D keys each, and a load warp."""
    PACKED: gl.constexpr = order is not None
    h = gl.program_id(0) % Hq
    i = gl.program_id(0) // Hq
    if PACKED:
        b = gl.to_tensor(0)
        i, t, rows, _, _ = segment_at(order, i)
        if rows == 0:
            return
    else:
        chunks = gl.cdiv(T, C)
        b = i // chunks
        t = i % chunks * C
        rows = gl.minimum(T - t, C)
    if marks is not None:
        marks += (i * Hq + h).to(gl.int64) * gl.cdiv(K, PARTS * D)

    dtype: gl.constexpr = gl.bfloat16
    exponents: gl.constexpr = gl.NVMMASharedLayout.get_default_for([1, 1, C, D], gl.float32)
    square: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, C], dtype)
    row_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q_tiles = gl.allocate_shared_memory(dtype, [2 * PARTS, 1, 1, C, D], q_desc.layout)
    k_tiles = gl.allocate_shared_memory(dtype, [2 * PARTS, 1, 1, C, D], k_desc.layout)
    v_tiles = gl.allocate_shared_memory(dtype, [V_SLOTS, 1, 1, C, D], v_desc.layout)
    do_tiles = gl.allocate_shared_memory(dtype, [V_SLOTS, 1, 1, C, D], do_desc.layout)
    s_tiles = gl.allocate_shared_memory(dtype, [2 * PARTS * SLOTS, 1, 1, D, D], s_desc.layout)
    x_tiles = s_tiles._reinterpret(gl.float32, [PARTS * SLOTS, 1, 1, C, D], exponents)
    da_tiles = gl.allocate_shared_memory(dtype, [2, C, C], square)
    dv_tiles = gl.allocate_shared_memory(dtype, [1, 1, 1, C, D], dv_desc.layout)
    r_tiles = gl.allocate_shared_memory(gl.float32, [2 * PARTS, D], row_layout)
    bars: gl.constexpr = mbarrier.MBarrierLayout()
    qk_full = gl.allocate_shared_memory(gl.int64, [1], bars)  # q and k have been loaded
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], bars)  # a tile of S, P or g has been loaded
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], bars)  # both warpgroups have read it
    v_full = gl.allocate_shared_memory(gl.int64, [V_SLOTS, 1], bars)  # tiles of v and do have been loaded
    v_empty = gl.allocate_shared_memory(gl.int64, [V_SLOTS, 1], bars)  # both warpgroups have read them
    gated = gl.allocate_shared_memory(gl.int64, [1], bars)  # q and k have become qg and kg
    ready = gl.allocate_shared_memory(gl.int64, [1], bars)  # dA has been written, and all of kg has been read
    mbarrier.init(qk_full, count=1)
    for slot in gl.static_range(SLOTS):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=2)
    for slot in gl.static_range(V_SLOTS):
        mbarrier.init(v_full.index(slot), count=1)
        mbarrier.init(v_empty.index(slot), count=2)
    mbarrier.init(gated, count=2)
    mbarrier.init(ready, count=2)

    descriptors = (q_desc, k_desc, v_desc, do_desc, g_desc, s_desc, p_desc)
    load_tiles = (q_tiles, k_tiles, v_tiles, do_tiles, s_tiles, x_tiles)
    load_barriers = (qk_full, full, empty, v_full, v_empty)
    tiles = (
        q_tiles,
        k_tiles,
        v_tiles,
        do_tiles,
        s_tiles,
        x_tiles,
        da_tiles,
        dv_tiles.index(0).reshape([C, D]),
        r_tiles,
    )
    barriers = (qk_full, full, empty, v_full, v_empty, gated, ready)
    logits: gl.constexpr = None
    if NORMALIZER is not None:
        logits = (g_ptr + b.to(gl.int64) * g_b + (h // G).to(gl.int64) * g_h, g_t)
    outputs = (dq_desc, dk_desc, dv_desc, dq_ptr, dk_ptr, dv_ptr, dg_ptr, logits)
    place = (b, h, t, rows)
    sizes = (T, Hq, K, V)
    gl.warp_specialize(
        [
            (
                _gradient_warps,
                (g_desc, tiles, barriers, outputs, marks, place, sizes, scale, 0, NORMALIZER, PACKED),
            ),
            (
                _gradient_warps,
                (g_desc, tiles, barriers, outputs, marks, place, sizes, scale, 1, NORMALIZER, PACKED),
            ),
            (_load_warp, (descriptors, load_tiles, load_barriers, (b, h, t, i), gl.cdiv(V, D), G)),
        ],
        [4, 1],
        [232, 24],
    )
