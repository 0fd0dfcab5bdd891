"""Carries gradients of states of the delta rule backwards through sequences on Hopper.

A chunk of C tokens has kin, qin, kout, decay, A and G of backward_pairs.py, and B = diag(beta). With dS' the gradient
of the state that leaves it,

    dU = A^T dO + kout dS'        Y = dU - G^T (B dU)        dV = B Y        dS = diag(decay) dS' + qin^T dO - kin^T dV

A block of warps has 2 W columns of one value head of one segment. It writes dV, or Y if general/gradients.py reads it,
and dS' of each chunk; all other gradients are computed in parallel over chunks. It needs neither the states nor v.

**Wide keys.** More than 128 keys, which share a gate, are two parts, each with a warpgroup. Both have the same W
columns of V, and exchange kout dS' through shared memory.

If sequences are cut, one launch computes the summary of each segment but the first: the gradient of the state that
enters it if that of the state that leaves it is 0, and the transpose of its transition, which is the same for dO of 0
and the identity. A scan then computes the gradients of the states that leave segments (chunks/scan.py).

All of it is computed transposed: dS^T [W, K] and dU^T [W, C] are results of products and left operands of others, and
stay in registers. Two warpgroups have W = 64 columns of V each. One warp loads the tiles of the next chunks by TMA.
With wide keys, there is room for A and qin of one chunk only.

Y is what a difference leaves, so G and B dU are float16, in units of rows, and A is a sum of two numbers of bfloat16.
All other operands are bfloat16.

B batch   T tokens   J chunks   I segments, or sequences   Hv heads of values   K, V key and value width
C tokens of a chunk   PARTS parts of the keys
"""

# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportAssignmentType=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
from __future__ import annotations

from collections.abc import Mapping

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
from gla_triton_kernels.chunks.scan import launch_scan
from gla_triton_kernels.chunks.segments import Recurrence, Segments, are_cut, state_strides
from gla_triton_kernels.delta.sm90.backward_pairs import Chunks
from gla_triton_kernels.delta.sm90.common_backward import (
    MOST,
    NUMBERS,
    WIDTH,
    C,
    size_arguments,
    token_arguments,
    unit_of_rows,
)
from gla_triton_kernels.delta.tensors import BackwardTensors
from gla_triton_kernels.gla.sm90.common import chunk_of, clear_rows, in_state, keep_apart, opaque_zero, tokens_of
from gla_triton_runtime.launch import Launch
from gla_triton_runtime.tma import row_tiles, shared_tiles, state_tiles

W = gl.constexpr(64)
SLOTS = gl.constexpr(2)
STATE = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))  # of dS^T [W, K]
TOKENS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))  # of dU^T [W, C]
ROWS = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))  # of a tile [C, W]
LEFT_STATE = gl.constexpr(gl.DotOperandLayout(0, TOKENS.value, 2))
LEFT_TOKENS = gl.constexpr(gl.DotOperandLayout(0, STATE.value, 2))


def launch_states(
    x: BackwardTensors, chunks: Chunks, segments: Segments, y: Tensor | None = None
) -> tuple[Tensor, list[Launch]]:
    """Returns the gradients of the states that leave chunks [J, Hv, K, V], and the launches that fill them and x.dv.

    They fill the gradients of initial states as well, unless x has none.

    Args:
        y: receives Y in place of x.dv, [B, T, Hv, V]. If it is None, V is at most 128.
        segments: the segments, of a multiple of `CHUNK` tokens; a sequence that stays whole is one segment.
    """
    behind, before = None, []
    if are_cut(x.k.shape[1], segments):
        behind, before = _launch_behind(x, chunks, segments)
    leaving = x.v.new_empty(chunks.segments.count, *_shape(x), dtype=torch.bfloat16)
    pointers = {"last_ptr": x.dstate, "behind_ptr": behind, "dinitial_ptr": x.dinitial_state, "transitions_ptr": None}
    return leaving, [*before, _launch(x, chunks, segments, leaving, segments.count, pointers, False, y)]


