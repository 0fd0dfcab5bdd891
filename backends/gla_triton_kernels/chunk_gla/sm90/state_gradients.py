"""Computes the gradients of the states that leave chunks, on Hopper: backwards through segments, with dS in registers.

For a chunk of C tokens, let dS be the gradient of the leaving state, dS' the gradient of the entering state, b_t the
sum of the log gates of the chunk through token t, and r = b_C / 2. Then

    dS' = exp(b_C) dS + (scale q exp(b))^T do        P = exp(b_C - r) dS, or dS if the chunk is not mild

The kernel goes from the last chunk of a segment to the first, and writes P of each chunk to memory. Whether a chunk is
mild is decided for each D keys separately.

B batch   T tokens   N sequences   I segments   H key/value heads   Hq query heads   G query heads of a group
K, V key and value width   C tokens of a chunk   D = 64 keys of a block   BV values of a block, 64 or 128
n rows of states, one for each chunk   TURNS gate warpgroups, 2 or 3
STAGES pipeline stages, a multiple of TURNS   slot   a pipeline stage in shared memory: the tiles of one chunk

The grid has one block per segment, query head, D keys and BV values. The warps of a block are specialised. They
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
from gla_triton_kernels.chunk_gla.kernel import GradientParameters
from gla_triton_kernels.chunk_gla.shared.limits import LOG2E, MILD_DECAY_SM90
from gla_triton_kernels.chunk_gla.shared.segments import Segments, lengths_of, state_strides
from gla_triton_kernels.chunk_gla.sm90 import pairs
from gla_triton_kernels.chunk_gla.sm90.common import as_float32, clear_rows, in_state, plus
from gla_triton_kernels.chunk_gla.sm90.common_backward import RUNS, WIDTH, C, D, gates, product, segment_backwards
from gla_triton_kernels.chunk_gla.sm90.log_gates import launch_log_gates
from gla_triton_kernels.chunk_gla.tensors import BackwardTensors
from gla_triton_kernels.runtime.launch import Launch
from gla_triton_kernels.runtime.tma import shared_tiles, state_tiles


class StateGradients(NamedTuple):
    """Inputs of the kernel of backward_wide.py that are not tensors of the call.

    Attributes:
        g: log gates [B, T, H, K], or None.
        P: decayed gradients of the states that leave chunks, [n, Hq, K, V] bfloat16.
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
    H, V = x.v.shape[2:]
    g, found = x.g, []
    if g is not None and normalizer is not None:
        g, log_gates = launch_log_gates(g, normalizer)
        found.append(log_gates)
    marks = pairs.new_marks(x, entering, WIDTH)
    P = torch.empty(entering.numel() // (H * K * V), Hq, K, V, dtype=entering.dtype, device=x.q.device)
    turns = 3 if kernel.BV == 64 else 2
    arguments = {
        "q_desc": shared_tiles(x.q, CHUNK, WIDTH),
        "do_desc": shared_tiles(x.do, CHUNK, kernel.BV),
        "g_desc": None if g is None else shared_tiles(g, CHUNK, WIDTH),
        "p_desc": state_tiles(P, WIDTH, kernel.BV),
        "marks": marks,
        "leaving": leaving,
        "dinitial": x.dinitial_state,
        "order": segments.order,
        "scale": scale,
        **state_strides("state_", leaving),
        **lengths_of(T, segments),
        "Hq": Hq,
        "K": K,
        "V": V,
        "G": Hq // H,
        "TURNS": turns,
        "STAGES": 2 * turns,
        "LAST_LEAVE_NONE": x.last_leave_none,
    }
    blocks = ceil_div(K, WIDTH) * ceil_div(V, kernel.BV) * segments.count * Hq
    options = {"num_warps": kernel.warps, "maxnreg": 96 if turns > 2 else 128}
    found.append(Launch(_state_kernel, (blocks, 1, 1), arguments, options))
    return StateGradients(g, P, marks, found)


@gluon.jit
def _load_chunks(given, G: gl.constexpr, STAGES: gl.constexpr):
    """Loads q, do and g of all chunks, the last chunk first, ahead of the other warps."""
    descriptors, tiles, barriers, place = given
    q_desc, do_desc, g_desc = descriptors
    q_tiles, do_tiles, g_tiles = tiles
    full, empty = barriers
    b, h, key, value, start, chunks = place
    GATE_SIZE: gl.constexpr = 0 if g_desc is None else g_desc.block_type.nbytes
    SIZE: gl.constexpr = q_desc.block_type.nbytes + GATE_SIZE + do_desc.block_type.nbytes
    for i in range(chunks):
        slot = i % STAGES
        t = start + (chunks - 1 - i) * C
        bar = full.index(slot)
        mbarrier.wait(empty.index(slot), (i // STAGES & 1) ^ 1)
        mbarrier.expect(bar, SIZE)
        if g_desc is not None:
            tma.async_copy_global_to_shared(g_desc, [b, h // G, t, key], bar, g_tiles.index(slot))
        tma.async_copy_global_to_shared(q_desc, [b, h, t, key], bar, q_tiles.index(slot))
        tma.async_copy_global_to_shared(do_desc, [b, h, t, value], bar, do_tiles.index(slot))


@gluon.jit
def _gate_warps(given, turn: gl.constexpr, TURNS: gl.constexpr, STAGES: gl.constexpr, PACKED: gl.constexpr):
    """Replaces q by scale q exp(b), and marks chunks that are not mild, in every TURNS-th chunk from `turn` on."""
    tiles, barriers, marks, place, sizes, scale = given
    q_tiles, do_tiles, g_tiles, end_tiles, mild_flags = tiles
    full, gated = barriers
    h, key, value, row, length = place
    Hq, K = sizes
    BV: gl.constexpr = do_tiles.type.shape[4]
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
                at = ((row + c) * Hq + h).to(gl.int64) * gl.cdiv(K, D) + key // D
                gl.store(marks + at, gl.where(mild, 0, 1))
            factor = gl.exp2(gl.associative_scan(g, 0, plus)) * scale  # [C, D]
        q_tile.store((as_float32(q_tile.load(RUNS)) * factor).to(gl.bfloat16))
        if PACKED:
            clear_rows(q_tile, rows, RUNS)
            clear_rows(do_tiles.index(slot).reshape([C, BV]), rows, RUNS)
        fence_async_shared()  # q has been stored from registers; wgmma reads it
        mbarrier.arrive(gated.index(slot), count=1)


@gluon.jit
def _state_warps(given, HAS_GATE: gl.constexpr, G: gl.constexpr, STAGES: gl.constexpr):
    """Carries dS backwards through the segment, and writes P of each chunk."""
    tiles, barriers, p_desc, states, place, sizes = given
    q_tiles, do_tiles, p_tiles, end_tiles, mild_flags = tiles
    full, gated, empty = barriers
    leaving, held, state_n, state_h, state_k, state_v, dinitial = states
    h, n, key, value, row, length = place
    Hq, K, V = sizes
    BV: gl.constexpr = do_tiles.type.shape[4]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BV, 16])
    line: gl.constexpr = gl.SliceLayout(1, layout)
    keys = key + gl.arange(0, D, line)[:, None]  # [D, 1]
    values = value + gl.arange(0, BV, gl.SliceLayout(0, layout))[None, :]  # [1, BV]
    inside = (keys < K) & (values < V)  # [D, BV]
    if leaving is not None:
        head = leaving + n.to(gl.int64) * state_n + (h // G).to(gl.int64) * state_h
        taken = inside & (keys < held) & (h % G == 0)  # only one query head of a group adds the gradient
        dS = gl.load(head + in_state(keys, values, state_k, state_v), taken, 0.0)  # [D, BV]
    else:
        dS = gl.zeros([D, BV], gl.float32, layout)
    chunks = gl.cdiv(length, C)
    for i in range(chunks):
        slot = i % STAGES
        phase = i // STAGES & 1
        q_tile = q_tiles.index(slot).reshape([C, D])
        do_tile = do_tiles.index(slot).reshape([C, BV])
        p_block = p_tiles.index(i & 1)
        p_tile = p_block.reshape([D, BV])
        tma.store_wait(1)  # P of the chunk before the previous one has left this tile
        mbarrier.wait(full.index(slot), phase)
        mbarrier.wait(gated.index(slot), phase)
        if HAS_GATE:
            mild = gl.max(mild_flags.index(slot).load(line), 0) != 0
            end = end_tiles.index(slot).load(line)[:, None]  # b_C [D, 1]
            started = product(q_tile.permute([1, 0]), do_tile, dS * gl.exp2(end))  # [D, BV]
            p_tile.store((dS * gl.exp2(gl.where(mild, 0.5 * end, 0.0))).to(gl.bfloat16))
        else:
            started = product(q_tile.permute([1, 0]), do_tile, dS)
            p_tile.store(dS.to(gl.bfloat16))
        fence_async_shared()  # P has been stored from registers; TMA reads it
        tma.async_copy_shared_to_global(p_desc, [row + chunks - 1 - i, h, key, value], p_block)
        dS = warpgroup_mma_wait(0, [started])
        mbarrier.arrive(empty.index(slot), count=1)
    if dinitial is not None:
        gl.store(dinitial + ((n * Hq + h).to(gl.int64) * K + keys) * V + values, dS, inside)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["scale", "T", "segment", "segments", "Hq", "K"])
def _state_kernel(
    q_desc,  # [B, Hq, T, K], tiles [C, D]
    do_desc,  # [B, Hq, T, V], tiles [C, BV]
    g_desc,  # [B, H, T, K], tiles [C, D], or None
    p_desc,  # P, [n, Hq, K, V], tiles [D, BV]
    marks,  # [n, Hq, blocks of D], 1 if these keys of a chunk are not mild; None if g is None
    leaving,  # gradients of leaving states, [I, H, K, V] or None
    dinitial,  # gradients of initial states, [N, Hq, K, V] or None
    order,  # [I, 5], or None for a batch
    scale,
    state_n,  # strides of `leaving`; see `in_state`
    state_h,
    state_k,
    state_v,
    T,
    segment,  # tokens of a segment
    segments,  # segments of a sequence of a batch
    Hq,
    K,
    V,
    G: gl.constexpr,
    TURNS: gl.constexpr,
    STAGES: gl.constexpr,
    LAST_LEAVE_NONE: gl.constexpr,
):
    """Computes dS and P of D keys and BV values of one query head of one segment."""
    PACKED: gl.constexpr = order is not None
    BV: gl.constexpr = do_desc.block_type.shape[3]
    blocks_v = gl.cdiv(V, BV)
    blocks_k = gl.cdiv(K, D)
    pid = gl.program_id(0)  # neighbouring blocks read the same q and g
    value = pid % blocks_v * BV
    key = pid // blocks_v % blocks_k * D
    h = pid // (blocks_v * blocks_k) % Hq
    i = pid // (blocks_v * blocks_k * Hq)
    i, b, start, length, row, held = segment_backwards(i, T, segment, segments, order, K, LAST_LEAVE_NONE)

    dtype: gl.constexpr = gl.bfloat16
    row_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, C, D], q_desc.layout)
    do_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, C, BV], do_desc.layout)
    p_tiles = gl.allocate_shared_memory(dtype, [2, 1, 1, D, BV], p_desc.layout)  # used in turns
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
    states = (leaving, held, state_n, state_h, state_k, state_v, dinitial)
    place = (h, i, key, value, row, length)
    sizes = (Hq, K, V)
    descriptors = (q_desc, do_desc, g_desc)
    gate = (gate_tiles, (full, gated), marks, (h, key, value, row, length), (Hq, K), scale)
    load = (descriptors, (q_tiles, do_tiles, g_tiles), (full, empty), (b, h, key, value, start, gl.cdiv(length, C)))
    state = (tiles, barriers, p_desc, states, place, sizes)
    if TURNS == 2:
        gl.warp_specialize(
            [
                (_gate_warps, (gate, 0, TURNS, STAGES, PACKED)),
                (_gate_warps, (gate, 1, TURNS, STAGES, PACKED)),
                (_state_warps, (state, HAS_GATE, G, STAGES)),
                (_load_chunks, (load, G, STAGES)),
            ],
            [4, 4, 1],
            [152, 168, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_gate_warps, (gate, 0, TURNS, STAGES, PACKED)),
                (_gate_warps, (gate, 1, TURNS, STAGES, PACKED)),
                (_gate_warps, (gate, 2, TURNS, STAGES, PACKED)),
                (_state_warps, (state, HAS_GATE, G, STAGES)),
                (_load_chunks, (load, G, STAGES)),
            ],
            [4, 4, 4, 1],
            [104, 104, 136, 24],
        )
