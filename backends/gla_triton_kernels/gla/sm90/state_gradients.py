"""Computes the gradients of the states that leave chunks, on Hopper: backwards through segments, with dS in registers.

For a chunk of C tokens, let dS be the gradient of the leaving state, dS' the gradient of the entering state, b_t the
sum of the log gates of the chunk through token t, and r = b_C / 2. Then

    dS' = exp(b_C) dS + (scale q exp(b))^T do        P = exp(b_C - r) dS, or dS if the chunk is not mild

The kernel goes from the last chunk of a segment to the first, and writes P of each chunk to memory. Whether a chunk is
mild is decided for each D keys separately.

With float16, a mild chunk decays by at most MILD_DECAY_HALF, and `scale` multiplies all gradients at the end; see
backward.py. exp(b) is divided by exp(a), where a is the gate of the first token, so that some token keeps its range:

    dS' = exp(a) (exp(b_C - a) dS + (q exp(b - a))^T do)

The factor exp(a) waits for the next chunk. P is divided by its unit, which is written to memory; see operands.py.

B batch   T tokens   N sequences   I segments   Hq query heads   Hv value heads, of g and S
Ho = max(Hq, Hv) heads of o   PER_Q, PER_V heads of o that share a head of q, of g; one of them is 1
K, V key and value width   C tokens of a chunk   D = 64 keys of a block, and values of a tile
TILES tiles of values of a block, 1 to 3   n rows of states, one for each chunk   TURNS gate warpgroups, 2 or 3
STAGES pipeline stages, a multiple of TURNS   slot   a pipeline stage in shared memory: the tiles of one chunk

The grid has one block per segment, head of o, D keys and TILES D values. The warps of a block are specialised. They
communicate over barriers in shared memory; common.py gives the rules.

    load    one warp: copies q, do and g of the next chunks to shared memory by TMA
    gate    TURNS warpgroups, which take turns: each replaces q by scale q exp(b) in every TURNS-th chunk. They have the
            longest work on a chunk, so several chunks are decayed at once. A slot always belongs to the same warpgroup,
            which has therefore waited for the phase before; see the last rule of common.py.
    state   one warpgroup: carries dS, and writes P

Source: Yang et al., "Gated Linear Attention Transformers with Hardware-Efficient Training" (arXiv 2312.06635).
"""

# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportAssignmentType=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
# pyright: reportUnboundVariable=false, reportPossiblyUnboundVariable=false, reportIndexIssue=false
from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma_wait

from gla_core.dispatch.backend import CHUNK
from gla_core.dispatch.tensors import ceil_div
from gla_triton_kernels.chunks.kernel import GradientParameters
from gla_triton_kernels.chunks.segments import Segments, lengths_of, state_strides
from gla_triton_kernels.gla.shared.limits import LEAST_GATE, MILD_DECAY_HALF, MILD_DECAY_SM90
from gla_triton_kernels.gla.sm90 import pairs
from gla_triton_kernels.gla.sm90.common import as_float32, clear_rows, divisible_unit_of, largest, plus, unit_at
from gla_triton_kernels.gla.sm90.common_backward import (
    LAYOUT,
    RUNS,
    WIDTH,
    C,
    D,
    gates,
    leaving_gradient,
    product,
    segment_backwards,
)
from gla_triton_kernels.gla.sm90.log_gates import launch_log_gates
from gla_triton_kernels.gla.sm90.operands import factors_of
from gla_triton_kernels.gla.tensors import BackwardTensors
from gla_triton_runtime.arithmetic import LOG2E
from gla_triton_runtime.launch import Launch
from gla_triton_runtime.tma import shared_tiles, state_tiles


class StateGradients(NamedTuple):
    """Inputs of the kernel of backward_wide.py that are not tensors of the call.

    Attributes:
        g: log gates [B, T, Hv, K], or None.
        P: decayed gradients of the states that leave chunks, [n, Ho, K, V], in the dtype of q.
        p_units: the units of the tiles of P, [n, Ho, ceil(K / 64), ceil(V / 64)] float32; None for bfloat16.
        marks: see `launch_pairs` of pairs.py; there is one mark for WIDTH keys.
        launches: the launches that fill these tensors.
    """

    g: Tensor | None
    P: Tensor
    p_units: Tensor | None
    marks: Tensor | None
    launches: list[Launch]


