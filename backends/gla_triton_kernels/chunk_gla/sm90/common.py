"""Functions shared by the kernels for SM90: segments, decays and scores of a chunk, clears and writes of rows, overlap.

    b_t = g_1 + .. + g_t                             within a chunk
    mild chunk (no channel decays by more than MILD_DECAY_SM90): with r = b_C / 2,
        qg = q exp(b - r)        kg = k exp(r - b)         A = tril(qg kg^T)
    any chunk: no exponent is above 0, so nothing overflows,
        qg = q exp(b)            kg = k exp(b_C - b)       A: see _scores_by_halving

B batch   T tokens   I segments   H heads   C tokens of a chunk   K key width of a head, or of a slice of it
"""

# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportAssignmentType=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
# pyright: reportFunctionMemberAccess=false
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from gla_triton_kernels.chunk_gla.shared.limits import LEAST_GATE, LEAST_NORMAL, LOG2E, MILD_INPUT_HALF

LOG2_C = gl.constexpr(6)  # a chunk has C = 64 tokens
# The least unit of an operand in float16. Units and products of operands are at most 2^38, so a product times the
# quotient of two units is at most 2^116.
LEAST_UNIT = gl.constexpr(2.0**-40)


@gluon.jit
def plus(a, b):
    return a + b


@gluon.jit
def _then(before, last, more, new_last):
    return before + last + more, new_last


@gluon.jit
def sum_of_earlier(x):
    """Returns for each number of x the sum of the numbers before it.

    A sum that includes the number, less the number, would lose what is small beside it.
    """
    found, _ = gl.associative_scan((gl.zeros_like(x), x), 0, _then)
    return found


@gluon.jit
def _either(a, b):
    return a | b


@gluon.jit
def as_float32(x):
    """Returns x in float32.

    Two instructions convert the two bfloat16 numbers of a register; the compiler would use three.
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
    """Returns the power of two `unit` with 2^14 <= most / unit < 2^15, and 1 / unit; `most` is the largest number.

    Numbers that are divided by it fit into float16.
    """
    unit = most.to(gl.int32, bitcast=True) & 0x7F800000  # the exponent's bits
    unit = gl.maximum(unit - (14 << 23), 1 << 23)
    return unit.to(gl.float32, bitcast=True), ((254 << 23) - unit).to(gl.float32, bitcast=True)


@gluon.jit
def largest(x):
    """Returns the largest absolute value of a matrix."""
    return gl.max(gl.max(gl.abs(x), 1), 0)


@gluon.jit
def magnitudes(q_tile, k_tile, layout: gl.constexpr):
    """Returns the larger of |q| and |k| [C, K], in float16, as the bits of float32 numbers, which have their order."""
    most = gl.maximum(gl.abs(q_tile.load(layout)), gl.abs(k_tile.load(layout)))
    return most.to(gl.float32).to(gl.int32, bitcast=True)


@gluon.jit
def fit_mild_chunk(bits):
    """Returns whether all `magnitudes` [C, K] are at most MILD_INPUT_HALF.

    It reduces integers, and all dimensions at once, because one instruction of Hopper then compares those of a warp.
    """
    most = gl.max(bits.reshape([bits.shape[0] * bits.shape[1]]), 0)
    return most.to(gl.float32, bitcast=True) <= MILD_INPUT_HALF


@gluon.jit
def store_state(tile, S, factor, outer):
    """Stores outer * factor * S as an operand, and returns its unit, by which products with it are multiplied.

    A sum over many tokens may be too large or too small for float16, but not for bfloat16, where outer has to be 1.

    Args:
        S: [K, V]. factor: [K, 1], numbers from exp(-12) to 1; None stands for 1. outer: a power of two.
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
def unit_at(units, row, H, h):
    """Returns the unit of the tile of a chunk and head from units [rows, H], or 1 if there are none; see half.py."""
    if units is None:
        return 1.0
    else:  # noqa: RET505 -- one branch is compiled
        return gl.load(units + (row.to(gl.int64) * H + h))


@gluon.jit
def divisible_unit_of(most):
    """Returns the unit as `unit_of` does, but at least LEAST_UNIT, so that other units may be divided by it."""
    return unit_of(gl.maximum(most, LEAST_UNIT * 16384.0))


@gluon.jit
def in_units(x, dtype: gl.constexpr):
    """Returns a matrix as an operand of a product, and its unit, by which the product is multiplied.

    The unit is 1 for bfloat16. For float16 it may be a divisor; see `divisible_unit_of`.
    """
    if dtype == gl.float16:
        unit, inverse = divisible_unit_of(largest(x))
        return (x * inverse).to(dtype), unit
    else:  # noqa: RET505 -- one branch is compiled
        return x.to(dtype), 1.0


