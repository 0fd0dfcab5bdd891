"""Functions shared by the kernels for SM90: segments, decays and scores of a chunk, clears and writes of rows, overlap.

For the log gates g_1 .. g_C of a chunk, let b_t = g_1 + .. + g_t, per channel of K. Then

    mild chunk (no channel decays by more than MILD_DECAY_SM90): with r = b_C / 2,
        qg = q exp(b - r)        kg = k exp(r - b)         A = tril(qg kg^T)
    any chunk: no exponent is above 0, so nothing overflows,
        qg = q exp(b)            kg = k exp(b_C - b)       A: see _scores_by_halving

B batch   T tokens   N sequences   I segments   P slots of a pool   H heads, Hv of them of states
C tokens of a chunk   K, V key and value width of a head; in functions of tiles, K is the width of the tile
BK, W keys and values of a block of a state

tile   a matrix in shared memory
unit   the power of two by which an operand in float16 is divided, so that its largest number is in range; a product
       with the operand is multiplied by the unit. Operands in bfloat16 have the unit 1.

The kernels of this folder follow five rules of Hopper:

- wgmma and TMA access shared memory through a path of their own, the async proxy. `fence_async_shared` orders accesses
  from registers before it; without the fence, wgmma could read a tile before a store to it has arrived.
- The same holds for loads. Without the fence, a load to registers may still be under way when TMA overwrites the tile,
  even if the warp has arrived at the barrier that the load warp waits for. If a warp stores results that depend on all
  of its loads before it arrives, it needs no fence.
- `tma.store_wait(n)` returns when all copies to global memory except the latest n have read their tiles. Only then may
  a tile be overwritten.
- A barrier completes a phase after `count` arrivals. `mbarrier.expect` is one arrival, and the phase then also waits
  for that number of bytes from TMA. `mbarrier.arrive` is one arrival of all warps that run the function, whether they
  are one warp or a warpgroup.
- The phases of a barrier are numbered 0, 1, 0, 1 and so on. A wait for phase 1 of a new barrier returns at once, so the
  first wait for an empty pipeline stage, `phase ^ 1`, does not block. For the same reason, a warpgroup may wait for a
  phase only if it knows that the phase before has completed: otherwise the wait may return at once.
"""

# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportAssignmentType=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
# pyright: reportFunctionMemberAccess=false
from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma, warpgroup_mma, warpgroup_mma_wait

from gla_triton_kernels.gla.shared.limits import LEAST_GATE, LEAST_NORMAL, MILD_INPUT_HALF
from gla_triton_runtime.arithmetic import LOG2E

LOG2_C = gl.constexpr(6)  # a chunk has C = 64 tokens
# The least unit of an operand in float16. Units and products of operands are at most 2^38, so a product times the
# quotient of two units is at most 2^116.
LEAST_UNIT = gl.constexpr(2.0**-40)
INFINITY = gl.constexpr(float("inf"))


def gate_strides(g: Tensor | None) -> dict[str, int]:
    """Returns the strides of gates [B, T, Hv] or [Hv], as arguments of a kernel; 0 for None and for axes not there."""
    b, t, h = (0, 0, 0) if g is None else (0, 0, *g.stride())[-3:]
    return {"g_b": b, "g_t": t, "g_h": h}


@gluon.jit
def tile_of_gates(memory, desc):
    """Returns memory as the tile [1, 1, C, BK] where gates arrive: all of it in float32, else its first half."""
    C: gl.constexpr = desc.block_type.shape[2]
    BK: gl.constexpr = desc.block_type.shape[3]
    tiles: gl.constexpr = 1 if desc.dtype == gl.float32 else 2  # Triton 3.8 reinterprets memory as a whole only
    return memory._reinterpret(desc.dtype, [tiles, 1, 1, C, BK], desc.layout).index(0)


@gluon.jit
def plus(a, b):
    """Returns a + b, as the operation of a scan."""
    return a + b


@gluon.jit
def _then(before, last, more, new_last):
    """Combines two runs of numbers. A run is a pair: the sum of all its numbers but the last, and the last number."""
    return before + last + more, new_last


@gluon.jit
def sum_of_earlier(x):
    """Returns for each number of x [C] the sum of the numbers before it, [C].

    The difference of an inclusive sum and the number itself would lose small earlier numbers by rounding.
    """
    earlier, _ = gl.associative_scan((gl.zeros_like(x), x), 0, _then)
    return earlier


@gluon.jit
def _either(a, b):
    return a | b


