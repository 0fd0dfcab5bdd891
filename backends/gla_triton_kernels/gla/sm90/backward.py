"""Computes gradients of chunked gated linear attention on Hopper in one pass, from the last chunk to the first.

For a chunk of C tokens, let S be the entering state, dS the gradient of the leaving state, b_t = g_1 + .. + g_t the
sums of the log gates of the chunk, r = b_C / 2, and

    qg = scale q exp(b - r)      kg = k exp(r - b)      P = exp(b_C - r) dS
    A  = tril(qg kg^T)           dA = tril(do v^T)

    dq = scale exp(b - r) * (dA kg + do (exp(r) S)^T)       dk = exp(r - b) * (dA^T qg + v P^T)
    dv = A^T do + kg P                                      dS' = exp(r) (P + qg^T do)
    dg_u = sum over V of S * dS' - sum over t < u of (q * dq - k * dk)_t

dS' is the gradient of S. In dg, the sum over V of S * dS' is the `anchor`, the value at the chunk's start, and
w = q * dq - k * dk is computed from the rounded operands of the products. A pair of tokens on the same side of gate u,
or a pair of a token with itself, therefore adds the same products to q * dq and to k * dk, and they cancel.

In a chunk that is not mild (some channel decays by more than MILD_DECAY_SM90) A and dA count as 0. The other terms are
computed from

    qg = scale q exp(b)          kg = k exp(b_C - b)        P = dS        dS' = exp(b_C) dS + qg^T do

in which no exponent is above 0. The kernel marks the chunk, and pairs.py adds the terms of its pairs of tokens.

With float16, an operand that is a sum (S, P, A, dA) is divided by its unit; see common.py and operands.py. A mild chunk
then decays by at most MILD_DECAY_HALF, and its |q| and |k| are at most MILD_INPUT_HALF. `scale` is left out of qg and
of dS, to keep the range of q, and multiplies all gradients instead. In other chunks exp(b) could be 0 for all tokens.
So exp(b) is divided by exp(a), where a is the largest gate of the first token (`first`):

    qg = scale q exp(b - a)      dS' = exp(a) (exp(b_C - a) dS + qg^T do)

B batch   T tokens   N sequences   I segments   H key heads   Hq query heads   Hv value heads, of v, g and S
Ho = max(Hq, Hv) heads of o   PER_Q, PER_V heads of o that share a head of q, of v; one of them is 1
K, V key and value width   C tokens of a chunk   D = 64 columns of a tile
PARTS parts of 64 keys of a block   HALVES parts of 64 values of a block
SLOTS = 2 pipeline stages of q, k and g   slot   a pipeline stage in shared memory: the tiles of one chunk
VALUE_SLOTS pipeline stages of v, do and S: 2, or 1 for 128 keys and 128 values, for which shared memory is too small
rows   of checkpoints: one for each chunk; see common.py: `chunk_of`

The grid has one block per segment (by default a whole sequence), head of o, 64 PARTS keys and 64 HALVES values. The
warps of a block are specialised. They communicate over barriers in shared memory; common.py gives the rules.

    load       one warp: copies q, k, v, do, g and S of the next chunks to shared memory by TMA
    gate       a warpgroup: sums g and replaces q, k by qg, kg in shared memory, while the gradient warps process
               previous chunks; then writes dg from w and the anchor
    gradient   PARTS warpgroups: each holds the rows of dS of its 64 keys in registers, and computes dq, dk, w and the
               anchor of these keys. dv is a sum over all keys: after all warpgroups have written P, each of them
               computes some halves of dv. If there are two warpgroups, the first computes dA and the second A^T. They
               exchange these through the tiles of S.

Sources: Yang et al., "Gated Linear Attention Transformers with Hardware-Efficient Training" (arXiv 2312.06635).
"""

# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportAssignmentType=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
# pyright: reportUnboundVariable=false, reportPossiblyUnboundVariable=false, reportIndexIssue=false
from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma_wait

from gla_core.dispatch.backend import CHUNK
from gla_core.dispatch.tensors import ceil_div
from gla_triton_kernels.chunks import partials
from gla_triton_kernels.chunks.kernel import GradientParameters
from gla_triton_kernels.chunks.segments import Segments
from gla_triton_kernels.gla.shared.limits import LEAST_GATE, MILD_DECAY_HALF, MILD_DECAY_SM90
from gla_triton_kernels.gla.sm90 import pairs
from gla_triton_kernels.gla.sm90.common import (
    as_float32,
    clear_rows,
    fit_mild_chunk,
    in_units,
    magnitudes,
    opaque_zero,
    plus,
    slope_of_gates,
    unit_at,
    write,
)
from gla_triton_kernels.gla.sm90.common_backward import (
    LAYOUT,
    RUNS,
    WIDTH,
    C,
    D,
    decay,
    exponents,
    gate_tile,
    gates,
    gradient_arguments,
    leaving_gradient,
    logits_strides,
    product,
    segment_backwards,
    sums_of_logits,
)
from gla_triton_kernels.gla.sm90.half import in_half
from gla_triton_kernels.gla.sm90.operands import as_operands, factors_of, store_operands
from gla_triton_kernels.gla.tensors import BackwardTensors
from gla_triton_runtime.arithmetic import LOG2E
from gla_triton_runtime.launch import Launch
from gla_triton_runtime.tma import shared_tiles