@gluon.jit
def write_state(ptr, number, S, key, value, sizes):
    """Writes S [BK, W] from registers to the state of this number in a tensor [.., K, V].

    Args:
        key, value: the keys [BK, 1] and the values [1, W] of S. sizes: K and V.
    """
    K, V = sizes
    key += opaque_zero()  # the assembler of Triton 3.6 crashes if addresses are kept through the loop
    gl.store(ptr + number.to(gl.int64) * K * V + key * V + value, S, (key < K) & (value < V))


@gluon.jit
def slots_at(slots, sequence):
    """Returns the slots of a sequence: of the state that it reads, of its last state and of its checkpoint.

    The fourth number of the result is the number of tokens before the checkpoint; see shared/slots.py.
    """
    row = slots + sequence.to(gl.int64) * 4
    return gl.load(row), gl.load(row + 1), gl.load(row + 2), gl.load(row + 3)


@gluon.jit
def read_slot(pool, strides, slot, h, key, value, inside):
    """Returns a head's state [BK, W] in a slot of the pool [P, H, K, V], in float32; 0 without a slot.

    Args:
        strides: of P, H, K and V; the one of K or of V is None, see `in_state`.
        key, value, inside: the keys [BK, 1] and the values [1, W] of the state, and which of them there are.
    """
    state_n, state_h, state_k, state_v = strides
    state = pool + slot.to(gl.int64) * state_n + h.to(gl.int64) * state_h
    return gl.load(state + in_state(key, value, state_k, state_v), inside & (slot >= 0), 0.0).to(gl.float32)


@gluon.jit
def write_slot(pool, strides, slot, h, S, key, value, sizes):
    """Writes a head's state S [BK, W] into a slot of the pool, if there is a slot; sizes are K and V.

    The other arguments are as in `read_slot`.
    """
    K, V = sizes
    state_n, state_h, state_k, state_v = strides
    key += opaque_zero()  # see write_state
    state = pool + slot.to(gl.int64) * state_n + h.to(gl.int64) * state_h
    inside = (key < K) & (value < V) & (slot >= 0)
    gl.store(state + in_state(key, value, state_k, state_v), S.to(pool.dtype.element_ty), inside)


@gluon.jit
def first_state(S, states, n, sequence, h, is_first, key, value, sizes):
    """Returns the state [BK, W] of a head that enters segment n of a sequence, in float32, or S if it enters with none.

    Args:
        S: zeros. states: initial_state, its strides or those of the pool, entering, final_state, pool and slots.
        is_first: whether the segment is the first of its sequence.
        key, value: as in `read_slot`. sizes: Hv, K and V.
    """
    initial_state, strides, entering, _, pool, slots = states
    Hv, K, V = sizes
    inside = (key < K) & (value < V)
    if entering is not None:
        head = entering + (n * Hv + h).to(gl.int64) * K * V
        # The scan has written the last states, so the pool no longer holds the first ones.
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
    """Writes the last state of a head of a sequence, if sequences are whole; the arguments are as in `first_state`."""
    _, strides, entering, final_state, pool, slots = states
    Hv, K, V = sizes
    if final_state is not None:
        write_state(final_state, n * Hv + h, S, key, value, (K, V))
    elif pool is not None and entering is None:
        _, to_slot, _, _ = slots_at(slots, sequence)
        write_slot(pool, strides, to_slot, h, S, key, value, (K, V))


@gluon.jit
def levels_that_count(g, least):
    """Returns the levels m of the halving, as bits, at which some gate of g [C, K] between two halves is above `least`.

    The lowest set bit m of a row's number gives the level: the row is the first of the second half of a block of 2 m
    rows. Its gate decays every pair of the two halves.
    """
    row = gl.arange(0, g.shape[0], gl.SliceLayout(1, g.type.layout))[:, None]  # [C, 1]
    bits = gl.where(g > least, row & -row, 0)  # [C, K]
    return gl.reduce(gl.reduce(bits, 0, _either), 0, _either)


@gluon.jit
def opaque_zero():
    """Returns a zero that the compiler cannot fold: values that depend on it do not occupy registers between chunks."""
    return gl.inline_asm_elementwise("mov.u32 $0, 0;", "=r", [], gl.int32, is_pure=False, pack=1)


@gluon.jit
def let_dependents_start():
    """Lets the next kernel of the stream start, if it was launched with `launch_pdl`; see `wait_for_predecessor`."""
    gl.inline_asm_elementwise("griddepcontrol.launch_dependents; // $0", "=r", [], gl.int32, is_pure=False, pack=1)