@gluon.jit
def as_float32(x):
    """Returns x in float32.

    Two instructions convert the two bfloat16 numbers of a register. The compiler would use three.
    """
    if x.dtype == gl.bfloat16:
        widen: gl.constexpr = """{
            .reg .b32 first, second;
            shl.b32 first, $2, 16;
            and.b32 second, $2, 0xffff0000;
            mov.b32 $0, first;
            mov.b32 $1, second;
        }"""
        x = gl.inline_asm_elementwise(widen, "=f,=f,r", [x], gl.float32, is_pure=True, pack=2)
    return x.to(gl.float32)


@gluon.jit
def unit_of(most):
    """Returns the power of two `unit` with 2^14 <= most / unit < 2^15, and 1 / unit.

    A matrix whose largest absolute value is `most` fits into float16 after it is divided by `unit`.
    """
    unit = most.to(gl.int32, bitcast=True) & 0x7F800000  # the exponent's bits
    unit = gl.maximum(unit - (14 << 23), 1 << 23)
    return unit.to(gl.float32, bitcast=True), ((254 << 23) - unit).to(gl.float32, bitcast=True)


@gluon.jit
def largest(x):
    """Returns the largest absolute value of a matrix x, a scalar."""
    return gl.max(gl.max(gl.abs(x), 1), 0)


@gluon.jit
def magnitudes(q_tile, k_tile, layout: gl.constexpr):
    """Returns max(|q|, |k|) [C, K] for tiles in float16, as int32; q_tile may be None.

    The integers are the bits of the numbers in float32. They have the same order as the numbers.
    """
    most = gl.abs(k_tile.load(layout))
    if q_tile is not None:
        most = gl.maximum(gl.abs(q_tile.load(layout)), most)
    return most.to(gl.float32).to(gl.int32, bitcast=True)


@gluon.jit
def fit_mild_chunk(bits):
    """Returns whether all numbers are at most MILD_INPUT_HALF; `bits` [C, K] comes from `magnitudes`.

    The maximum is taken of integers and over all dimensions at once. Hopper then needs one instruction for a warp.
    """
    most = gl.max(bits.reshape([bits.shape[0] * bits.shape[1]]), 0)
    return most.to(gl.float32, bitcast=True) <= MILD_INPUT_HALF


@gluon.jit
def store_state(tile, S, factor, outer):
    """Stores outer * factor * S in a tile as an operand of products, and returns its unit.

    A state is a sum over many tokens, which may be too large or too small for float16, but not for bfloat16.

    Args:
        S: the state [BK, W].
        factor: [BK, 1], numbers from exp(-12) to 1 if the tile is float16; None stands for 1.
        outer: the unit of S, a power of two; 1 if the tile is bfloat16.
    """
    if tile.dtype == gl.float16:
        unit, inverse = unit_of(largest(S) * outer)
        inverse *= outer
        tile.store((S * (inverse if factor is None else factor * inverse)).to(tile.dtype))
        return unit
    else:  # noqa: RET505 -- one branch is compiled
        tile.store((S if factor is None else S * factor).to(tile.dtype))
        return 1.0


@gluon.jit
def unit_of_slices(S, outer, SLICES: gl.constexpr):
    """Returns the unit of outer * S as an operand in float16, and the factor of S that divides outer * S by it.

    The slices of a state share a unit, because their products with queries are one sum.

    Args:
        S: a state as SLICES slices [BK, W].
        outer: the unit of S, a power of two.
    """
    most = largest(S[0])
    for j in gl.static_range(SLICES - 1):
        most = gl.maximum(most, largest(S[j + 1]))
    unit, inverse = unit_of(most * outer)
    return unit, inverse * outer


@gluon.jit
def unit_at(units, row, H, h):
    """Returns the unit of an input in one chunk and head, from `units` [rows, H]; 1 if it is None. See half.py."""
    if units is None:
        return 1.0
    else:  # noqa: RET505 -- one branch is compiled
        return gl.load(units + (row.to(gl.int64) * H + h))


@gluon.jit
def divisible_unit_of(most):
    """Returns a unit and its inverse as `unit_of` does; the unit is at least LEAST_UNIT, so it may be a divisor."""
    return unit_of(gl.maximum(most, LEAST_UNIT * 16384.0))


@gluon.jit
def in_units(x, dtype: gl.constexpr):
    """Returns a matrix x as an operand of products, and its unit; see `divisible_unit_of`."""
    if dtype == gl.float16:
        unit, inverse = divisible_unit_of(largest(x))
        return (x * inverse).to(dtype), unit
    else:  # noqa: RET505 -- one branch is compiled
        return x.to(dtype), 1.0