def _launch_behind(x: BackwardTensors, chunks: Chunks, segments: Segments) -> tuple[Tensor, list[Launch]]:
    """Returns the gradients of the states that leave segments [I, Hv, K, V], except last ones, and the launches."""
    Hv, K, V = _shape(x)
    reached, transitions = (x.v.new_empty(segments.count, Hv, K, n, dtype=torch.float32) for n in (V, K))
    summaries = launch_summaries(x, chunks, segments, reached, transitions, False)
    recurrence = Recurrence(x.q, x.do, x.g, x.dstate, None, backwards=True)
    scan = launch_scan(False, recurrence, segments, reached, transitions, reached, skip_first=True)
    return reached, [summaries, *scan]


def launch_summaries(
    x: BackwardTensors, chunks: Chunks, segments: Segments, reached: Tensor, transitions: Tensor, every_one: bool
) -> Launch:
    """Returns the launch that fills the summaries of segments.

    Args:
        reached: receives the gradients of the states that enter segments, from 0, [I, Hv, K, V].
        transitions: [I, Hv, K, K].
        every_one: whether the summaries of first segments are filled too; they are undefined otherwise.
    """
    none_leaves = x.v.new_empty(1, *_shape(x), dtype=torch.bfloat16)  # of which a summary writes nothing
    pointers = {"last_ptr": None, "behind_ptr": None, "dinitial_ptr": reached, "transitions_ptr": transitions}
    return _launch(x, chunks, segments, none_leaves, segments.count, pointers, every_one)


def _shape(x: BackwardTensors) -> tuple[int, int, int]:
    """Returns Hv, K and V."""
    return x.v.shape[2], x.k.shape[3], x.v.shape[3]