@gluon.jit
def wait_for_predecessor():
    """Waits until the kernel before this one in the stream is done, and all its writes are visible."""
    gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], gl.int32, is_pure=False, pack=1)


@gluon.jit
def segment_at(order, place):
    """Returns the segment at a place of the order [I, 5].

    The result is (number, first token, number of tokens, first token of its sequence, end of its sequence).

    Args:
        order: see `Segments`.
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
    """Returns the number of a sequence's chunk that begins at token `start`, as checkpoints are numbered."""
    return (sequence if PACKED else sequence * gl.cdiv(T, C)) + start // C


@gluon.jit
def next_checkpoint(start, sequence, origin, every, slots, PACKED: gl.constexpr):
    """Returns the row of the first checkpoint at or after `start`, and the number of tokens until it.

    A sequence has a checkpoint every `every` tokens. With the slots of a pool it has one at most, and the first result
    is its slot.
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
    """Returns a layout of a tile [C, K] for 4 warps, which hold runs of C K / 256 rows.

    A warp holds 64 columns, and a thread two of these columns. The warp then reads whole rows of shared memory, without
    bank conflicts.
    """
    runs = 256 // K
    return gl.BlockedLayout([C // runs, 2], [1, 32], [runs, 4 // runs], [1, 0])


@gluon.constexpr_function
def layout_of_columns(C, K):
    """Returns a layout of a tile [C, K] for 4 warps in which few threads sum over rows; a thread holds two columns.

    With 128 columns a thread holds half of the rows, because registers spill otherwise. With fewer columns it holds
    runs of 4 rows, for which bank conflicts in shared memory are rare.
    """
    run = C // 2 if K > 64 else 4
    lanes = 256 // K
    return gl.BlockedLayout([run, 2], [lanes, 32 // lanes], [1, 4], [1, 0])


@gluon.jit
def sums_of_runs(x):
    """Returns sums over the rows of x [C, K] in `layout_of_runs`; warps wait for each other only once.

    The result is three tensors: the sums within each of the R runs up to each row [R, C / R, K], the sums of all runs
    before each run [R, K], and the sum of all rows [K].
    """
    layout: gl.constexpr = x.type.layout
    R: gl.constexpr = layout.warps_per_cta[0]
    RUN: gl.constexpr = layout.size_per_thread[0]
    K: gl.constexpr = x.shape[1]
    runs: gl.constexpr = gl.BlockedLayout([1, RUN, 2], [1, 1, 32], [R, 1, 4 // R], [2, 1, 0])
    everywhere: gl.constexpr = gl.BlockedLayout([R, 2], [1, 32], [R, 4 // R], [1, 0])  # a warp holds all runs
    keys: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, runs))
    blocks = gl.convert_layout(x.reshape([R, RUN, K]), runs, assert_trivial=True)
    within = gl.associative_scan(blocks, 1, plus)
    row = gl.arange(0, RUN, gl.SliceLayout(0, gl.SliceLayout(2, runs)))[None, :, None]
    # The compiler knows that adding -0.0 changes nothing: these sums only select numbers that a thread holds.
    last = gl.sum(gl.where(row == RUN - 1, within, -0.0), 1)  # [R, K]
    totals = gl.convert_layout(last, everywhere)  # [R, K]
    run = gl.arange(0, R, gl.SliceLayout(1, everywhere))[:, None]  # [R, 1]
    own = gl.arange(0, R, gl.SliceLayout(1, gl.SliceLayout(1, runs)))[:, None]  # [R, 1]
    before = gl.zeros_like(last)
    for i in gl.static_range(R - 1):
        total = gl.sum(gl.where(run == i, totals, -0.0), 0)  # [K]
        before += gl.where(own > i, gl.convert_layout(total, keys, assert_trivial=True)[None, :], 0.0)
    return within, before, gl.convert_layout(gl.sum(totals, 0), gl.SliceLayout(0, layout), assert_trivial=True)


@gluon.jit
def exponents_of_mild_chunk(g):
    """Returns the exponents b - r [C, K], base 2, and b_C [K] for the gates g [C, K] of a chunk that may be mild."""
    within, before, end = sums_of_runs(g)
    r = gl.convert_layout(0.5 * end, gl.SliceLayout(0, before.type.layout), assert_trivial=True)[None, :]  # [1, K]
    x = within * LOG2E + ((before - r) * LOG2E)[:, None, :]
    return gl.convert_layout(x.reshape(g.shape), g.type.layout, assert_trivial=True), end


@gluon.jit
def decay_mild_chunk(q_tile, k_tile, x, end):
    """Replaces the tiles q, k [C, K] of a mild chunk with exponents x [C, K] by qg, kg, and returns exp(r) [K]."""
    layout: gl.constexpr = x.type.layout
    q_tile.store((as_float32(q_tile.load(layout)) * gl.exp2(x)).to(q_tile.dtype))
    minus_x = -1.0 * x  # -x would become 0 - x, one more instruction
    k_tile.store((as_float32(k_tile.load(layout)) * gl.exp2(minus_x)).to(k_tile.dtype))
    return gl.exp2(0.5 * end * LOG2E)


@gluon.jit
def decay_any_chunk(q_tile, k_tile, scratch, g):
    """Replaces the tiles q, k [C, K] of any chunk by qg, kg, and returns exp(b_C) [K] and A [C, C].

    g [C, K] are the gates of the chunk.
    """
    g = gl.maximum(g, LEAST_GATE) * LOG2E
    b = gl.associative_scan(g, 0, plus)  # [C, K]
    b_end = gl.sum(g, 0)  # [K]
    a = _scores_by_halving(q_tile, k_tile, scratch, b, levels_that_count(g, LEAST_NORMAL))  # [C, C]
    q_tile.store((q_tile.load(g.type.layout).to(gl.float32) * gl.exp2(b)).to(q_tile.dtype))
    k_tile.store((k_tile.load(g.type.layout).to(gl.float32) * gl.exp2(b_end[None, :] - b)).to(k_tile.dtype))
    return gl.exp2(b_end), a


@gluon.jit
def in_state(key, value, stride_k, stride_v):
    """Returns the offsets of elements of a state from its first element.

    stride_k is None if keys are contiguous; otherwise values are.
    """
    return value.to(gl.int64) * stride_v + key if stride_k is None else key.to(gl.int64) * stride_k + value


@gluon.jit
def log_gates(x, NORMALIZER: gl.constexpr):
    """Returns log gates in float32: x itself, or log sigma(x) / NORMALIZER if NORMALIZER is given and x holds logits.

    log sigma(x) = min(x, 0) - log(1 + exp(-|x|)), with an error of at most 1e-7, which bfloat16 does not show.
    """
    x = x.to(gl.float32)
    if NORMALIZER is None:
        return x
    else:  # noqa: RET505 -- one branch is compiled
        log2 = _log2(1.0 + gl.exp2(gl.abs(x) * -LOG2E))
        return gl.minimum(x, 0.0) * (1.0 / NORMALIZER) - log2 * (1.0 / (NORMALIZER * LOG2E))


@gluon.jit
def _log2(x):
    """Computes log2 in one instruction; `gl.log2` takes twenty."""
    return gl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], gl.float32, is_pure=True, pack=1)


@gluon.jit
def slope_of_gates(x, NORMALIZER: gl.constexpr):
    """Returns the derivative of log sigma(x) / NORMALIZER at the logits x, in float32."""
    return _reciprocal(NORMALIZER + NORMALIZER * gl.exp2(x.to(gl.float32) * LOG2E))


@gluon.jit
def _reciprocal(x):
    """Computes 1 / x in one instruction, with an error of one bit; a division takes eight."""
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], gl.float32, is_pure=True, pack=1)


@gluon.jit
def log_gates_of_tile(tile, rows, layout: gl.constexpr, NORMALIZER: gl.constexpr, PACKED: gl.constexpr):
    """Returns the log gates of a tile [C, K] in a layout, in float32; the gates from row `rows` on are 0.

    In a batch, memory after the last token counts as 0, so gates need no mask there, but logits do.
    """
    if NORMALIZER is None:
        if PACKED:
            clear_rows(tile, rows, layout)
        return tile.load(layout).to(gl.float32)
    else:  # noqa: RET505 -- one branch is compiled
        row = gl.arange(0, tile.shape[0], gl.SliceLayout(1, layout))[:, None]  # [C, 1]
        return gl.where(row < rows, log_gates(tile.load(layout), NORMALIZER), 0.0)


@gluon.jit
def gates_of(gates, t, rows, token, NORMALIZER: gl.constexpr):
    """Returns the log gates [C] of a head for a chunk that begins at token t, at least LEAST_GATE.

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
def clear_rows(tile, rows, layout: gl.constexpr):
    """Clears all but the first `rows` rows of a tile: the other rows belong to the next sequence."""
    if rows < tile.shape[0]:
        row = gl.arange(0, tile.shape[0], gl.SliceLayout(1, layout)) + opaque_zero()
        x = tile.load(layout)
        tile.store(gl.where((row < rows)[:, None], x, gl.zeros_like(x)))