@gluon.jit
def write_state(ptr, number, S, key, value, sizes):
    """Writes S [BK, W] from registers to a tensor of states [.., K, V].

    Args:
        number: the index of the state in the tensor.
        key, value: the indices of the keys [BK, 1] and of the values [1, W] of S.
        sizes: K and V.
    """
    K, V = sizes
    key += opaque_zero()  # the assembler of Triton 3.6 crashes if addresses are kept through the loop
    gl.store(ptr + number.to(gl.int64) * K * V + key * V + value, S, (key < K) & (value < V))


@gluon.jit
def slots_at(slots, sequence):
    """Returns four numbers of a sequence from `slots` [N, 4]; see chunks/slots.py.

    They are the slot of its initial state, the slot of its final state, the slot of its checkpoint, and the number of
    tokens before the checkpoint. A slot of -1 means that there is no such state.
    """
    row = slots + sequence.to(gl.int64) * 4
    return gl.load(row), gl.load(row + 1), gl.load(row + 2), gl.load(row + 3)


@gluon.jit
def read_slot(pool, strides, slot, h, key, value, inside):
    """Returns the state [BK, W] of head h from a slot of the pool [P, H, K, V], in float32; 0 if `slot` is negative.

    Args:
        strides: strides of P, H, K and V; the stride of K or of V is None, see `in_state`.
        key, value: the indices of the keys [BK, 1] and of the values [1, W] of the state.
        inside: mask [BK, W] of the elements that the pool holds.
    """
    state_n, state_h, state_k, state_v = strides
    state = pool + slot.to(gl.int64) * state_n + h.to(gl.int64) * state_h
    return gl.load(state + in_state(key, value, state_k, state_v), inside & (slot >= 0), 0.0).to(gl.float32)


@gluon.jit
def write_slot(pool, strides, slot, h, S, key, value, sizes):
    """Writes the state S [BK, W] of head h into a slot of the pool, unless `slot` is negative.

    Args:
        sizes: K and V. The other arguments are the same as in `read_slot`.
    """
    K, V = sizes
    state_n, state_h, state_k, state_v = strides
    key += opaque_zero()  # see write_state
    state = pool + slot.to(gl.int64) * state_n + h.to(gl.int64) * state_h
    inside = (key < K) & (value < V) & (slot >= 0)
    gl.store(state + in_state(key, value, state_k, state_v), S.to(pool.dtype.element_ty), inside)


@gluon.jit
def first_state(S, states, n, sequence, h, is_first, key, value, sizes):
    """Returns the state [BK, W] of head h that enters segment n, in float32; returns S if no tensor holds this state.

    Args:
        S: zeros [BK, W].
        states: initial_state, the strides of initial_state or of the pool, entering, final_state, pool and slots.
        is_first: whether the segment is the first of its sequence.
        key, value: see `read_slot`.
        sizes: Hv, K and V.
    """
    initial_state, strides, entering, _, pool, slots = states
    Hv, K, V = sizes
    inside = (key < K) & (value < V)
    if entering is not None:
        head = entering + (n * Hv + h).to(gl.int64) * K * V
        # The scan before this kernel has written final states to the pool, perhaps over initial states. So `entering`
        # holds the initial states as well.
        in_entering = inside if pool is not None else inside & (not is_first)
        S = gl.load(head + key * V + value, in_entering, 0.0)
    elif pool is not None:
        from_slot, _, _, _ = slots_at(slots, sequence)
        S = read_slot(pool, strides, from_slot, h, key, value, inside)
    if initial_state is not None:
        state_n, state_h, state_k, state_v = strides
        head = initial_state + sequence.to(gl.int64) * state_n + h.to(gl.int64) * state_h
        S = gl.load(head + in_state(key, value, state_k, state_v), inside & is_first, S)
    return S


@gluon.jit
def write_last_state(S, states, n, sequence, h, key, value, sizes):
    """Writes the final state S [BK, W] of a head, if sequences are whole. `first_state` explains the arguments.

    If sequences are cut, the scan before this kernel has written the final states.
    """
    _, strides, entering, final_state, pool, slots = states
    Hv, K, V = sizes
    if final_state is not None:
        write_state(final_state, n * Hv + h, S, key, value, (K, V))
    elif pool is not None and entering is None:
        _, to_slot, _, _ = slots_at(slots, sequence)
        write_slot(pool, strides, to_slot, h, S, key, value, (K, V))