SLOTS = gl.constexpr(2)  # pipeline stages of q, k and g
ROWS = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))  # a warp holds whole rows
SECTORS = gl.constexpr(gl.BlockedLayout([1, 1], [4, 8], [4, 1], [1, 0]))  # for one element in each 32 bytes


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
    (Hq, K), (Hv, V), Ho = x.q.shape[2:], x.v.shape[2:], x.do.shape[2]
    entering, s_units, before = as_operands(entering, x.q.dtype)
    blocks_k, blocks_v = ceil_div(K, kernel.BK), ceil_div(V, kernel.BV)
    dq, dk, dg = (partials.parts_of(y, blocks_v) for y in (x.dq, x.dk, x.dg))
    dv = partials.parts_of(x.dv, blocks_k)
    marks = pairs.new_marks(x, entering, kernel.BK)
    # With one warpgroup, and for packed sequences, it takes less time to write dg from registers.
    dg_by_tma = blocks_v == 1 and kernel.BK > WIDTH and segments.order is None
    arguments = {
        **gradient_arguments(kernel, x, entering, leaving, segments, scale, bool(converted)),
        "g_desc": shared_tiles(x.g, CHUNK, WIDTH),
        "dg_desc": shared_tiles(x.dg, CHUNK, WIDTH) if dg_by_tma and normalizer is None else None,
        "dq_ptr": dq,
        "dk_ptr": dk,
        "dv_ptr": dv,
        "dg_ptr": dg,
        "g_ptr": x.g if normalizer is not None else None,
        "marks": marks,
        "s_units": s_units,
        **units,
        **logits_strides(x.g, normalizer),
        "Ho": Ho,
        "PER_Q": Ho // Hq,
        "PER_V": Ho // Hv,
        "NORMALIZER": normalizer,
    }
    grid = (blocks_k * blocks_v * segments.count * Ho, 1, 1)
    # A block has all registers of a multiprocessor, for 12 or 16 warps: the load warp takes as many as four warps.
    options = {"num_warps": kernel.warps, "maxnreg": 168 if kernel.BK == WIDTH else 128}
    computed = Launch(_gla_backward_kernel, grid, arguments, options)
    summed = partials.launch_partial_sums((dq, dk, dg, dv), (x.dq, x.dk, x.dg, x.dv))
    added = pairs.launch_pairs(x, units, marks, scale, kernel.BK, normalizer)
    return [*converted, *before, computed, *summed, *added]


@gluon.jit
def _rows():
    """Returns the numbers of the rows of a tile."""
    return (gl.arange(0, C, gl.SliceLayout(1, LAYOUT)) + opaque_zero())[:, None]  # [C, 1]


@gluon.jit
def _columns():
    """Returns the numbers of the columns of a tile."""
    return (gl.arange(0, D, gl.SliceLayout(0, LAYOUT)) + opaque_zero())[None, :]  # [1, D]