@gluon.jit
def write_rows(ptr, x, column, width, where, rows):
    """Writes the first `rows` rows of x [C, K] from registers to a tensor [B, T, H, width].

    Args:
        column: the column of the tensor where x begins.
        where: (batch, head, first token, T, H).
    """
    b, h, t, T, H = where
    row = (gl.arange(0, x.shape[0], gl.SliceLayout(1, x.type.layout)) + opaque_zero())[:, None]  # [C, 1]
    columns = (gl.arange(0, x.shape[1], gl.SliceLayout(0, x.type.layout)) + opaque_zero())[None, :]  # [1, K]
    first = ptr + ((b.to(gl.int64) * T + t) * H + h) * width + column
    offsets = row.to(gl.int64) * (H * width) + columns  # [C, K]
    gl.store(first + offsets, x.to(ptr.dtype.element_ty), (row < rows) & (columns < width - column))


@gluon.jit
def write(desc, ptr, tile, x, column, width, where, rows, PACKED: gl.constexpr):
    """Writes the first `rows` rows of x [C, K] to a tensor.

    TMA writes them from a tile in shared memory. Partial results are written from registers. So is the incomplete chunk
    of a packed sequence, because the rows after it belong to another sequence.

    Args:
        desc: descriptor of the tensor, or None if x is one of several partial results.
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

    The chunk is halved repeatedly. In every block of 2 m rows, the rows t of the second half are multiplied by the rows
    s of the first half. Both are decayed to the last row of the first half, with exponents that are not above 0. The
    diagonal is not decayed. Blocks whose m is not among the bits of `levels` are skipped.
    """
    C: gl.constexpr = b.shape[0]
    K: gl.constexpr = b.shape[1]
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, K], q_tile.dtype)
    t = gl.arange(0, C, gl.SliceLayout(1, scores))[:, None]  # [C, 1]
    s = gl.arange(0, C, gl.SliceLayout(0, scores))[None, :]  # [1, C]
    decayed = scratch._reinterpret(q_tile.dtype, [2, C, K], tile).index(0)
    a = gl.zeros([C, C], gl.float32, scores)
    fence_async_shared()  # the caller may have cleared rows of the tiles
    a = warpgroup_mma(q_tile, k_tile.permute([1, 0]), a, use_acc=False, is_async=True)
    a = gl.where(t == s, warpgroup_mma_wait(0, [a]), 0.0)  # [C, C]
    for level in gl.static_range(LOG2_C):
        if levels & (C >> (level + 1)) != 0:
            m: gl.constexpr = C >> (level + 1)
            a = gl.where(((t ^ s) & -m) == m, _across_halves(q_tile, k_tile, decayed, b, scores, m), a)
    return gl.where(t >= s, a, 0.0)


