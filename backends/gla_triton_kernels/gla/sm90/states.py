"""Computes the state of each segment from a zero initial state, or backwards its gradient, on Hopper.

Let a segment have the tokens 1 to L, and b_t = g_1 + .. + g_t. Its decay D and its state S from a zero initial state
are

    D = exp(b_L)        S = sum over t of (k_t exp(b_L - b_t))^T v_t                forwards
                        S = scale * sum over t of (q_t exp(b_t))^T do_t             backwards (see `Recurrence`)

The kernel goes through the chunks of a segment in the order opposite to the recurrence. When it reaches a token, it
then knows all gates that decay the token, so S is a plain sum. Let R be the sum of the gates of all chunks so far, 0 at
first, and let b_t now be the sum of the gates of a chunk of C tokens through t:

    left = k_t exp(R + b_C - b_t)    from the last chunk to the first
    left = q_t exp(R + b_t)          backwards, from the first to the last; both times the factor of the token, if any
    S += left^T right                R += b_C

No exponent is above 0 and S is never decayed, so one path handles gates of any strength. With one gate for each head,
b and R are numbers instead of vectors; R is then summed in float64 and rounded when it is used. Backwards, exp(R + b_t)
may be 0 in float16 for all tokens. With float16, R therefore begins at -g_1 (`first`), and exp(g_1) multiplies S.

A block stops once exp(R) is 0 in float32, and does not read the remaining chunks. With one gate for each head, the
block computes beforehand how many chunks count. With one gate for each key, the state warps write R to shared memory.
The load warp reads R before every STAGES-th chunk, and writes the number of chunks that count for the state warps.

B batch   T tokens   I segments   Hv heads of `right`, of gates and of S   R = Hv / heads of `left`, in the kernel
K, V key and value width   C tokens of a chunk
BV columns of `right` of a block   PART keys of a warpgroup, BK of the plan   PARTS warpgroups of a block
STAGES pipeline stages   slot   a pipeline stage in shared memory: the tiles of one chunk

The grid has one block per segment, head, PARTS * PART keys and BV columns of `right`. The warps of a block are
specialised. They communicate over barriers in shared memory; common.py gives the rules.

    load    one warp: copies left, right, g of the next chunks to shared memory by TMA
    state   PARTS warpgroups: each decays its part of `left` in shared memory and adds left^T right to its rows of S,
            which stay in registers. The product of a chunk runs while `left` of the next chunk is decayed. The
            warpgroups do not wait for each other.

Sources: Yang et al., "Gated Linear Attention Transformers with Hardware-Efficient Training" (arXiv 2312.06635).
"""

# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportAssignmentType=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
# pyright: reportUnboundVariable=false, reportPossiblyUnboundVariable=false
from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from gla_core.dispatch.tensors import ceil_div
from gla_triton_kernels.chunks.kernel import SegmentPlan
from gla_triton_kernels.chunks.segments import Recurrence, Segments, lengths_of
from gla_triton_kernels.gla.sm90.common import (
    as_float32,
    bounded_gates,
    chunk_of,
    clear_rows,
    gate_strides,
    gates_of,
    let_dependents_start,
    log_gates_of_tile,
    logits_of,
    plus,
    segment_at,
    unit_at,
    wait_for_predecessor,
)
from gla_triton_kernels.gla.sm90.half import in_half
from gla_triton_runtime.arithmetic import LOG2E
from gla_triton_runtime.launch import Launch
from gla_triton_runtime.tma import shared_tiles