def _launch(
    x: BackwardTensors,
    chunks: Chunks,
    segments: Segments,
    leaving: Tensor,
    count: int,
    pointers: Mapping[str, Tensor | None],
    every_one: bool,
    y: Tensor | None = None,
) -> Launch:
    """Returns a launch for `count` segments.

    Args:
        pointers: the arguments of the kernel from last_ptr to transitions_ptr.
        every_one: as in `launch_summaries`.
        y: as in `launch_states`.
    """
    Hv, K, V = _shape(x)
    parts, written = ceil_div(K, MOST), x.dv if y is None else y
    blocks = ceil_div(V, MOST // parts) + (pointers["transitions_ptr"] is not None)
    arguments = {
        "kin_desc": shared_tiles(x.k, CHUNK, MOST) if chunks.kin is None else row_tiles(chunks.kin, CHUNK, MOST),
        "qin_desc": row_tiles(chunks.qin, CHUNK, MOST),
        "kout_desc": None if chunks.kout is None else row_tiles(chunks.kout, CHUNK, MOST),
        "A_desc": row_tiles(chunks.A, CHUNK, CHUNK),
        "G_desc": row_tiles(chunks.G, CHUNK, CHUNK),
        "do_desc": shared_tiles(x.do, CHUNK, MOST // 2),
        "dv_desc": shared_tiles(written, CHUNK, MOST // 2),
        "leaving_desc": state_tiles(leaving, MOST, MOST // 2),
        "dv_ptr": written,
        "units_ptr": chunks.units,
        "decay_ptr": chunks.decay,
        "factors_ptr": chunks.factors,
        **pointers,
        **token_arguments(x, segments),
        **state_strides("state_", x.dstate),
        **size_arguments(x, segments),
        "V": V,
        "places": len(chunks.units),
        "WRITES_Y": y is not None,
        "PARTS": parts,
        "EVERY_ONE": every_one,
    }
    return Launch(_scan_kernel, (blocks * count * Hv, 1, 1), arguments, {"num_warps": 4, "maxnreg": 168})


@gluon.jit
def _load_warp(descriptors, tiles, barriers, place, PARTS: gl.constexpr):
    kin_desc, qin_desc, kout_desc, a_desc, g_desc, do_desc = descriptors
    kin_tiles, qin_tiles, kout_tiles, a_tiles, g_tiles, do_tiles = tiles
    full, empty, q_full, q_empty, _, _ = barriers
    b, h, R, Hv, first, start, length, places, column = place
    rest = places * C  # the first row of the rest of A
    Q_SLOTS: gl.constexpr = SLOTS // PARTS
    COLUMNS: gl.constexpr = 2 // PARTS  # of W values
    chunks = gl.cdiv(length, C)
    for i in range(chunks):
        slot, q_slot = i % SLOTS, i % Q_SLOTS
        c = chunks - 1 - i
        row = ((first + c) * Hv + h) * C
        t = start + c * C
        mbarrier.wait(empty.index(slot), i // SLOTS & 1 ^ 1)
        size: gl.constexpr = (
            (PARTS if kout_desc is None else 2) * kin_desc.block_type.nbytes
            + g_desc.block_type.nbytes
            + COLUMNS * do_desc.block_type.nbytes
        )
        bar = full.index(slot)
        mbarrier.expect(bar, size)
        if kout_desc is None:
            for p in gl.static_range(PARTS):
                kin_tile = kin_tiles.index(PARTS * slot + p)
                tma.async_copy_global_to_shared(kin_desc, [b, h // R, t, p * WIDTH], bar, kin_tile)
        else:
            tma.async_copy_global_to_shared(kout_desc, [row, 0], bar, kout_tiles.index(slot))
        for j in gl.static_range(COLUMNS):
            do_tile = do_tiles.index(COLUMNS * slot + j)
            tma.async_copy_global_to_shared(do_desc, [b, h, t, column + j * W], bar, do_tile)
        q_bar = q_full.index(q_slot)
        mbarrier.wait(q_empty.index(q_slot), i // Q_SLOTS & 1 ^ 1)
        mbarrier.expect(q_bar, 2 * a_desc.block_type.nbytes + PARTS * qin_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(a_desc, [row, 0], q_bar, a_tiles.index(2 * q_slot))
        tma.async_copy_global_to_shared(a_desc, [rest + row, 0], q_bar, a_tiles.index(2 * q_slot + 1))
        tma.async_copy_global_to_shared(g_desc, [row, 0], bar, g_tiles.index(slot))
        for p in gl.static_range(PARTS):
            tma.async_copy_global_to_shared(qin_desc, [row, p * WIDTH], q_bar, qin_tiles.index(PARTS * q_slot + p))
        if kout_desc is not None:
            tma.async_copy_global_to_shared(kin_desc, [row, 0], bar, kin_tiles.index(slot))


@gluon.jit
def _sum_of_parts(x, partials, barriers, i, PART: gl.constexpr):
    """Returns x [W, C], the product of a part of the keys in chunk i, summed over both parts.

    Args:
        partials: a buffer for each part, [2, W, C].
        barriers: at which the warpgroup of a part says that it has written its buffer, and read that of the other [2].
    """
    written, read = barriers
    mbarrier.wait(read.index(1 - PART), i & 1 ^ 1)
    partials.index(PART).store(x)
    mbarrier.arrive(written.index(PART), count=1)
    mbarrier.wait(written.index(1 - PART), i & 1)
    x += partials.index(1 - PART).load(x.type.layout)
    mbarrier.arrive(read.index(PART), count=1)
    return x


@gluon.jit
def _state_warps(
    tiles,
    outputs,
    numbers,
    states,
    barriers,
    place,
    sizes,
    WRITES_Y: gl.constexpr,
    PARTS: gl.constexpr,
    PACKED: gl.constexpr,
    WARPGROUP: gl.constexpr,
):
    """Carries dS of W values and a part of the keys."""
    kin_tiles, qin_tiles, kout_tiles, a_tiles, g_tiles, do_tiles, dv_tiles, leaving_tiles, partials = tiles
    full, empty, q_full, q_empty, written, read = barriers
    dv_desc, leaving_desc, dv_ptr = outputs
    beta_ptr, beta_t, units_ptr, decay_ptr, factors_ptr = numbers
    last_ptr, strides, behind_ptr, dinitial_ptr, transitions_ptr, is_transition, n, sequence, is_first, is_last = states
    SUMMARIES: gl.constexpr = transitions_ptr is not None
    PART: gl.constexpr = WARPGROUP if PARTS == 2 else 0
    COLUMN: gl.constexpr = 0 if PARTS == 2 else WARPGROUP
    COLUMNS: gl.constexpr = 2 // PARTS
    Q_SLOTS: gl.constexpr = SLOTS // PARTS
    b, h, _, Hv, first, start, length, _, column = place
    K, V = sizes
    first_value = column + COLUMN * W
    if SUMMARIES:
        first_value = gl.where(is_transition, 0, column) + COLUMN * W
    value = gl.arange(0, W, gl.SliceLayout(1, STATE))[:, None] + first_value
    key = gl.arange(0, WIDTH, gl.SliceLayout(0, STATE)) + PART * WIDTH
    token = gl.arange(0, C, gl.SliceLayout(0, TOKENS))
    dS = gl.zeros([W, WIDTH], gl.float32, STATE)
    if SUMMARIES:
        dS = gl.where(is_transition & (value == key[None, :]), 1.0, dS)
    if behind_ptr is not None:
        head = behind_ptr + (n * Hv + h).to(gl.int64) * K * V
        dS = gl.load(head + (key[None, :] * V + value), (key < K)[None, :] & (value < V) & (not is_last), 0.0)
    if last_ptr is not None:
        state_n, state_h, state_k, state_v = strides
        head = last_ptr + sequence.to(gl.int64) * state_n + h.to(gl.int64) * state_h
        inside = (key < K)[None, :] & (value < V)
        dS = gl.load(head + in_state(key[None, :], value, state_k, state_v), inside & is_last, dS).to(gl.float32)
    leaving_block = leaving_tiles.index(WARPGROUP)
    leaving_tile = leaving_block.reshape([WIDTH, W])
    dv_block = dv_tiles.index(COLUMN)
    chunks = gl.cdiv(length, C)
    for i in range(chunks):
        slot, q_slot = i % SLOTS, i % Q_SLOTS
        c = chunks - 1 - i
        rows = gl.minimum(length - c * C, C)
        t = start + c * C
        number = ((first + c) * Hv + h).to(gl.int64)
        beta = gl.load(beta_ptr + (t + token).to(gl.int64) * beta_t, token < rows, 0.0).to(gl.float32)[None, :]
        unit = gl.load(units_ptr + number * C + token)[None, :]
        decay = gl.load(decay_ptr + number * K + key, key < K, 0.0)[None, :]
        if factors_ptr is not None:
            through = gl.load(factors_ptr + number * (2 * C) + token)[None, :]
            after = gl.load(factors_ptr + number * (2 * C) + C + token)[None, :]
        state = dS.to(gl.bfloat16)
        if not SUMMARIES:
            tma.store_wait(0)  # the copies have read their tiles
            leaving_tile.permute([1, 0]).store(state)
            fence_async_shared()
            tma.async_copy_shared_to_global(leaving_desc, [first + c, h, PART * WIDTH, first_value], leaving_block)
        mbarrier.wait(full.index(slot), i // SLOTS & 1)
        mbarrier.wait(q_full.index(q_slot), i // Q_SLOTS & 1)
        kin_tile = kin_tiles.index(PARTS * slot + PART).reshape([C, WIDTH])
        kout_tile = kout_tiles.index(PARTS * slot + PART).reshape([C, WIDTH])
        do_tile = do_tiles.index(COLUMNS * slot + COLUMN).reshape([C, W])
        qin_tile, a_tile, rest_tile = (
            qin_tiles.index(PARTS * q_slot + PART),
            a_tiles.index(2 * q_slot),
            a_tiles.index(2 * q_slot + 1),
        )
        if PACKED:
            clear_rows(do_tile, rows, ROWS)  # they belong to the next sequence
            if factors_ptr is not None:
                for j in gl.static_range(4):  # in parts, for fewer registers; both warpgroups write the same zeros
                    clear_rows(kin_tile.slice(16 * j, 16), rows - 16 * j, ROWS)
            fence_async_shared()
        do_t = do_tile.permute([1, 0])  # [W, C]
        dU = gl.zeros([W, C], gl.float32, TOKENS)
        left = gl.convert_layout(state, LEFT_STATE)
        dU = warpgroup_mma(left, kout_tile.permute([1, 0]), dU, use_acc=False, is_async=True)
        if factors_ptr is not None:
            dA = gl.zeros([W, C], gl.float32, TOKENS)
            dA = warpgroup_mma(do_t, a_tile, dA, use_acc=False, is_async=True)
            dA = warpgroup_mma(do_t, rest_tile, dA, is_async=True)
            dS = warpgroup_mma(do_t, qin_tile, dS * decay, is_async=True)
            dU, dA = warpgroup_mma_wait(1, [dU, dA])
            if PARTS == 2:
                dU = _sum_of_parts(dU, partials, (written, read), i, PART)
            dU = dU * after + dA
        else:
            dU = warpgroup_mma(do_t, a_tile, dU, is_async=True)
            dU = warpgroup_mma(do_t, rest_tile, dU, is_async=True)
            dS = warpgroup_mma(do_t, qin_tile, dS * decay, is_async=True)
            dU = warpgroup_mma_wait(1, [dU])
        x = dU * (beta * unit)
        row_unit, inverse = unit_of_rows(x)
        x = gl.convert_layout((x * inverse[:, None]).to(gl.float16), LEFT_STATE)
        P = gl.zeros([W, C], gl.float32, TOKENS)
        P = warpgroup_mma(x, g_tiles.index(slot), P, use_acc=False, is_async=True)
        P, dS = warpgroup_mma_wait(0, [P, dS])
        mbarrier.arrive(q_empty.index(q_slot), count=1)
        Y = dU - P * row_unit[:, None]
        dV = beta * Y
        minus = -1.0 * dV
        if factors_ptr is not None:
            minus *= through
        minus = gl.convert_layout(minus.to(gl.bfloat16), LEFT_TOKENS)
        dS = warpgroup_mma(minus, kin_tile, dS, is_async=True)
        where = (b, h, t, Hv, first_value, V, rows)
        if WRITES_Y:
            dV = Y
        if SUMMARIES or PART == 1:
            pass
        elif PACKED:
            if rows < C:
                _write_rows(dv_ptr, dV, where)
            else:
                _copy_rows(dv_desc, dv_block, dV, where)
        else:
            _copy_rows(dv_desc, dv_block, dV, where)
        dS = warpgroup_mma_wait(0, [dS])
        mbarrier.arrive(empty.index(slot), count=1)
    key += opaque_zero()
    value += opaque_zero()
    if SUMMARIES:
        if is_transition:
            _write_state(transitions_ptr, n * Hv + h, dS, key, value, K, K)
        else:
            _write_state(dinitial_ptr, n * Hv + h, dS, key, value, K, V)
    elif dinitial_ptr is not None:  # noqa: SIM102 -- known when this is compiled
        if is_first:
            _write_state(dinitial_ptr, sequence * Hv + h, dS, key, value, K, V)
    tma.store_wait(0)
    keep_apart(WARPGROUP)


@gluon.jit
def _write_state(ptr, number, dS, key, value, K, V):
    """Writes the transpose of dS [W, K] to a tensor of states [.., K, V]."""
    to = ptr + number.to(gl.int64) * K * V
    gl.store(to + (key[None, :] * V + value), dS, (key < K)[None, :] & (value < V))


@gluon.jit
def _copy_rows(desc, block, x, where):
    """Writes the transpose of x [W, C] to a tensor [B, T, Hv, V] by TMA, from the memory `block`."""
    b, h, t, _, value, _, _ = where
    block.reshape([C, W]).permute([1, 0]).store(x.to(desc.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(desc, [b, h, t, value], block)


@gluon.jit
def _write_rows(ptr, x, where):
    """Writes the first rows of the transpose of x [W, C] from registers: the rows after them are another sequence's."""
    _, h, t, Hv, first, V, rows = where
    # With an opaque zero, addresses are computed here, and occupy no registers in the loop.
    token = gl.arange(0, C, gl.SliceLayout(0, TOKENS))[None, :] + opaque_zero()
    value = gl.arange(0, W, gl.SliceLayout(1, TOKENS))[:, None] + opaque_zero()
    offsets = token.to(gl.int64) * (Hv * V) + value
    to = ptr + ((t.to(gl.int64) * Hv + h) * V + first)
    gl.store(to + offsets, x.to(ptr.dtype.element_ty), (token < rows) & (value < V - first))


@gluon.jit(do_not_specialize=[*NUMBERS, "places"])
def _scan_kernel(
    kin_desc,  # [J Hv C, K], tiles of up to 128 keys; k [B, H, T, K] if the keys of a head share a gate
    qin_desc,
    kout_desc,  # None if it is k
    A_desc,  # [2 J Hv C, C], tiles [C, C]
    G_desc,  # [J Hv C, C], tiles [C, C]
    do_desc,  # [B, Hv, T, V], tiles [C, W]
    dv_desc,
    leaving_desc,  # [J, Hv, K, V], tiles [K, W]
    dv_ptr,  # [B, T, Hv, V]; receives Y with WRITES_Y
    units_ptr,  # [J, Hv, C]
    decay_ptr,  # [J, Hv, K]
    factors_ptr,  # of the rows of kin and of kout if they are k, [J, Hv, 2, C], else None
    last_ptr,  # gradients of final states [N, Hv, K, V], or None
    behind_ptr,  # gradients of the states that leave segments [I, Hv, K, V], or None if sequences are whole
    dinitial_ptr,  # gradients of initial states [N, Hv, K, V], or None; for summaries, of entering states [I, Hv, K, V]
    transitions_ptr,  # [I, Hv, K, K] for summaries of segments, or None
    beta_ptr,  # [B, T, Hv]
    g_ptr,  # unused, and so are its strides
    order,  # [I, 5], or None for a batch
    state_n,  # strides of last_ptr; see `in_state`
    state_h,
    state_k,
    state_v,
    beta_b,
    beta_t,
    beta_h,
    g_b,
    g_t,
    g_h,
    T,
    segment,  # tokens of a segment
    segments,  # segments of a sequence of a batch
    Hv,
    K,
    R,
    V,
    places,  # J Hv
    WRITES_Y: gl.constexpr,
    PARTS: gl.constexpr,
    EVERY_ONE: gl.constexpr,  # whether there are summaries of first segments too
):
    """Computes 2 W / PARTS columns of one value head of one segment, or of its summary."""
    PACKED: gl.constexpr = order is not None
    values = gl.cdiv(V, 2 // PARTS * W)
    blocks = values
    if transitions_ptr is not None:
        blocks += 1
    program, column = gl.program_id(0) // blocks, gl.program_id(0) % blocks * (2 // PARTS * W)
    is_transition = gl.program_id(0) % blocks == values  # TMA fills columns above V with 0
    h = program % Hv
    n, b, start, length, sequence, origin, end = tokens_of(program // Hv, T, segment, segments, order)
    is_first, is_last = start == origin, start + length == end
    if transitions_ptr is not None:
        if is_first and not EVERY_ONE:
            return
    elif PACKED and behind_ptr is not None:  # noqa: SIM102 -- known when this is compiled
        if length == 0:
            return
    first = chunk_of(sequence, start, T, C, PACKED)
    if kout_desc is None:
        kin_tiles = gl.allocate_shared_memory(gl.bfloat16, [PARTS * SLOTS, 1, 1, C, WIDTH], kin_desc.layout)
        kout_tiles = kin_tiles
    else:
        kin_tiles = gl.allocate_shared_memory(gl.bfloat16, [SLOTS, C, WIDTH], kin_desc.layout)
        kout_tiles = gl.allocate_shared_memory(gl.bfloat16, [SLOTS, C, WIDTH], kout_desc.layout)
    Q_SLOTS: gl.constexpr = SLOTS // PARTS
    qin_tiles = gl.allocate_shared_memory(gl.bfloat16, [PARTS * Q_SLOTS, C, WIDTH], qin_desc.layout)
    a_tiles = gl.allocate_shared_memory(gl.bfloat16, [2 * Q_SLOTS, C, C], A_desc.layout)
    g_tiles = gl.allocate_shared_memory(gl.float16, [SLOTS, C, C], G_desc.layout)
    do_tiles = gl.allocate_shared_memory(gl.bfloat16, [2 // PARTS * SLOTS, 1, 1, C, W], do_desc.layout)
    dv_tiles = gl.allocate_shared_memory(gl.bfloat16, [2 // PARTS, 1, 1, C, W], dv_desc.layout)
    leaving_tiles = gl.allocate_shared_memory(gl.bfloat16, [2, 1, 1, WIDTH, W], leaving_desc.layout)
    partials = dv_tiles
    if PARTS == 2:
        lines: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 4, [1, 0])  # four rows of an accumulator use all banks
        partials = gl.allocate_shared_memory(gl.float32, [2, W, C], lines)
    bars: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], bars)
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], bars)
    q_full = gl.allocate_shared_memory(gl.int64, [Q_SLOTS, 1], bars)  # A and qin have been loaded
    q_empty = gl.allocate_shared_memory(gl.int64, [Q_SLOTS, 1], bars)
    written = gl.allocate_shared_memory(gl.int64, [2, 1], bars)
    read = gl.allocate_shared_memory(gl.int64, [2, 1], bars)
    for i in gl.static_range(SLOTS):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    for i in gl.static_range(Q_SLOTS):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=2)
    for i in gl.static_range(2):
        mbarrier.init(written.index(i), count=1)
        mbarrier.init(read.index(i), count=1)
    barriers = (full, empty, q_full, q_empty, written, read)
    loaded = (kin_tiles, qin_tiles, kout_tiles, a_tiles, g_tiles, do_tiles)
    tiles = loaded + (dv_tiles, leaving_tiles, partials)  # noqa: RUF005 -- Triton compiles no stars
    numbers = (beta_ptr + b.to(gl.int64) * beta_b + h.to(gl.int64) * beta_h, beta_t, units_ptr, decay_ptr, factors_ptr)
    strides = (state_n, state_h, state_k, state_v)
    states = (last_ptr, strides, behind_ptr, dinitial_ptr, transitions_ptr)
    states = states + (is_transition, n, sequence, is_first, is_last)  # noqa: RUF005 -- Triton compiles no stars
    place = (b, h, R, Hv, first, start, length, places, column)
    outputs = (dv_desc, leaving_desc, dv_ptr)
    sizes = (K, V)
    gl.warp_specialize(
        [
            (_state_warps, (tiles, outputs, numbers, states, barriers, place, sizes, WRITES_Y, PARTS, PACKED, 0)),
            (_state_warps, (tiles, outputs, numbers, states, barriers, place, sizes, WRITES_Y, PARTS, PACKED, 1)),
            (_load_warp, ((kin_desc, qin_desc, kout_desc, A_desc, G_desc, do_desc), loaded, barriers, place, PARTS)),
        ],
        [4, 1],
        [240, 24],
    )
