"""Adds the terms of pairs of tokens of a chunk to gradients of gated linear attention, for chunks that are not mild.

If a chunk of C tokens is not mild, the backward kernels for SM90 leave out the pairs s <= t of its tokens and mark the
chunk. Let dA_ts = dA_st = scale * do_t . v_s, for s <= t, be the gradients of scores, and
e_ts = exp(g_{s+1} + .. + g_t) the decay of each channel of K. The terms are

    dq_t += sum over s <= t of dA_ts e_ts k_s        dv_s += scale * sum over t >= s of (sum_K q_t e_ts k_s) do_t
    dk_s += sum over t >= s of dA_ts e_ts q_t        dg_u += sum over s < u <= t of q_t dA_ts e_ts k_s

The chunk is halved repeatedly: every pair s < t lies in the two halves of one block of 2m tokens, for exactly one level
m among 1, 2, 4 .. C/2. Let b_t = g_1 + .. + g_t, let b* be b at the last token of the left half of the block, and u the
first token of its right half. Then

    z_t = q_t e_t,  e_t = exp(b_t - b_u)  in the right half        f = exp(g_u)
    z_s = k_s e_s,  e_s = exp(b* - b_s)   in the left half         dz = f * dA z

where dA is masked to pairs of the two halves. e dz is added to dq in right halves, and to dk in left halves. The
product z z^T, with the same mask and with f in right halves, gives the sums over K in dv.

No exponent is above 0, so gates down to -inf need no special case. Next to the middle of a block e is 1, so no gate
makes all of z small. Therefore z and dA can be float16, in units that keep numbers down to 2^-28 times the largest.
Gate u decays each pair that has one token before u and one token at or after u:

    dg_u += sum over t >= u of w_t        w = z * dz in right halves, -z * dz in left halves

A pair whose tokens are both at or after u adds the same product of rounded numbers twice, with opposite signs, and so
adds 0. If exp(g_u) is 0 in float32, dg_u is set to 0. Pairs s = t have no gate and are multiplied element by element.

Loops over levels, blocks of keys and blocks of values run at run time. This keeps the code small, so its instructions
stay in the cache. Each iteration loads all its inputs at once, after the previous iteration has prefetched them into
the L2 cache.

B batch   T tokens   N sequences   H key heads   Hq query heads   Hv value heads, of v and g
Ho = max(Hq, Hv) heads of o   PER_Q, PER_V heads of o that share a head of q, of v; one of them is 1
K, V key and value width   C tokens of a chunk   D = 64 columns of a tile   W = 64 or 128 columns of v and do
KEYS keys that share a mark   blocks_k blocks of KEYS keys   unit   see common.py
rows   of marks: one for each chunk, numbered like checkpoints

Source: Yang et al., "Gated Linear Attention Transformers with Hardware-Efficient Training" (arXiv 2312.06635), sec. 4.
"""

# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportAssignmentType=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
# pyright: reportIndexIssue=false, reportFunctionMemberAccess=false
from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from gla_core.dispatch.backend import CHUNK
from gla_core.dispatch.tensors import ceil_div
from gla_triton_kernels.gla.shared.limits import LEAST_GATE, LEAST_NORMAL
from gla_triton_kernels.gla.sm90.common import (
    largest,
    levels_that_count,
    log_gates,
    opaque_zero,
    plus,
    slope_of_gates,
    unit_at,
    unit_of,
)
from gla_triton_kernels.gla.tensors import BackwardTensors
from gla_triton_runtime.arithmetic import LOG2E
from gla_triton_runtime.launch import Launch, strides_of

MARKS = 64
"""The maximum number of pairs (chunk, head) that a program checks. Checking them takes less time than starting it."""
PROGRAMS = 1024
"""The number of pairs (chunk, head) up to which each pair has its own program: several for every multiprocessor."""