@gluon.jit
def levels_that_count(g, least):
    """Returns the levels m of the halving that contribute, as a bit mask; see `_scores_by_halving`.

    If m is the lowest set bit of the number of a row, the row begins the second half of a block of 2 m rows. The gate
    of this row decays every pair of tokens across the two halves. Level m contributes if such a gate of g [C, K] is
    above `least` in some block and channel.
    """
    row = gl.arange(0, g.shape[0], gl.SliceLayout(1, g.type.layout))[:, None]  # [C, 1]
    bits = gl.where(g > least, row & -row, 0)  # [C, K]
    return gl.reduce(gl.reduce(bits, 0, _either), 0, _either)


@gluon.jit
def opaque_zero():
    """Returns a zero that the compiler cannot fold.

    Offsets that depend on it are computed again in each chunk, so they do not occupy registers between chunks.
    """
    return gl.inline_asm_elementwise("mov.u32 $0, 0;", "=r", [], gl.int32, is_pure=False, pack=1)


@gluon.jit
def keep_apart(part: gl.constexpr):
    """Marks the end of one of several parts that run the same code.

    Without different ends, Triton 3.8 merges the last instructions of the parts. What differs between them would then
    occupy registers through the whole kernel.
    """
    gl.inline_asm_elementwise(f"// $0 ends part {part}", "=r", [], gl.int32, is_pure=False, pack=1)