def launch_state_gradients(
    kernel: GradientParameters,
    x: BackwardTensors,
    entering: Tensor,
    leaving: Tensor | None,
    segments: Segments,
    scale: float,
    units: dict[str, Tensor | None],
    normalizer: int | None,
) -> StateGradients:
    """Returns log gates, P, the marks of chunks that are not mild, and the launches that fill them.

    Args:
        entering, leaving, segments, normalizer: see `launch_gradients` of general/backward.py; entering has the dtype
            of q.
        units: the units of q, k, v and do, if these were float32; see half.py.
    """
    T, Hq, K = x.q.shape[1:]
    (Hv, V), Ho = x.v.shape[2:], x.do.shape[2]
    g, made = x.g, []
    if g is not None and normalizer is not None:
        g, log_gates = launch_log_gates(g, normalizer)
        made.append(log_gates)
    marks = pairs.new_marks(x, entering, WIDTH)
    P = torch.empty(entering.numel() // (Hv * K * V), Ho, K, V, dtype=entering.dtype, device=x.q.device)
    p_units = None
    if P.dtype == torch.float16:
        p_units = torch.empty(*P.shape[:2], ceil_div(K, WIDTH), ceil_div(V, WIDTH), device=x.q.device)
    tiles = kernel.BV // WIDTH
    turns = 2 if tiles == 2 else 3
    arguments = {
        "q_desc": shared_tiles(x.q, CHUNK, WIDTH),
        "do_desc": shared_tiles(x.do, CHUNK, WIDTH),
        "g_desc": None if g is None else shared_tiles(g, CHUNK, WIDTH),
        "p_desc": state_tiles(P, WIDTH, WIDTH),
        "p_units": p_units,
        "marks": marks,
        "q_units": units["q_units"],
        "do_units": units["do_units"],
        "leaving": leaving,
        "dinitial": x.dinitial_state,
        "order": segments.order,
        "scale": scale,
        **state_strides("state_", leaving),
        **lengths_of(T, segments),
        "Ho": Ho,
        "K": K,
        "V": V,
        "PER_Q": Ho // Hq,
        "PER_V": Ho // Hv,
        "TILES": tiles,
        "TURNS": turns,
        "STAGES": turns if tiles == 3 else 2 * turns,  # the most that fit into shared memory
        "LAST_LEAVE_NONE": x.last_leave_none,
    }
    blocks = ceil_div(K, WIDTH) * ceil_div(V, kernel.BV) * segments.count * Ho
    options = {"num_warps": kernel.warps, "maxnreg": 96 if turns > 2 else 128}
    made.append(Launch(_state_kernel, (blocks, 1, 1), arguments, options))
    return StateGradients(g, P, p_units, marks, made)


@gluon.jit
def _load_chunks(args, TILES: gl.constexpr, PER_Q: gl.constexpr, PER_V: gl.constexpr, STAGES: gl.constexpr):
    """Loads q, do and g of all chunks, the last chunk first, ahead of the other warps."""
    descriptors, tiles, barriers, place = args
    q_desc, do_desc, g_desc = descriptors
    q_tiles, do_tiles, g_tiles = tiles
    full, empty = barriers
    b, h, key, value, start, chunks = place
    GATE_SIZE: gl.constexpr = 0 if g_desc is None else g_desc.block_type.nbytes
    SIZE: gl.constexpr = q_desc.block_type.nbytes + GATE_SIZE + TILES * do_desc.block_type.nbytes
    for i in range(chunks):
        slot = i % STAGES
        t = start + (chunks - 1 - i) * C
        bar = full.index(slot)
        mbarrier.wait(empty.index(slot), (i // STAGES & 1) ^ 1)
        mbarrier.expect(bar, SIZE)
        if g_desc is not None:
            tma.async_copy_global_to_shared(g_desc, [b, h // PER_V, t, key], bar, g_tiles.index(slot))
        tma.async_copy_global_to_shared(q_desc, [b, h // PER_Q, t, key], bar, q_tiles.index(slot))
        for j in gl.static_range(TILES):
            tma.async_copy_global_to_shared(do_desc, [b, h, t, value + j * D], bar, do_tiles.index(TILES * slot + j))


@gluon.jit
def _gate_warps(
    args, turn: gl.constexpr, TURNS: gl.constexpr, TILES: gl.constexpr, STAGES: gl.constexpr, PACKED: gl.constexpr
):
    """Replaces q by scale q exp(b), and marks chunks that are not mild, in every TURNS-th chunk from `turn` on.

    `scale` is the factor of q from `factors_of`.
    """
    tiles, barriers, marks, place, sizes, scale = args
    q_tiles, do_tiles, g_tiles, end_tiles, first_tiles, mild_flags = tiles
    full, gated = barriers
    h, key, value, row, length = place
    Ho, K = sizes
    HALF: gl.constexpr = q_tiles.dtype == gl.float16
    LIMIT: gl.constexpr = MILD_DECAY_HALF if HALF else MILD_DECAY_SM90
    chunks = gl.cdiv(length, C)
    for i in range(turn, chunks, TURNS):
        c = chunks - 1 - i
        slot = i % STAGES
        rows = length - c * C
        q_tile = q_tiles.index(slot).reshape([C, D])
        mbarrier.wait(full.index(slot), i // STAGES & 1)
        factor = scale
        if marks is not None:
            g = gates(g_tiles.index(slot), rows, PACKED)  # [C, D]
            end = gl.sum(g, 0)  # b_C [D]
            mild = gl.min(end, 0) > -LIMIT * LOG2E
            end_tiles.index(slot).store(end)
            mild_flags.index(slot).store(gl.full([1], mild, gl.int32, gl.SliceLayout(1, RUNS)))
            if value == 0:
                at = ((row + c) * Ho + h).to(gl.int64) * gl.cdiv(K, D) + key // D
                gl.store(marks + at, gl.where(mild, 0, 1))
            b = gl.associative_scan(g, 0, plus)  # [C, D]
            if HALF:
                token = gl.arange(0, C, gl.SliceLayout(1, RUNS))[:, None]  # [C, 1]
                first = gl.max(gl.where(token == 0, g, 2 * LEAST_GATE), 0)  # a [D]
                first_tiles.index(slot).store(first)
                b -= first[None, :]
            factor = gl.exp2(b) * scale  # [C, D]
        q_tile.store((as_float32(q_tile.load(RUNS)) * factor).to(q_tile.dtype))
        if PACKED:
            clear_rows(q_tile, rows, RUNS)
            for j in gl.static_range(TILES):
                clear_rows(do_tiles.index(TILES * slot + j).reshape([C, D]), rows, RUNS)
        fence_async_shared()  # q has been stored from registers; wgmma reads it
        mbarrier.arrive(gated.index(slot), count=1)


@gluon.jit
def _write_units(p_units, dS, factor, place, sizes, TILES: gl.constexpr):
    """Writes the unit of P, that is of factor * dS, for each of TILES tiles, and returns the inverse of the unit.

    Args:
        dS: TILES tiles [D, D], which share a unit.
        factor: [D, 1].
        place: the number of the chunk and head, the first key and the first value.
        sizes: K and V.
    """
    number, key, value = place
    K, V = sizes
    most = largest(dS[0] * factor)
    for j in gl.static_range(1, TILES):
        most = gl.maximum(most, largest(dS[j] * factor))
    unit, inverse = divisible_unit_of(most)
    tiles_v = gl.cdiv(V, D)
    first = p_units + (number.to(gl.int64) * gl.cdiv(K, D) + key // D) * tiles_v + value // D
    for j in gl.static_range(TILES):
        gl.store(first + j, unit, value // D + j < tiles_v)
    return inverse


@gluon.jit
def _state_warps(
    args, HAS_GATE: gl.constexpr, TILES: gl.constexpr, PER_Q: gl.constexpr, PER_V: gl.constexpr, STAGES: gl.constexpr
):
    """Carries dS backwards through the segment, and writes P of each chunk."""
    tiles, barriers, outputs, states, units, place, sizes = args
    q_tiles, do_tiles, p_tiles, end_tiles, first_tiles, mild_flags = tiles
    p_desc, p_units = outputs
    q_units, do_units, outer = units
    HALF: gl.constexpr = q_tiles.dtype == gl.float16
    SCALED: gl.constexpr = HAS_GATE or HALF
    full, gated, empty = barriers
    leaving, held, strides, dinitial = states
    h, n, key, value, row, length = place
    Ho, K, V = sizes
    line: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    keys = key + gl.arange(0, D, line)[:, None]  # [D, 1]
    values = value + gl.arange(0, D, gl.SliceLayout(0, LAYOUT))[None, :]  # [1, D]
    divisor = outer if HALF else None
    dS = leaving_gradient(
        leaving, strides, n, h // PER_V, held, h % PER_V == 0, keys, values, V, divisor, TILES
    )  # [D, D] each
    waiting = gl.full([D, 1], 1.0, gl.float32, LAYOUT)  # a factor of each key of dS that has not been applied yet
    chunks = gl.cdiv(length, C)
    for i in range(chunks):
        slot = i % STAGES
        phase = i // STAGES & 1
        q_tile = q_tiles.index(slot).reshape([C, D])
        p_first = (i & 1) * TILES  # the number of the first tile of P
        tma.store_wait(TILES)  # P of the chunk before the previous one has left these tiles
        mbarrier.wait(full.index(slot), phase)
        mbarrier.wait(gated.index(slot), phase)
        if HAS_GATE:
            mild = gl.max(mild_flags.index(slot).load(line), 0) != 0
            end = end_tiles.index(slot).load(line)[:, None]  # b_C [D, 1]
            decay = gl.exp2(end)
            P_factor = gl.exp2(gl.where(mild, 0.5 * end, 0.0))
        if HALF:
            c = row + chunks - 1 - i
            unit = unit_at(q_units, c, Ho // PER_Q, h // PER_Q) * unit_at(do_units, c, Ho, h)  # of q^T do
            if HAS_GATE:
                first = first_tiles.index(slot).load(line)[:, None]  # a [D, 1]
                P_factor *= waiting
                decay = waiting * gl.exp2(end - first) / unit
                waiting = gl.exp2(first) * unit
            else:
                P_factor, decay = waiting, waiting / unit
                waiting = gl.full([D, 1], 1.0, gl.float32, LAYOUT) * unit
            P_factor *= _write_units(p_units, dS, P_factor, (c * Ho + h, key, value), (K, V), TILES)
        started = ()
        for j in gl.static_range(TILES):
            do_tile = do_tiles.index(TILES * slot + j).reshape([C, D])
            started += (product(q_tile.permute([1, 0]), do_tile, dS[j] * decay if SCALED else dS[j]),)
        for j in gl.static_range(TILES):
            p_tile = p_tiles.index(p_first + j).reshape([D, D])
            p_tile.store((dS[j] * P_factor if SCALED else dS[j]).to(p_tiles.dtype))
        fence_async_shared()  # P has been stored from registers; TMA reads it
        for j in gl.static_range(TILES):
            at = [row + chunks - 1 - i, h, key, value + j * D]
            tma.async_copy_shared_to_global(p_desc, at, p_tiles.index(p_first + j))
        dS = warpgroup_mma_wait(0, started)
        if TILES == 1:  # `warpgroup_mma_wait` returns a tuple of one element as the element
            dS = (dS,)
        mbarrier.arrive(empty.index(slot), count=1)
    if dinitial is not None:
        for j in gl.static_range(TILES):
            inside = (keys < K) & (values + j * D < V)
            x = dS[j] * (waiting * outer) if HALF else dS[j]
            gl.store(dinitial + ((n * Ho + h).to(gl.int64) * K + keys) * V + values + j * D, x, inside)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["scale", "T", "segment", "segments", "Ho", "K"])
def _state_kernel(
    q_desc,  # [B, Hq, T, K], tiles [C, D]
    do_desc,  # [B, Ho, T, V], tiles [C, D]
    g_desc,  # [B, Hv, T, K], tiles [C, D], or None
    p_desc,  # P, [n, Ho, K, V], tiles [D, D]
    p_units,  # [n, Ho, blocks of D keys, blocks of D values], or None for bfloat16
    marks,  # [n, Ho, blocks of D], 1 if these keys of a chunk are not mild; None if g is None
    q_units,  # [n, Hq] if q and do were float32, else None
    do_units,  # [n, Ho] or None
    leaving,  # gradients of leaving states, [I, Hv, K, V] or None
    dinitial,  # gradients of initial states, [N, Ho, K, V] or None
    order,  # [I, 5], or None for a batch
    scale,
    state_n,  # strides of `leaving`; see `in_state`
    state_h,
    state_k,
    state_v,
    T,
    segment,  # tokens of a segment
    segments,  # segments of a sequence of a batch
    Ho,
    K,
    V,
    PER_Q: gl.constexpr,
    PER_V: gl.constexpr,
    TILES: gl.constexpr,
    TURNS: gl.constexpr,
    STAGES: gl.constexpr,
    LAST_LEAVE_NONE: gl.constexpr,
):
    """Computes dS and P of D keys and TILES D values of one head of o of one segment."""
    PACKED: gl.constexpr = order is not None
    blocks_v = gl.cdiv(V, TILES * D)
    blocks_k = gl.cdiv(K, D)
    pid = gl.program_id(0)  # neighbouring blocks read the same q and g
    value = pid % blocks_v * (TILES * D)
    key = pid // blocks_v % blocks_k * D
    h = pid // (blocks_v * blocks_k) % Ho
    i = pid // (blocks_v * blocks_k * Ho)
    i, b, start, length, row, held = segment_backwards(i, T, segment, segments, order, K, LAST_LEAVE_NONE)

    dtype: gl.constexpr = q_desc.dtype
    row_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, C, D], q_desc.layout)
    do_tiles = gl.allocate_shared_memory(dtype, [TILES * STAGES, 1, 1, C, D], do_desc.layout)
    p_tiles = gl.allocate_shared_memory(dtype, [2 * TILES, 1, 1, D, D], p_desc.layout)  # P of two chunks, in turns
    g_tiles = (
        q_tiles if g_desc is None else gl.allocate_shared_memory(g_desc.dtype, [STAGES, 1, 1, C, D], g_desc.layout)
    )
    end_tiles = gl.allocate_shared_memory(gl.float32, [STAGES, D], row_layout)  # b_C
    first_tiles: gl.constexpr = None
    if dtype == gl.float16:
        first_tiles = gl.allocate_shared_memory(gl.float32, [STAGES, D], row_layout)  # a
    mild_flags = gl.allocate_shared_memory(gl.int32, [STAGES, 1], row_layout)
    bars: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bars)  # q, do, g have been loaded
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bars)  # q and do have been read
    gated = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bars)  # q has been decayed
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(gated.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=1)

    HAS_GATE: gl.constexpr = marks is not None
    gate_tiles = (q_tiles, do_tiles, g_tiles, end_tiles, first_tiles, mild_flags)
    tiles = (q_tiles, do_tiles, p_tiles, end_tiles, first_tiles, mild_flags)
    barriers = (full, gated, empty)
    states = (leaving, held, (state_n, state_h, state_k, state_v), dinitial)
    place = (h, i, key, value, row, length)
    sizes = (Ho, K, V)
    descriptors = (q_desc, do_desc, g_desc)
    q_factor, outer = factors_of(scale, dtype)
    gate = (gate_tiles, (full, gated), marks, (h, key, value, row, length), (Ho, K), q_factor)
    load = (descriptors, (q_tiles, do_tiles, g_tiles), (full, empty), (b, h, key, value, start, gl.cdiv(length, C)))
    units = (q_units, do_units, outer)
    state = (tiles, barriers, (p_desc, p_units), states, units, place, sizes)
    # Registers of a thread of a gate and of the state warpgroup. In the latter, a tile of dS takes 32, and addresses of
    # given and returned states take more.
    HAS_STATES: gl.constexpr = leaving is not None or dinitial is not None
    GATE: gl.constexpr = 104 if TILES == 1 else 152 if TILES == 2 else 80 if HAS_STATES else 88
    STATE: gl.constexpr = 136 if TILES == 1 else 168 if TILES == 2 else 208 if HAS_STATES else 176
    if TURNS == 2:
        gl.warp_specialize(
            [
                (_gate_warps, (gate, 0, TURNS, TILES, STAGES, PACKED)),
                (_gate_warps, (gate, 1, TURNS, TILES, STAGES, PACKED)),
                (_state_warps, (state, HAS_GATE, TILES, PER_Q, PER_V, STAGES)),
                (_load_chunks, (load, TILES, PER_Q, PER_V, STAGES)),
            ],
            [4, 4, 1],
            [GATE, STATE, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_gate_warps, (gate, 0, TURNS, TILES, STAGES, PACKED)),
                (_gate_warps, (gate, 1, TURNS, TILES, STAGES, PACKED)),
                (_gate_warps, (gate, 2, TURNS, TILES, STAGES, PACKED)),
                (_state_warps, (state, HAS_GATE, TILES, PER_Q, PER_V, STAGES)),
                (_load_chunks, (load, TILES, PER_Q, PER_V, STAGES)),
            ],
            [4, 4, 4, 1],
            [GATE, GATE, STATE, 24],
        )