@gluon.jit
def _masked(scores, beyond, units, part: gl.constexpr, PARTS: gl.constexpr, dtype: gl.constexpr):
    """Returns the scores [C, C] of this warpgroup, masked, as operands, and stores their units.

    Args:
        scores: a tuple of dA and A^T, or of the one that this warpgroup has computed.
        beyond: C to mask every element, else 0.
    """
    row, column = _rows(), _columns()
    masked = ()
    for n in gl.static_range(2):
        if n % PARTS == part:
            mask = row + beyond <= column if n else row - beyond >= column
            x, unit = in_units(gl.where(mask, scores[n // PARTS], 0.0), dtype)
            masked += (x,)
            if dtype == gl.float16:
                units.index(PARTS + n).store(gl.full([1], unit, gl.float32, gl.SliceLayout(1, LAYOUT)))
    return masked


@gluon.jit
def _load_warp(loads, PARTS: gl.constexpr, HALVES: gl.constexpr, PER_Q: gl.constexpr, PER_V: gl.constexpr):
    """Loads the inputs of all chunks, the last chunk first, ahead of the other warps."""
    descriptors, tiles, barriers, place = loads
    q_desc, k_desc, v_desc, do_desc, g_desc, s_desc = descriptors
    q_tiles, k_tiles, v_tiles, do_tiles, x_tiles, s_tiles = tiles
    g_full, qk_full, qk_empty, v_full, done = barriers
    b, h, key, value, start, chunks, row = place
    VALUE_SLOTS: gl.constexpr = v_tiles.shape[0] // HALVES
    for i in range(chunks):
        c = chunks - 1 - i
        t = start + c * C
        slot = i % SLOTS
        mbarrier.wait(qk_empty.index(slot), (i // SLOTS & 1) ^ 1)
        bar = g_full.index(slot)
        mbarrier.expect(bar, PARTS * g_desc.block_type.nbytes)
        for p in gl.static_range(PARTS):
            x_tile = gate_tile(g_desc, x_tiles, PARTS * slot + p)
            tma.async_copy_global_to_shared(g_desc, [b, h // PER_V, t, key + p * D], bar, x_tile)
        bar = qk_full.index(slot)
        mbarrier.expect(bar, 2 * PARTS * q_desc.block_type.nbytes)
        for p in gl.static_range(PARTS):
            at = PARTS * slot + p
            q_head, k_head = h // PER_Q, h // (PER_Q * PER_V)
            tma.async_copy_global_to_shared(q_desc, [b, q_head, t, key + p * D], bar, q_tiles.index(at))
            tma.async_copy_global_to_shared(k_desc, [b, k_head, t, key + p * D], bar, k_tiles.index(at))
        value_slot = i % VALUE_SLOTS
        bar = v_full.index(value_slot)
        mbarrier.wait(done.index(value_slot), (i // VALUE_SLOTS & 1) ^ 1)
        mbarrier.expect(bar, (2 + PARTS) * HALVES * q_desc.block_type.nbytes)
        for j in gl.static_range(HALVES):
            half = HALVES * value_slot + j
            tma.async_copy_global_to_shared(v_desc, [b, h // PER_V, t, value + j * D], bar, v_tiles.index(half))
            tma.async_copy_global_to_shared(do_desc, [b, h, t, value + j * D], bar, do_tiles.index(half))
        for p in gl.static_range(PARTS):
            for j in gl.static_range(HALVES):
                at = [row + c, h // PER_V, key + p * D, value + j * D]
                s_tile = s_tiles.index(max(PARTS * HALVES, 2) * value_slot + HALVES * p + j)
                tma.async_copy_global_to_shared(s_desc, at, bar, s_tile)


@gluon.jit
def _sum_logits(g_desc, x_tiles, r_tiles, i, rows, NORMALIZER: gl.constexpr):
    """Replaces the logits in tile i by NORMALIZER b [C, D], stores b_C / 2 [D], and returns b_C."""
    b, end = sums_of_logits(gate_tile(g_desc, x_tiles, i), rows, NORMALIZER)  # [C, D], [D]
    x_tiles.index(i).reshape([C, D]).store(b)
    r_tiles.index(i).store(0.5 * end)
    return end


@gluon.jit
def _decay_by_sums(mild, i, tiles, scale, NORMALIZER: gl.constexpr):
    """Replaces q, k in tile i by qg, kg, and the sums of gates by the exponents of queries; see `_sum_logits`."""
    q_tiles, k_tiles, x_tiles, r_tiles, firsts = tiles
    x_tile = x_tiles.index(i).reshape([C, D])
    b = x_tile.load(RUNS) * (1.0 / NORMALIZER)  # [C, D]
    half = r_tiles.index(i).load(gl.SliceLayout(0, RUNS))  # [D], b_C / 2
    first = _first_gate(b, i, q_tiles, firsts)
    x = b - gl.where(mild, half, first)[None, :]
    x_tile.store(x)
    q_tile = q_tiles.index(i).reshape([C, D])
    decay(q_tile, k_tiles.index(i).reshape([C, D]), x, 2 * half, mild, first, scale)


@gluon.jit
def _first_gate(g, i, q_tiles, firsts):
    """Returns `a` of the module's docstring, 0 unless q is float16, and stores it; the first row of g holds gates."""
    first = 0.0
    if q_tiles.dtype == gl.float16:
        row = gl.arange(0, C, gl.SliceLayout(1, RUNS))[:, None]  # [C, 1]
        first = gl.max(gl.max(gl.where(row == 0, g, 2 * LEAST_GATE), 0), 0)
        firsts.index(i).store(gl.full([1], first, gl.float32, gl.SliceLayout(1, RUNS)))
    return first


@gluon.jit
def _decay(g, mild, i, tiles, scale):
    """Replaces q, k in tile i by qg, kg, and the gates by the exponents of queries, and stores b_C / 2 [D].

    Args:
        g: gates of the tile [C, D], in units of log 2.
        i: the number of the tile: PARTS times the slot, plus the part.
    """
    q_tiles, k_tiles, x_tiles, r_tiles, firsts = tiles
    q_tile = q_tiles.index(i).reshape([C, D])
    k_tile = k_tiles.index(i).reshape([C, D])
    first = _first_gate(g, i, q_tiles, firsts)
    x, end = exponents(g, mild, first)  # [C, D], [D]
    x_tiles.index(i).reshape([C, D]).store(x)
    r_tiles.index(i).store(0.5 * end)
    decay(q_tile, k_tile, x, end, mild, first, scale)


@gluon.jit
def _dg_before_slopes(tiles, i):
    """Returns the anchor minus the sum of w over the rows before each row of tile i, [C, D]."""
    _, _, x_tiles, r_tiles, _ = tiles
    w = x_tiles.index(i).reshape([C, D]).load(RUNS)  # [C, D]
    anchor = r_tiles.index(i).load(gl.SliceLayout(0, RUNS))  # [D]
    return anchor[None, :] - (gl.associative_scan(w, 0, plus) - w)


@gluon.jit
def _write_dg(tiles, where, outputs, key, K, slot, rows, PARTS: gl.constexpr):
    """Writes dg of a chunk; see `_dg_before_slopes`.

    Args:
        outputs: the descriptor of dg, or None, and the pointer to dg. With a descriptor, TMA writes dg from the tile of
            w, and this function returns when the tile may be overwritten.
        where: (batch, head, first token, T, Ho).
    """
    _, _, x_tiles, _, _ = tiles
    dg_desc, dg_ptr = outputs
    b, h, t, T, Ho = where
    row = gl.arange(0, C, gl.SliceLayout(1, RUNS))[:, None]  # [C, 1]
    column = gl.arange(0, D, gl.SliceLayout(0, RUNS))[None, :]  # [1, D]
    first = dg_ptr + ((b.to(gl.int64) * T + t) * Ho + h) * K + key
    offsets = row.to(gl.int64) * (Ho * K) + column  # [C, D]
    for p in range(PARTS):
        inside = (row < rows) & (column < K - key - p * D)
        dg = _dg_before_slopes(tiles, PARTS * slot + p)  # [C, D]
        if dg_desc is None:
            gl.store(first + p * D + offsets, dg.to(dg_ptr.dtype.element_ty), inside)
        else:
            dg_tile = gate_tile(dg_desc, x_tiles, PARTS * slot + p).reshape([C, D])
            write(dg_desc, dg_ptr, dg_tile, dg, key + p * D, K, where, rows, False)
    if dg_desc is not None:
        tma.store_wait(0)


@gluon.jit
def _prefetch_logits(logits, t, rows, key, K, PARTS: gl.constexpr):
    """Prefetches the logits of a chunk into the L1 cache; see `_write_gradients_of_logits`."""
    g_ptr, g_t = logits
    each: gl.constexpr = 256 // g_ptr.dtype.element_ty.primitive_bitwidth  # elements in 32 bytes
    column = each * gl.arange(0, PARTS * D // each, gl.SliceLayout(0, SECTORS))[None, :]  # [1, PARTS D / each]
    row = gl.arange(0, C, gl.SliceLayout(1, SECTORS))[:, None]  # [C, 1]
    at = g_ptr + t.to(gl.int64) * g_t + key + ((row + opaque_zero()).to(gl.int64) * g_t + column)
    gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p prefetch.global.L1 [$1]; mov.u32 $0, 0; }",
        "=r,l,r",
        [at.to(gl.int64), ((row < rows) & (column < K - key)).to(gl.int32)],
        gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _write_gradients_of_logits(
    tiles, where, dg_ptr, logits, key, K, slot, rows, NORMALIZER: gl.constexpr, PARTS: gl.constexpr
):
    """Writes the gradients of the logits of a chunk: dg times the slopes of the gates.

    They are multiplied in a layout in which a thread holds 8 columns of few rows, so that it needs few addresses.

    Args:
        where: (batch, head, first token, T, Ho).
        logits: a pointer to the logits of the head at token 0, and the stride of tokens.
    """
    _, _, x_tiles, _, _ = tiles
    g_ptr, g_t = logits
    b, h, t, T, Ho = where
    row = gl.arange(0, C, gl.SliceLayout(1, ROWS))[:, None]  # [C, 1]
    column = gl.arange(0, D, gl.SliceLayout(0, ROWS))[None, :]  # [1, D]
    from_ptr = g_ptr + t.to(gl.int64) * g_t + key
    to_ptr = dg_ptr + ((b.to(gl.int64) * T + t) * Ho + h) * K + key
    for p in range(PARTS):
        inside = (row < rows) & (column < K - key - p * D)
        at = (row + opaque_zero()).to(gl.int64)  # [C, 1]
        x = gl.load(from_ptr + p * D + (at * g_t + column), inside, 0.0)  # [C, D], arrives while dg is summed
        x_tile = x_tiles.index(PARTS * slot + p).reshape([C, D])
        x_tile.store(_dg_before_slopes(tiles, PARTS * slot + p))
        dg = x_tile.load(ROWS) * slope_of_gates(as_float32(x), NORMALIZER)  # [C, D]
        gl.store(to_ptr + p * D + (at * (Ho * K) + column), dg.to(dg_ptr.dtype.element_ty), inside)


@gluon.jit
def _is_mild_in_half(least, q_tiles, k_tiles, first, PARTS: gl.constexpr):
    """Returns whether a chunk in float16 is mild.

    Args:
        least: the least b_C of its channels, in units of log 2.
        first: the number of the first tile of the chunk.
    """
    most = gl.zeros([C, D], gl.int32, RUNS)
    for p in range(PARTS):
        q_tile = q_tiles.index(first + p).reshape([C, D])
        most = gl.maximum(most, magnitudes(q_tile, k_tiles.index(first + p).reshape([C, D]), RUNS))
    return (least > -MILD_DECAY_HALF * LOG2E) & fit_mild_chunk(most)


@gluon.jit
def _gate_warps(args, NORMALIZER: gl.constexpr, PARTS: gl.constexpr, PACKED: gl.constexpr):
    """Replaces q, k by qg, kg in each chunk, marks chunks that are not mild, and writes dg of the previous chunk.

    Loops over parts run at run time, to keep the code small: the instructions are fetched again for each chunk. The
    gates of a part are therefore read twice; if they come from logits, the first loop stores their sums for the second.
    """
    g_desc, tiles, barriers, marks, marks_c, outputs, logits, place, sizes, scale = args
    q_tiles, k_tiles, x_tiles, r_tiles, firsts, mild_flags = tiles
    g_full, qk_full, qk_empty, gated, w_full = barriers
    b, h, _, key, _, start, length = place
    T, Ho, K, _ = sizes
    HALF: gl.constexpr = q_tiles.dtype == gl.float16
    parts = (q_tiles, k_tiles, x_tiles, r_tiles, firsts)
    chunks = gl.cdiv(length, C)
    for i in range(chunks + 1):
        c = chunks - 1 - i
        slot = i % SLOTS
        phase = i // SLOTS & 1
        rows = gl.minimum(length - c * C, C)
        first = PARTS * slot
        if NORMALIZER is not None:  # of the previous chunk
            _prefetch_logits(logits, start + (c + 1) * C, gl.where(i > 0, length - (c + 1) * C, 0), key, K, PARTS)
        if i < chunks:
            mbarrier.wait(g_full.index(slot), phase)
            least = gl.to_tensor(0.0)
            for p in range(PARTS):
                if NORMALIZER is None:
                    g = gates(gate_tile(g_desc, x_tiles, first + p), rows, PACKED)  # [C, D]
                    end = gl.sum(g, 0)  # [D]
                else:
                    end = _sum_logits(g_desc, x_tiles, r_tiles, first + p, rows, NORMALIZER)  # [D]
                least = gl.minimum(least, gl.min(end, 0))
            if HALF:
                mbarrier.wait(qk_full.index(slot), phase)
                mild = _is_mild_in_half(least, q_tiles, k_tiles, first, PARTS)
            else:
                mild = least > -MILD_DECAY_SM90 * LOG2E
            mild_flags.index(slot).store(gl.full([1], mild, gl.int32, gl.SliceLayout(1, RUNS)))
            gl.store(marks + c * marks_c, gl.where(mild, 0, 1))
            mbarrier.wait(qk_full.index(slot), phase)
            if PACKED:
                for p in gl.static_range(PARTS):
                    clear_rows(q_tiles.index(first + p).reshape([C, D]), rows, RUNS)
                    clear_rows(k_tiles.index(first + p).reshape([C, D]), rows, RUNS)
            for p in range(PARTS):
                if NORMALIZER is None:
                    g = gates(gate_tile(g_desc, x_tiles, first + p), rows, PACKED)  # [C, D]
                    _decay(g, mild, first + p, parts, scale)
                else:
                    _decay_by_sums(mild, first + p, parts, scale, NORMALIZER)
            fence_async_shared()  # qg and kg have been stored from registers; wgmma reads them
            mbarrier.arrive(gated.index(slot), count=1)
        if i > 0:  # the gradient warps have computed w of the previous chunk
            before = (i - 1) % SLOTS
            mbarrier.wait(w_full.index(before), (i - 1) // SLOTS & 1)
            where = (b, h, start + (c + 1) * C, T, Ho)
            rows = gl.minimum(length - (c + 1) * C, C)
            if NORMALIZER is None:
                _write_dg(parts, where, outputs, key, K, before, rows, PARTS)
            else:
                _write_gradients_of_logits(parts, where, outputs[1], logits, key, K, before, rows, NORMALIZER, PARTS)
            mbarrier.arrive(qk_empty.index(before), count=1)


@gluon.jit
def _values(args, part: gl.constexpr, PARTS: gl.constexpr, HALVES: gl.constexpr):
    """Starts the products dv = A^T do + kg P [C, D] of the halves of this warpgroup, and returns a tuple of them.

    Args:
        args: among others aT, the tile of A^T, value, the number of the first tile of do, and first, the unit of
            A^T do.
    """
    k_tiles, do_tiles, p_tiles, op_units, aT, slot, value, zero, first = args
    HALF: gl.constexpr = do_tiles.dtype == gl.float16
    dv = ()
    for j in gl.static_range(HALVES):
        if j % PARTS == part:
            acc = product(aT, do_tiles.index(value + j).reshape([C, D]), gl.zeros([C, D], gl.float32, LAYOUT))
            unit = first
            for p in gl.static_range(PARTS):
                if HALF:
                    before = unit
                    unit = gl.max(op_units.index(p).load(gl.SliceLayout(1, LAYOUT)), 0)
                    acc = warpgroup_mma_wait(0, [acc]) * (before / unit)
                k_tile = k_tiles.index(PARTS * slot + p).reshape([C, D])
                acc = product(k_tile, p_tiles.index(zero + HALVES * p + j).reshape([D, D]), acc)
            dv += (acc,)
    return dv


@gluon.jit
def _write_values(to, dv, part: gl.constexpr, PARTS: gl.constexpr, HALVES: gl.constexpr, PACKED: gl.constexpr):
    """Writes the halves of dv of this warpgroup through its tiles of P."""
    desc, ptr, p_tiles, unit, value, V, where, rows, zero = to
    for j in gl.static_range(HALVES):
        if j % PARTS == part:
            p_tile = p_tiles.index(zero + HALVES * part + j // PARTS).reshape([C, D])
            x = dv[j // PARTS] * unit if p_tiles.dtype == gl.float16 else dv[j // PARTS]
            write(desc, ptr, p_tile, x, value + j * D, V, where, rows, PACKED)


@gluon.jit
def _factors_of_dS(waiting, tiles, slot, tile, units, UNITS: gl.constexpr):
    """Returns (mild, first, inner, factor, decay) of a chunk.

    They are whether it is mild; `a` of the module's docstring, 0 unless q is float16; the factor of dS' [D], which the
    next chunk applies; and the factors of dS [D, 1] that give P, and dS decayed to the start of the chunk, or to the
    middle of a mild chunk.

    Args:
        waiting: [D], a factor of each key of dS that has not been applied yet.
        tile: the number of this warpgroup's tiles of q, k and g.
        tiles, slot, units: see `_chunk`.
    """
    q_tiles, _, _, _, _, _, _, r_tiles, firsts, mild_flags, _ = tiles
    HALF: gl.constexpr = q_tiles.dtype == gl.float16
    first = 0.0
    mild = gl.max(mild_flags.index(slot).load(gl.SliceLayout(1, LAYOUT)), 0) != 0
    r = r_tiles.index(tile).load(gl.SliceLayout(1, LAYOUT))  # [D], b_C / 2, with keys as rows
    if HALF:
        first = gl.max(firsts.index(tile).load(gl.SliceLayout(1, LAYOUT)), 0)
    inner = gl.exp2(gl.where(mild, r, first))
    P_factor = gl.exp2(gl.where(mild, r, 0.0)) if HALF else inner  # [D]
    factor = (waiting * P_factor)[:, None]
    decay = (waiting * gl.exp2(gl.where(mild, r, 2 * r - first)))[:, None]
    if UNITS:
        _, q_unit, _, _, do_unit = units
        decay = decay / (q_unit * do_unit)
        inner = inner * (q_unit * do_unit)
    return mild, first, inner, factor, decay


@gluon.jit
def _scores(tiles, q_first, v_first, part: gl.constexpr, PARTS: gl.constexpr, HALVES: gl.constexpr):
    """Starts the products dA = do v^T and A^T = kg qg^T [C, C], or the one that this warpgroup computes.

    Returns a tuple of them.

    Args:
        q_first, v_first: the numbers of the first tile of q and k, and of v and do.
    """
    q_tiles, k_tiles, v_tiles, do_tiles, _, _, _, _, _, _, _ = tiles
    scores = ()
    for n in gl.static_range(2):
        if n % PARTS == part:
            acc = gl.zeros([C, C], gl.float32, LAYOUT)
            if n == 0:
                for j in gl.static_range(HALVES):
                    v_tile = v_tiles.index(v_first + j).reshape([C, D])
                    acc = product(do_tiles.index(v_first + j).reshape([C, D]), v_tile.permute([1, 0]), acc)
            else:
                for p in gl.static_range(PARTS):
                    q_tile = q_tiles.index(q_first + p).reshape([C, D])
                    acc = product(k_tiles.index(q_first + p).reshape([C, D]), q_tile.permute([1, 0]), acc)
            scores += (acc,)
    return scores


@gluon.jit
def _chunk(
    dS,
    waiting,
    tiles,
    barriers,
    outputs,
    factors,
    units,
    place,
    part: gl.constexpr,
    PARTS: gl.constexpr,
    HALVES: gl.constexpr,
    PACKED: gl.constexpr,
    UNITS: gl.constexpr,
):
    """Writes the gradients of a chunk, except dg, from the gradient of its leaving state, waiting * dS.

    With float16, operands that are sums have units. A gradient that accumulates two products is multiplied by the
    quotient of their units between the two.

    Args:
        dS: a tuple of HALVES matrices [D, D], keys by values.
        waiting: [D], a factor of each key of dS that has not been applied yet.
        factors: the factor of q (`q_factor`) and the factor of all gradients (`outer`); see `factors_of`.
        units: the units of the tiles of S, q, k, v and do; see half.py.
        place: the number of the chunk counted from the last one, its slot, its rows, (batch, head, first token, T, Ho),
            the first key and value of this warpgroup, K and V.

    Returns:
        dS and waiting of the entering state. The next chunk multiplies the factor by its own decay, so that dS is
        scaled once.
    """
    q_tiles, k_tiles, v_tiles, do_tiles, x_tiles, s_tiles, p_tiles, r_tiles, _, _, op_units = tiles
    w_full, ready, done = barriers
    LAST: gl.constexpr = max(PARTS * HALVES, 2) - 1  # the last tile of S of a slot
    VALUE_SLOTS: gl.constexpr = v_tiles.shape[0] // HALVES
    i, slot, rows, where, key, value, K, V = place
    value_slot = i % VALUE_SLOTS
    dq_desc, dk_desc, dv_desc, dq_ptr, dk_ptr, dv_ptr = outputs
    q_factor, outer = factors
    dtype: gl.constexpr = q_tiles.dtype
    HALF: gl.constexpr = dtype == gl.float16
    zero = opaque_zero()
    tile = zero + PARTS * slot + part  # the number of this warpgroup's tiles of q, k and g
    v_first = zero + HALVES * value_slot  # the number of the first tile of v and do
    s_first = zero + (LAST + 1) * value_slot  # the number of the first tile of S
    q_tile = q_tiles.index(tile).reshape([C, D])
    k_tile = k_tiles.index(tile).reshape([C, D])
    x_tile = x_tiles.index(tile).reshape([C, D])
    none = gl.zeros([C, C], gl.float32, LAYOUT)  # also for [C, D], since C = D
    s_unit, q_unit, k_unit, v_unit, do_unit = units
    mild, first, inner, factor, decay = _factors_of_dS(waiting, tiles, slot, tile, units, UNITS)
    P = ()  # [D, D] each
    decayed = ()  # [D, D] each, dS decayed to the start of the chunk, or to the middle of a mild chunk
    for j in gl.static_range(HALVES):
        P += (dS[j] * factor,)
        decayed += (dS[j] * decay,)
    TOGETHER: gl.constexpr = PARTS >= HALVES  # whether registers suffice for most products at once
    # With float16, the largest number of P has to be found, which takes registers, so P is stored before the products.
    LATER: gl.constexpr = TOGETHER and not HALF
    if not LATER:
        p_unit = store_operands(p_tiles, zero + HALVES * part, P, HALVES)
    if HALF:
        op_units.index(part).store(gl.full([1], p_unit, gl.float32, gl.SliceLayout(1, LAYOUT)))
    scores = _scores(tiles, PARTS * slot, v_first, part, PARTS, HALVES)
    beyond = gl.where(mild, 0, C)  # C masks every element
    if not TOGETHER:
        scores = _masked(warpgroup_mma_wait(0, scores), beyond, op_units, part, PARTS, dtype)
    dq = none  # [C, D], do S^T
    for j in gl.static_range(HALVES):
        s_tile = s_tiles.index(s_first + HALVES * part + j).reshape([D, D])
        dq = product(do_tiles.index(v_first + j).reshape([C, D]), s_tile.permute([1, 0]), dq)
    if LATER:
        store_operands(p_tiles, zero + HALVES * part, P, HALVES)
    started = (dq,)
    for j in gl.static_range(HALVES):
        do_tile = do_tiles.index(v_first + j).reshape([C, D])
        started += (product(q_tile.permute([1, 0]), do_tile, decayed[j]),)

    if TOGETHER:  # while the other products run; `warpgroup_mma_wait` returns a tuple of one element as the element
        waited = warpgroup_mma_wait(2 * HALVES, scores)
        scores = _masked(waited if PARTS == 1 else (waited,), beyond, op_units, part, PARTS, dtype)
    products = warpgroup_mma_wait(0, started)
    dq, entering = products[0], products[1:]  # [C, D]; [D, D] each, the gradient of S before the factor `inner`
    anchor = gl.zeros([D], gl.float32, gl.SliceLayout(1, LAYOUT))
    for j in gl.static_range(HALVES):
        s_tile = s_tiles.index(s_first + HALVES * part + j).reshape([D, D])
        anchor += gl.sum(entering[j] * s_tile.load(LAYOUT).to(gl.float32), 1)
    half_sums = r_tiles.index(tile).load(gl.SliceLayout(0, LAYOUT))[None, :]  # [1, D]
    dq *= gl.exp2(gl.where(mild, half_sums, first))
    # dA and A^T take the place of S: all products with S are done.
    for n in gl.static_range(2):
        if n % PARTS == part:
            s_tiles.index(s_first + n * LAST).reshape([C, C]).store(scores[n // PARTS])
    fence_async_shared()  # P, dA and A^T have been stored from registers; wgmma reads them
    if PARTS > 1:
        mbarrier.arrive(ready, count=1)
        mbarrier.wait(ready, i & 1)
    # A new zero makes the compiler compute the addresses of tiles again. Otherwise it would keep the addresses of the
    # first products in registers, and spill them.
    zero = opaque_zero()
    slot += zero
    tile = PARTS * slot + part
    v_first = zero + HALVES * value_slot
    s_first = zero + (LAST + 1) * value_slot
    q_tile = q_tiles.index(tile).reshape([C, D])
    k_tile = k_tiles.index(tile).reshape([C, D])
    dA = s_tiles.index(s_first).reshape([C, C])
    aT = s_tiles.index(s_first + LAST).reshape([C, C])
    if HALF:
        dA_unit = gl.max(op_units.index(PARTS).load(gl.SliceLayout(1, LAYOUT)), 0)
        a_unit = gl.max(op_units.index(PARTS + 1).load(gl.SliceLayout(1, LAYOUT)), 0)
        dq_unit = dA_unit * (v_unit * k_unit)
        dq *= s_unit / dq_unit
    dq = product(dA, k_tile, dq)
    dk = product(dA.permute([1, 0]), q_tile, none)
    if HALF:
        dk = warpgroup_mma_wait(0, [dk]) * (dA_unit * (q_unit * do_unit) / p_unit)
    for j in gl.static_range(HALVES):
        p_tile = p_tiles.index(zero + HALVES * part + j).reshape([D, D])
        dk = product(v_tiles.index(v_first + j).reshape([C, D]), p_tile.permute([1, 0]), dk)
    dv_start = a_unit * (q_unit * do_unit) if HALF else 1.0
    dv_args = (k_tiles, do_tiles, p_tiles, op_units, aT, slot, v_first, zero, dv_start)
    started = (dq, dk)
    if TOGETHER:
        started += _values(dv_args, part, PARTS, HALVES)
    products = warpgroup_mma_wait(0, started)
    dq, dk = products[0], products[1]
    dv_unit = gl.max(op_units.index(PARTS - 1).load(gl.SliceLayout(1, LAYOUT)), 0) * (k_unit * outer) if HALF else 1.0
    to = (dv_desc, dv_ptr, p_tiles, dv_unit, value, V, where, rows, zero)
    if TOGETHER:
        mbarrier.arrive(done.index(value_slot), count=1)
        mbarrier.wait(done.index(value_slot), i // VALUE_SLOTS & 1)
        _write_values(to, products[2:], part, PARTS, HALVES, PACKED)
    if HALF:
        dq *= dq_unit * do_unit
        dk *= p_unit * v_unit * outer
    w = as_float32(q_tile.load(LAYOUT)) * dq  # [C, D], q * dq
    dq *= gl.exp2(x_tile.load(LAYOUT))
    write(dq_desc, dq_ptr, q_tile, dq * (q_factor * outer if HALF else q_factor), key, K, where, rows, PACKED)
    # The compiler would also fuse one of the two products, but not the same one for packed sequences and batches.
    minus_k = as_float32(k_tile.load(LAYOUT)) * -1.0
    w = gl.fma(minus_k, dk * k_unit, w * (q_unit * outer)) if HALF else gl.fma(minus_k, dk, w)
    half_sums = r_tiles.index(tile).load(gl.SliceLayout(0, LAYOUT))[None, :]  # [1, D]
    dk *= gl.exp2(gl.where(mild, 0.0, 2 * half_sums - first) - x_tile.load(LAYOUT))
    x_tile.store(w)
    r_tiles.index(tile).store(anchor * (inner * (s_unit * outer) if HALF else inner))
    mbarrier.arrive(w_full.index(slot), count=1)
    if not TOGETHER:
        if dk_desc is not None:  # converted before it is written: half the registers
            dk = dk.to(dtype)
        dv = warpgroup_mma_wait(0, _values(dv_args, part, PARTS, HALVES))
        mbarrier.arrive(done.index(value_slot), count=1)
        _write_values(to, dv, part, PARTS, HALVES, PACKED)
    write(dk_desc, dk_ptr, k_tile, dk, key, K, where, rows, PACKED)
    return entering, inner


@gluon.jit
def _gradient_warps(
    args,
    part: gl.constexpr,
    PARTS: gl.constexpr,
    HALVES: gl.constexpr,
    PACKED: gl.constexpr,
    PER_Q: gl.constexpr,
    PER_V: gl.constexpr,
):
    """Carries the rows of dS of D keys backwards through the segment, and writes the gradients.

    Args:
        part: the number of this gradient warpgroup.
    """
    tiles, barriers, outputs, states, place, sizes, factors = args
    v_tiles, do_tiles = tiles[2], tiles[3]
    HALF: gl.constexpr = do_tiles.dtype == gl.float16
    VALUE_SLOTS: gl.constexpr = v_tiles.shape[0] // HALVES
    gated, w_full, qk_empty, v_full, ready, done = barriers
    leaving, held, strides, dinitial, s_units, given_units, row = states
    q_units, k_units, v_units, do_units = given_units
    UNITS: gl.constexpr = q_units is not None
    b, h, n, key, value, start, length = place
    T, Ho, K, V = sizes
    Hq, H, Hv = Ho // PER_Q, Ho // (PER_Q * PER_V), Ho // PER_V
    q_head, k_head, v_head = h // PER_Q, h // (PER_Q * PER_V), h // PER_V
    blocks = gl.cdiv(K, D)  # tiles of keys, each of which has a unit
    keys = key + part * D + gl.arange(0, D, gl.SliceLayout(1, LAYOUT))[:, None]  # [D, 1]
    values = value + gl.arange(0, D, gl.SliceLayout(0, LAYOUT))[None, :]  # [1, D]
    outer = factors[1] if HALF else None
    dS = leaving_gradient(leaving, strides, n, v_head, held, h % PER_V == 0, keys, values, V, outer, HALVES)
    waiting = gl.full([D], 1.0, gl.float32, gl.SliceLayout(1, LAYOUT))  # [D]
    chunks = gl.cdiv(length, C)
    for i in range(chunks):
        c = chunks - 1 - i
        slot = i % SLOTS
        rows = gl.minimum(length - c * C, C)
        tma.store_wait(0)  # the gradients of the previous chunk have left the tiles
        mbarrier.arrive(qk_empty.index((i + SLOTS - 1) % SLOTS), count=1, pred=i > 0)
        value_slot = i % VALUE_SLOTS
        mbarrier.wait(v_full.index(value_slot), i // VALUE_SLOTS & 1)
        if PACKED:
            for j in gl.static_range(HALVES):
                half = HALVES * value_slot + j
                clear_rows(do_tiles.index(half).reshape([C, D]), rows, LAYOUT)
                if HALF:  # rows of the next sequence would count in the largest number of dA
                    clear_rows(v_tiles.index(half).reshape([C, D]), rows, LAYOUT)
            fence_async_shared()  # rows have been cleared from registers; wgmma reads the tiles
        mbarrier.wait(gated.index(slot), i // SLOTS & 1)
        at = (i, slot, rows, (b, h, start + c * C, T, Ho), key + part * D, value, K, V)
        chunk_barriers = (w_full, ready, done)
        s_unit = 1.0
        if HALF:  # a part beyond the keys of the head has no unit
            tile = key // D + part
            s_unit = gl.load(s_units + c.to(gl.int64) * Hv * blocks + tile, tile < blocks, 1.0)
        q_unit, do_unit = unit_at(q_units, row + c, Hq, q_head), unit_at(do_units, row + c, Ho, h)
        k_unit, v_unit = unit_at(k_units, row + c, H, k_head), unit_at(v_units, row + c, Hv, v_head)
        units = (s_unit, q_unit, k_unit, v_unit, do_unit)
        dS, waiting = _chunk(
            dS, waiting, tiles, chunk_barriers, outputs, factors, units, at, part, PARTS, HALVES, PACKED, UNITS
        )
    if dinitial is not None:
        for j in gl.static_range(HALVES):
            to = dinitial + ((n * Ho + h).to(gl.int64) * K + keys) * V + values + j * D
            x = dS[j] * waiting[:, None]
            gl.store(to, x * factors[1] if HALF else x, (keys < K) & (values + j * D < V))
    tma.store_wait(0)


# K, V and the strides of logits are specialised: if they are multiples of 16, a thread moves two elements at once.
@gluon.jit(do_not_specialize=["scale", "T", "segment", "segments", "Ho", "B"])
def _gla_backward_kernel(
    q_desc,  # [B, Hq, T, K], tiles [C, D]
    k_desc,  # [B, H, T, K], tiles [C, D]
    v_desc,  # [B, Hv, T, V], tiles [C, D]
    do_desc,  # [B, Ho, T, V], tiles [C, D]
    g_desc,  # [B, Hv, T, K], tiles [C, D]
    s_desc,  # states that enter chunks, [rows, Hv, K, V], tiles [D, D], divided by their units
    dq_desc,  # [B, Ho, T, K], tiles [C, D]; None if there are several blocks of values
    dk_desc,  # like dq_desc
    dv_desc,  # [B, Ho, T, V], tiles [C, D]; None if there are several blocks of keys
    dg_desc,  # [B, Ho, T, K], tiles [C, D]; None if it is written from registers
    dq_ptr,  # [blocks of values, B, T, Ho, K]
    dk_ptr,  # [blocks of values, B, T, Ho, K]
    dv_ptr,  # [blocks of keys, B, T, Ho, V]
    dg_ptr,  # [blocks of values, B, T, Ho, K]
    g_ptr,  # [B, T, Hv, K] if NORMALIZER is given, else None
    s_units,  # [rows, Hv, tiles of D keys], the units of the states; None for bfloat16
    marks,  # [rows, Ho, blocks of keys], 1 if a chunk is not mild
    leaving,  # gradients of leaving states, [I, Hv, K, V] or None
    dinitial,  # gradients of initial states, [N, Ho, K, V] or None
    order,  # [I, 5], or None for a batch
    q_units,  # [rows, Hq] if q, k, v and do were float32, else None
    k_units,  # [rows, H] or None
    v_units,  # [rows, Hv] or None
    do_units,  # [rows, Ho] or None
    scale,
    state_n,  # strides of `leaving`; see `in_state`
    state_h,
    state_k,
    state_v,
    T,
    segment,  # tokens of a segment
    segments,  # segments of a sequence of a batch
    g_b,  # strides of logits
    g_t,
    g_h,
    Ho,
    K,
    V,
    B,
    PARTS: gl.constexpr,
    HALVES: gl.constexpr,
    PER_Q: gl.constexpr,
    PER_V: gl.constexpr,
    NORMALIZER: gl.constexpr,
    LAST_LEAVE_NONE: gl.constexpr,
):
    """Computes the gradients of one head of o of one segment, for a block of keys and of values."""
    PACKED: gl.constexpr = order is not None
    blocks_v = gl.cdiv(V, HALVES * D)
    blocks_k = gl.cdiv(K, PARTS * D)
    pid = gl.program_id(0)  # neighbouring blocks read the same q, k and g, or the same v and do
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
    dg_ptr += block_v * whole * K
    marks += (row * Ho + h).to(gl.int64) * blocks_k + block_k
    logits: gl.constexpr = None
    if NORMALIZER is not None:
        logits = (g_ptr + b.to(gl.int64) * g_b + (h // PER_V).to(gl.int64) * g_h, g_t)

    if s_units is not None:
        s_units += (row * (Ho // PER_V) + h // PER_V).to(gl.int64) * gl.cdiv(K, D)
    dtype: gl.constexpr = q_desc.dtype
    exponents: gl.constexpr = gl.NVMMASharedLayout.get_default_for([1, 1, C, D], gl.float32)
    row_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q_tiles = gl.allocate_shared_memory(dtype, [SLOTS * PARTS, 1, 1, C, D], q_desc.layout)
    k_tiles = gl.allocate_shared_memory(dtype, [SLOTS * PARTS, 1, 1, C, D], k_desc.layout)
    VALUE_SLOTS: gl.constexpr = 1 if PARTS * HALVES == 4 else 2
    v_tiles = gl.allocate_shared_memory(dtype, [VALUE_SLOTS * HALVES, 1, 1, C, D], v_desc.layout)
    do_tiles = gl.allocate_shared_memory(dtype, [VALUE_SLOTS * HALVES, 1, 1, C, D], do_desc.layout)
    # These hold g, then the exponents of queries, then w.
    x_tiles = gl.allocate_shared_memory(gl.float32, [SLOTS * PARTS, 1, 1, C, D], exponents)
    # The tiles of S also hold dA and A^T, so a slot has at least two.
    s_tiles = gl.allocate_shared_memory(dtype, [VALUE_SLOTS * max(PARTS * HALVES, 2), 1, 1, D, D], s_desc.layout)
    p_tiles = gl.allocate_shared_memory(dtype, [PARTS * HALVES, 1, 1, D, D], s_desc.layout)
    r_tiles = gl.allocate_shared_memory(gl.float32, [SLOTS * PARTS, D], row_layout)  # b_C / 2, then the anchor
    firsts = gl.allocate_shared_memory(gl.float32, [SLOTS * PARTS, 1], row_layout)  # a of each part, for float16
    op_units = gl.allocate_shared_memory(gl.float32, [PARTS + 2, 1], row_layout)  # of P, dA and A^T, for float16
    mild_flags = gl.allocate_shared_memory(gl.int32, [SLOTS, 1], row_layout)
    bars: gl.constexpr = mbarrier.MBarrierLayout()
    g_full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], bars)  # g has been loaded
    qk_full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], bars)  # q, k have been loaded
    gated = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], bars)  # q, k have become qg, kg, and g the exponents
    w_full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], bars)  # w and the anchor have been written
    qk_empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], bars)  # dq, dk, dg have left the tiles of q, k, g
    v_full = gl.allocate_shared_memory(gl.int64, [VALUE_SLOTS, 1], bars)  # v, do, S have been loaded
    ready = gl.allocate_shared_memory(gl.int64, [1], bars)  # P, dA and A^T have been written
    done = gl.allocate_shared_memory(gl.int64, [VALUE_SLOTS, 1], bars)  # all products of the chunk are done
    for i in gl.static_range(SLOTS):
        mbarrier.init(g_full.index(i), count=1)
        mbarrier.init(qk_full.index(i), count=1)
        mbarrier.init(gated.index(i), count=1)
        mbarrier.init(w_full.index(i), count=PARTS)  # each gradient warpgroup arrives once, here and below
        mbarrier.init(qk_empty.index(i), count=PARTS + 1)  # and so does the gate warpgroup
    for i in gl.static_range(VALUE_SLOTS):
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(done.index(i), count=PARTS)
    mbarrier.init(ready, count=PARTS)

    descriptors = (q_desc, k_desc, v_desc, do_desc, g_desc, s_desc)
    load_tiles = (q_tiles, k_tiles, v_tiles, do_tiles, x_tiles, s_tiles)
    load_barriers = (g_full, qk_full, qk_empty, v_full, done)
    load_place = (b, h, key, value, start, chunks, row)
    loads = (descriptors, load_tiles, load_barriers, load_place)
    gate_tiles = (q_tiles, k_tiles, x_tiles, r_tiles, firsts, mild_flags)
    gate_barriers = (g_full, qk_full, qk_empty, gated, w_full)
    tiles = (q_tiles, k_tiles, v_tiles, do_tiles, x_tiles, s_tiles, p_tiles, r_tiles, firsts, mild_flags, op_units)
    barriers = (gated, w_full, qk_empty, v_full, ready, done)
    outputs = (dq_desc, dk_desc, dv_desc, dq_ptr, dk_ptr, dv_ptr)
    states = (
        leaving,
        held,
        (state_n, state_h, state_k, state_v),
        dinitial,
        s_units,
        (q_units, k_units, v_units, do_units),
        row,
    )
    place = (b, h, n, key, value, start, length)
    sizes = (T, Ho, K, V)
    factors = factors_of(scale, dtype)
    gate_outputs = (dg_desc, dg_ptr)
    gate = (g_desc, gate_tiles, gate_barriers, marks, Ho * blocks_k, gate_outputs, logits, place, sizes, factors[0])
    gradients = (tiles, barriers, outputs, states, place, sizes, factors)
    # Registers of a thread: the gradient warps need most of them, and the gate warps have the remaining ones.
    if PARTS == 1:
        gl.warp_specialize(
            [
                (_gate_warps, (gate, NORMALIZER, PARTS, PACKED)),
                (_gradient_warps, (gradients, 0, PARTS, HALVES, PACKED, PER_Q, PER_V)),
                (_load_warp, (loads, PARTS, HALVES, PER_Q, PER_V)),
            ],
            [4, 1],
            [240, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_gate_warps, (gate, NORMALIZER, PARTS, PACKED)),
                (_gradient_warps, (gradients, 0, PARTS, HALVES, PACKED, PER_Q, PER_V)),
                (_gradient_warps, (gradients, 1, PARTS, HALVES, PACKED, PER_Q, PER_V)),
                (_load_warp, (loads, PARTS, HALVES, PER_Q, PER_V)),
            ],
            [4, 4, 1],
            [192, 192, 24],
        )
