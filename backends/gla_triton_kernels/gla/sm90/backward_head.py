"""Computes gradients of gated linear attention on Hopper, with one gate for each head or without gates.

The kernel goes backwards through the chunks in one pass. For a chunk of C tokens, let S be the entering state, P the
gradient of the leaving state, b_t the sum of the log gates of the chunk through t, and

    A_ts  = scale * q_t k_s exp(b_t - b_s)       dA_ts = scale * do_t v_s exp(b_t - b_s)       for s <= t, else 0
    dq^S_t = scale * exp(b_t) do_t S^T           dk^S_s = exp(b_C - b_s) v_s P^T

    dq = dq^S + dA k             dk = dk^S + dA^T q
    dv_s = exp(b_C - b_s) k_s P + (A^T do)_s
    dS = exp(b_C) P + sum over t of (scale * exp(b_t) q_t)^T do_t

dS is the gradient of S, and is P of the previous chunk. Gate g_u decays every contribution from before u to u and
after. Its gradient has four terms: the entering state contributes to the leaving state and to tokens from u on, and
tokens before u contribute to the leaving state and to tokens from u on:

    dg_u = exp(b_C) sum(S * P) + sum over t >= u of q_t dq^S_t + sum over s < u of k_s dk^S_s
           + sum over s < u <= t of A_ts (do_t v_s)

With float16, an operand that is a sum or a product (S, P, A, dA, scale * exp(b) do) is divided by its unit; see
common.py and operands.py. exp(b) could be 0 for all tokens, so exp(b_1) is then left out of scale * exp(b) do, and
multiplies dS instead.

No exponent is above 0, so one path handles gates of any strength; see forward_head.py for the sums of gates. The last
term of dg is a difference of two sums that both contain the pairs on the same side of u. These are the same float32
numbers in both, so the error of the difference is at most 2^-20 of the sum. If exp(g_u) is 0 in float32, dg_u is set
to 0, which is its exact value.

B batch   T tokens   N sequences   I segments   H key heads   Hq query heads   Hv value heads, of v, g and S
Ho = max(Hq, Hv) heads of o   K, V key and value width   C tokens of a chunk   D = 64 columns of a tile
PARTS parts of 64 keys of a block   HALVES parts of 64 values of a block
SLOTS = 2 pipeline stages   slot   a pipeline stage in shared memory: the tiles of one chunk
rows   of checkpoints: one for each chunk; see common.py: `chunk_of`
eo   scale * exp(b) do   dots   sums of products of each token, for dg

The grid has one block per segment (by default a whole sequence), head of o, 64 PARTS keys and 64 HALVES values. The
warps of a block are specialised. They communicate over barriers in shared memory; common.py gives the rules.

    load       one warp: copies q, k, v, do and S of the next chunks to shared memory by TMA
    gate       one warp: sums the gates of the next chunks, and computes dg
    score      a warpgroup: computes A^T, dA^T and scale * exp(b) do; then dv
    gradient   PARTS warpgroups: each holds the rows of dS of its 64 keys in registers, and computes dq and dk of these
               keys

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

from gla_core.dispatch.tensors import ceil_div
from gla_triton_kernels.chunks import partials
from gla_triton_kernels.chunks.kernel import GradientParameters
from gla_triton_kernels.chunks.segments import Segments
from gla_triton_kernels.gla.shared.limits import LEAST_GATE
from gla_triton_kernels.gla.sm90.common import (
    as_float32,
    clear_rows,
    gate_strides,
    gates_of,
    in_units,
    keep_apart,
    log_gates,
    logits_of,
    opaque_zero,
    plus,
    row_sums,
    slope_of_gates,
    sum_of_earlier,
    unit_at,
    write,
)
from gla_triton_kernels.gla.sm90.common_backward import (
    LAYOUT,
    LEFT,
    C,
    D,
    gradient_arguments,
    leaving_gradient,
    product,
    segment_backwards,
)
from gla_triton_kernels.gla.sm90.half import in_half
from gla_triton_kernels.gla.sm90.operands import as_operands, store_operands
from gla_triton_kernels.gla.tensors import BackwardTensors
from gla_triton_runtime.arithmetic import LOG2E
from gla_triton_runtime.launch import Launch

SLOTS = gl.constexpr(2)  # pipeline stages of q, k, v and do
LINE = gl.constexpr(gl.BlockedLayout([C.value // 32], [32], [1], [0]))  # of the tokens of a chunk, in one warp
ONE = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))  # of one number, in one warp
# Vectors [C] of `dots` for a chunk: the sums of A_ts (do_t v_s) over s, and over t; then, for each part of the keys,
# the sums of q * dq^S and of k * dk^S over its keys, and of exp(b_C) S * P over values.
ROOM = gl.constexpr(8)
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
    """Returns the launches that fill the gradients in x; entering is bfloat16, or float32 if q is float16.

    See `launch_gradients` of general/backward.py for the other arguments.
    """
    x, units, converted = in_half(x, ("q", "k", "v", "do"), x.cu_seqlens)
    (Hq, K), H, (Hv, V), Ho = x.q.shape[2:], x.k.shape[2], x.v.shape[2:], x.do.shape[2]
    entering, s_units, before = as_operands(entering, x.q.dtype)
    blocks_k, blocks_v = ceil_div(K, kernel.BK), ceil_div(V, kernel.BV)
    dq, dk = (partials.parts_of(y, blocks_v) for y in (x.dq, x.dk))
    dv, blocks = partials.parts_of(x.dv, blocks_k), blocks_k * blocks_v
    constant = x.g is not None and x.g.ndim == 1
    dg = partials.parts_of(x.dg, blocks)
    if x.g is not None and constant:  # one sum for each segment and block
        dg = x.g.new_empty(segments.count * blocks, Ho, dtype=torch.float32)
    arguments = {
        **gradient_arguments(kernel, x, entering, leaving, segments, scale, bool(converted)),
        "dq_ptr": dq,
        "dk_ptr": dk,
        "dv_ptr": dv,
        "dg_ptr": dg,
        "g_ptr": x.g,
        "s_units": s_units,
        **units,
        **gate_strides(x.g),
        "Ho": Ho,
        "per_q": Ho // Hq,
        "per_k": Ho // H,
        "per_v": Ho // Hv,
        "CONSTANT": constant,
        "NORMALIZER": normalizer,
    }
    grid = (blocks * segments.count * Ho, 1, 1)
    options = {"num_warps": kernel.warps, "maxnreg": 128}
    computed = Launch(_gla_backward_head_kernel, grid, arguments, options)
    if constant:
        return [
            *(*converted, *before, computed, partials.launch_sum_of_rows(dg, x.dg)),
            *partials.launch_partial_sums((dq, dk, dv), (x.dq, x.dk, x.dv)),
        ]
    return [*converted, *before, computed, *partials.launch_partial_sums((dq, dk, dg, dv), (x.dq, x.dk, x.dg, x.dv))]


@gluon.jit
def _load_warp(args, PARTS: gl.constexpr, HALVES: gl.constexpr):
    """Loads the inputs of all chunks, the last chunk first, ahead of the other warps."""
    descriptors, tiles, barriers, where = args
    q_desc, k_desc, v_desc, do_desc, s_desc = descriptors
    q_tiles, k_tiles, v_tiles, do_tiles, s_tiles = tiles
    full, empty, s_full, s_empty = barriers
    b, h, heads, key, value, start, chunks, row = where
    q_head, k_head, v_head = heads
    TILE: gl.constexpr = q_desc.block_type.nbytes
    for i in range(chunks):
        c = chunks - 1 - i
        t = start + c * C
        slot = i % SLOTS
        bar = full.index(slot)
        mbarrier.wait(empty.index(slot), (i // SLOTS & 1) ^ 1)
        mbarrier.expect(bar, 2 * (PARTS + HALVES) * TILE)
        for j in gl.static_range(HALVES):
            at = HALVES * slot + j
            tma.async_copy_global_to_shared(v_desc, [b, v_head, t, value + j * D], bar, v_tiles.index(at))
            tma.async_copy_global_to_shared(do_desc, [b, h, t, value + j * D], bar, do_tiles.index(at))
        for p in gl.static_range(PARTS):
            at = PARTS * slot + p
            tma.async_copy_global_to_shared(q_desc, [b, q_head, t, key + p * D], bar, q_tiles.index(at))
            tma.async_copy_global_to_shared(k_desc, [b, k_head, t, key + p * D], bar, k_tiles.index(at))
        mbarrier.wait(s_empty, (i & 1) ^ 1)
        mbarrier.expect(s_full, PARTS * HALVES * TILE)
        for p in gl.static_range(PARTS):
            for j in gl.static_range(HALVES):
                place = [row + c, v_head, key + p * D, value + j * D]
                tma.async_copy_global_to_shared(s_desc, place, s_full, s_tiles.index(HALVES * p + j))


@gluon.jit
def _gate_gradients(gates, dots, slot, t, rows, NORMALIZER: gl.constexpr, PARTS: gl.constexpr):
    """Returns dg [C] of the chunk that begins at token t, from the sums that other warps have written to `dots`."""
    token = gl.arange(0, C, LINE)  # [C]
    pair_terms = (dots.index(ROOM * slot).load(LINE) - dots.index(ROOM * slot + 1).load(LINE)).to(gl.float64)
    pair_terms = gl.associative_scan(pair_terms, 0, plus, reverse=True)  # [C], pairs of tokens on two sides of u
    q_terms = gl.zeros([C], gl.float32, LINE)  # q_t dq^S_t
    k_terms = gl.zeros([C], gl.float32, LINE)  # k_s dk^S_s
    state_terms = gl.zeros([C], gl.float32, LINE)  # exp(b_C) S * P, whose sum counts
    for p in gl.static_range(PARTS):
        q_terms += dots.index(ROOM * slot + 2 + 3 * p).load(LINE)
        k_terms += dots.index(ROOM * slot + 3 + 3 * p).load(LINE)
        state_terms += dots.index(ROOM * slot + 4 + 3 * p).load(LINE)
    q_terms = gl.where(token < rows, q_terms, 0.0).to(gl.float64)
    k_terms = gl.where(token < rows, k_terms, 0.0).to(gl.float64)
    later = gl.associative_scan(q_terms, 0, plus, reverse=True)  # [C], from tokens u on
    earlier = sum_of_earlier(k_terms)  # [C], from tokens before u
    dg = gl.sum(state_terms.to(gl.float64), 0) + later + earlier + gl.where(token > 0, pair_terms, 0.0)
    x = logits_of(gates, t, rows, token)  # read again, because Triton 3.6 confuses gates that are kept through the loop
    g = log_gates(x, NORMALIZER)
    if NORMALIZER is not None:
        dg *= slope_of_gates(x, NORMALIZER).to(gl.float64)
    return gl.where((token < rows) & (g > LEAST_GATE), dg, 0.0)


@gluon.jit
def _gate_warp(
    gates, args, scale, NORMALIZER: gl.constexpr, PARTS: gl.constexpr, CONSTANT: gl.constexpr, HALF: gl.constexpr
):
    """Sums the gates of each chunk, and writes dg of the previous chunk.

    With CONSTANT, the gradient of the gate is summed over the segment.
    """
    sums, decays, dots, empty, summed, dotted, dg_ptr, start, length, Ho = args
    token = gl.arange(0, C, LINE)  # [C]
    chunks = gl.cdiv(length, C)
    segment_sums = gl.zeros([C], gl.float64, LINE)  # sums of dg over chunks
    if gates is not None:
        first = gl.maximum(chunks - 1, 0) * C
        g_next = gates_of(gates, start + first, length - first, token, NORMALIZER)
        for i in range(chunks + 1):
            slot = i % SLOTS
            if i < chunks:
                c = chunks - 1 - i
                wide = g_next.to(gl.float64) * LOG2E  # [C]
                ahead = gl.where(c > 0, C, 0)
                g_next = gates_of(gates, start + (c - 1) * C, ahead, token, NORMALIZER)  # loaded during this chunk
                total = gl.associative_scan(wide, 0, plus)  # [C], b
                end = gl.sum(wide, 0)  # b_C
                mbarrier.wait(empty.index(slot), (i // SLOTS & 1) ^ 1)
                b = total.to(gl.float32)
                sums.index(3 * slot).store(b)
                sums.index(3 * slot + 1).store(gl.exp2(b) * scale)
                sums.index(3 * slot + 2).store(gl.exp2((end - total).to(gl.float32)))
                decays.index(slot).store(gl.full([1], gl.exp2(end.to(gl.float32)), gl.float32, ONE))
                if HALF:
                    b_1 = gl.max(total, 0)
                    decays.index(SLOTS + slot).store(gl.full([1], gl.exp2(b_1.to(gl.float32)), gl.float32, ONE))
                    rest = gl.exp2((end - b_1).to(gl.float32))
                    decays.index(2 * SLOTS + slot).store(gl.full([1], rest, gl.float32, ONE))
                mbarrier.arrive(summed.index(slot), count=1)
            if i > 0:
                last = (i - 1) % SLOTS
                first = (chunks - i) * C
                rows = gl.minimum(length - first, C)
                mbarrier.wait(dotted.index(last), (i - 1) // SLOTS & 1)
                dg = _gate_gradients(gates, dots, last, start + first, rows, NORMALIZER, PARTS)
                if CONSTANT:
                    segment_sums += dg
                else:
                    at = dg_ptr + (start + first + token).to(gl.int64) * Ho
                    gl.store(at, dg.to(dg_ptr.dtype.element_ty), token < rows)
        if CONSTANT:
            gl.store(dg_ptr, gl.sum(segment_sums, 0).to(gl.float32))


@gluon.jit
def _number(numbers, i):
    """Returns number i from shared memory [.., 1], as a scalar."""
    return gl.max(numbers.index(i).load(gl.SliceLayout(1, LAYOUT)), 0)


@gluon.jit
def _units_of(units, c):
    """Returns the units of q, k, v and do in chunk c of the segment; see half.py."""
    q_units, k_units, v_units, do_units, row, heads, numbers = units
    q_head, k_head, v_head, h = heads
    Hq, H, Hv, Ho = numbers
    q_unit, k_unit = unit_at(q_units, row + c, Hq, q_head), unit_at(k_units, row + c, H, k_head)
    return q_unit, k_unit, unit_at(v_units, row + c, Hv, v_head), unit_at(do_units, row + c, Ho, h)


@gluon.jit
def _score_warps(args, scale, PARTS: gl.constexpr, HALVES: gl.constexpr, HAS_GATE: gl.constexpr, PACKED: gl.constexpr):
    """Computes A^T, dA^T, scale * exp(b) do, the sums of A * (do v^T) for dg, and dv of each chunk."""
    tiles, barriers, outputs, units, place, sizes = args
    q_tiles, k_tiles, v_tiles, do_tiles, p_tiles, eo_tiles, da_tile, sums, dots, p_units, o_units = tiles
    dtype: gl.constexpr = q_tiles.dtype
    HALF: gl.constexpr = dtype == gl.float16
    full, empty, summed, gated, ready, used, v_read, p_read, dotted = barriers
    dv_desc, dv_ptr = outputs
    b, h, value, start, length = place
    T, Ho, V = sizes
    s = gl.arange(0, C, gl.SliceLayout(1, LAYOUT))[:, None]  # [C, 1]
    t = gl.arange(0, C, gl.SliceLayout(0, LAYOUT))[None, :]  # [1, C]
    none = gl.zeros([C, C], gl.float32, LAYOUT)  # also for [C, D], since C = D
    chunks = gl.cdiv(length, C)
    for i in range(chunks):
        c = chunks - 1 - i
        slot = i % SLOTS
        phase = i // SLOTS & 1
        rows = gl.minimum(length - c * C, C)
        q_unit, k_unit, v_unit, do_unit = _units_of(units, c)
        mbarrier.wait(full.index(slot), phase)
        if PACKED:
            for p in gl.static_range(PARTS):
                clear_rows(q_tiles.index(PARTS * slot + p).reshape([C, D]), rows, ROWS)
                clear_rows(k_tiles.index(PARTS * slot + p).reshape([C, D]), rows, ROWS)
            for j in gl.static_range(HALVES):
                clear_rows(do_tiles.index(HALVES * slot + j).reshape([C, D]), rows, ROWS)
            fence_async_shared()  # wgmma reads the cleared rows
        aT = none  # [C, C]
        for p in gl.static_range(PARTS):
            q_tile = q_tiles.index(PARTS * slot + p).reshape([C, D])
            aT = product(k_tiles.index(PARTS * slot + p).reshape([C, D]), q_tile.permute([1, 0]), aT)
        daT = none  # [C, C]
        for j in gl.static_range(HALVES):
            do_tile = do_tiles.index(HALVES * slot + j).reshape([C, D])
            daT = product(v_tiles.index(HALVES * slot + j).reshape([C, D]), do_tile.permute([1, 0]), daT)
        tma.store_wait(0)  # dv of the previous chunk has left the tiles of v
        mbarrier.arrive(empty.index((i + SLOTS - 1) % SLOTS), count=1, pred=i > 0)
        mbarrier.wait(used, (i & 1) ^ 1)  # dA and scale * exp(b) do of the previous chunk have been read
        if HAS_GATE:
            mbarrier.wait(summed.index(slot), phase)
            enter = sums.index(3 * slot + 1).load(gl.SliceLayout(1, ROWS))[:, None]  # [C, 1], scale * exp(b)
            if HALF:
                b_t = sums.index(3 * slot).load(gl.SliceLayout(1, ROWS))  # [C]
                enter = (gl.exp2(b_t - gl.max(b_t, 0)) * scale)[:, None]  # [C, 1], scale * exp(b - b_1)
        else:
            enter = scale
        for j in gl.static_range(HALVES):
            do_tile = do_tiles.index(HALVES * slot + j).reshape([C, D])
            eo, unit = in_units(as_float32(do_tile.load(ROWS)) * enter, dtype)
            eo_tiles.index(j).store(eo)
            if HALF:
                unit *= q_unit * do_unit
                o_units.index(1 + j).store(gl.full([1], unit, gl.float32, gl.SliceLayout(1, LAYOUT)))
        aT, daT = warpgroup_mma_wait(0, [aT, daT])
        below = (t >= s) & (t < rows)  # [C, C]; scores are transposed, so s is the row
        between = scale
        if HAS_GATE:
            b_rows = sums.index(3 * slot).load(gl.SliceLayout(1, LAYOUT))[:, None]  # [C, 1], b_s
            b_columns = sums.index(3 * slot).load(gl.SliceLayout(0, LAYOUT))[None, :]  # [1, C], b_t
            between = gl.exp2(b_columns - b_rows) * scale  # [C, C], undefined for t < s
        if HALF:
            aT, daT = aT * (q_unit * k_unit), daT * (do_unit * v_unit)
        aT = gl.where(below, aT * between, 0.0)  # [C, C]
        da, unit = in_units(gl.where(below, daT * between, 0.0), dtype)  # [C, C], dA^T
        da_tile.store(da)
        if HALF:
            o_units.index(0).store(gl.full([1], unit, gl.float32, gl.SliceLayout(1, LAYOUT)))
        fence_async_shared()  # dA^T and scale * exp(b) do have been stored from registers; wgmma reads them
        mbarrier.arrive(gated.index(slot), count=1)
        if HAS_GATE:
            pairs = gl.where((t > s) & (t < rows), aT * daT, 0.0)  # [C, C]
            dots.index(ROOM * slot).store(gl.sum(pairs, 0))
            dots.index(ROOM * slot + 1).store(gl.sum(pairs, 1))
            mbarrier.arrive(dotted.index(slot), count=1)
        aT, a_unit = in_units(aT, dtype)
        a_unit *= do_unit
        aT = gl.convert_layout(aT, LEFT)  # the left operand of wgmma may stay in registers

        mbarrier.wait(ready, i & 1)
        zero = opaque_zero()  # otherwise the compiler would keep addresses of the first products, and spill them
        dv = ()  # [C, D] each
        for j in gl.static_range(HALVES):
            acc = none
            for p in gl.static_range(PARTS):
                k_tile = k_tiles.index(zero + PARTS * slot + p).reshape([C, D])
                acc = product(k_tile, p_tiles.index(zero + HALVES * p + j).reshape([D, D]), acc)
                if HALF:
                    unit = _number(p_units, p) * k_unit
                    following = _number(p_units, p + 1) * k_unit if p + 1 < PARTS else a_unit
                    acc = warpgroup_mma_wait(0, [acc]) * (unit / following)
            dv += (acc,)
        if HAS_GATE:
            leave = sums.index(3 * slot + 2).load(gl.SliceLayout(1, LAYOUT))[:, None]  # [C, 1], exp(b_C - b)
            decayed = ()
            for j in gl.static_range(HALVES):
                decayed += (warpgroup_mma_wait(0, [dv[j]]) * leave,)
            dv = decayed
            mbarrier.arrive(p_read, count=1)
        finished = ()
        for j in gl.static_range(HALVES):
            finished += (product(aT, do_tiles.index(zero + HALVES * slot + j).reshape([C, D]), dv[j]),)
        finished = warpgroup_mma_wait(0, finished)
        if HALVES == 1:
            finished = (finished,)  # `warpgroup_mma_wait` returns a tuple of one element as the element
        if not HAS_GATE:
            mbarrier.arrive(p_read, count=1)
        mbarrier.wait(v_read, i & 1)
        where = (b, h, start + c * C, T, Ho)
        for j in gl.static_range(HALVES):
            v_tile = v_tiles.index(zero + HALVES * slot + j).reshape([C, D])
            x = finished[j] * a_unit if HALF else finished[j]
            write(dv_desc, dv_ptr, v_tile, x, value + j * D, V, where, rows, PACKED)
    tma.store_wait(0)


@gluon.jit
def _gradient_warps(
    args, part: gl.constexpr, PARTS: gl.constexpr, HALVES: gl.constexpr, HAS_GATE: gl.constexpr, PACKED: gl.constexpr
):
    """Carries the rows of dS of D keys backwards through the segment, and writes dq and dk.

    Args:
        part: the number of this gradient warpgroup.
    """
    tiles, barriers, outputs, states, units, place, sizes, scale = args
    q_tiles, k_tiles, v_tiles, do_tiles, s_tiles, p_tiles, eo_tiles, da_tile, sums, decays, dots = tiles[:11]
    p_units, o_units = tiles[11:]
    dtype: gl.constexpr = q_tiles.dtype
    HALF: gl.constexpr = dtype == gl.float16
    full, empty, s_full, s_empty, gated, ready, used, v_read, p_read, dotted = barriers
    dq_desc, dk_desc, dq_ptr, dk_ptr = outputs
    leaving, held, adds, strides, dinitial, s_units = states
    b, h, v_head, n, key, value, start, length = place
    T, Ho, K, V, Hv = sizes
    key += part * D
    keys = key + gl.arange(0, D, gl.SliceLayout(1, LAYOUT))[:, None]  # [D, 1]
    values = value + gl.arange(0, D, gl.SliceLayout(0, LAYOUT))[None, :]  # [1, D]
    none = gl.zeros([C, D], gl.float32, LAYOUT)
    dS = leaving_gradient(leaving, strides, n, v_head, held, adds, keys, values, V, None, HALVES)  # [D, D] each
    waiting = ()  # factors of dS that have not been applied yet, one for each half
    for _ in gl.static_range(HALVES):
        waiting += (gl.to_tensor(1.0),)
    # With an opaque zero, addresses are computed again in each chunk, and the compiler does not spill them. In some
    # cases fewer spills are left if only those of S are.
    ONLY_S: gl.constexpr = (PACKED and not HALF) or dq_desc is None
    chunks = gl.cdiv(length, C)
    for i in range(chunks):
        c = chunks - 1 - i
        slot = i % SLOTS
        rows = gl.minimum(length - c * C, C)
        zero = opaque_zero()
        others = 0 if ONLY_S else zero
        q_tile = q_tiles.index(others + PARTS * slot + part).reshape([C, D])
        k_tile = k_tiles.index(others + PARTS * slot + part).reshape([C, D])
        if HALF:
            scaled = ()
            for j in gl.static_range(HALVES):
                scaled += (dS[j] * waiting[j],)
            dS = scaled
        p_unit = store_operands(p_tiles, others + HALVES * part, dS, HALVES)
        s_unit = 1.0
        q_unit, k_unit, v_unit, do_unit = _units_of(units, c)
        if HALF:
            p_units.index(part).store(gl.full([1], p_unit, gl.float32, gl.SliceLayout(1, LAYOUT)))
            # A part beyond the keys of the head has no unit.
            s_unit = gl.load(s_units + c.to(gl.int64) * Hv * gl.cdiv(K, D) + key // D, key < K, 1.0)
        fence_async_shared()  # P has been stored from registers; wgmma reads it
        mbarrier.arrive(ready, count=1)
        tma.store_wait(0)  # dq and dk of the previous chunk have left the tiles
        mbarrier.arrive(empty.index((i + SLOTS - 1) % SLOTS), count=1, pred=i > 0)
        mbarrier.wait(full.index(slot), i // SLOTS & 1)
        dk = none  # [C, D], v P^T
        for j in gl.static_range(HALVES):
            p_tile = p_tiles.index(others + HALVES * part + j).reshape([D, D])
            dk = product(v_tiles.index(others + HALVES * slot + j).reshape([C, D]), p_tile.permute([1, 0]), dk)
        mbarrier.wait(s_full, i & 1)
        if PACKED:
            mbarrier.wait(gated.index(slot), i // SLOTS & 1)  # rows of the next sequence have been cleared
        dq = none  # [C, D], do S^T
        for j in gl.static_range(HALVES):
            s_tile = s_tiles.index(zero + HALVES * part + j).reshape([D, D])
            dq = product(do_tiles.index(others + HALVES * slot + j).reshape([C, D]), s_tile.permute([1, 0]), dq)
        if HAS_GATE:
            through = gl.zeros([D], gl.float32, gl.SliceLayout(1, LAYOUT))  # sums of S * P over values
            for j in gl.static_range(HALVES):
                s_tile = s_tiles.index(zero + HALVES * part + j).reshape([D, D])
                through += row_sums(dS[j] * as_float32(s_tile.load(LAYOUT)))
        mbarrier.wait(gated.index(slot), i // SLOTS & 1)
        dk, dq = warpgroup_mma_wait(0, [dk, dq])
        if HAS_GATE:
            fence_async_shared()  # S has been loaded to registers; TMA overwrites the tiles
        mbarrier.arrive(s_empty, count=1)
        mbarrier.arrive(v_read, count=1)
        if HAS_GATE:
            dq *= sums.index(3 * slot + 1).load(gl.SliceLayout(1, LAYOUT))[:, None]
            dk *= sums.index(3 * slot + 2).load(gl.SliceLayout(1, LAYOUT))[:, None]
            decay = gl.max(decays.index(slot).load(gl.SliceLayout(1, LAYOUT)), 0)  # exp(b_C)
            dot = ROOM * slot + 2 + 3 * part
            dots.index(dot).store(row_sums(as_float32(q_tile.load(LAYOUT)) * dq) * (s_unit * do_unit * q_unit))
            dots.index(dot + 1).store(row_sums(as_float32(k_tile.load(LAYOUT)) * dk) * (p_unit * v_unit * k_unit))
            dots.index(dot + 2).store(through * decay * s_unit)
            mbarrier.arrive(dotted.index(slot), count=1)
        else:
            dq *= scale
        if HALF:
            a_unit = _number(o_units, 0)
            dq *= s_unit * do_unit / (a_unit * k_unit)
            dk *= p_unit * v_unit / (a_unit * q_unit)
        decayed = ()
        for j in gl.static_range(HALVES):
            factor = decay if HAS_GATE else 1.0
            if HALF:
                rest = _number(decays, 2 * SLOTS + slot) if HAS_GATE else 1.0
                factor = rest / _number(o_units, 1 + j)
            decayed += (dS[j] * factor if HAS_GATE or HALF else dS[j],)
        dq = product(da_tile.permute([1, 0]), k_tile, dq)
        dk = product(da_tile, q_tile, dk)
        entering = ()  # [D, D] each, the gradient of S
        for j in gl.static_range(HALVES):
            entering += (product(q_tile.permute([1, 0]), eo_tiles.index(j), decayed[j]),)
        token_products = (dq, dk)
        finished = warpgroup_mma_wait(0, entering + token_products)
        dS, dq, dk = finished[:HALVES], finished[HALVES], finished[HALVES + 1]
        if HALF:
            dq, dk = dq * (a_unit * k_unit), dk * (a_unit * q_unit)
            waiting = ()
            for j in gl.static_range(HALVES):
                first = _number(decays, SLOTS + slot) if HAS_GATE else 1.0
                waiting += (first * _number(o_units, 1 + j),)
        mbarrier.arrive(used, count=1)
        dq = dq.to(dtype) if dq_desc is not None else dq
        dk = dk.to(dtype) if dk_desc is not None else dk
        mbarrier.wait(p_read, i & 1)  # the score warps have read P, and k, which dk overwrites
        where = (b, h, start + c * C, T, Ho)
        write(dq_desc, dq_ptr, q_tile, dq, key, K, where, rows, PACKED)
        write(dk_desc, dk_ptr, k_tile, dk, key, K, where, rows, PACKED)
    if dinitial is not None:
        for j in gl.static_range(HALVES):
            to = dinitial + ((n * Ho + h).to(gl.int64) * K + keys) * V + values + j * D
            gl.store(to, dS[j] * waiting[j] if HALF else dS[j], (keys < K) & (values + j * D < V))
    tma.store_wait(0)
    keep_apart(part)


# V is specialised: if it is a multiple of 16, a thread moves two elements of a state at once.
@gluon.jit(
    do_not_specialize=["scale", "g_b", "g_t", "g_h", "T", "segment", "segments", "Ho", "per_q", "per_k", "K", "B"]
)
def _gla_backward_head_kernel(
    q_desc,  # [B, Hq, T, K], tiles [C, D]
    k_desc,  # [B, H, T, K], tiles [C, D]
    v_desc,  # [B, Hv, T, V], tiles [C, D]
    do_desc,  # [B, Ho, T, V], tiles [C, D]
    s_desc,  # states that enter chunks, [rows, Hv, K, V], tiles [D, D], divided by their units
    dq_desc,  # [B, Ho, T, K], tiles [C, D]; None if there are several blocks of values
    dk_desc,  # like dq_desc
    dv_desc,  # [B, Ho, T, V], tiles [C, D]; None if there are several blocks of keys
    dq_ptr,  # [blocks of values, B, T, Ho, K]
    dk_ptr,  # [blocks of values, B, T, Ho, K]
    dv_ptr,  # [blocks of keys, B, T, Ho, V]
    dg_ptr,  # [blocks of keys and values, B, T, Ho]; [I, blocks of keys and values, Ho] with CONSTANT; or None
    g_ptr,  # [B, T, Hv], or [Hv] with g_b = g_t = 0, or None
    s_units,  # [rows, Hv, tiles of D keys], the units of the states; None for bfloat16
    leaving,  # gradients of leaving states, [I, Hv, K, V] or None
    dinitial,  # gradients of initial states, [N, Ho, K, V] or None
    order,  # [I, 5], or None for a batch
    q_units,  # [rows, Hq] if q, k, v and do were float32, else None
    k_units,  # [rows, H] or None
    v_units,  # [rows, Hv] or None
    do_units,  # [rows, Ho] or None
    scale,
    g_b,  # strides of g
    g_t,
    g_h,
    state_n,  # strides of `leaving`; see `in_state`
    state_h,
    state_k,
    state_v,
    T,
    segment,  # tokens of a segment
    segments,  # segments of a sequence of a batch
    Ho,
    per_q,  # heads of o that share a head of q
    per_k,  # heads of o that share a head of k
    per_v,  # heads of o that share a head of v
    K,
    V,
    B,
    PARTS: gl.constexpr,
    HALVES: gl.constexpr,
    CONSTANT: gl.constexpr,
    NORMALIZER: gl.constexpr,
    LAST_LEAVE_NONE: gl.constexpr,
):
    """Computes the gradients of one head of o of one segment, for a block of keys and of values."""
    HAS_GATE: gl.constexpr = g_ptr is not None
    PACKED: gl.constexpr = order is not None
    blocks_v = gl.cdiv(V, HALVES * D)
    blocks_k = gl.cdiv(K, PARTS * D)
    pid = gl.program_id(0)  # neighbouring blocks read the same q and k, or the same v and do
    block_v = pid % blocks_v
    block_k = pid // blocks_v % blocks_k
    h = pid // (blocks_v * blocks_k) % Ho
    n = pid // (blocks_v * blocks_k * Ho)
    n, b, start, length, row, held = segment_backwards(n, T, segment, segments, order, K, LAST_LEAVE_NONE)
    chunks = gl.cdiv(length, C)
    key = block_k * (PARTS * D)
    value = block_v * (HALVES * D)
    whole = B.to(gl.int64) * T * Ho
    dq_ptr += block_v * whole * K
    dk_ptr += block_v * whole * K
    dv_ptr += block_k * whole * V
    v_head = h // per_v
    gates: gl.constexpr = None
    if CONSTANT:
        dg_ptr += ((n * blocks_k + block_k) * blocks_v + block_v).to(gl.int64) * Ho + h
    elif HAS_GATE:
        dg_ptr += (block_k * blocks_v + block_v) * whole + b.to(gl.int64) * T * Ho + h
    if HAS_GATE:
        gates = (g_ptr + b.to(gl.int64) * g_b + v_head.to(gl.int64) * g_h, g_t)

    Hv = Ho // per_v
    if s_units is not None:
        s_units += (row * Hv + v_head).to(gl.int64) * gl.cdiv(K, D)
    dtype: gl.constexpr = q_desc.dtype
    HALF: gl.constexpr = dtype == gl.float16
    tile_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, D], dtype)
    row_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q_tiles = gl.allocate_shared_memory(dtype, [SLOTS * PARTS, 1, 1, C, D], q_desc.layout)
    k_tiles = gl.allocate_shared_memory(dtype, [SLOTS * PARTS, 1, 1, C, D], k_desc.layout)
    v_tiles = gl.allocate_shared_memory(dtype, [SLOTS * HALVES, 1, 1, C, D], v_desc.layout)
    do_tiles = gl.allocate_shared_memory(dtype, [SLOTS * HALVES, 1, 1, C, D], do_desc.layout)
    s_tiles = gl.allocate_shared_memory(dtype, [PARTS * HALVES, 1, 1, D, D], s_desc.layout)
    p_tiles = gl.allocate_shared_memory(dtype, [PARTS * HALVES, 1, 1, D, D], s_desc.layout)
    eo_tiles = gl.allocate_shared_memory(dtype, [HALVES, C, D], tile_layout)  # scale * exp(b) do
    da_tile = gl.allocate_shared_memory(dtype, [C, C], tile_layout)  # dA^T
    sums = gl.allocate_shared_memory(gl.float32, [3 * SLOTS, C], row_layout)  # b, scale * exp(b), exp(b_C - b)
    decays = gl.allocate_shared_memory(gl.float32, [3 * SLOTS, 1], row_layout)  # exp(b_C); exp(b_1), exp(b_C - b_1)
    dots = gl.allocate_shared_memory(gl.float32, [ROOM * SLOTS, C], row_layout)  # sums of products for dg
    # Units for float16: of the parts of P; of dA and the halves of scale * exp(b) do.
    p_units = gl.allocate_shared_memory(gl.float32, [PARTS, 1], row_layout)
    o_units = gl.allocate_shared_memory(gl.float32, [1 + HALVES, 1], row_layout)
    bars: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], bars)  # q, k, v, do have been loaded
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], bars)  # dq, dk, dv have left the tiles of q, k, v
    gated = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], bars)  # dA, scale * exp(b) do and decays have been written
    s_full = gl.allocate_shared_memory(gl.int64, [1], bars)  # S has been loaded
    s_empty = gl.allocate_shared_memory(gl.int64, [1], bars)  # S has been read
    ready = gl.allocate_shared_memory(gl.int64, [1], bars)  # all parts of P have been written
    summed = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], bars)  # the sums of gates have been written
    dotted = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], bars)  # the sums of products for dg have been written
    used = gl.allocate_shared_memory(gl.int64, [1], bars)  # dA and scale * exp(b) do have been read
    v_read = gl.allocate_shared_memory(gl.int64, [1], bars)  # v has been read by the gradient warps
    p_read = gl.allocate_shared_memory(gl.int64, [1], bars)  # P and k have been read by the score warps
    for i in gl.static_range(SLOTS):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=PARTS + 1)  # the gradient warpgroups and the score warpgroup
        mbarrier.init(summed.index(i), count=1)
        mbarrier.init(gated.index(i), count=1)
        mbarrier.init(dotted.index(i), count=PARTS + 1)  # the same warpgroups
    mbarrier.init(s_full, count=1)
    mbarrier.init(s_empty, count=PARTS)
    mbarrier.init(ready, count=PARTS)
    mbarrier.init(used, count=PARTS)
    mbarrier.init(v_read, count=PARTS)
    mbarrier.init(p_read, count=1)

    load_tiles = (q_tiles, k_tiles, v_tiles, do_tiles, s_tiles)
    load_place = (b, h, (h // per_q, h // per_k, v_head), key, value, start, chunks, row)
    load = ((q_desc, k_desc, v_desc, do_desc, s_desc), load_tiles, (full, empty, s_full, s_empty), load_place)
    gate = (sums, decays, dots, empty, summed, dotted, dg_ptr, start, length, Ho)
    score_tiles = (q_tiles, k_tiles, v_tiles, do_tiles, p_tiles, eo_tiles, da_tile, sums, dots, p_units, o_units)
    score_barriers = (full, empty, summed, gated, ready, used, v_read, p_read, dotted)
    heads = (h // per_q, h // per_k, v_head, h)
    units = (q_units, k_units, v_units, do_units, row, heads, (Ho // per_q, Ho // per_k, Hv, Ho))
    score = (score_tiles, score_barriers, (dv_desc, dv_ptr), units, (b, h, value, start, length), (T, Ho, V))
    tiles = (q_tiles, k_tiles, v_tiles, do_tiles, s_tiles, p_tiles, eo_tiles, da_tile, sums, decays, dots)
    tiles += (p_units, o_units)
    barriers = (full, empty, s_full, s_empty, gated, ready, used, v_read, p_read, dotted)
    outputs = (dq_desc, dk_desc, dq_ptr, dk_ptr)
    states = (leaving, held, h % per_v == 0, (state_n, state_h, state_k, state_v), dinitial, s_units)
    place = (b, h, v_head, n, key, value, start, length)
    gradient_args = (tiles, barriers, outputs, states, units, place, (T, Ho, K, V, Hv), scale)
    # Registers of a thread. The score warps have the remaining registers.
    if PARTS == 1:
        gl.warp_specialize(
            [
                (_score_warps, (score, scale, PARTS, HALVES, HAS_GATE, PACKED)),
                (_gradient_warps, (gradient_args, 0, PARTS, HALVES, HAS_GATE, PACKED)),
                (_load_warp, (load, PARTS, HALVES)),
                (_gate_warp, (gates, gate, scale, NORMALIZER, PARTS, CONSTANT, HALF)),
            ],
            [4, 1, 1],
            [184, 48, 48],
        )
    else:
        gl.warp_specialize(
            [
                (_score_warps, (score, scale, PARTS, HALVES, HAS_GATE, PACKED)),
                (_gradient_warps, (gradient_args, 0, PARTS, HALVES, HAS_GATE, PACKED)),
                (_gradient_warps, (gradient_args, 1, PARTS, HALVES, HAS_GATE, PACKED)),
                (_load_warp, (load, PARTS, HALVES)),
                (_gate_warp, (gates, gate, scale, NORMALIZER, PARTS, CONSTANT, HALF)),
            ],
            [4, 4, 1, 1],
            [168, 168, 48, 48],
        )