@gluon.jit
def row_sums(x):
    """Returns the sums of the rows of x [R, D], a product of two tensors in a layout of wgmma.

    A thread adds its D / 4 columns of a row one after the other, which takes one register. `gl.sum` of Triton 3.8 adds
    them in pairs, and needs all products first.
    """
    R: gl.constexpr = x.shape[0]
    D: gl.constexpr = x.shape[1]
    by_thread = x.reshape([R, D // 8, 4, 2]).permute([0, 2, 1, 3]).reshape([R, 4, D // 4])
    sums = gl.sum(_plus_columns(None, by_thread), 1)
    return gl.convert_layout(sums, gl.SliceLayout(1, x.type.layout), assert_trivial=True)


@gluon.jit
def _plus_columns(total, x):
    """Returns total [R, 4] plus the sums over the last axis of x [R, 4, n], in order; `total` may be None."""
    if x.shape[2] == 1:
        x = x.reshape(x.shape[:2])
        return x if total is None else total + x
    else:  # noqa: RET505 -- one branch is compiled
        first, second = x.reshape([x.shape[0], 4, 2, x.shape[2] // 2]).permute([0, 1, 3, 2]).split()
        return _plus_columns(_plus_columns(total, first), second)


@gluon.jit
def let_dependents_start():
    """Lets the next kernel of the stream start, if it was launched with `launch_pdl` (programmatic dependent launch).

    That kernel must call `wait_for_predecessor` before it reads results of this one.
    """
    gl.inline_asm_elementwise("griddepcontrol.launch_dependents; // $0", "=r", [], gl.int32, is_pure=False, pack=1)


@gluon.jit
def wait_for_predecessor():
    """Waits until the previous kernel of the stream is done and all its writes are visible."""
    gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], gl.int32, is_pure=False, pack=1)


@gluon.jit
def segment_at(order, place):
    """Returns (number, first token, number of tokens, first token of its sequence, end of its sequence) of a segment.

    Args:
        order: the segments in the order in which blocks start, [I, 5]; see `Segments`.
        place: the row of the segment in `order`.
    """
    row = order + place.to(gl.int64) * 5
    i, start, end, origin, last = gl.load(row), gl.load(row + 1), gl.load(row + 2), gl.load(row + 3), gl.load(row + 4)
    return i, start, end - start, origin, last


@gluon.jit
def tokens_of(n, T, segment, segments, order):
    """Returns the tokens of the n-th sequence or segment to start.

    The result is (number, batch, first token, number of tokens) of the segment, followed by (number, first token, end)
    of its sequence.

    Args:
        order, segment, segments: `order`, `length` and `per_sequence` of `Segments`.
    """
    if order is None:
        b = n // segments
        start = n % segments * segment
        length = gl.minimum(segment, T - start)
        return n, b, start, length, b, gl.to_tensor(0), T
    else:  # noqa: RET505 -- one branch is compiled
        n, start, length, origin, end = segment_at(order, n)
        return n, gl.to_tensor(0), start, length, n - start // segment, origin, end  # see segments.py


@gluon.jit
def chunk_of(sequence, start, T, C: gl.constexpr, PACKED: gl.constexpr):
    """Returns the number of the chunk that begins at token `start` of a sequence.

    Chunks are numbered like checkpoints every C tokens.
    """
    return (sequence if PACKED else sequence * gl.cdiv(T, C)) + start // C


@gluon.jit
def next_checkpoint(start, sequence, origin, every, slots, PACKED: gl.constexpr):
    """Returns the row of the first checkpoint at or after `start`, and the number of tokens until it.

    A sequence has a checkpoint every `every` tokens. With a pool, a sequence has at most one checkpoint; the first
    result is then its slot, and the second is negative if there is none.

    Args:
        start: the first token of the segment.
        origin: the first token of the sequence.
    """
    passed = start - origin
    if slots is not None:
        _, _, slot, before = slots_at(slots, sequence)
        return slot, gl.where(slot >= 0, before - passed, -1)
    else:  # noqa: RET505 -- one branch is compiled
        row = 0
        if PACKED:
            row = sequence + origin // every
        checkpoint = row + gl.cdiv(passed, every)
        return checkpoint, (checkpoint - row) * every - passed


@gluon.constexpr_function
def layout_of_runs(C, K):
    """Returns a layout of a tile [C, K] for 4 warps, each of which holds a run of C K / 256 rows of 64 columns.

    A thread holds two columns of the run. The warp therefore reads whole rows of 64 columns from shared memory, without
    bank conflicts.
    """
    runs = 256 // K
    return gl.BlockedLayout([C // runs, 2], [1, 32], [runs, 4 // runs], [1, 0])


@gluon.constexpr_function
def layout_of_columns(C, K):
    """Returns a layout of a tile [C, K] for 4 warps in which few threads share a column, so scans over rows are short.

    A thread holds two columns. With 128 columns it holds C / 2 consecutive rows, because registers would spill
    otherwise. With 64 columns it holds runs of 4 rows, for which bank conflicts in shared memory are rare.
    """
    run = C // 2 if K > 64 else 4
    lanes = 256 // K
    return gl.BlockedLayout([run, 2], [lanes, 32 // lanes], [1, 4], [1, 0])


@gluon.jit
def sums_of_runs(x):
    """Returns sums over the rows of x [C, K] in `layout_of_runs`. The warps wait for each other only once.

    A tile has R runs of RUN = C / R rows. The result is three tensors: the inclusive prefix sums within each run
    [R, RUN, K], the sum of all rows before each run [R, K], and the sum of all rows [K].
    """
    layout: gl.constexpr = x.type.layout
    R: gl.constexpr = layout.warps_per_cta[0]
    RUN: gl.constexpr = layout.size_per_thread[0]
    K: gl.constexpr = x.shape[1]
    runs: gl.constexpr = gl.BlockedLayout([1, RUN, 2], [1, 1, 32], [R, 1, 4 // R], [2, 1, 0])
    everywhere: gl.constexpr = gl.BlockedLayout([R, 2], [1, 32], [R, 4 // R], [1, 0])  # a warp holds all runs
    keys: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, runs))
    blocks = gl.convert_layout(x.reshape([R, RUN, K]), runs, assert_trivial=True)
    within = gl.associative_scan(blocks, 1, plus)  # [R, RUN, K]
    row = gl.arange(0, RUN, gl.SliceLayout(0, gl.SliceLayout(2, runs)))[None, :, None]  # [1, RUN, 1]
    # These sums only select numbers that a thread holds. The compiler drops additions of -0.0, so they cost nothing.
    last = gl.sum(gl.where(row == RUN - 1, within, -0.0), 1)  # [R, K]
    totals = gl.convert_layout(last, everywhere)  # [R, K]
    run = gl.arange(0, R, gl.SliceLayout(1, everywhere))[:, None]  # [R, 1]
    number = gl.arange(0, R, gl.SliceLayout(1, gl.SliceLayout(1, runs)))[:, None]  # [R, 1]
    before = gl.zeros_like(last)  # [R, K]
    for i in gl.static_range(R - 1):
        total = gl.sum(gl.where(run == i, totals, -0.0), 0)  # [K]
        before += gl.where(number > i, gl.convert_layout(total, keys, assert_trivial=True)[None, :], 0.0)
    return within, before, gl.convert_layout(gl.sum(totals, 0), gl.SliceLayout(0, layout), assert_trivial=True)


@gluon.jit
def exponents_of_mild_chunk(g, NORMALIZER: gl.constexpr):
    """Returns the exponents b - r [C, K] in base 2, and b_C [K] in nats.

    If the chunk proves not to be mild, the exponents are not used.

    Args:
        g: the log gates [C, K], as `log_gates_of_tile` returns them.
    """
    within, before, end = sums_of_runs(g)
    r = gl.convert_layout(0.5 * end, gl.SliceLayout(0, before.type.layout), assert_trivial=True)[None, :]  # [1, K]
    unit: gl.constexpr = LOG2E if NORMALIZER is None else 1.0 / NORMALIZER
    x = within * unit + ((before - r) * unit)[:, None, :]
    if NORMALIZER is not None:
        end *= 1.0 / (NORMALIZER * LOG2E)
    return gl.convert_layout(x.reshape(g.shape), g.type.layout, assert_trivial=True), end


@gluon.jit
def decay_mild_chunk(q_tile, k_tile, x, end):
    """Replaces q, k in the tiles [C, K] of a mild chunk by qg, kg, and returns exp(r) [K]; q_tile may be None.

    Args:
        x, end: the exponents [C, K] and b_C [K], from `exponents_of_mild_chunk`.
    """
    layout: gl.constexpr = x.type.layout
    if q_tile is not None:
        q_tile.store((as_float32(q_tile.load(layout)) * gl.exp2(x)).to(q_tile.dtype))
    minus_x = -1.0 * x  # -x would become 0 - x, one more instruction
    k_tile.store((as_float32(k_tile.load(layout)) * gl.exp2(minus_x)).to(k_tile.dtype))
    return gl.exp2(0.5 * end * LOG2E)


@gluon.jit
def decay_any_chunk(q_tile, k_tile, scratch, g, NORMALIZER: gl.constexpr):
    """Replaces q, k in the tiles [C, K] of any chunk by qg, kg, and returns exp(b_C) [K] and A [C, C].

    Args:
        scratch: shared memory of at least one tile [C, K]; see `_scores_by_halving`.
        g: the log gates of the chunk [C, K], as `log_gates_of_tile` returns them.
    """
    g, b, b_end = _sums_of_any_chunk(g, NORMALIZER)
    a = _scores_by_halving(q_tile, k_tile, scratch, b, levels_that_count(g, LEAST_NORMAL))  # [C, C]
    q_tile.store((q_tile.load(g.type.layout).to(gl.float32) * gl.exp2(b)).to(q_tile.dtype))
    return _decay_keys(k_tile, b, b_end), a


@gluon.jit
def decay_any_keys(k_tile, g, NORMALIZER: gl.constexpr):
    """Replaces k in the tile [C, K] of any chunk by kg, and returns exp(b_C) [K]; see `decay_any_chunk`."""
    _, b, b_end = _sums_of_any_chunk(g, NORMALIZER)
    return _decay_keys(k_tile, b, b_end)


@gluon.jit
def _sums_of_any_chunk(g, NORMALIZER: gl.constexpr):
    """Returns the log gates [C, K], their sums b [C, K] and b_C [K], all in base 2; see `decay_any_chunk`."""
    g = bounded_gates(g, NORMALIZER)
    return g, gl.associative_scan(g, 0, plus), gl.sum(g, 0)


@gluon.jit
def _decay_keys(k_tile, b, b_end):
    """Replaces k in the tile [C, K] by k exp(b_C - b), and returns exp(b_C) [K], for sums of gates in base 2."""
    k_tile.store((k_tile.load(b.type.layout).to(gl.float32) * gl.exp2(b_end[None, :] - b)).to(k_tile.dtype))
    return gl.exp2(b_end)


@gluon.jit
def in_state(key, value, stride_k, stride_v):
    """Returns the offsets of elements of a state from its first element; the stride of the contiguous axis is None."""
    return value.to(gl.int64) * stride_v + key if stride_k is None else key.to(gl.int64) * stride_k + value


@gluon.jit
def log_gates(x, NORMALIZER: gl.constexpr):
    """Returns log gates in float32: x itself, or log sigma(x) / NORMALIZER if NORMALIZER is given: x holds logits."""
    x = x.to(gl.float32)
    return x if NORMALIZER is None else log2_sigmoid(x) * (1.0 / (NORMALIZER * LOG2E))


@gluon.jit
def log2_sigmoid(x):
    """Returns log2 sigma(x) for x in float32.

    log sigma(x) = min(x, 0) - log(1 + exp(-|x|)), computed with an error of at most 2e-7, or of 2e-7 times the result
    if that is larger. This is far below the rounding of bfloat16.
    """
    y = x * LOG2E
    minus_y = -1.0 * gl.abs(y)  # -gl.abs(y) would become 0 - |y|, one more instruction
    return gl.minimum(y, 0.0) - _log2(1.0 + gl.exp2(minus_y))


@gluon.jit
def bounded_gates(g, NORMALIZER: gl.constexpr):
    """Returns log gates in units of log 2, at least LEAST_GATE, for gates as `log_gates_of_tile` returns them."""
    if NORMALIZER is None:
        return gl.maximum(g, LEAST_GATE) * LOG2E
    else:  # noqa: RET505 -- one branch is compiled
        return gl.maximum(g * (1.0 / NORMALIZER), LEAST_GATE * LOG2E)


@gluon.jit
def _log2(x):
    """Returns log2(x), computed in one instruction; `gl.log2` takes twenty."""
    return gl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], gl.float32, is_pure=True, pack=1)


@gluon.jit
def slope_of_gates(x, NORMALIZER: gl.constexpr):
    """Returns the derivative of log sigma(x) / NORMALIZER at the logits x, in float32."""
    return _reciprocal(NORMALIZER + NORMALIZER * gl.exp2(x.to(gl.float32) * LOG2E))


@gluon.jit
def silu(x):
    """Returns x sigma(x), for x in float32."""
    return x * _reciprocal(1.0 + gl.exp2(x * -LOG2E))


@gluon.jit
def _reciprocal(x):
    """Returns 1 / x with an error of one bit, computed in one instruction; a division takes eight."""
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], gl.float32, is_pure=True, pack=1)


@gluon.jit
def log_gates_of_tile(tile, rows, layout: gl.constexpr, NORMALIZER: gl.constexpr, PACKED: gl.constexpr):
    """Returns the log gates of a tile [C, K] in float32, in nats; the gates from row `rows` on are 0.

    If the tile holds logits, the results are NORMALIZER times the log gates, in units of log 2: the caller multiplies
    by a constant anyway.

    In a batch, TMA fills rows after the last token with 0. These are gates that do not decay, but logits that do.
    """
    if NORMALIZER is None:
        if PACKED:
            clear_rows(tile, rows, layout)
        return tile.load(layout).to(gl.float32)
    else:  # noqa: RET505 -- one branch is compiled
        clear_rows(tile, rows, layout, INFINITY)
        return log2_sigmoid(as_float32(tile.load(layout)))


@gluon.jit
def gates_of(gates, t, rows, token, NORMALIZER: gl.constexpr):
    """Returns the log gates [C] of a head for the chunk that begins at token t, or LEAST_GATE if that is larger.

    Args:
        gates: pointer to the gate of the head at token 0, and the stride of tokens.
        rows: the gates from this row on are 0.
        token: 0, 1 .. C - 1, in the layout of the result.
        NORMALIZER: see `log_gates`.
    """
    g = gl.where(token < rows, log_gates(logits_of(gates, t, rows, token), NORMALIZER), 0.0)
    return gl.maximum(g, LEAST_GATE)


@gluon.jit
def logits_of(gates, t, rows, token):
    """Returns the gates or logits [C] of a head as they are given, 0 from row `rows` on; see `gates_of`."""
    g_ptr, g_t = gates
    return gl.load(g_ptr + (t + token).to(gl.int64) * g_t, token < rows, 0.0).to(gl.float32)


@gluon.jit
def clear_rows(tile, rows, layout: gl.constexpr, value: gl.constexpr = 0.0):
    """Writes a value to all but the first `rows` rows of a tile [C, K]: these rows belong to the next sequence."""
    if rows < tile.shape[0]:
        row = gl.arange(0, tile.shape[0], gl.SliceLayout(1, layout)) + opaque_zero()  # [C]
        x = tile.load(layout)  # [C, K]
        tile.store(gl.where((row < rows)[:, None], x, gl.full_like(x, value)))


@gluon.jit
def write_rows(ptr, x, column, width, where, rows):
    """Writes the first `rows` rows of x [C, K] from registers to a tensor [B, T, H, width].

    Args:
        column: the column of the tensor to which the first column of x belongs.
        where: (batch, head, first token, T, H).
    """
    b, h, t, T, H = where
    row = (gl.arange(0, x.shape[0], gl.SliceLayout(1, x.type.layout)) + opaque_zero())[:, None]  # [C, 1]
    # a multiple of 8, so that a thread writes several columns at once
    columns = (gl.arange(0, x.shape[1], gl.SliceLayout(0, x.type.layout)) + 8 * opaque_zero())[None, :]  # [1, K]
    first = ptr + ((b.to(gl.int64) * T + t) * H + h) * width + column
    offsets = row.to(gl.int64) * (H * width) + columns  # [C, K]
    gl.store(first + offsets, x.to(ptr.dtype.element_ty), (row < rows) & (columns < width - column))


@gluon.jit
def write(desc, ptr, tile, x, column, width, where, rows, PACKED: gl.constexpr):
    """Writes the first `rows` rows of x [C, K] to a tensor.

    TMA writes them from a tile, whole. Two kinds of results are written from registers: partial results, and an
    incomplete chunk of a packed sequence, because the rows after it belong to another sequence.

    Args:
        desc: descriptor of the tensor, or None if x is one of several partial results.
        tile: memory [1, 1, C, K] or [C, K], which may be overwritten until `tma.store_wait`.
        ptr, x, column, width, where, rows: see `write_rows`.
    """
    b, h, t, _, _ = where
    if desc is None:  # noqa: SIM114 -- known when this is compiled
        write_rows(ptr, x, column, width, where, rows)
    elif PACKED and rows < x.shape[0]:
        write_rows(ptr, x, column, width, where, rows)
    else:
        tile.store(x.to(desc.dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(desc, [b, h, t, column], tile.reshape([1, 1, x.shape[0], x.shape[1]]))


@gluon.jit
def _scores_by_halving(q_tile, k_tile, scratch, b, levels):
    """Returns A [C, C] with A_ts = sum over d of q_td k_sd exp2(b_td - b_sd) for t >= s, for gates of any strength.

    The chunk is halved repeatedly, for m = C / 2, C / 4 .. 1. In every block of 2 m rows, one product multiplies the
    rows t of the second half by the rows s of the first half. Both are decayed to the last row of the first half, with
    exponents that are not above 0. The diagonal t = s is not decayed.

    Args:
        q_tile, k_tile: [C, K], not decayed.
        scratch: shared memory of at least one tile [C, K], for the decayed rows.
        b: sums of gates [C, K], in base 2.
        levels: bit mask of the m that contribute; the others are skipped.
    """
    C: gl.constexpr = b.shape[0]
    K: gl.constexpr = b.shape[1]
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, K], q_tile.dtype)
    t = gl.arange(0, C, gl.SliceLayout(1, scores))[:, None]  # [C, 1]
    s = gl.arange(0, C, gl.SliceLayout(0, scores))[None, :]  # [1, C]
    decayed = scratch._reinterpret(q_tile.dtype, [2, C, K], tile).index(0)
    a = gl.zeros([C, C], gl.float32, scores)
    fence_async_shared()  # the caller may have cleared rows of the tiles, which wgmma reads
    a = warpgroup_mma(q_tile, k_tile.permute([1, 0]), a, use_acc=False, is_async=True)
    a = gl.where(t == s, warpgroup_mma_wait(0, [a]), 0.0)  # [C, C]
    for level in gl.static_range(LOG2_C):
        if levels & (C >> (level + 1)) != 0:
            m: gl.constexpr = C >> (level + 1)
            a = gl.where(((t ^ s) & -m) == m, _across_halves(q_tile, k_tile, decayed, b, scores, m), a)
    return gl.where(t >= s, a, 0.0)


@gluon.jit
def _across_halves(q_tile, k_tile, decayed, b, scores: gl.constexpr, m: gl.constexpr):
    """Returns A [C, C] for the pairs (t, s) in the two halves of a block of 2 m rows. All other elements are undefined.

    One tile holds both factors of the product: rows of q in second halves, and rows of k in first halves.
    """
    C: gl.constexpr = b.shape[0]
    second = (gl.arange(0, C, gl.SliceLayout(1, b.type.layout))[:, None] & m) != 0  # [C, 1]
    x = relative_to_middle(b, m)  # [C, K]
    decay = gl.exp2(gl.where(second, x, -x))  # [C, K]
    z = gl.where(second, q_tile.load(b.type.layout), k_tile.load(b.type.layout)).to(gl.float32)  # [C, K]
    decayed.store((z * decay).to(q_tile.dtype))
    fence_async_shared()
    a = gl.zeros([C, C], gl.float32, scores)
    a = warpgroup_mma(decayed, decayed.permute([1, 0]), a, use_acc=False, is_async=True)
    return warpgroup_mma_wait(0, [a])


@gluon.jit
def relative_to_middle(b, m: gl.constexpr):
    """Returns b [C, K] minus the middle row of its block of 2 m rows: the last row of the first half."""
    C: gl.constexpr = b.shape[0]
    K: gl.constexpr = b.shape[1]
    blocks = b.reshape([C // (2 * m), 2 * m, K])  # [C / 2m, 2m, K]
    row = gl.arange(0, 2 * m, gl.SliceLayout(0, gl.SliceLayout(2, blocks.type.layout)))[None, :, None]  # [1, 2m, 1]
    # The sum selects one row. The compiler drops additions of -0.0, so the sum is free if one thread holds the block.
    middle = gl.sum(gl.where(row == m - 1, blocks, -0.0), 1)  # [C / 2m, K]
    return gl.convert_layout((blocks - middle[:, None, :]).reshape([C, K]), b.type.layout)