def launch_states(plan: SegmentPlan, x: Recurrence, segments: Segments, S: Tensor, D: Tensor | None) -> list[Launch]:
    """Returns the launches that fill S [I, Hv, K, V] and D [I, Hv, K]; D is None without gates.

    They do not write the rows of empty segments. If x.after is None, they do not write the rows of the last segment of
    each sequence either.
    """
    x, units, before = in_half(x, ("left", "right"), segments.cu_seqlens)
    kernel, packed, skip_last = plan.parameters, segments.order is not None, x.after is None
    B, T = x.left.shape[:2]
    Hv, K, V = S.shape[1:]
    key_gates = x.g is not None and x.g.ndim == 4
    asked = segments.count
    if skip_last:
        asked = segments.most if packed else segments.count - B
    parts = min(2, ceil_div(K, kernel.BK))
    blocks = asked * Hv * ceil_div(K, parts * kernel.BK) * ceil_div(V, kernel.BV)
    if blocks == 0:
        return []
    arguments = {
        "left_desc": shared_tiles(x.left, kernel.C, kernel.BK),
        "right_desc": shared_tiles(x.right, kernel.C, kernel.BV),
        "g_desc": shared_tiles(x.g, kernel.C, kernel.BK) if key_gates else None,
        "g_ptr": None if key_gates else x.g,
        "factor": x.factor,
        "S_ptr": S,
        "D_ptr": D,
        "order": segments.order,
        "counts": segments.counts,
        **units,
        "scale": x.scale,
        **gate_strides(None if key_gates else x.g),
        **lengths_of(T, segments),
        "Hv": Hv,
        "R": Hv // x.left.shape[2],
        "K": K,
        "V": V,
        "NORMALIZER": x.normalizer,
        "PARTS": parts,
        "BACKWARDS": x.backwards,
        "SKIP_LAST": skip_last,
        "STAGES": kernel.stages,
    }
    options = {"num_warps": kernel.warps, "maxnreg": 128}
    if packed and plan.overlap and not before:
        options["launch_pdl"] = True
    return [*before, Launch(_build_states_kernel, (blocks, 1, 1), arguments, options)]


# A sum of gates, in nats, whose exp is computed as 0: it is below 2^-126, with room for the rounding of sums.
FORGOTTEN = gl.constexpr(-88.0)
AHEAD = gl.constexpr(32)  # chunks whose gates are summed at once


@gluon.jit
def chunks_of(length, C: gl.constexpr):
    """Returns the number of chunks of a segment, at least one.

    Segments are not empty here. But the compiler must know that the loop over chunks runs at least once, so that it
    leaves S in the registers that wgmma writes.
    """
    return gl.maximum(gl.cdiv(length, C), 1)


@gluon.jit
def _chunks_that_count(gates, start, length, C: gl.constexpr, NORMALIZER: gl.constexpr, BACKWARDS: gl.constexpr):
    """Returns the number of chunks that a block computes before exp(R) is 0; `gates_of` explains `gates`."""
    layout: gl.constexpr = gl.BlockedLayout([1, C // 32], [1, 32], [4, 1], [1, 0])
    line: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])  # every warp holds all chunks
    column = gl.arange(0, C, gl.SliceLayout(0, layout))[None, :]  # [1, C]
    n_chunks = chunks_of(length, C)
    first, count, R = gl.to_tensor(0), gl.to_tensor(0), gl.to_tensor(0.0)
    while (count == first) & (first < n_chunks):
        i = first + gl.arange(0, AHEAD, gl.SliceLayout(1, layout))  # [AHEAD]
        token = (i if BACKWARDS else n_chunks - 1 - i)[:, None] * C + column  # [AHEAD, C]
        g = gates_of(gates, start, length, gl.where(token < 0, length, token), NORMALIZER)  # [AHEAD, C]
        end = gl.convert_layout(gl.sum(g, 1), line)  # [AHEAD]
        before = R + gl.associative_scan(end, 0, plus) - end  # [AHEAD]
        read = (before > FORGOTTEN) & (first + gl.arange(0, AHEAD, line) < n_chunks)  # [AHEAD]
        R += gl.sum(end, 0)
        count += gl.sum(read.to(gl.int32), 0)
        first += AHEAD
    return count


