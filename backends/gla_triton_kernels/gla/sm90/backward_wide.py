"""Computes gradients of chunked gated linear attention on Hopper for wide heads: states first, then all chunks.

For a chunk of C tokens, let S be the entering state, P the decayed gradient of the leaving state, and qg, kg and r the
values that backward.py defines. Then, in a mild chunk,

    A  = tril(qg kg^T)           dA = tril(do v^T)
    dq = scale exp(b - r) * (dA kg + exp(r) (do S^T))       dk = exp(r - b) * (dA^T qg + v P^T)
    dv = A^T do + kg P           w = q * dq - k * dk
    dg_u = exp(r) (sum over V of S * P) + sum over t of (qg * exp(r) (do S^T))_t - sum over t < u of w_t

In a part of the keys that is not mild, the factors exp(b - r), exp(r - b) and exp(r) become exp(b), exp(b_C - b) and
1, and the factor of S * P becomes exp(b_C). In a slice with such a part, A and dA count as 0. pairs.py then adds the
terms of pairs of tokens.

With float16, operands have units; see common.py and operands.py. Units of S and P are units of tiles [D, D], so sums
over values are multiplied by the quotient of two units between tiles, and dv between the products that it is a sum of.
q and k of a part, which a mild chunk multiplies by up to 403, have units as well. `scale`, and exp(a) in a part that is
not mild, are left out of qg as in backward.py.

If a head needed several blocks of states, each block would repeat the work on q, k and g, and dq, dk, dg and dv would
be sums over blocks. Instead, the gradients of states are written to memory once:

    state_gradients.py   goes backwards through segments, and writes P of every chunk
    this file            computes all chunks, in any order: it loops over the values, and sums dq, dk and dv on chip

If gates come from logits, a launch before these two writes the log gates to memory, and both kernels read them.

B batch   T tokens   N sequences   H key heads   Hq query heads   Hv value heads, of v, g and S
Ho = max(Hq, Hv) heads of o   PER_Q, PER_V heads of o that share a head of q, of v; one of them is 1
K, V key and value width   C tokens of a chunk   D = 64 values of a tile, and keys of a part
PARTS parts of a slice of the keys, 1 or 2   SLICES slices of the keys, PARTS D keys each
n rows of states, one for each chunk   CHUNKS, V_SLOTS, SLOTS pipeline stages of q, k, g; of v, do; of S, P
pair   a chunk and a head of o   item   a pair of tiles of v and do, counted over all slices of a block

The grid is persistent: a block computes every step-th pair, and the slices of a pair one after the other. dv is
a sum over slices. The block keeps it in scratch memory of its own (`sums`), which stays in the L2 cache. The warps of a
block are specialised. They communicate over barriers in shared memory; common.py gives the rules.

    load       one warp: copies q, k and g of the next slice, and tiles of v, do, S and P, by TMA
    gate       a warpgroup: sums g and replaces q, k by qg, kg for the next slice, and writes dg of the previous slice
    gradient   two warpgroups: each computes dq and dk of its part of the keys. If there is one part, the first computes
               dq and the second dk. In addition, the first computes dA, and the second computes A^T and dv.

Results take the place of inputs that have been read, so that four tiles of S and P fit: dA that of the last tile of S.
With two parts, dv takes that of the tile of P of its warpgroup, and dq and dk those of q and k.

Source: Yang et al., "Gated Linear Attention Transformers with Hardware-Efficient Training" (arXiv 2312.06635).
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
from gla_triton_kernels.chunks.kernel import GradientParameters
from gla_triton_kernels.chunks.segments import Segments, cut
from gla_triton_kernels.gla.shared.limits import LEAST_GATE
from gla_triton_kernels.gla.sm90 import pairs
from gla_triton_kernels.gla.sm90.common import (
    clear_rows,
    in_units,
    magnitudes,
    opaque_zero,
    plus,
    segment_at,
    slope_of_gates,
    unit_at,
    write,
)
from gla_triton_kernels.gla.sm90.common_backward import (
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
    tile_arguments,
)
from gla_triton_kernels.gla.sm90.half import in_half
from gla_triton_kernels.gla.sm90.operands import factors_of, tiles_as_operands
from gla_triton_kernels.gla.sm90.state_gradients import launch_state_gradients
from gla_triton_kernels.gla.tensors import BackwardTensors
from gla_triton_runtime.launch import Launch
from gla_triton_runtime.tma import shared_tiles, state_tiles

SLICE = 2 * WIDTH
"""The maximum number of keys of a slice."""
CHUNKS = gl.constexpr(2)  # pipeline stages of q, k and g: slices in shared memory
V_SLOTS = gl.constexpr(2)  # pipeline stages of v and do
ROWS = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))  # few threads share a row, for sums over columns


def launch_gradients(
    kernel: GradientParameters,
    x: BackwardTensors,
    entering: Tensor,
    leaving: Tensor | None,
    segments: Segments,
    scale: float,
    normalizer: int | None = None,
) -> list[Launch]:
    """Returns the launches that fill the gradients in x; entering is bfloat16, or float32 if q is not bfloat16.

    See `launch_gradients` of general/backward.py for the other arguments.
    """
    x, units, converted = in_half(x, ("q", "k", "v", "do"), x.cu_seqlens)
    entering, s_units, operands = tiles_as_operands(entering, x.q.dtype)
    B, T, Hq, K = x.q.shape
    (Hv, V), Ho = x.v.shape[2:], x.do.shape[2]
    made = launch_state_gradients(kernel, x, entering, leaving, segments, scale, units, normalizer)
    g, P, marks = made.g, made.P, made.marks
    chunks = cut(B, T, CHUNK, CHUNK, x.cu_seqlens, longest_first=False)
    count, slices = len(P) * Ho, ceil_div(K, SLICE)
    programs, tiles_v = min(count, kernel.programs), max(2, ceil_div(V, WIDTH))
    sums = torch.empty(programs, tiles_v, CHUNK, WIDTH, dtype=torch.float32, device=x.q.device) if slices > 1 else None
    from_registers = {"dq_desc": None, "dk_desc": None, "dv_desc": None}  # float32 does not fit into the tiles
    arguments = {
        **tile_arguments(x, ("q", "k", "v", "do")),
        **(from_registers if converted else tile_arguments(x, ("dq", "dk", "dv"))),
        "g_desc": None if g is None else shared_tiles(g, CHUNK, WIDTH),
        "s_desc": state_tiles(entering, WIDTH, WIDTH),
        "p_desc": state_tiles(P, WIDTH, WIDTH),
        "dq_ptr": x.dq,
        "dk_ptr": x.dk,
        "dv_ptr": x.dv,
        "dg_ptr": x.dg,
        "g_ptr": x.g if normalizer is not None else None,
        "s_units": s_units,
        "p_units": made.p_units,
        **units,
        "marks": marks,
        "sums": sums,
        "order": chunks.order,
        "scale": scale,
        "count": count,
        "step": programs,
        "T": T,
        **logits_strides(x.g, normalizer),
        "Ho": Ho,
        "K": K,
        "V": V,
        "tiles_v": tiles_v,
        "PARTS": min(2, ceil_div(K, WIDTH)),
        "SLICES": slices,
        "SLOTS": 4 if K > WIDTH else 5,  # the most that fit into shared memory
        "PER_Q": Ho // Hq,
        "PER_V": Ho // Hv,
        "NORMALIZER": normalizer,
    }
    options = {"num_warps": kernel.warps, "maxnreg": 128}
    gradients = Launch(_gradient_kernel, (programs, 1, 1), arguments, options)
    added = pairs.launch_pairs(x, units, marks, scale, WIDTH, normalizer, together=SLICE // WIDTH)
    return [*converted, *operands, *made.launches, *chunks.launches, gradients, *added]


@gluon.jit
def _filled(n, work):
    """Returns the first pair among n, n + step, n + 2 step .. that has tokens; `count` or more if there is none.

    Args:
        work: T, Ho, K, the number of pairs, the order of chunks, the first pair of this block, and the number of
            blocks, here and below.
    """
    _, _, _, count, order, _, step = work
    if order is not None:
        while (n < count) & (_tokens(gl.minimum(n, count - 1), work) == 0):
            n += step
    return n


@gluon.jit
def _next(n, key, work, SLICES: gl.constexpr):
    """Returns the pair and the first key of the slice that a block computes after the slice of pair n from `key` on."""
    _, _, K, _, _, _, step = work
    if SLICES == 1:
        n = _filled(n + step, work)
    else:
        key += 2 * D
        if key >= K:
            key = 0
            n = _filled(n + step, work)
    return n, key


@gluon.jit
def _tokens(n, work):
    """Returns the number of tokens of pair n."""
    _, _, _, _, rows = _place(n, work)
    return rows


@gluon.jit
def _place(n, work):
    """Returns the row of states, the batch, the head, the first token and the number of tokens of pair n."""
    T, Ho, _, _, order, _, _ = work
    n = gl.to_tensor(n)
    h = n % Ho
    i = n // Ho
    if order is not None:
        b = gl.to_tensor(0)
        i, t, rows, _, _ = segment_at(order, i)
    else:
        chunks = gl.cdiv(T, C)
        b = i // chunks
        t = i % chunks * C
        rows = gl.minimum(T - t, C)
    return i, b, h, t, rows


@gluon.jit
def _load_queries(
    i, n, key, descriptors, tiles, barriers, work, PARTS: gl.constexpr, PER_Q: gl.constexpr, PER_V: gl.constexpr
):
    """Starts the loads of q, k and g of a slice, once their slot is empty.

    Args:
        i: the number of the slice, counted in this block.
        n, key: the pair, and the first key of the slice.
    """
    q_desc, k_desc, _, _, g_desc, _, _ = descriptors
    q_tiles, k_tiles, _, _, _, x_tiles = tiles
    qk_full, qk_empty, _, _, _, _ = barriers
    _, b, h, t, _ = _place(n, work)
    slot = i % CHUNKS
    GATE_SIZE: gl.constexpr = 0 if g_desc is None else g_desc.block_type.nbytes
    bar = qk_full.index(slot)
    mbarrier.wait(qk_empty.index(slot), (i // CHUNKS & 1) ^ 1)
    mbarrier.expect(bar, PARTS * (2 * q_desc.block_type.nbytes + GATE_SIZE))
    for p in gl.static_range(PARTS):
        if g_desc is not None:
            x_tile = gate_tile(g_desc, x_tiles, PARTS * slot + p)
            tma.async_copy_global_to_shared(g_desc, [b, h // PER_V, t, key + p * D], bar, x_tile)
        at = PARTS * slot + p
        q_head, k_head = h // PER_Q, h // (PER_Q * PER_V)
        tma.async_copy_global_to_shared(q_desc, [b, q_head, t, key + p * D], bar, q_tiles.index(at))
        tma.async_copy_global_to_shared(k_desc, [b, k_head, t, key + p * D], bar, k_tiles.index(at))


@gluon.jit
def _load_states(desc, s_tiles, full, empty, item, place, PARTS: gl.constexpr, SLOTS: gl.constexpr):
    """Starts the load of S or P, of the keys of a slice and D values, once its slot is empty.

    Args:
        item: the number of the load, counted in this block.
        place: the row of states, the head, the first key and the first value.
    """
    row, h, key, value = place
    slot = item % SLOTS
    mbarrier.wait(empty.index(slot), (item // SLOTS & 1) ^ 1)
    mbarrier.expect(full.index(slot), PARTS * desc.block_type.nbytes)
    for p in gl.static_range(PARTS):
        tile = s_tiles.index(PARTS * slot + p)
        tma.async_copy_global_to_shared(desc, [row, h, key + p * D, value], full.index(slot), tile)


@gluon.jit
def _load_warp(
    args, PARTS: gl.constexpr, SLICES: gl.constexpr, SLOTS: gl.constexpr, PER_Q: gl.constexpr, PER_V: gl.constexpr
):
    """Loads tiles of v and do, and of S and P in turns. Before the last tiles, loads q, k and g of the next slice.

    The tiles of q, k and g are released when dg has been written, and the first tiles of a slice do not wait for this.
    """
    descriptors, tiles, barriers, work, tiles_v = args
    _, _, v_desc, do_desc, _, s_desc, p_desc = descriptors
    _, _, v_tiles, do_tiles, s_tiles, _ = tiles
    _, _, full, empty, v_full, v_empty = barriers
    _, _, _, count, _, first, _ = work
    i, n, key = 0, _filled(first, work), 0
    if n < count:
        _load_queries(i, n, key, descriptors, tiles, barriers, work, PARTS, PER_Q, PER_V)
    while n < count:
        row, b, h, t, _rows = _place(n, work)
        this = key  # the first key of this slice; n and key then refer to the next slice
        n, key = _next(n, key, work, SLICES)
        for j in range(tiles_v):
            item = i * tiles_v + j
            slot = item % V_SLOTS
            mbarrier.wait(v_empty.index(slot), (item // V_SLOTS & 1) ^ 1)
            mbarrier.expect(v_full.index(slot), 2 * v_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(do_desc, [b, h, t, j * D], v_full.index(slot), do_tiles.index(slot))
            tma.async_copy_global_to_shared(v_desc, [b, h // PER_V, t, j * D], v_full.index(slot), v_tiles.index(slot))
            _load_states(s_desc, s_tiles, full, empty, 2 * item, (row, h // PER_V, this, j * D), PARTS, SLOTS)
            _load_states(p_desc, s_tiles, full, empty, 2 * item + 1, (row, h, this, j * D), PARTS, SLOTS)
            if (j == gl.maximum(tiles_v - 2, 1)) & (n < count):
                _load_queries(i + 1, n, key, descriptors, tiles, barriers, work, PARTS, PER_Q, PER_V)
        i += 1


@gluon.jit
def _tile(tiles, i):
    """Returns tile i of several tiles [1, 1, C, D] as a matrix [C, D]."""
    return tiles.index(i).reshape([tiles.type.shape[3], tiles.type.shape[4]])


@gluon.jit
def _are_mild(marks, keys, flags, slot, PARTS: gl.constexpr):
    """Returns whether each part of a slice is mild, and stores it for the gradient warps.

    A flag is 0 if the part is not mild, 1 if it is mild but another part is not, and 3 if all are mild.

    Args:
        marks: a pointer to the marks of the slice.
        keys: number of keys from the start of the slice to the end of the head.
    """
    mild = ()
    for p in gl.static_range(PARTS):
        mild += (gl.load(marks + p, p * D < keys, 0) == 0,)
    together = mild[0]
    if PARTS > 1:
        together = together & mild[1]
    for p in gl.static_range(PARTS):
        flag = gl.where(mild[p], gl.where(together, 3, 1), 0)
        flags.index(PARTS * slot + p).store(gl.full([1], flag, gl.int32, gl.SliceLayout(1, RUNS)))
    return mild


@gluon.jit
def _divide_by_unit(tile):
    """Divides a tile [C, D] in float16 by its unit, and returns the unit.

    The unit is 1, or the least power of two that makes all numbers less than 128.
    """
    bits = magnitudes(None, tile, RUNS)
    most = gl.max(bits.reshape([C * D]), 0)
    exponent = gl.maximum((most & 0x7F800000) - (6 << 23), 127 << 23)  # of the unit, as its bits in float32
    if exponent > 127 << 23:
        inverse = ((254 << 23) - exponent).to(gl.float32, bitcast=True)
        tile.store((tile.load(RUNS).to(gl.float32) * inverse).to(tile.dtype))
    return exponent.to(gl.float32, bitcast=True)


@gluon.jit
def _store_number(tiles, i, x):
    """Stores a number in element i of `tiles` [n, 1]."""
    tiles.index(i).store(gl.full([1], x, gl.float32, gl.SliceLayout(1, RUNS)))


@gluon.jit
def _number(tiles, i):
    """Returns the number in element i of `tiles` [n, 1]."""
    return gl.max(tiles.index(i).load(gl.SliceLayout(1, LAYOUT)), 0)


@gluon.jit
def _decay(g_desc, tiles, slot, are_mild, rows, scale, units, PARTS: gl.constexpr, PACKED: gl.constexpr):
    """Replaces q, k by qg, kg, and the gates by the exponents of queries, and stores b_C / 2 [D] of each part.

    With float16, it also stores `a` and the units of q and k of each part. If q and k were float32, these are given as
    `units`. If they were not, `units` is None, and q and k are divided by units.

    Loops over parts run at run time, here and below, to keep the code small: the instructions are fetched again for
    each slice.
    """
    q_tiles, k_tiles, x_tiles, _, r_tiles, _, _, firsts, part_units = tiles
    HALF: gl.constexpr = q_tiles.dtype == gl.float16
    for p in range(PARTS):
        tile_number = PARTS * slot + p
        q_tile, k_tile = _tile(q_tiles, tile_number), _tile(k_tiles, tile_number)
        if PACKED:
            clear_rows(q_tile, rows, RUNS)
            clear_rows(k_tile, rows, RUNS)
        if HALF:
            q_unit, k_unit = (_divide_by_unit(q_tile), _divide_by_unit(k_tile)) if units is None else units
            _store_number(part_units, 2 * tile_number, q_unit)
            _store_number(part_units, 2 * tile_number + 1, k_unit)
        if g_desc is not None:
            mild = are_mild[0] if PARTS == 1 else gl.where(p == 0, are_mild[0], are_mild[1])
            g = gates(gate_tile(g_desc, x_tiles, tile_number), rows, PACKED)  # [C, D]
            first = 0.0
            if HALF:
                row = gl.arange(0, C, gl.SliceLayout(1, RUNS))[:, None]  # [C, 1]
                first = gl.max(gl.max(gl.where(row == 0, g, 2 * LEAST_GATE), 0), 0)  # a
                _store_number(firsts, tile_number, first)
            x, end = exponents(g, mild, first)  # [C, D], [D]
            _tile(x_tiles, tile_number).store(x)
            r_tiles.index(tile_number).store(0.5 * end)
            decay(q_tile, k_tile, x, end, mild, first, scale)
        else:
            q_tile.store((q_tile.load(RUNS).to(gl.float32) * scale).to(q_tile.dtype))


@gluon.jit
def _write_dg(
    tiles, slot, place, key, dg_ptr, logits, sizes, NORMALIZER: gl.constexpr, PARTS: gl.constexpr, PER_V: gl.constexpr
):
    """Writes dg of a slice: the anchor, which is the value at the chunk's start, minus the sum of w before each row.

    Args:
        place: see `_place`.
        key: the first key of the slice.
        logits: if NORMALIZER is given, a pointer to the logits, and the strides of batches, tokens and heads.
    """
    _, _, _, w_tiles, _, anchors, _, _, _ = tiles
    _, b, h, t, rows = place
    T, Ho, K, _, _ = sizes
    row = (gl.arange(0, C, gl.SliceLayout(1, RUNS)) + opaque_zero())[:, None]  # [C, 1]
    column = gl.arange(0, D, gl.SliceLayout(0, RUNS))[None, :]  # [1, D]
    first = dg_ptr + ((b.to(gl.int64) * T + t) * Ho + h) * K + key
    offsets = row.to(gl.int64) * (Ho * K) + column  # [C, D]
    for p in range(PARTS):
        inside = (row < rows) & (column < K - key - p * D)
        if NORMALIZER is not None:
            g_ptr, g_b, g_t, g_h = logits
            head = g_ptr + b.to(gl.int64) * g_b + (h // PER_V).to(gl.int64) * g_h
            x = gl.load(head + (t + row).to(gl.int64) * g_t + (key + p * D + column), inside, 0.0)  # [C, D], logits
        if PARTS > 1:
            w = _tile(w_tiles, PARTS * slot + p).load(RUNS)  # [C, D]
        else:
            w = _tile(w_tiles, 2 * slot).load(RUNS) - _tile(w_tiles, 2 * slot + 1).load(RUNS)  # [C, D]
        anchor = anchors.index(PARTS * slot + p).load(gl.SliceLayout(0, RUNS))  # [D]
        dg = anchor[None, :] - (gl.associative_scan(w, 0, plus) - w)  # [C, D]
        if NORMALIZER is not None:
            dg *= slope_of_gates(x, NORMALIZER)
        gl.store(first + p * D + offsets, dg.to(dg_ptr.dtype.element_ty), inside)


@gluon.jit
def _gate_warps(
    args, NORMALIZER: gl.constexpr, PARTS: gl.constexpr, SLICES: gl.constexpr, PER_Q: gl.constexpr, PER_V: gl.constexpr
):
    """Replaces q, k by qg, kg in each slice, and writes dg of the previous slice."""
    g_desc, tiles, barriers, marks, dg_ptr, logits, work, sizes, scale, q_units, k_units = args
    qk_full, qk_empty, gated, w_full = barriers
    _, Ho, K, count, order, first, _ = work
    PACKED: gl.constexpr = order is not None
    mild_flags = tiles[6]
    i, n, key = 0, _filled(first, work), 0
    last_n, last_key = -1, 0
    while (n < count) | (last_n >= 0):
        slot = i % CHUNKS
        if n < count:
            row, _b, h, _t, rows = _place(n, work)
            are_mild = ()
            if g_desc is not None:
                at = (row * Ho + h).to(gl.int64) * gl.cdiv(K, D) + key // D
                are_mild = _are_mild(marks + at, K - key, mild_flags, slot, PARTS)
            mbarrier.wait(qk_full.index(slot), i // CHUNKS & 1)
            units: gl.constexpr = None
            if q_units is not None:
                q_unit = unit_at(q_units, row, Ho // PER_Q, h // PER_Q)
                units = (q_unit, unit_at(k_units, row, Ho // (PER_Q * PER_V), h // (PER_Q * PER_V)))
            _decay(g_desc, tiles, slot, are_mild, rows, scale, units, PARTS, PACKED)
            fence_async_shared()  # qg and kg have been stored from registers; wgmma reads them
            mbarrier.arrive(gated.index(slot), count=1)
        if last_n >= 0:
            slot = (i + 1) % CHUNKS  # of the previous slice, because CHUNKS is 2
            if g_desc is not None:
                mbarrier.wait(w_full.index(slot), (i - 1) // CHUNKS & 1)
                place = _place(last_n, work)
                _write_dg(tiles, slot, place, last_key, dg_ptr, logits, sizes, NORMALIZER, PARTS, PER_V)
            mbarrier.arrive(qk_empty.index(slot), count=1)
        last_n, last_key = gl.where(n < count, n, -1), key
        n, key = _next(n, key, work, SLICES)
        i += 1


@gluon.jit
def _sums_of_runs(x):
    """Returns the sums of each 8 adjacent columns of x [D, D] as [D, D / 8]. In ROWS, a thread holds all 8."""
    return gl.sum(x.reshape([D, D // 8, 8]), 2)


@gluon.jit
def _masked(scores, row, column, dtype: gl.constexpr):
    """Returns the scores [C, C] where row <= column, else 0, as an operand, and its unit."""
    return in_units(gl.where(row <= column, scores, 0.0), dtype)


@gluon.jit
def _inverse(unit):
    """Returns 1 / unit for a power of two."""
    return ((254 << 23) - unit.to(gl.int32, bitcast=True)).to(gl.float32, bitcast=True)


@gluon.jit
def _units_of_slice(units, row, h, H, key, K, V):
    """Returns a pointer to the unit of the first tile of a slice, from units [n, H, tiles of keys, tiles of values]."""
    return units + ((row * H + h).to(gl.int64) * gl.cdiv(K, D) + key // D) * gl.cdiv(V, D)


@gluon.jit
def _unit_of_tile(units, p, j, keys, V):
    """Returns the unit of the j-th tile of values of part p of a slice; 1 beyond the keys and the values of the head.

    Args:
        units: see `_units_of_slice`.
        keys: number of keys from the start of the slice to the end of the head.
    """
    tiles_v = gl.cdiv(V, D)
    return gl.load(units + p * tiles_v + j, (p * D < keys) & (j < tiles_v), 1.0)


@gluon.jit
def _gradient_warps(
    args,
    part: gl.constexpr,
    PARTS: gl.constexpr,
    SLICES: gl.constexpr,
    SLOTS: gl.constexpr,
    HAS_GATE: gl.constexpr,
    PER_Q: gl.constexpr,
    PER_V: gl.constexpr,
):
    """Computes dq and dk of a part of the keys; with one part, dq or dk. The second warpgroup also computes dv.

    Args:
        part: the number of this gradient warpgroup.
    """
    tiles, barriers, outputs, work, sums, sizes, scale, units, outer = args
    q_tiles, k_tiles, v_tiles, do_tiles, s_tiles, x_tiles, w_tiles, out_tiles = tiles[:8]
    r_tiles, anchors, flags, firsts, part_units, score_units = tiles[8:]
    s_units, p_units, v_units, do_units = units
    qk_empty, gated, w_full, full, empty, v_full, v_empty, ready = barriers
    dq_desc, dk_desc, dv_desc, dq_ptr, dk_ptr, dv_ptr = outputs
    T, Ho, K, V, tiles_v = sizes
    _, _, _, count, order, first, _ = work
    PACKED: gl.constexpr = order is not None
    dtype: gl.constexpr = q_tiles.dtype
    HALF: gl.constexpr = dtype == gl.float16
    WRITES_DQ: gl.constexpr = PARTS > 1 or part == 0
    WRITES_DK: gl.constexpr = PARTS > 1 or part == 1
    tile_part: gl.constexpr = part if PARTS > 1 else 0
    KEEPS_P: gl.constexpr = PARTS > 1 and part == 1  # its tile of P then holds dv, until TMA has read that
    none = gl.zeros([C, C], gl.float32, LAYOUT)  # also for [C, D], since C = D
    in_order = gl.arange(0, C, gl.SliceLayout(1, LAYOUT))[:, None] * D  # [C, D] with the next line, offsets in a tile
    in_order += gl.arange(0, D, gl.SliceLayout(0, LAYOUT))[None, :]
    i, n, key = 0, _filled(first, work), 0
    item = 0
    while n < count:
        state, b, h, t, rows = _place(n, work)
        where = (b, h, t, T, Ho)
        slot = i % CHUNKS
        tile_number = PARTS * slot + tile_part
        q_tile, k_tile = _tile(q_tiles, tile_number), _tile(k_tiles, tile_number)
        row = (gl.arange(0, C, gl.SliceLayout(1, LAYOUT)) + opaque_zero())[:, None]  # [C, 1]
        column = (gl.arange(0, C, gl.SliceLayout(0, LAYOUT)) + opaque_zero())[None, :]  # [1, C]
        tma.store_wait(0)  # the gradients of the previous slice have left the tiles
        mbarrier.arrive(qk_empty.index((i + 1) % CHUNKS), count=1, pred=i > 0)
        mbarrier.wait(gated.index(slot), i // CHUNKS & 1)
        last = True  # whether this is the last slice of the pair
        if SLICES > 1:
            last = key + 2 * D >= K
        beyond = 0  # C would mask every score
        if HAS_GATE:
            flag = gl.max(flags.index(tile_number).load(gl.SliceLayout(1, LAYOUT)), 0)  # see `_are_mild`
            mild = flag != 0
            beyond = gl.where(flag == 3, 0, C)
        if HALF:
            do_unit = unit_at(do_units, state, Ho, h)
            s_at = _units_of_slice(s_units, state, h // PER_V, Ho // PER_V, key, K, V)
            p_at = _units_of_slice(p_units, state, h, Ho, key, K, V)
            s_unit, p_unit = gl.to_tensor(1.0), gl.to_tensor(1.0)  # of the tiles of S and P
        if part == 1:
            aT = none  # [C, C], A^T
            a_unit = 1.0
            for p in gl.static_range(PARTS):
                other_q = _tile(q_tiles, PARTS * slot + p)
                if HALF:
                    before = a_unit
                    a_unit = _number(part_units, 2 * (PARTS * slot + p))
                    a_unit *= _number(part_units, 2 * (PARTS * slot + p) + 1)
                    if p > 0:
                        aT = warpgroup_mma_wait(0, [aT]) * (before * _inverse(a_unit))
                aT = product(_tile(k_tiles, PARTS * slot + p), other_q.permute([1, 0]), aT)
            aT, aT_unit = _masked(warpgroup_mma_wait(0, [aT]), row + beyond, column, dtype)
            aT = gl.convert_layout(aT, LEFT)
            values_unit = a_unit * aT_unit * do_unit if HALF else 1.0  # of A^T do
        # dq and dk are [C, D]. `square` is dA [C, C] in the first warpgroup, and a tile of dv [C, D] in the second.
        dq, dk, square = none, none, none
        crossing = _sums_of_runs(gl.zeros([D, D], gl.float32, ROWS))  # S * P, summed over tiles of values
        for j in range(tiles_v):
            v_slot = item % V_SLOTS
            S, P = 2 * item % SLOTS, (2 * item + 1) % SLOTS  # the slots of S and of P
            v_tile, do_tile = _tile(v_tiles, v_slot), _tile(do_tiles, v_slot)
            s_tile, p_tile = _tile(s_tiles, PARTS * S + tile_part), _tile(s_tiles, PARTS * P + tile_part)
            if HALF:
                s_before, p_before = s_unit, p_unit
                s_unit = _unit_of_tile(s_at, tile_part, j, K - key, V)
                p_unit = _unit_of_tile(p_at, tile_part, j, K - key, V)
                first_unit = _unit_of_tile(p_at, 0, j, K - key, V)  # of the first part's tile of P
            if part == 1:
                square = none
                if SLICES > 1:
                    summed = sums + j * (C * D) + in_order  # [C, D]
                    earlier = gl.load(summed, key > 0, 0.0)  # [C, D], which the same thread has stored
                    if not HALF:
                        square = earlier
            mbarrier.wait(v_full.index(v_slot), item // V_SLOTS & 1)
            if PACKED:
                clear_rows(do_tile, rows, LAYOUT)
                if HALF:  # rows of the next sequence would count in the largest number of dA
                    clear_rows(v_tile, rows, LAYOUT)
                fence_async_shared()  # wgmma reads the cleared rows
            mbarrier.wait(full.index(S), 2 * item // SLOTS & 1)
            if HALF:  # the units have arrived while this warpgroup waited
                dq *= s_before * _inverse(s_unit)
                dk *= p_before * _inverse(p_unit)
                if part == 1:
                    square = product(aT, do_tile, none)
            if WRITES_DQ:
                dq = product(do_tile, s_tile.permute([1, 0]), dq)
            if part == 0:
                square = product(do_tile, v_tile.permute([1, 0]), square)
            mbarrier.wait(full.index(P), (2 * item + 1) // SLOTS & 1)
            if WRITES_DK:
                dk = product(v_tile, p_tile.permute([1, 0]), dk)
            if part == 1:
                if not HALF:
                    square = product(aT, do_tile, square)
                unit = values_unit  # of `square`
                for p in gl.static_range(PARTS):
                    if HALF:
                        before = unit
                        unit = _number(part_units, 2 * (PARTS * slot + p) + 1) * (first_unit if p == 0 else p_unit)
                        inverse = _inverse(unit)
                        square = warpgroup_mma_wait(0, [square]) * (before * inverse)
                        if p == 0 and SLICES > 1:
                            square += earlier * inverse
                    square = product(_tile(k_tiles, PARTS * slot + p), _tile(s_tiles, PARTS * P + p), square)
            if KEEPS_P:  # while the products run, the previous tile of dv leaves its tile of P
                tma.store_wait(0)
                mbarrier.arrive(empty.index((2 * item - 1) % SLOTS), count=1, pred=j > 0)
            if HAS_GATE and WRITES_DQ:
                sums_of_tile = _sums_of_runs(s_tile.load(ROWS).to(gl.float32) * p_tile.load(ROWS).to(gl.float32))
                crossing += sums_of_tile * (s_unit * p_unit) if HALF else sums_of_tile
            if PARTS > 1:
                dq, dk, square = warpgroup_mma_wait(0, [dq, dk, square])
            elif part == 0:
                dq, square = warpgroup_mma_wait(0, [dq, square])
            else:
                dk, square = warpgroup_mma_wait(0, [dk, square])
            if HAS_GATE and WRITES_DQ:
                fence_async_shared()  # S and P have been loaded to registers; TMA overwrites the tiles
            mbarrier.arrive(empty.index(S), count=1, pred=j + 1 < tiles_v)  # the last tile of S will hold dA
            if not KEEPS_P:
                mbarrier.arrive(empty.index(P), count=1)
            mbarrier.arrive(v_empty.index(v_slot), count=1)
            if part == 1:
                if HALF:
                    square *= unit
                if SLICES > 1:
                    gl.store(summed, square, key + 2 * D < K)
                if last:
                    if not KEEPS_P:
                        tma.store_wait(0)
                    dv_tile = p_tile if KEEPS_P else _tile(out_tiles, 0)
                    dv = square * outer if HALF else square
                    write(dv_desc, dv_ptr, dv_tile, dv, j * D, V, where, rows, PACKED)
            item += 1

        last_S, last_P = (2 * item - 2) % SLOTS, (2 * item - 1) % SLOTS
        da_tile = _tile(s_tiles, PARTS * last_S)  # [C, C]; only the first warpgroup reads this tile of S
        if part == 0:
            dA, dA_unit = _masked(square, column + beyond, row, dtype)
            da_tile.store(dA)
            if HALF:
                score_units.index(slot).store(gl.full([1], dA_unit, gl.float32, gl.SliceLayout(1, LAYOUT)))
            fence_async_shared()
        mbarrier.arrive(ready, count=1)
        if HAS_GATE and WRITES_DQ:
            anchors.index(tile_number).store(gl.sum(crossing, 1))
        mbarrier.wait(ready, i & 1)
        first_gate = 0.0
        if HALF:
            if HAS_GATE:
                first_gate = _number(firsts, tile_number)
            q_unit, k_unit = _number(part_units, 2 * tile_number), _number(part_units, 2 * tile_number + 1)
            v_unit = unit_at(v_units, state, Ho // PER_V, h // PER_V)
            scores_unit = _number(score_units, slot) * v_unit * do_unit
            dq *= s_unit * do_unit
            dk *= p_unit * v_unit
            if WRITES_DK:  # a sum of its own, because its unit may be too small to be a divisor of the other
                more = warpgroup_mma_wait(0, [product(da_tile.permute([1, 0]), q_tile, none)])  # [C, D]
                dk += more * (scores_unit * q_unit)
        if WRITES_DQ:
            started = product(da_tile, k_tile, none)  # [C, D], dA kg
        if WRITES_DK and not HALF:
            dk = product(da_tile.permute([1, 0]), q_tile, dk)
        if KEEPS_P:  # the same for the last tile of dv
            tma.store_wait(0)
            mbarrier.arrive(empty.index(last_P), count=1)
        if HAS_GATE:
            r = r_tiles.index(tile_number).load(gl.SliceLayout(0, LAYOUT))[None, :]  # [1, D]
            x = _tile(x_tiles, tile_number).load(LAYOUT)  # [C, D]
            w_tile = _tile(w_tiles, 2 * slot + part)  # [C, D]; with two parts, w takes the place of x
            if WRITES_DQ:
                dq *= gl.exp2(gl.where(mild, r, first_gate))
                w_tile.store(q_tile.load(LAYOUT).to(gl.float32) * dq)
                # The term of queries that read S. In this layout, the sum needs no scratch memory.
                entered = gl.sum(w_tile.load(RUNS), 0)  # [D]
                half = r_tiles.index(tile_number).load(gl.SliceLayout(0, RUNS))  # b_C / 2 [D]
                crossed = anchors.index(tile_number).load(gl.SliceLayout(0, RUNS))  # [D]
                if HALF:
                    entered, crossed = entered * (q_unit * outer), crossed * outer
                anchors.index(tile_number).store(entered + crossed * gl.exp2(gl.where(mild, half, 2 * half)))
        if WRITES_DQ and (HALF or not WRITES_DK):
            started = warpgroup_mma_wait(0, [started])
        elif WRITES_DQ:
            started, dk = warpgroup_mma_wait(0, [started, dk])
        elif not HALF:
            dk = warpgroup_mma_wait(0, [dk])
        mbarrier.arrive(empty.index(last_S), count=1)
        if WRITES_DQ:
            dq += started * (scores_unit * k_unit) if HALF else started
        if HAS_GATE:
            if HALF:
                q_unit *= outer
                k_unit *= outer
            if WRITES_DQ:
                w_q = q_tile.load(LAYOUT).to(gl.float32) * (dq * q_unit if HALF else dq)  # [C, D]
            if WRITES_DK:
                w_k = k_tile.load(LAYOUT).to(gl.float32) * (dk * k_unit if HALF else dk)
            w = w_q - w_k if PARTS > 1 else w_q if part == 0 else w_k
            w_tile.store(w)
            mbarrier.arrive(w_full.index(slot), count=1)
            if WRITES_DQ:
                dq *= gl.exp2(x)
            if WRITES_DK:
                dk *= gl.exp2(gl.where(mild, 0.0, 2 * r - first_gate) - x)
        # With two parts, dq and dk are written through the tiles of q and k, which all warps have read.
        if WRITES_DQ:
            dq_tile = q_tile if PARTS > 1 else _tile(out_tiles, 1)
            write(dq_desc, dq_ptr, dq_tile, dq * scale, key + tile_part * D, K, where, rows, PACKED)
        if WRITES_DK:
            dk_tile = k_tile if PARTS > 1 else _tile(out_tiles, 0)
            if PARTS == 1:
                tma.store_wait(0)  # the last tile of dv has left out_tiles
            write(dk_desc, dk_ptr, dk_tile, dk * outer if HALF else dk, key + tile_part * D, K, where, rows, PACKED)
        n, key = _next(n, key, work, SLICES)
        i += 1
    tma.store_wait(0)


# K, V and the strides of logits are specialised: if they are multiples of 16, a thread moves two elements at once.
@gluon.jit(do_not_specialize=["scale", "count", "step", "T", "Ho", "tiles_v"])
def _gradient_kernel(
    q_desc,  # [B, Hq, T, K], tiles [C, D]
    k_desc,  # [B, H, T, K], tiles [C, D]
    v_desc,  # [B, Hv, T, V], tiles [C, D]
    do_desc,  # [B, Ho, T, V], tiles [C, D]
    g_desc,  # log gates, [B, Hv, T, K], tiles [C, D], or None
    dq_desc,  # [B, Ho, T, K], tiles [C, D]; None if q was float32, here and below
    dk_desc,  # [B, Ho, T, K], tiles [C, D]
    dv_desc,  # [B, Ho, T, V], tiles [C, D]
    s_desc,  # S, [n, Hv, K, V], tiles [D, D]
    p_desc,  # P, [n, Ho, K, V], tiles [D, D]
    dq_ptr,  # [B, T, Ho, K]
    dk_ptr,  # [B, T, Ho, K]
    dv_ptr,  # [B, T, Ho, V]
    dg_ptr,  # [B, T, Ho, K] or None
    g_ptr,  # logits, [B, T, Hv, K], if NORMALIZER is given, else None
    s_units,  # [n, Hv, tiles of keys, tiles of values], the units of S, or None for bfloat16
    p_units,  # [n, Ho, tiles of keys, tiles of values], the units of P, or None
    q_units,  # [n, Hq] if q, k, v and do were float32, else None
    k_units,  # [n, H] or None
    v_units,  # [n, Hv] or None
    do_units,  # [n, Ho] or None
    marks,  # [n, Ho, blocks of D keys], 1 if these keys of a chunk are not mild; None if g is None
    sums,  # [programs, tiles_v, C, D] float32, or None if there is one slice
    order,  # [n, 5], the chunks as segments, or None for a batch
    scale,
    count,  # number of pairs
    step,  # number of blocks
    T,
    g_b,  # strides of logits
    g_t,
    g_h,
    Ho,
    K,
    V,
    tiles_v,  # number of tiles of values, at least two: with one, a warpgroup could fall behind by a slice
    PARTS: gl.constexpr,
    SLICES: gl.constexpr,
    SLOTS: gl.constexpr,  # pipeline stages of S and P, each with the keys of a slice
    PER_Q: gl.constexpr,
    PER_V: gl.constexpr,
    NORMALIZER: gl.constexpr,
):
    """Computes every step-th pair of a chunk and a head of o."""
    HAS_GATE: gl.constexpr = marks is not None
    dtype: gl.constexpr = q_desc.dtype
    exponents: gl.constexpr = gl.NVMMASharedLayout.get_default_for([1, 1, C, D], gl.float32)
    row_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q_tiles = gl.allocate_shared_memory(dtype, [CHUNKS * PARTS, 1, 1, C, D], q_desc.layout)
    k_tiles = gl.allocate_shared_memory(dtype, [CHUNKS * PARTS, 1, 1, C, D], k_desc.layout)
    v_tiles = gl.allocate_shared_memory(dtype, [V_SLOTS, 1, 1, C, D], v_desc.layout)
    do_tiles = gl.allocate_shared_memory(dtype, [V_SLOTS, 1, 1, C, D], do_desc.layout)
    s_tiles = gl.allocate_shared_memory(dtype, [PARTS * SLOTS, 1, 1, D, D], s_desc.layout)
    # x_tiles hold g, then the exponents of queries; with two parts, then w.
    x_tiles = gl.allocate_shared_memory(gl.float32, [CHUNKS * PARTS, 1, 1, C, D], exponents) if HAS_GATE else q_tiles
    # out_tiles are of dk and dv, and of dq. With two parts, dq, dk and dv are written through tiles of inputs.
    out_tiles = gl.allocate_shared_memory(dtype, [2, 1, 1, C, D], v_desc.layout) if PARTS == 1 else q_tiles
    w_tiles = x_tiles
    if HAS_GATE and PARTS == 1:
        w_tiles = gl.allocate_shared_memory(gl.float32, [CHUNKS * 2, 1, 1, C, D], exponents)
    r_tiles = gl.allocate_shared_memory(gl.float32, [CHUNKS * PARTS, D], row_layout)  # b_C / 2
    anchors = gl.allocate_shared_memory(gl.float32, [CHUNKS * PARTS, D], row_layout)  # dg at the chunk's start
    mild_flags = gl.allocate_shared_memory(gl.int32, [CHUNKS * PARTS, 1], row_layout)  # see `_are_mild`
    firsts: gl.constexpr = None
    part_units: gl.constexpr = None
    score_units: gl.constexpr = None
    if dtype == gl.float16:
        firsts = gl.allocate_shared_memory(gl.float32, [CHUNKS * PARTS, 1], row_layout)  # a of each part
        part_units = gl.allocate_shared_memory(gl.float32, [2 * CHUNKS * PARTS, 1], row_layout)  # of q and k, in turns
        score_units = gl.allocate_shared_memory(gl.float32, [CHUNKS, 1], row_layout)  # of dA
    bars: gl.constexpr = mbarrier.MBarrierLayout()
    qk_full = gl.allocate_shared_memory(gl.int64, [CHUNKS, 1], bars)  # q, k and g have been loaded
    qk_empty = gl.allocate_shared_memory(gl.int64, [CHUNKS, 1], bars)  # dq, dk, dg have left the tiles of q, k, g
    gated = gl.allocate_shared_memory(gl.int64, [CHUNKS, 1], bars)  # q, k have become qg, kg, and g the exponents
    w_full = gl.allocate_shared_memory(gl.int64, [CHUNKS, 1], bars)  # w and the anchor have been written
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], bars)  # a tile of S or P has been loaded
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], bars)  # both warpgroups need it no longer
    v_full = gl.allocate_shared_memory(gl.int64, [V_SLOTS, 1], bars)  # tiles of v and do have been loaded
    v_empty = gl.allocate_shared_memory(gl.int64, [V_SLOTS, 1], bars)  # both warpgroups have read them
    ready = gl.allocate_shared_memory(gl.int64, [1], bars)  # dA has been written, and all of kg has been read
    for slot in gl.static_range(CHUNKS):
        mbarrier.init(qk_full.index(slot), count=1)
        mbarrier.init(qk_empty.index(slot), count=3)  # the gate warpgroup and both gradient warpgroups
        mbarrier.init(gated.index(slot), count=1)
        mbarrier.init(w_full.index(slot), count=2)  # both gradient warpgroups, here and below
    for slot in gl.static_range(SLOTS):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=2)
    for slot in gl.static_range(V_SLOTS):
        mbarrier.init(v_full.index(slot), count=1)
        mbarrier.init(v_empty.index(slot), count=2)
    mbarrier.init(ready, count=2)

    descriptors = (q_desc, k_desc, v_desc, do_desc, g_desc, s_desc, p_desc)
    load_tiles = (q_tiles, k_tiles, v_tiles, do_tiles, s_tiles, x_tiles)
    load_barriers = (qk_full, qk_empty, full, empty, v_full, v_empty)
    gate_tiles = (q_tiles, k_tiles, x_tiles, w_tiles, r_tiles, anchors, mild_flags, firsts, part_units)
    gate_barriers = (qk_full, qk_empty, gated, w_full)
    tiles = (
        q_tiles,
        k_tiles,
        v_tiles,
        do_tiles,
        s_tiles,
        x_tiles,
        w_tiles,
        out_tiles,
        r_tiles,
        anchors,
        mild_flags,
        firsts,
        part_units,
        score_units,
    )
    barriers = (qk_empty, gated, w_full, full, empty, v_full, v_empty, ready)
    outputs = (dq_desc, dk_desc, dv_desc, dq_ptr, dk_ptr, dv_ptr)
    work = (T, Ho, K, count, order, gl.program_id(0), step)
    sizes = (T, Ho, K, V, tiles_v)
    if SLICES > 1:
        sums += gl.program_id(0) * (tiles_v * (C * D))
    logits = (g_ptr, g_b, g_t, g_h)
    q_factor, outer = factors_of(scale, dtype)
    units = (s_units, p_units, v_units, do_units)
    gate = (g_desc, gate_tiles, gate_barriers, marks, dg_ptr, logits, work, sizes, q_factor, q_units, k_units)
    gradients = (tiles, barriers, outputs, work, sums, sizes, scale, units, outer)
    load = (descriptors, load_tiles, load_barriers, work, tiles_v)
    # Registers of a thread of the gradient warpgroups. The gate warpgroup has the rest, and needs more for logits.
    REGISTERS: gl.constexpr = 208 if NORMALIZER is None else 192
    gl.warp_specialize(
        [
            (_gate_warps, (gate, NORMALIZER, PARTS, SLICES, PER_Q, PER_V)),
            (_gradient_warps, (gradients, 0, PARTS, SLICES, SLOTS, HAS_GATE, PER_Q, PER_V)),
            (_gradient_warps, (gradients, 1, PARTS, SLICES, SLOTS, HAS_GATE, PER_Q, PER_V)),
            (_load_warp, (load, PARTS, SLICES, SLOTS, PER_Q, PER_V)),
        ],
        [4, 4, 1],
        [REGISTERS, REGISTERS, 24],
    )