C = gl.constexpr(CHUNK)
D = gl.constexpr(64)
LOG2_FAR = gl.constexpr(-40.0)
FAR = gl.constexpr(2.0**-40)  # divided by FAR, exp(g) is a normal float32 for g down to -115, instead of -87
LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 32, 16]))
PER_ROW = gl.constexpr(gl.SliceLayout(1, LAYOUT.value))
PER_COLUMN = gl.constexpr(gl.SliceLayout(0, LAYOUT.value))
ROWS = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0]))  # for elements of 2 bytes
RUNS = gl.constexpr(gl.BlockedLayout([8, 2], [8, 4], [1, 8], [1, 0]))  # a warp holds all rows of 8 columns
SECTORS = gl.constexpr(gl.BlockedLayout([1, 1], [8, 4], [8, 1], [1, 0]))  # for one element in each 32 bytes
MARKED = gl.constexpr(gl.BlockedLayout([2], [32], [8], [0]))  # each warp holds all marks
TILE = gl.constexpr(gl.NVMMASharedLayout.get_default_for([CHUNK, 64], gl.float16))
TILE_32 = gl.constexpr(gl.NVMMASharedLayout.get_default_for([CHUNK, 64], gl.float32))


def new_marks(x: BackwardTensors, entering: Tensor, keys: int) -> Tensor | None:
    """Returns memory for the marks of chunks; None without gates.

    Args:
        entering: the states that enter chunks, [.., Hv, K, V].
        keys: number of keys that share a mark.
    """
    if x.g is None:
        return None
    Ho, (Hv, K, V) = x.do.shape[2], entering.shape[-3:]
    rows = entering.numel() // (Hv * K * V)
    return torch.empty(rows, Ho, ceil_div(K, keys), dtype=torch.int32, device=x.q.device)


def launch_pairs(
    x: BackwardTensors,
    units: dict[str, Tensor | None],
    marks: Tensor | None,
    scale: float,
    keys: int,
    normalizer: int | None = None,
    together: int = 1,
) -> list[Launch]:
    """Returns the launch that completes the gradients of marked chunks.

    Args:
        x: tensors in bfloat16 or float16, except for gates. The gradients are contiguous, have Ho heads, and lack the
            terms of pairs in marked chunks.
        units: the units of q, k, v and do, if these were float32; see half.py.
        marks: [rows, Ho, ceil(K / keys)] int32, contiguous; not 0 if a chunk is marked. Rows are numbered like
            checkpoints every `CHUNK` tokens; rows without a chunk are not read. None without gates; then there is no
            launch, because there is nothing to add.
        scale: factor of the scores.
        keys: number of keys that share a mark, 64 or 128.
        normalizer: see `launch_outputs` of general/forward.py.
        together: number of adjacent marks of a chunk and head that count as one: if one is set, all are.
    """
    if marks is None or x.g is None:
        return []
    T, Hq, K = x.q.shape[1:]
    (Hv, V), Ho = x.v.shape[2:], x.do.shape[2]
    count = len(marks) * Ho
    strides_t = [y.stride(1) for y in (x.q, x.k, x.v, x.g, x.do)]
    arguments = {
        "q_ptr": x.q,
        "k_ptr": x.k,
        "v_ptr": x.v,
        "g_ptr": x.g,
        "do_ptr": x.do,
        "cu_seqlens_ptr": x.cu_seqlens,
        "marks_ptr": marks,
        "dq_ptr": x.dq,
        "dk_ptr": x.dk,
        "dv_ptr": x.dv,
        "dg_ptr": x.dg,
        **units,
        "scale": scale,
        "T": T,
        "N": 0 if x.cu_seqlens is None else len(x.cu_seqlens) - 1,
        "Ho": Ho,
        "count": count,
        **strides_of("q", x.q),
        **strides_of("k", x.k),
        **strides_of("v", x.v),
        **strides_of("g", x.g),
        **strides_of("o", x.do),
        "stride_dkb": x.dk.stride(0),
        "stride_dvb": x.dv.stride(0),
        "K": K,
        "V": V,
        "PER_Q": Ho // Hq,
        "PER_V": Ho // Hv,
        "KEYS": keys,
        "TOGETHER": together,
        "NORMALIZER": normalizer,
        "MARKS": MARKS,
        "FAR_ROWS": CHUNK * max(*strides_t, Ho * K, Ho * V) >= 2**31,
    }
    grid = (max(min(count, PROGRAMS), ceil_div(count, MARKS)), 1, 1)
    return [Launch(_pairs_kernel, grid, arguments, {"num_warps": 8, "maxnreg": 128})]