@gluon.jit
def _forgotten(R_tiles, slot, PARTS: gl.constexpr):
    """Returns whether exp(R) is 0 for all keys of the block after the chunk of a slot. Only one warp may call it."""
    layout: gl.constexpr = gl.BlockedLayout([R_tiles.shape[1] // 32], [32], [1], [0])
    most = R_tiles.index(PARTS * slot).load(layout)  # [PART]
    for part in gl.static_range(1, PARTS):
        most = gl.maximum(most, R_tiles.index(PARTS * slot + part).load(layout))
    return gl.max(most, 0) <= FORGOTTEN * LOG2E


@gluon.jit
def _load_warp(args, PARTS: gl.constexpr, BACKWARDS: gl.constexpr, STAGES: gl.constexpr):
    """Loads left, right and g of the chunks that count, up to STAGES chunks ahead of the state warps."""
    descriptors, tiles, barriers, chunks = args
    left_desc, right_desc, g_desc = descriptors
    left_tiles, right_tiles, g_tiles, R_tiles, count_tiles = tiles
    full, empty = barriers
    b, left_head, h, key, column, start, n_chunks, count = chunks
    C: gl.constexpr = left_desc.block_type.shape[2]
    PART: gl.constexpr = left_desc.block_type.shape[3]
    GATE_SIZE: gl.constexpr = 0 if g_desc is None else g_desc.block_type.nbytes
    SIZE: gl.constexpr = PARTS * (left_desc.block_type.nbytes + GATE_SIZE) + right_desc.block_type.nbytes
    i = gl.to_tensor(0)
    while i < count:
        slot = i % STAGES
        t = start + (i if BACKWARDS else n_chunks - 1 - i) * C
        bar = full.index(slot)
        mbarrier.wait(empty.index(slot), ((i // STAGES) & 1) ^ 1)
        if g_desc is not None:
            if (slot == 0) & (i > 0):  # slot 0 was freed during the chunk of slot 1, after R of slot 1 was written
                count = gl.where(_forgotten(R_tiles, 1, PARTS), i + 1, count)
            count_tiles.index(slot).store(gl.full([1], count, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))
        mbarrier.expect(bar, SIZE)
        for part in gl.static_range(PARTS):
            place = PARTS * slot + part
            if g_desc is not None:
                tma.async_copy_global_to_shared(g_desc, [b, h, t, key + part * PART], bar, g_tiles.index(place))
            tma.async_copy_global_to_shared(
                left_desc, [b, left_head, t, key + part * PART], bar, left_tiles.index(place)
            )
        tma.async_copy_global_to_shared(right_desc, [b, h, t, column], bar, right_tiles.index(slot))
        i += 1


@gluon.jit
def _state_warps(
    args,
    part: gl.constexpr,
    NORMALIZER: gl.constexpr,
    PARTS: gl.constexpr,
    PACKED: gl.constexpr,
    BACKWARDS: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Computes PART rows of S and of D.

    Args:
        part: the number of this state warpgroup.
    """
    tiles, barriers, states, units, gates, factors, place, sizes = args
    left_tiles, right_tiles, g_tiles, R_tiles, count_tiles = tiles
    full, empty = barriers
    S_ptr, D_ptr, scale = states
    left_units, right_units, left_head, left_heads, right_heads, chunk = units
    segment, h, first_key, column, start, length, count = place
    Hv, K, V = sizes
    HAS_GATE: gl.constexpr = D_ptr is not None
    HEAD_GATES: gl.constexpr = gates is not None  # whether there is one gate for each head instead of each key
    FROM_FIRST: gl.constexpr = BACKWARDS and left_tiles.dtype == gl.float16
    C: gl.constexpr = left_tiles.type.shape[3]
    PART: gl.constexpr = left_tiles.type.shape[4]
    BV: gl.constexpr = right_tiles.type.shape[4]
    state_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BV, 16])
    # A thread holds runs of 16 rows of two columns, so that few threads share a column in sums over rows.
    layout: gl.constexpr = gl.BlockedLayout([16, 2], [4, 8], [1, 4], [1, 0])
    R = gl.zeros([PART], gl.float32, gl.SliceLayout(0, layout))  # [PART], in units of log 2
    S = warpgroup_mma_init(gl.zeros([PART, BV], gl.float32, state_layout))  # [PART, BV], a product that may be running
    first_key += part * PART
    own_key = first_key + gl.arange(0, PART, gl.SliceLayout(0, layout))  # [PART]
    n_chunks = chunks_of(length, C)
    outer = 1.0  # the unit of S, which is the unit of the product of the previous chunk
    if left_units is not None:
        outer = gl.to_tensor(1.0)
    if HEAD_GATES:
        line: gl.constexpr = gl.BlockedLayout([C // 32], [32], [4], [0])  # every warp holds all tokens
        token = gl.arange(0, C, line)  # [C]
        sum_of_gates = gl.to_tensor(0.0).to(gl.float64)
        before = 0 if BACKWARDS else (n_chunks - 1) * C
        g_next = gates_of(gates, start + before, length - before, token, NORMALIZER)  # [C]
        if factors is not None:
            f_next = logits_of(factors, start + before, length - before, token)  # [C]
        if FROM_FIRST:
            first = gl.sum(gl.where(token == 0, g_next, 0.0), 0).to(gl.float64) * LOG2E
            sum_of_gates = -first
    elif FROM_FIRST:
        first = gl.zeros_like(R)
    i = gl.to_tensor(0)
    while i < count:
        slot = i % STAGES
        rows = length - (i if BACKWARDS else n_chunks - 1 - i) * C
        if HEAD_GATES:
            wide = g_next.to(gl.float64) * LOG2E  # [C]
            after = (i + 1 if BACKWARDS else n_chunks - 2 - i) * C
            ahead = gl.where(i + 1 < count, length - after, 0)
            g_next = gates_of(gates, start + after, ahead, token, NORMALIZER)  # [C], loaded during this chunk
            b = gl.associative_scan(wide, 0, plus)  # [C]
            end = gl.sum(wide, 0)
            x = (sum_of_gates + b if BACKWARDS else sum_of_gates + (end - b)).to(gl.float32)  # [C]
            sum_of_gates += end
            x = gl.exp2(x)
            if factors is not None:
                x *= f_next
                f_next = logits_of(factors, start + after, ahead, token)
            factor = gl.convert_layout(x, gl.SliceLayout(1, layout))[:, None]  # [C, 1]
        left_tile = left_tiles.index(PARTS * slot + part).reshape([C, PART])
        right_tile = right_tiles.index(slot).reshape([C, BV])
        mbarrier.wait(full.index(slot), (i // STAGES) & 1)
        if HEAD_GATES:
            left_tile.store((as_float32(left_tile.load(layout)) * factor).to(left_tile.dtype))
        elif HAS_GATE:
            count = gl.max(count_tiles.index(slot).load(gl.BlockedLayout([1], [32], [4], [0])), 0)
            g_tile = g_tiles.index(PARTS * slot + part).reshape([C, PART])
            g = log_gates_of_tile(g_tile, rows, layout, NORMALIZER, PACKED)
            g = bounded_gates(g, NORMALIZER)  # [C, PART]
            if FROM_FIRST:
                row = gl.arange(0, C, gl.SliceLayout(1, layout))[:, None]  # [C, 1]
                first = gl.where(i == 0, gl.sum(gl.where(row == 0, g, 0.0), 0), first)  # [PART]
                R = gl.where(i == 0, -first, R)
            b = gl.associative_scan(g, 0, plus)  # [C, PART]
            R_end = R + gl.sum(g, 0)  # [PART]
            x = R[None, :] + b if BACKWARDS else R_end[None, :] - b  # [C, PART]
            R = R_end
            R_tiles.index(PARTS * slot + part).store(gl.where(own_key < K, R, FORGOTTEN * LOG2E))
            left_tile.store((as_float32(left_tile.load(layout)) * gl.exp2(x)).to(left_tile.dtype))
        if PACKED:
            clear_rows(left_tile, rows, layout)
            clear_rows(right_tile, rows, layout)
        fence_async_shared()  # `left` has been stored from registers; wgmma reads it
        S = warpgroup_mma_wait(0, [S])  # the product of the previous chunk
        if left_units is not None:
            at = chunk + (i if BACKWARDS else n_chunks - 1 - i)
            unit = unit_at(left_units, at, left_heads, left_head) * unit_at(right_units, at, right_heads, h)
            S = S * (outer / unit)
            outer = unit
        mbarrier.arrive(empty.index((i + STAGES - 1) % STAGES), count=1, pred=i > 0)
        S = warpgroup_mma(left_tile.permute([1, 0]), right_tile, warpgroup_mma_init(S), is_async=True)
        i += 1
    S = warpgroup_mma_wait(0, [S])  # [PART, BV]
    if BACKWARDS:
        S = S * (scale * outer)
    elif left_units is not None:
        S = S * outer
    if HEAD_GATES:
        if FROM_FIRST:
            S = S * gl.exp2(first.to(gl.float32))
            sum_of_gates += first
        R += sum_of_gates.to(gl.float32)
    elif HAS_GATE and FROM_FIRST:
        S = S * gl.convert_layout(gl.exp2(first), gl.SliceLayout(1, state_layout))[:, None]
        R += first
    state = (segment * Hv + h).to(gl.int64) * K
    key = first_key + gl.arange(0, PART, gl.SliceLayout(1, state_layout))[:, None]  # [PART, 1]
    value = column + gl.arange(0, BV, gl.SliceLayout(0, state_layout))[None, :]  # [1, BV]
    gl.store(S_ptr + state * V + key * V + value, S, (key < K) & (value < V))
    if HAS_GATE:
        gl.store(D_ptr + state + own_key, gl.exp2(R), (own_key < K) & (column == 0))


# V is specialised: if it is a multiple of 16, a thread writes two elements of a state at once.
@gluon.jit(do_not_specialize=["scale", "g_b", "g_t", "g_h", "T", "segment", "segments", "Hv", "K"])
def _build_states_kernel(
    left_desc,  # [B, Hv / R, T, K], tiles [C, PART]
    right_desc,  # [B, Hv, T, V], tiles [C, BV]
    g_desc,  # [B, Hv, T, K], tiles [C, PART], or None
    g_ptr,  # [B, T, Hv], or [Hv] with g_b = g_t = 0, or None
    factor,  # [B, T, Hv], contiguous, or None; only with g_ptr
    S_ptr,  # [I, Hv, K, V]
    D_ptr,  # [I, Hv, K]; None if there are no gates
    order,  # [I, 5], or None for a batch
    counts,  # [2] or None; see `Segments`
    left_units,  # [chunks, Hv / R] if left and right were float32, else None
    right_units,  # [chunks, Hv], or None
    scale,
    g_b,  # strides of g_ptr
    g_t,
    g_h,
    T,
    segment,  # tokens of a segment
    segments,  # segments of a sequence of a batch
    Hv,
    R,  # Hv / heads of `left`
    K,
    V,
    NORMALIZER: gl.constexpr,
    PARTS: gl.constexpr,
    BACKWARDS: gl.constexpr,
    SKIP_LAST: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Computes PARTS * PART rows and BV columns of S, and these rows of D, of one head of one segment."""
    C: gl.constexpr = left_desc.block_type.shape[2]
    PART: gl.constexpr = left_desc.block_type.shape[3]
    BV: gl.constexpr = right_desc.block_type.shape[3]
    PACKED: gl.constexpr = order is not None
    if PACKED:
        # Dependent kernels read the order without waiting, so none may start before the predecessor has written it.
        wait_for_predecessor()
    let_dependents_start()
    columns = gl.cdiv(V, BV)
    blocks = columns * gl.cdiv(K, PARTS * PART)  # blocks of a head
    column = gl.program_id(0) % columns * BV
    key = gl.program_id(0) // columns % gl.cdiv(K, PARTS * PART) * (PARTS * PART)
    h = gl.program_id(0) // blocks % Hv
    i = gl.program_id(0) // blocks // Hv
    if PACKED:
        if SKIP_LAST:  # noqa: SIM102 -- known when this is compiled
            if i >= gl.load(counts):
                return
        b = gl.to_tensor(0)
        i, start, length, _, last = segment_at(order, i)
        if SKIP_LAST and BACKWARDS:  # backwards, the segments to compute are those that come after a followed segment
            i, start = i + 1, start + length
            length = gl.minimum(segment, last - start)
        if length == 0:
            return
    else:
        built = segments - 1 if SKIP_LAST else segments
        b = i // built
        m = i % built + 1 if SKIP_LAST and BACKWARDS else i % built
        start = m * segment
        length = gl.minimum(segment, T - start)
        i = b * segments + m

    left_tiles = gl.allocate_shared_memory(left_desc.dtype, [PARTS * STAGES, 1, 1, C, PART], left_desc.layout)
    right_tiles = gl.allocate_shared_memory(right_desc.dtype, [STAGES, 1, 1, C, BV], right_desc.layout)
    g_tiles = (
        left_tiles
        if g_desc is None
        else gl.allocate_shared_memory(g_desc.dtype, [PARTS * STAGES, 1, 1, C, PART], g_desc.layout)
    )
    row: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    R_tiles = gl.allocate_shared_memory(gl.float32, [PARTS * STAGES, PART], row)  # R after the chunk of each slot
    count_tiles = gl.allocate_shared_memory(gl.int32, [STAGES, 1], row)  # number of chunks that count, as known so far
    bars: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bars)  # left, right, g have been loaded
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bars)  # all warpgroups have read them
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=PARTS)

    tiles = (left_tiles, right_tiles, g_tiles, R_tiles, count_tiles)
    barriers = (full, empty)
    states = (S_ptr, D_ptr, scale)
    gates: gl.constexpr = None
    count = chunks_of(length, C)
    if g_ptr is not None:
        gates = (g_ptr + b.to(gl.int64) * g_b + h.to(gl.int64) * g_h, g_t)
        count = _chunks_that_count(gates, start, length, C, NORMALIZER, BACKWARDS)
    chunk = chunk_of(i - start // segment if PACKED else b, start, T, C, PACKED)
    factors: gl.constexpr = None
    if factor is not None:
        factors = (factor + b.to(gl.int64) * T * Hv + h, Hv)
    units = (left_units, right_units, h // R, Hv // R, Hv, chunk)
    place = (i, h, key, column, start, length, count)
    sizes = (Hv, K, V)
    descriptors = (left_desc, right_desc, g_desc)
    load = (descriptors, tiles, barriers, (b, h // R, h, key, column, start, chunks_of(length, C), count))
    state_args = (tiles, barriers, states, units, gates, factors, place, sizes)
    # Registers of a thread: the state warpgroups share the registers that the load warp does not need.
    if PARTS == 1:
        gl.warp_specialize(
            [
                (_state_warps, (state_args, 0, NORMALIZER, PARTS, PACKED, BACKWARDS, STAGES)),
                (_load_warp, (load, PARTS, BACKWARDS, STAGES)),
            ],
            [1],
            [24],
        )
    else:
        gl.warp_specialize(
            [
                (_state_warps, (state_args, 0, NORMALIZER, PARTS, PACKED, BACKWARDS, STAGES)),
                (_state_warps, (state_args, 1, NORMALIZER, PARTS, PACKED, BACKWARDS, STAGES)),
                (_load_warp, (load, PARTS, BACKWARDS, STAGES)),
            ],
            [4, 1],
            [168, 40],
        )