@gluon.jit
def _across_halves(q_tile, k_tile, decayed, b, scores: gl.constexpr, m: gl.constexpr):
    """Returns A [C, C] where t and s are in the two halves of a block of 2 m rows, also for t < s.

    All other elements are undefined. One tile holds both factors: rows of q in second halves, and rows of k in first
    halves.
    """
    C: gl.constexpr = b.shape[0]
    second = (gl.arange(0, C, gl.SliceLayout(1, b.type.layout))[:, None] & m) != 0  # [C, 1]
    x = _relative_to_middle(b, m)  # [C, K]
    decay = gl.exp2(gl.where(second, x, -x))
    z = gl.where(second, q_tile.load(b.type.layout), k_tile.load(b.type.layout)).to(gl.float32)  # [C, K]
    decayed.store((z * decay).to(q_tile.dtype))
    fence_async_shared()
    a = gl.zeros([C, C], gl.float32, scores)
    a = warpgroup_mma(decayed, decayed.permute([1, 0]), a, use_acc=False, is_async=True)
    return warpgroup_mma_wait(0, [a])


@gluon.jit
def _relative_to_middle(b, m: gl.constexpr):
    """Subtracts the middle row of each block of 2 m rows from b [C, K]: the last row of the first half."""
    C: gl.constexpr = b.shape[0]
    K: gl.constexpr = b.shape[1]
    blocks = b.reshape([C // (2 * m), 2 * m, K])
    row = gl.arange(0, 2 * m, gl.SliceLayout(0, gl.SliceLayout(2, blocks.type.layout)))[None, :, None]
    # The compiler knows that adding -0.0 changes nothing: the sum is free if one thread holds the block.
    middle = gl.sum(gl.where(row == m - 1, blocks, -0.0), 1)  # [C / 2m, K]
    return gl.convert_layout((blocks - middle[:, None, :]).reshape([C, K]), b.type.layout)
