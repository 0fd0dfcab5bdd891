"""Computes the gradients of the states that leave chunks, on Hopper: backwards through segments, with dS in registers.

For a chunk of C tokens, let dS be the gradient of the leaving state, dS' the gradient of the entering state, b_t the
sum of the log gates of the chunk through token t, and r = b_C / 2. Then

    dS' = exp(b_C) dS + (scale q exp(b))^T do        P = exp(b_C - r) dS, or dS if the chunk is not mild

The kernel goes from the last chunk of a segment to the first, and writes P of each chunk to memory. Whether a chunk is
mild is decided for each D keys separately.

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
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma_wait,
)

from gla_core.dispatch.backend import CHUNK
from gla_core.dispatch.tensors import ceil_div
from gla_triton_kernels.chunks.kernel import GradientParameters
from gla_triton_kernels.chunks.segments import Segments, lengths_of, state_strides
from gla_triton_kernels.gla.shared.limits import MILD_DECAY_SM90
from gla_triton_kernels.gla.sm90 import pairs
from gla_triton_kernels.gla.sm90.common import as_float32, clear_rows, plus
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
from gla_triton_kernels.gla.tensors import BackwardTensors
from gla_triton_runtime.arithmetic import LOG2E
from gla_triton_runtime.launch import Launch
from gla_triton_runtime.tma import shared_tiles, state_tiles


class StateGradients(NamedTuple):
    """Inputs of the kernel of backward_wide.py that are not tensors of the call.

    Attributes:
        g: log gates [B, T, Hv, K], or None.
        P: decayed gradients of the states that leave chunks, [n, Ho, K, V] bfloat16.
        marks: see `launch_pairs` of pairs.py; there is one mark for WIDTH keys.
        launches: the launches that fill these tensors.
    """

    g: Tensor | None
    P: Tensor
    marks: Tensor | None
    launches: list[Launch]


def launch_state_gradients(
    kernel: GradientParameters,
    x: BackwardTensors,
    entering: Tensor,
    leaving: Tensor | None,
    segments: Segments,
    scale: float,
    normalizer: int | None,
) -> StateGradients:
    """Returns log gates, P, the marks of chunks that are not mild, and the launches that fill them.

    Args:
        entering, leaving, segments, normalizer: see `launch_gradients` of general/backward.py; entering is bfloat16.
    """
    T, Hq, K = x.q.shape[1:]
    (Hv, V), Ho = x.v.shape[2:], x.do.shape[2]
    g, made = x.g, []
    if g is not None and normalizer is not None:
        g, log_gates = launch_log_gates(g, normalizer)
        made.append(log_gates)
    marks = pairs.new_marks(x, entering, WIDTH)
    P = torch.empty(entering.numel() // (Hv * K * V), Ho, K, V, dtype=entering.dtype, device=x.q.device)
    tiles = kernel.BV // WIDTH
    turns = 2 if tiles == 2 else 3
    arguments = {
        "q_desc": shared_tiles(x.q, CHUNK, WIDTH),
        "do_desc": shared_tiles(x.do, CHUNK, WIDTH),
        "g_desc": None if g is None else shared_tiles(g, CHUNK, WIDTH),
        "p_desc": state_tiles(P, WIDTH, WIDTH),
        "marks": marks,
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
    return StateGradients(g, P, marks, made)


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
    """Replaces q by scale q exp(b), and marks chunks that are not mild, in every TURNS-th chunk from `turn` on."""
    tiles, barriers, marks, place, sizes, scale = args
    q_tiles, do_tiles, g_tiles, end_tiles, mild_flags = tiles
    full, gated = barriers
    h, key, value, row, length = place
    Ho, K = sizes
    chunks = gl.cdiv(length, C)
    for i in range(turn, chunks, TURNS):
        c = chunks - 1 - i
        slot = i % STAGES
        rows = length - c * C
        q_tile = q_tiles.index(slot).reshape([C, D])
        mbarrier.wait(full.index(slot), i // STAGES & 1)
        factor = scale
        if marks is not None:
            g = gates(g_tiles.index(slot), rows, None, PACKED)  # [C, D]
            end = gl.sum(g, 0)  # b_C [D]
            mild = gl.min(end, 0) > -MILD_DECAY_SM90 * LOG2E
            end_tiles.index(slot).store(end)
            mild_flags.index(slot).store(gl.full([1], mild, gl.int32, gl.SliceLayout(1, RUNS)))
            if value == 0:
                at = ((row + c) * Ho + h).to(gl.int64) * gl.cdiv(K, D) + key // D
                gl.store(marks + at, gl.where(mild, 0, 1))
            factor = gl.exp2(gl.associative_scan(g, 0, plus)) * scale  # [C, D]
        q_tile.store((as_float32(q_tile.load(RUNS)) * factor).to(gl.bfloat16))
        if PACKED:
            clear_rows(q_tile, rows, RUNS)
            for j in gl.static_range(TILES):
                clear_rows(do_tiles.index(TILES * slot + j).reshape([C, D]), rows, RUNS)
        fence_async_shared()  # q has been stored from registers; wgmma reads it
        mbarrier.arrive(gated.index(slot), count=1)


@gluon.jit
def _state_warps(args, HAS_GATE: gl.constexpr, TILES: gl.constexpr, PER_V: gl.constexpr, STAGES: gl.constexpr):
    """Carries dS backwards through the segment, and writes P of each chunk."""
    tiles, barriers, p_desc, states, place, sizes = args
    q_tiles, do_tiles, p_tiles, end_tiles, mild_flags = tiles
    full, gated, empty = barriers
    leaving, held, strides, dinitial = states
    h, n, key, value, row, length = place
    Ho, K, V = sizes
    line: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    keys = key + gl.arange(0, D, line)[:, None]  # [D, 1]
    values = value + gl.arange(0, D, gl.SliceLayout(0, LAYOUT))[None, :]  # [1, D]
    dS = leaving_gradient(
        leaving, strides, n, h // PER_V, held, h % PER_V == 0, keys, values, V, None, TILES
    )  # [D, D] each
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
        started = ()
        for j in gl.static_range(TILES):
            do_tile = do_tiles.index(TILES * slot + j).reshape([C, D])
            started += (product(q_tile.permute([1, 0]), do_tile, dS[j] * decay if HAS_GATE else dS[j]),)
        for j in gl.static_range(TILES):
            p_tiles.index(p_first + j).reshape([D, D]).store((dS[j] * P_factor if HAS_GATE else dS[j]).to(gl.bfloat16))
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
            gl.store(dinitial + ((n * Ho + h).to(gl.int64) * K + keys) * V + values + j * D, dS[j], inside)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["scale", "T", "segment", "segments", "Ho", "K"])
def _state_kernel(
    q_desc,  # [B, Hq, T, K], tiles [C, D]
    do_desc,  # [B, Ho, T, V], tiles [C, D]
    g_desc,  # [B, Hv, T, K], tiles [C, D], or None
    p_desc,  # P, [n, Ho, K, V], tiles [D, D]
    marks,  # [n, Ho, blocks of D], 1 if these keys of a chunk are not mild; None if g is None
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

    dtype: gl.constexpr = gl.bfloat16
    row_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, C, D], q_desc.layout)
    do_tiles = gl.allocate_shared_memory(dtype, [TILES * STAGES, 1, 1, C, D], do_desc.layout)
    p_tiles = gl.allocate_shared_memory(dtype, [2 * TILES, 1, 1, D, D], p_desc.layout)  # P of two chunks, in turns
    g_tiles = (
        q_tiles if g_desc is None else gl.allocate_shared_memory(g_desc.dtype, [STAGES, 1, 1, C, D], g_desc.layout)
    )
    end_tiles = gl.allocate_shared_memory(gl.float32, [STAGES, D], row_layout)  # b_C
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
    gate_tiles = (q_tiles, do_tiles, g_tiles, end_tiles, mild_flags)
    tiles = (q_tiles, do_tiles, p_tiles, end_tiles, mild_flags)
    barriers = (full, gated, empty)
    states = (leaving, held, (state_n, state_h, state_k, state_v), dinitial)
    place = (h, i, key, value, row, length)
    sizes = (Ho, K, V)
    descriptors = (q_desc, do_desc, g_desc)
    gate = (gate_tiles, (full, gated), marks, (h, key, value, row, length), (Ho, K), scale)
    load = (descriptors, (q_tiles, do_tiles, g_tiles), (full, empty), (b, h, key, value, start, gl.cdiv(length, C)))
    state = (tiles, barriers, p_desc, states, place, sizes)
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
                (_state_warps, (state, HAS_GATE, TILES, PER_V, STAGES)),
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
                (_state_warps, (state, HAS_GATE, TILES, PER_V, STAGES)),
                (_load_chunks, (load, TILES, PER_Q, PER_V, STAGES)),
            ],
            [4, 4, 4, 1],
            [GATE, GATE, STATE, 24],
        )