@gluon.jit(do_not_specialize=["scale", "T", "N", "Ho", "count"])
def _pairs_kernel(
    q_ptr,  # [B, T, Hq, K]
    k_ptr,  # [B, T, H, K]
    v_ptr,  # [B, T, Hv, V]
    g_ptr,  # [B, T, Hv, K]
    do_ptr,  # [B, T, Ho, V]
    cu_seqlens_ptr,  # [N+1] or None
    marks_ptr,  # [rows, Ho, blocks_k]
    dq_ptr,  # [B, T, Ho, K]
    dk_ptr,  # [B, T, Ho, K]
    dv_ptr,  # [B, T, Ho, V]
    dg_ptr,  # [B, T, Ho, K]
    q_units,  # [rows, Hq] or None
    k_units,  # [rows, H] or None
    v_units,  # [rows, Hv] or None
    do_units,  # [rows, Ho] or None
    scale,
    T,
    N,
    Ho,
    count,  # number of pairs (chunk, head)
    stride_qb,
    stride_qt,
    stride_qh,
    stride_kb,
    stride_kt,
    stride_kh,
    stride_vb,
    stride_vt,
    stride_vh,
    stride_gb,
    stride_gt,
    stride_gh,
    stride_ob,
    stride_ot,
    stride_oh,
    stride_dkb,  # also of dq and dg
    stride_dvb,
    K: gl.constexpr,
    V: gl.constexpr,
    PER_Q: gl.constexpr,
    PER_V: gl.constexpr,
    KEYS: gl.constexpr,
    TOGETHER: gl.constexpr,  # adjacent marks that count as one
    NORMALIZER: gl.constexpr,
    MARKS: gl.constexpr,
    FAR_ROWS: gl.constexpr,  # whether offsets within a chunk exceed int32
):
    """Completes the gradients of the marked pairs (chunk, head) among MARKS pairs that are `programs` apart.

    Most programs find no mark.
    """
    pid, programs = gl.program_id(0), gl.num_programs(0)
    blocks_k: gl.constexpr = (K + KEYS - 1) // KEYS
    # Each tuple is a tensor, its strides of batches, tokens and heads, and the number of heads of o that share a head.
    q = (q_ptr, stride_qb, _stride(stride_qt, FAR_ROWS), stride_qh, PER_Q)
    k = (k_ptr, stride_kb, _stride(stride_kt, FAR_ROWS), stride_kh, PER_Q * PER_V)
    v = (v_ptr, stride_vb, _stride(stride_vt, FAR_ROWS), stride_vh, PER_V)
    g = (g_ptr, stride_gb, _stride(stride_gt, FAR_ROWS), stride_gh, PER_V)
    do = (do_ptr, stride_ob, _stride(stride_ot, FAR_ROWS), stride_oh, 1)
    tokens_k, tokens_v = _stride(Ho * K, FAR_ROWS), _stride(Ho * V, FAR_ROWS)
    dq, dk = (dq_ptr, stride_dkb, tokens_k, K, 1), (dk_ptr, stride_dkb, tokens_k, K, 1)
    dv, dg = (dv_ptr, stride_dvb, tokens_v, V, 1), (dg_ptr, stride_dkb, tokens_k, K, 1)
    numbers = pid + programs * gl.arange(0, MARKS, MARKED)  # [MARKS]
    marks = gl.zeros([MARKS], gl.int32, MARKED)  # [MARKS]
    for block in range(blocks_k):
        marks |= gl.load(marks_ptr + numbers.to(gl.int64) * blocks_k + block, mask=numbers < count, other=0)
    marked = gl.associative_scan((marks != 0).to(gl.int32), 0, plus)  # [MARKS], inclusive counts of marked pairs
    for j in range(gl.max(marked, 0)):
        ih = pid + programs * gl.sum((marked <= j).to(gl.int32), 0)
        i, h = ih // Ho, ih % Ho
        if cu_seqlens_ptr is None:
            chunks = gl.cdiv(T, C)
            b, t, end = i // chunks, i % chunks * C, T
        else:
            n = _sequence_of(i, cu_seqlens_ptr, N)
            start = gl.load(cu_seqlens_ptr + n).to(gl.int32)
            b, t = 0, start + (i - n - start // C) * C
            end = gl.load(cu_seqlens_ptr + n + 1).to(gl.int32)
            end = gl.where(t < start, t, end)  # rows before the first sequence have no chunk
        rows = gl.minimum(end - t, C)
        at = (b, t, h)
        _prefetch(q, at, 0, rows, K)
        _prefetch(k, at, 0, rows, K)
        _prefetch(g, at, 0, rows, K)
        q_unit, do_unit = unit_at(q_units, i, Ho // PER_Q, h // PER_Q), unit_at(do_units, i, Ho, h)
        k_unit = unit_at(k_units, i, Ho // (PER_Q * PER_V), h // (PER_Q * PER_V))
        v_unit = unit_at(v_units, i, Ho // PER_V, h // PER_V)
        factor = scale * (do_unit * v_unit)
        da_tile, da_tt, da_unit = _score_gradients_in_units(do, v, at, rows, V, factor)
        a_tile = _allocate(gl.float32, [C, C], TILE_32)  # sum_K q_t e_ts k_s
        a_tile.store(gl.zeros([C, C], gl.float32, LAYOUT))
        for k0 in range(0, K, D):
            inside = rows
            if blocks_k > 1:  # a block of keys that does not count as marked is neither read nor written
                first = k0 // (KEYS * TOGETHER) * TOGETHER
                mark = gl.load(marks_ptr + ih.to(gl.int64) * blocks_k + first)
                for more in gl.static_range(1, TOGETHER):
                    at_mark = marks_ptr + ih.to(gl.int64) * blocks_k + first + more
                    mark |= gl.load(at_mark, first + more < blocks_k, 0)
                inside = gl.where(mark == 0, 0, rows)
            if k0 + D >= K:
                for p in range(0, V, D):
                    _prefetch(do, at, p, rows, V)
                    _prefetch(dv, at, p, rows, V)
            scores = (a_tile, da_tile, da_tt, da_unit)
            inputs = (q, k, g, q_unit, k_unit)
            _add_block_of_keys(scores, inputs, (dq, dk, dg), at, k0, inside, K, NORMALIZER)
        _add_dv(a_tile, dv, do, at, rows, V, scale * do_unit)


@gluon.jit
def _rows_and_columns():
    """Returns the numbers of rows and of columns of a tile."""
    row = gl.arange(0, C, PER_ROW) + opaque_zero()
    return row[:, None], gl.arange(0, C, PER_COLUMN)[None, :]  # [C, 1], [1, C]


@gluon.jit
def _sequence_of(i, cu_seqlens_ptr, N):
    """Returns the last of N sequences whose chunks begin at or before row i; 0 if there is none."""
    n, above = 0, N
    while above - n > 1:
        middle = (n + above) // 2
        first = middle + gl.load(cu_seqlens_ptr + middle).to(gl.int32) // C  # the row of its first chunk
        n = gl.where(first <= i, middle, n)
        above = gl.where(first <= i, above, middle)
    return n


@gluon.jit
def _allocate(dtype: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr):
    """Returns a new tile in shared memory, whose addresses are computed again for each use.

    The compiler would compute the addresses of all tiles before the first pair (chunk, head), and spill them.
    """
    return gl.allocate_shared_memory(dtype, [1, shape[0], shape[1]], layout).index(opaque_zero())


@gluon.jit
def _stride(stride, FAR_ROWS: gl.constexpr):
    """Returns a stride of tokens in an integer type that holds the offset between any two rows of a chunk."""
    return gl.to_tensor(stride).to(gl.int64) if FAR_ROWS else gl.to_tensor(stride)


@gluon.jit
def _first(x, at, column):
    """Returns a pointer to a column of token t of a head, and the stride of tokens.

    The pointer is computed again for each use, because the pointers of all tensors would not fit into registers.

    Args:
        x: a tensor with its strides; see `_pairs_kernel`.
        at: batch, first token of the chunk, head of o.
    """
    ptr, stride_b, stride_t, stride_h, group = x
    b, t, h = at
    h = h // group
    zero = opaque_zero()
    b, t, h = (b + zero).to(gl.int64), (t + zero).to(gl.int64), (h + zero).to(gl.int64)
    return ptr + (b * stride_b + t * stride_t + h * stride_h + column), stride_t


@gluon.jit
def _tile(x, at, column, rows, width: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr):
    """Returns pointers to a tile from `column` on, and a mask of elements within `rows` rows and `width` columns."""
    ptr, stride_t = _first(x, at, column)
    row = (gl.arange(0, shape[0], gl.SliceLayout(1, layout)) + opaque_zero())[:, None]  # [C, 1]
    columns = gl.arange(0, shape[1], gl.SliceLayout(0, layout))[None, :]  # [1, shape[1]]
    inside = row < rows
    if width % shape[1] != 0:
        inside = inside & (columns < width - column)
    return ptr + (row * stride_t + columns), inside


@gluon.jit
def _load(x, at, column, rows, width: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr):
    """Returns a tile from `column` on, with 0 beyond `rows` rows and `width` columns; see `_tile`."""
    ptr, inside = _tile(x, at, column, rows, width, shape, layout)
    return gl.load(ptr, inside, 0.0)


@gluon.jit
def _prefetch(x, at, column, rows, width: gl.constexpr):
    """Prefetches a tile [C, D] into the L2 cache."""
    ptr, stride_t = _first(x, at, column)
    each: gl.constexpr = 256 // ptr.dtype.element_ty.primitive_bitwidth
    row = (gl.arange(0, C, gl.SliceLayout(1, SECTORS)) + opaque_zero())[:, None]  # [C, 1]
    columns = each * gl.arange(0, D // each, gl.SliceLayout(0, SECTORS))[None, :]  # [1, D/each]
    ptr += columns + row * stride_t
    inside = (row < rows) & (columns < width - column)
    gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.u32 $0, 0; }",
        "=r,l,r",
        [ptr.to(gl.int64), inside.to(gl.int32)],
        gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _choose(bits, x, y):
    """Returns x where `bits` is -1, and y where it is 0. One instruction handles two numbers of 16 bits."""
    return gl.inline_asm_elementwise(
        "lop3.b32 $0, $1, $2, $3, 0xCA;", "=r,r,r,r", [bits, x, y], gl.float16, is_pure=True, pack=2
    )


@gluon.jit
def _load_rows(ptr, stride, row, rows, columns):
    """Returns rows `row` [C, 1] of a tensor as a tile [C, D], with 0 beyond `rows` rows and `columns` columns."""
    column = gl.arange(0, D, PER_COLUMN)[None, :]  # [1, D]
    inside = row < rows  # [C, 1]
    if columns is not None:
        inside = inside & (column < columns)
    return gl.load(ptr + (row * stride + column), inside, 0.0)


@gluon.jit
def _log_gates(x, inside, NORMALIZER: gl.constexpr):
    """Returns the log gates of a tile x [C, D]; they are 0 beyond the edges of the tensor, even if x holds logits."""
    g = log_gates(x, NORMALIZER)
    return g if NORMALIZER is None else gl.where(inside, g, 0.0)


@gluon.jit
def _larger(a, b, c, d):
    """Combines two pairs of numbers to the pair of their maxima."""
    return gl.maximum(a, c), gl.maximum(b, d)


@gluon.jit
def _score_gradients_in_units(do, v, at, rows, V: gl.constexpr, scale):
    """Returns a tile with dA [C, C] divided by its unit; its diagonal [C], also divided by FAR; and FAR * unit."""
    W: gl.constexpr = D if V <= D else 2 * D
    products = gl.zeros([C, C], gl.float32, LAYOUT)
    transposed = gl.zeros([C, C], gl.float32, LAYOUT)
    dtype: gl.constexpr = v[0].dtype.element_ty
    do_tile = _allocate(dtype, [C, W], TILE)
    v_tile = _allocate(dtype, [C, W], TILE)
    for p in range(0, V, W):
        do_block = _load(do, at, p, rows, V, [C, W], ROWS)
        v_block = _load(v, at, p, rows, V, [C, W], ROWS)
        do_tile.store(do_block)
        v_tile.store(v_block)
        fence_async_shared()
        products = warpgroup_mma(do_tile, v_tile.permute([1, 0]), products, is_async=True)
        transposed = warpgroup_mma(v_tile, do_tile.permute([1, 0]), transposed, is_async=True)
        products, transposed = warpgroup_mma_wait(0, [products, transposed])
    row, column = _rows_and_columns()
    dA = scale * gl.where(row >= column, products, transposed)  # [C, C]
    unit, inverse = unit_of(largest(dA))
    dA *= inverse
    da_tt = gl.sum(gl.where(row == column, dA, 0.0), 1) / FAR  # [C]
    da_tile = _allocate(gl.float16, [C, C], TILE)
    da_tile.store(dA.to(gl.float16))
    return da_tile, da_tt, FAR * unit


@gluon.jit
def _pairs(m):
    """Returns the mask [C, C] of pairs of tokens that lie in different halves of one block of 2m tokens."""
    row, column = _rows_and_columns()
    return ((row ^ column) & -m) == m


@gluon.jit
def _add_block_of_keys(scores, inputs, outputs, at, k0, rows, K: gl.constexpr, NORMALIZER: gl.constexpr):
    """Adds the terms of D keys to dq, dk and dg, and their sum over these keys to A [C, C].

    Args:
        scores: the tiles of A and dA, the diagonal of dA, and its unit.
        inputs: q, k and g, and the units of q and k.
        k0: the first key.
    """
    a_tile, da_tile, da_tt, da_unit = scores
    q, k, g, q_factor, k_factor = inputs
    dq, dk, dg = outputs
    q_at, inside = _tile(q, at, k0, rows, K, [C, D], ROWS)
    k_at, _ = _tile(k, at, k0, rows, K, [C, D], ROWS)
    gates_at, inside_runs = _tile(g, at, k0, rows, K, [C, D], RUNS)
    q_block, k_block = gl.load(q_at, inside, 0.0), gl.load(k_at, inside, 0.0)
    g_block = gl.load(gates_at, inside_runs, 0.0)
    if k0 + D < K:
        _prefetch(q, at, k0 + D, rows, K)
        _prefetch(k, at, k0 + D, rows, K)
        _prefetch(g, at, k0 + D, rows, K)
    _prefetch(dq, at, k0, rows, K)
    _prefetch(dk, at, k0, rows, K)
    _prefetch(dg, at, k0, rows, K)
    q_block, k_block = q_block.to(gl.float32) * q_factor, k_block.to(gl.float32) * k_factor
    most_q, most_k = gl.reduce((gl.max(gl.abs(q_block), 1), gl.max(gl.abs(k_block), 1)), 0, _larger)
    q_unit, q_inverse = unit_of(most_q)
    k_unit, k_inverse = unit_of(most_k)
    q_tile = _allocate(gl.float16, [C, D], TILE)
    k_tile = _allocate(gl.float16, [C, D], TILE)
    b_tile = _allocate(gl.float32, [C, D], TILE_32)
    q_tile.store((q_block * q_inverse).to(gl.float16))
    k_tile.store((k_block * k_inverse).to(gl.float16))
    gates = gl.maximum(_log_gates(g_block, inside_runs, NORMALIZER), LEAST_GATE) * LOG2E  # [C, D]
    b_tile.store(gl.associative_scan(gates, 0, plus))
    fence_async_shared()
    unit = q_unit * k_unit
    # In these units, no product is above 2^45. So a level whose gates are below `least` adds less than the least normal
    # number.
    least = gl.minimum(LEAST_NORMAL, LEAST_NORMAL - 45 + LOG2_FAR - gl.log2(da_unit) - gl.log2(unit))
    levels = levels_that_count(gl.where(inside_runs, gates, 2 * LEAST_GATE), least)
    row, column = _rows_and_columns()
    qk = gl.zeros([C, C], gl.float32, LAYOUT)
    qk = warpgroup_mma(q_tile, k_tile.permute([1, 0]), qk, use_acc=False, is_async=True)
    qk = warpgroup_mma_wait(0, [qk])
    a_tile.store(a_tile.load(LAYOUT) + gl.where(row == column, unit, 0.0) * qk)

    sum_q = gl.zeros([C, D], gl.float32, LAYOUT)
    sum_k = gl.zeros([C, D], gl.float32, LAYOUT)
    w_tile = _allocate(gl.float32, [C, D], TILE_32)
    w_tile.store(gl.zeros([C, D], gl.float32, LAYOUT))
    own_tile = _allocate(gl.float16, [C, D], TILE)
    masked_tile = _allocate(gl.float16, [C, C], TILE)
    far_tile = _allocate(gl.float16, [C, D], TILE)
    g_at, stride_g = _first(g, at, k0)
    columns = None if K % D == 0 else K - k0
    while levels != 0:
        m = levels & -levels
        levels -= m
        row, column = _rows_and_columns()
        right = (row & m) != 0  # [C, 1]
        right_bits = gl.where(right, -1, 0).to(gl.int16) + gl.zeros([C, D], gl.int16, LAYOUT)
        first = (row | m) & -m  # [C, 1], the first row of the right half
        nearest = gl.where(right, first, first - 1)  # [C, 1], the row nearest to the other half
        f = log_gates(_load_rows(g_at, stride_g, first, rows, columns), NORMALIZER)  # [C, D]
        f = gl.exp2(gl.maximum(f, LEAST_GATE) * LOG2E - LOG2_FAR)  # in units of `FAR`
        b = b_tile.load(LAYOUT)  # [C, D]
        e = gl.exp2(-gl.abs(b - gl.gather(b, nearest + gl.zeros([C, D], gl.int32, LAYOUT), 0)))  # [C, D]
        z = (_choose(right_bits, q_tile.load(LAYOUT), k_tile.load(LAYOUT)).to(gl.float32) * e).to(gl.float16)
        own_tile.store(z)
        far_tile.store((z.to(gl.float32) * (f * FAR)).to(gl.float16))
        pairs = _pairs(m)  # [C, C]
        masked_tile.store(gl.where(pairs, da_tile.load(LAYOUT), 0.0))
        fence_async_shared()
        dz = gl.zeros([C, D], gl.float32, LAYOUT)
        dz = warpgroup_mma(masked_tile, own_tile, dz, use_acc=False, is_async=True)
        dz = warpgroup_mma_wait(0, [dz]) * f  # [C, D]
        w = own_tile.load(LAYOUT).to(gl.float32) * gl.where(right, 1.0, -1.0) * dz
        w_tile.store(w_tile.load(LAYOUT) + w)
        dz *= e
        sum_q += gl.where(right, 1.0, 0.0) * dz
        sum_k += gl.where(right, 0.0, 1.0) * dz
        a = gl.zeros([C, C], gl.float32, LAYOUT)
        a = warpgroup_mma(far_tile, own_tile.permute([1, 0]), a, use_acc=False, is_async=True)
        a = warpgroup_mma_wait(0, [a])
        a_tile.store(a_tile.load(LAYOUT) + gl.where(pairs, unit, 0.0) * a)

    dq_at, inside = _tile(dq, at, k0, rows, K, [C, D], ROWS)
    dk_at, _ = _tile(dk, at, k0, rows, K, [C, D], ROWS)
    dg_at, inside_runs = _tile(dg, at, k0, rows, K, [C, D], RUNS)
    dq_block, dk_block = gl.load(dq_at, inside, 0.0), gl.load(dk_at, inside, 0.0)
    g_block = _load(g, at, k0, rows, K, [C, D], RUNS)
    dg_block = gl.load(dg_at, inside_runs, 0.0)
    sum_q += da_tt[:, None] * k_tile.load(LAYOUT).to(gl.float32)  # pairs s = t
    sum_k += da_tt[:, None] * q_tile.load(LAYOUT).to(gl.float32)
    q_sums = _allocate(gl.float32, [C, D], TILE_32)
    k_sums = _allocate(gl.float32, [C, D], TILE_32)
    q_sums.store(sum_q)
    k_sums.store(sum_k)
    w_runs = w_tile.load(RUNS)  # [C, D]
    # All w sum to 0, so the sum of w at or after a token is the negative of the sum before it. For the first token this
    # is exactly 0.
    x = (w_runs - gl.associative_scan(w_runs, 0, plus)) * da_unit * q_unit * k_unit
    if NORMALIZER is not None:
        x *= slope_of_gates(g_block, NORMALIZER)
    x = gl.where(log_gates(g_block, NORMALIZER) > LEAST_GATE, x + dg_block.to(gl.float32), 0.0)
    gl.store(dg_at, x.to(dg_at.dtype.element_ty), inside_runs)
    x = q_sums.load(ROWS) * (k_unit * da_unit) + dq_block.to(gl.float32)
    gl.store(dq_at, x.to(dq_at.dtype.element_ty), inside)
    x = k_sums.load(ROWS) * (q_unit * da_unit) + dk_block.to(gl.float32)
    gl.store(dk_at, x.to(dk_at.dtype.element_ty), inside)


@gluon.jit
def _add_dv(a_tile, dv, do, at, rows, V: gl.constexpr, scale):
    """Adds scale * A^T do to dv. A [C, C], masked to s <= t, is split into a high and a low part in the dtype of do."""
    W: gl.constexpr = D if V <= D else 2 * D
    dtype: gl.constexpr = do[0].dtype.element_ty
    high_tile = _allocate(dtype, [C, C], TILE)
    low_tile = _allocate(dtype, [C, C], TILE)
    do_tile = _allocate(dtype, [C, W], TILE)
    sums = _allocate(gl.float32, [C, W], TILE_32)
    row, column = _rows_and_columns()
    A = gl.where(row >= column, a_tile.load(LAYOUT), 0.0)  # [C, C]
    unit = 1.0
    if dtype == gl.float16:
        unit, inverse = unit_of(largest(A))
        A *= inverse
    high = A.to(dtype)
    high_tile.store(high)
    low_tile.store((A - high.to(gl.float32)).to(dtype))
    for p in range(0, V, W):
        do_block = _load(do, at, p, rows, V, [C, W], ROWS)
        dv_at, inside = _tile(dv, at, p, rows, V, [C, W], ROWS)
        dv_block = gl.load(dv_at, inside, 0.0)
        do_tile.store(do_block)
        fence_async_shared()
        acc = gl.zeros([C, W], gl.float32, LAYOUT)
        acc = warpgroup_mma(low_tile.permute([1, 0]), do_tile, acc, use_acc=False, is_async=True)
        acc = warpgroup_mma(high_tile.permute([1, 0]), do_tile, acc, is_async=True)
        sums.store(warpgroup_mma_wait(0, [acc]))
        x = sums.load(ROWS) * (scale * unit) + dv_block.to(gl.float32)
        gl.store(dv_at, x.to(dv_at.dtype.element_ty), inside)
