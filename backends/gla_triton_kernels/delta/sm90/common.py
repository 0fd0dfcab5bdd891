"""Functions shared by the kernels of the delta rule for SM90: decays of blocks, their pairs, and the solve.

A chunk has C = 64 tokens, in blocks of BT = 16 or 32. For the tokens t, s of a block, let b_t be the sum of its log
gates through token t, b_end the sum of all, D_ts = exp(b_t - b_s) and B = diag(beta). With a gate for each key, blocks
have 16 tokens, and b_t and D_ts have a number for each key d. Then

    kin_t = k_t exp(b_t)      qin_t = q_t exp(b_t)      kout_s = k_s exp(b_end - b_s)      decay = exp(b_end)
    M_ts = sum over d of k_td k_sd D_tsd   for s < t      A_ts = sum over d of q_td k_sd D_tsd   for s <= t
    L = (I + B M)^-1 B

so that the errors X that the entering state leaves become the update U = L X. No exponent above is positive.

If no key decays by more than MILD_DECAY_SM90 in a block, M and A are products of kin and qin with k_s exp(-b_s). The
pairs of any other chunk come from halving, as in gla/sm90/common.py, within blocks.

L and A are float32 and operands of products in TF32, which has the precision of float16 and the range of float32. Their
columns s have the order of `tf32_columns`.

B batch   T tokens   H heads of q and k   Hv heads of values, gates and beta   K key width   C tokens of a chunk
BT tokens of a block
"""

# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportAssignmentType=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
# pyright: reportFunctionMemberAccess=false
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from gla_triton_kernels.gla.sm90.common import as_float32, plus, relative_to_middle
from gla_triton_runtime.arithmetic import LOG2E


@gluon.jit
def nearest_tf32(x):
    """Returns x so that truncation to TF32 rounds it to the nearest number."""
    return (x.to(gl.int32, bitcast=True) + 4096).to(gl.float32, bitcast=True)


@gluon.jit
def upper_half(x):
    """Returns x truncated to the upper 16 bits, which bfloat16 holds."""
    return (x.to(gl.int32, bitcast=True) & -65536).to(gl.float32, bitcast=True)


@gluon.jit
def tf32_columns(x):
    """Returns x [R, BT] with its columns in another order, for products that sum over them in TF32.

    A thread has columns 2t and 2t + 1 of each 8 columns of an accumulator, and columns t and t + 4 of an operand in
    TF32. In this order, accumulators become operands in place.
    """
    R: gl.constexpr = x.shape[0]
    BT: gl.constexpr = x.shape[1]
    return x.reshape([R, BT // 8, 4, 2]).permute([0, 1, 3, 2]).reshape([R, BT])


@gluon.jit
def tf32_operand(x):
    """Returns an accumulator x [64, BT] as the left operand of a product in TF32; see `tf32_columns`."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, x.shape[1], 8])
    x = tf32_columns(nearest_tf32(x))
    return gl.convert_layout(x, gl.DotOperandLayout(0, layout, 1), assert_trivial=True)


@gluon.jit
def blocks_of_diagonal(x, BT: gl.constexpr):
    """Returns the blocks [C, BT] on the diagonal of x [C, C]."""
    C: gl.constexpr = x.shape[0]
    t = gl.arange(0, C, gl.SliceLayout(1, x.type.layout))[:, None]  # [C, 1]
    s = gl.arange(0, C, gl.SliceLayout(0, x.type.layout))[None, :]  # [1, C]
    return gl.sum(gl.where(t // BT == s // BT, x, 0.0).reshape([C, C // BT, BT]), 1)


@gluon.jit
def tokens_of_pairs(x):
    """Returns the tokens t [C, 1] and s [1, BT] of x [C, BT], numbered in their block."""
    C: gl.constexpr = x.shape[0]
    BT: gl.constexpr = x.shape[1]
    t = gl.arange(0, C, gl.SliceLayout(1, x.type.layout))[:, None]  # [C, 1]
    return t % BT, gl.arange(0, BT, gl.SliceLayout(0, x.type.layout))[None, :]


@gluon.jit
def decay_pairs(x, sums):
    """Returns x [C, BT], pairs of blocks, times the decays D_ts; pairs s > t are undefined, but finite.

    Args:
        sums: the sums of the gates of a head within blocks [C / BT, BT], in base 2, in shared memory.
    """
    N: gl.constexpr = sums.shape[0]
    BT: gl.constexpr = sums.shape[1]
    pairs = x.reshape([N, BT, BT])
    layout: gl.constexpr = pairs.type.layout
    D = sums.load(gl.SliceLayout(2, layout))[:, :, None] - sums.load(gl.SliceLayout(1, layout))[:, None, :]
    return gl.convert_layout((pairs * gl.exp2(gl.minimum(D, 0.0))).reshape(x.shape), x.type.layout, assert_trivial=True)


@gluon.jit
def store_products(matrices, q_tiles, k_tiles, columns_tiles, sums, beta, sign: gl.constexpr = 1.0):
    """Stores A and L of pairs that are products of the rows of q and of k with columns.

    A is computed while the solve waits for rows before.

    Args:
        matrices: the tile of A [C, BT], and l_tile and below_tile of `store_l`.
        q_tiles, k_tiles, columns_tiles: the tiles [C, BK] of their keys; no q_tiles if A is not needed.
        sums: see `decay_pairs`; None if the products need no decays.
        beta, sign: see `store_l`.
    """
    a_tile, _l_tile, _below_tile = matrices
    TILES: gl.constexpr = len(k_tiles)
    C: gl.constexpr = k_tiles[0].shape[0]
    BT: gl.constexpr = a_tile.shape[1]
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    A = gl.zeros([C, C], gl.float32, scores)
    M = gl.zeros([C, C], gl.float32, scores)
    for i in gl.static_range(TILES):
        M = warpgroup_mma(k_tiles[i], columns_tiles[i].permute([1, 0]), M, use_acc=i > 0, is_async=True)
    for i in gl.static_range(len(q_tiles)):
        A = warpgroup_mma(q_tiles[i], columns_tiles[i].permute([1, 0]), A, use_acc=i > 0, is_async=True)
    M = blocks_of_diagonal(warpgroup_mma_wait(len(q_tiles), [M]), BT)
    store_l(matrices, M if sums is None else decay_pairs(M, sums), beta, sign)
    if len(q_tiles) > 0:
        A = blocks_of_diagonal(warpgroup_mma_wait(0, [A]), BT)
        store_a(a_tile, A if sums is None else decay_pairs(A, sums))


@gluon.jit
def store_a(a_tile, A):
    """Stores A [C, BT]; pairs s > t are discarded."""
    t, s = tokens_of_pairs(A)
    a_tile.store(tf32_columns(nearest_tf32(gl.where(t >= s, A, 0.0))))


@gluon.jit
def store_l(matrices, M, beta, sign: gl.constexpr = 1.0):
    """Stores L of blocks of 16 or 32 tokens.

    A block of 32 tokens has two halves, with L_1 and L_2 on its diagonal. With M_21 between them, L_21 = -L_2 M_21 L_1.

    Args:
        matrices: the tile of A [C, BT], which is overwritten; that of L on the diagonal [C / 16, 16, 16], first halves
            before second ones; and that of L_21 [C / 32, 16, 16], for blocks of 32 tokens.
        M: [C, BT], times `sign`, which is 1.0 for blocks of 32 tokens; only pairs s < t are used.
        beta: [C], in the layout of rows of a product [C, C].
    """
    a_tile, l_tile, below_tile = matrices
    C: gl.constexpr = M.shape[0]
    HALVES: gl.constexpr = M.shape[1] // 16
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    m_tile = a_tile._reinterpret(gl.float32, [HALVES, C // 16, 16, 16], plain).index(0)
    if HALVES == 1:
        m_tile.store(_with_beta(M, beta, sign).reshape(m_tile.shape))
        l_tile.store(solve(m_tile))
    else:
        operands: gl.constexpr = gl.SwizzledSharedLayout(4, 2, 4, [2, 1, 0])  # a warp's operands are in all banks
        pairs_tile = a_tile._reinterpret(gl.float32, [HALVES, C // 16, 16, 16], operands).index(1)
        first, second = _halves(M)
        is_second = gl.arange(0, C, gl.SliceLayout(1, first.type.layout))[:, None] // 16 % 2 == 1  # [C, 1]
        _store_by_half(m_tile, _with_beta(gl.where(is_second, second, first), beta, sign))
        _store_by_half(pairs_tile, nearest_tf32(first))
        l_tile.store(solve(m_tile))
        _store_below(below_tile, l_tile, pairs_tile)


@gluon.jit
def _halves(x):
    """Returns the columns of first and of second halves, [R, 16] each, of x [R, 32]."""
    return x.reshape([x.shape[0], 2, 16]).permute([0, 2, 1]).split()


@gluon.jit
def _with_beta(M, beta, sign: gl.constexpr):
    """Returns B M [C, 16] of blocks of 16 tokens, with B on the diagonal; see `store_l`."""
    t, s = tokens_of_pairs(M)
    beta = gl.convert_layout(beta, gl.SliceLayout(1, M.type.layout), assert_trivial=True)[:, None]  # [C, 1]
    return gl.where(t > s, M, gl.where(t == s, sign, 0.0)) * (sign * beta)


@gluon.jit
def _store_by_half(tile, x):
    """Stores x [C, 16] in a tile [C / 16, 16, 16], with first halves of blocks of 32 tokens before second ones."""
    B: gl.constexpr = tile.shape[0] // 2
    tile.reshape([2, B, 16, 16]).permute([1, 0, 2, 3]).store(x.reshape([B, 2, 16, 16]))


@gluon.jit
def updates(X, l_tile, below_tile, j: gl.constexpr):
    """Returns U = L X of block j, transposed [W, BT].

    Args:
        X: transposed [W, BT].
        l_tile, below_tile: see `store_l`.
    """
    W: gl.constexpr = X.shape[0]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 16, 8])
    U = gl.zeros([W, 16], gl.float32, layout)
    rows = l_tile.reshape([16 * l_tile.shape[0], 16])
    L = rows.slice(16 * j, 16).permute([1, 0])  # [16, 16]
    if X.shape[1] == 16:
        U = warpgroup_mma_wait(0, [warpgroup_mma(tf32_operand(X), L, U, use_acc=False, is_async=True)])
    else:
        first, second = _halves(X)
        first, second = tf32_operand(first), tf32_operand(second)
        U_2 = gl.zeros([W, 16], gl.float32, layout)
        U = warpgroup_mma(first, L, U, use_acc=False, is_async=True)
        L_21 = below_tile.reshape([16 * below_tile.shape[0], 16]).slice(16 * j, 16).permute([1, 0])
        U_2 = warpgroup_mma(first, L_21, U_2, use_acc=False, is_async=True)
        L_2 = rows.slice(rows.shape[0] // 2 + 16 * j, 16).permute([1, 0])
        U_2 = warpgroup_mma(second, L_2, U_2, is_async=True)
        U, U_2 = warpgroup_mma_wait(0, [U, U_2])
        whole: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 8])
        U = gl.convert_layout(gl.join(U, U_2).permute([0, 2, 1]).reshape([W, 32]), whole, assert_trivial=True)
    return U


@gluon.jit
def solve(m_tile):
    """Returns L [C, 16] of each block of 16 tokens in the order of `tf32_columns`, by substitution of rows.

    x_t = beta_t e_t - sum over s < t of beta_t M_ts x_s

    Args:
        m_tile: B M, with B on the diagonal, of N blocks [N, 16, 16].
    """
    N: gl.constexpr = m_tile.shape[0]
    layout: gl.constexpr = gl.BlockedLayout([1, 16, 1], [2, 1, 16], [4, 1, 1], [2, 1, 0])
    rows: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, layout))
    columns: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, layout))
    row = gl.arange(0, 16, rows)[None, :, None]  # [1, 16, 1]
    column = gl.arange(0, 16, columns)[None, None, :]  # [1, 1, 16]
    token = column // 8 * 8 + column % 4 * 2 + column // 4 % 2  # of a column
    L = gl.zeros([N, 16, 16], gl.float32, layout)
    x = ()
    for t in gl.static_range(16):
        y = gl.where(token == t, m_tile.slice(t, 1, 1).slice(t, 1, 2).load(layout), 0.0)  # [N, 1, 16]
        for s in gl.static_range(t):
            y = y - m_tile.slice(t, 1, 1).slice(s, 1, 2).load(layout) * x[s]
        x = x + (y,)  # noqa: RUF005 -- Gluon does not unpack tuples
        L = gl.where(row == t, y, L)
    return nearest_tf32(L)


@gluon.jit
def _store_below(below_tile, l_tile, pairs_tile):
    """Stores L_21 of B blocks of 32 tokens; see `store_l`. Its columns have the order of those of L_1.

    Args:
        pairs_tile: M [2 B, 16, 16] with the tokens of first halves as columns; it is overwritten.
    """
    B: gl.constexpr = below_tile.shape[0]
    each: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [B, 1, 4 // B], [1, 16, 8])
    left: gl.constexpr = gl.DotOperandLayout(0, each, 1)
    right: gl.constexpr = gl.DotOperandLayout(1, each, 1)
    M = pairs_tile.slice(B, B).load(left)  # [B, 16, 16], with the tokens of second halves as rows
    P = gl.zeros([B, 16, 16], gl.float32, each)
    P = nearest_tf32(mma_v2(M, l_tile.slice(0, B).load(right), P, input_precision="tf32"))
    # L_2 has its columns, hence P its rows, in the order of `tf32_columns`.
    P = P.reshape([B, 2, 4, 2, 16]).permute([0, 1, 3, 2, 4]).reshape([B, 16, 16])
    p_tile = pairs_tile.slice(0, B)
    p_tile.store(P)
    L_21 = gl.zeros([B, 16, 16], gl.float32, each)
    L_21 = mma_v2(l_tile.slice(B, B).load(left), p_tile.load(right), L_21, input_precision="tf32")
    below_tile.store(nearest_tf32(-L_21))


@gluon.jit
def are_above(x, least: gl.constexpr):
    """Returns whether all numbers of x [R, K], none of which is negative, are above `least`.

    The minimum is taken of integers and over both dimensions at once. Hopper then needs one instruction for a warp.
    """
    bits = x.to(gl.int32, bitcast=True).reshape([x.shape[0] * x.shape[1]])
    return gl.min(bits, 0).to(gl.float32, bitcast=True) > least


@gluon.jit
def decays_to_end(alpha):
    """Returns the decays after each token to the end of its block [C, K], and those of whole blocks [C / 16, K].

    Products of gates need one exponential for each gate, and sums need another one for each product.

    Args:
        alpha: exp(g) [C, K].
    """
    blocks = _blocks(alpha)
    row = _rows(blocks)
    after = gl.full_like(blocks, 1.0)
    decay = gl.full_like(_row(blocks, row, 0), 1.0)  # [C / 16, K], of the tokens that follow
    for t in gl.static_range(16):
        after = gl.where(row == 15 - t, decay[:, None, :], after)
        decay = decay * _row(blocks, row, 15 - t)
    return gl.convert_layout(after.reshape(alpha.shape), alpha.type.layout, assert_trivial=True), decay


@gluon.jit
def decays_from_start(alpha):
    """Returns the decays from the start of each block through each token [C, K]; see `decays_to_end`."""
    blocks = _blocks(alpha)
    row = _rows(blocks)
    within = blocks
    decay = _row(blocks, row, 0)  # [C / 16, K]
    for t in gl.static_range(15):
        decay = decay * _row(blocks, row, t + 1)
        within = gl.where(row == t + 1, decay[:, None, :], within)
    return gl.convert_layout(within.reshape(alpha.shape), alpha.type.layout, assert_trivial=True)


@gluon.jit
def _rows(blocks):
    """Returns the numbers of the rows of blocks [N, 16, K], [1, 16, 1]."""
    return gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, blocks.type.layout)))[None, :, None]


@gluon.jit
def _row(blocks, row, t: gl.constexpr):
    """Returns row t of each block of [N, 16, K], [N, K].

    A thread holds all rows of its keys, and the compiler drops an "or" with 0. So this selects a register.
    """
    bits = gl.where(row == t, blocks.to(gl.int32, bitcast=True), 0)
    return gl.reduce(bits, 1, _either).to(gl.float32, bitcast=True)


@gluon.jit
def _either(a, b):
    return a | b


@gluon.jit
def in_log2(g, NORMALIZER: gl.constexpr):
    """Returns log gates in units of log 2, for gates as `log_gates_of_tile` returns them."""
    return g * (LOG2E if NORMALIZER is None else 1.0 / NORMALIZER)


@gluon.jit
def sums_of_blocks(g):
    """Returns the inclusive sums of g [C, K] within blocks of 16 rows [C, K], and those of whole blocks [C / 16, K].

    A warp has a block, and a thread all rows of its keys, so there is no exchange.
    """
    b = gl.associative_scan(_blocks(g), 1, plus)
    end = _row(b, _rows(b), 15)
    return gl.convert_layout(b.reshape(g.shape), g.type.layout, assert_trivial=True), end


@gluon.jit
def decay_rows(q_tile, k_tile, within):
    """Replaces q, k [C, K] by qin and -kin; q_tile may be None.

    Args:
        within: the decays from the start of a block through each token [C, K].
    """
    layout: gl.constexpr = within.type.layout
    k = k_tile.load(layout)
    q = k
    if q_tile is not None:
        q = q_tile.load(layout)  # while k is multiplied
    k_tile.store((as_float32(k) * (-1.0 * within)).to(k_tile.dtype))
    if q_tile is not None:
        q_tile.store((as_float32(q) * within).to(q_tile.dtype))


@gluon.jit
def pairs_of(q_tile, k_tile, columns_tile):
    """Returns the products of the rows of q and of k with columns [C, K], two matrices [C, 16] of blocks."""
    C: gl.constexpr = k_tile.shape[0]
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    A = gl.zeros([C, C], gl.float32, scores)
    M = gl.zeros([C, C], gl.float32, scores)
    M = warpgroup_mma(k_tile, columns_tile.permute([1, 0]), M, use_acc=False, is_async=True)
    A = warpgroup_mma(q_tile, columns_tile.permute([1, 0]), A, use_acc=False, is_async=True)
    M, A = warpgroup_mma_wait(0, [M, A])
    return blocks_of_diagonal(A, 16), blocks_of_diagonal(M, 16)


@gluon.jit
def products_of_blocks(rows_tile, columns_tile):
    """Returns the products of rows with columns [C, K] of the same block [C, 16]."""
    C: gl.constexpr = rows_tile.shape[0]
    x = gl.zeros([C, C], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16]))
    x = warpgroup_mma(rows_tile, columns_tile.permute([1, 0]), x, use_acc=False, is_async=True)
    return blocks_of_diagonal(warpgroup_mma_wait(0, [x]), 16)


@gluon.jit
def pairs_by_halving(q_tile, k_tile, q_decayed, k_decayed, b, levels):
    """Returns A and M [C, 16] of blocks, for gates of any strength; pairs s > t of A and s >= t of M are undefined.

    Args:
        q_tile, k_tile: [C, K], not decayed.
        q_decayed, k_decayed: shared memory [C, K].
        b: sums of gates within blocks [C, K], in base 2.
        levels: bit mask of the levels that contribute; the others are skipped.
    """
    fence_async_shared()  # the caller may have cleared rows of the tiles
    A = products_of_blocks(q_tile, k_tile)  # pairs t = s have no decay
    M = gl.zeros_like(A)
    t, s = tokens_of_pairs(A)
    for level in gl.static_range(4):
        across = ((t ^ s) & -(8 >> level)) == 8 >> level
        a, m = gl.zeros_like(A), gl.zeros_like(M)
        if levels & (8 >> level) != 0:
            a, m = _across_halves(q_tile, k_tile, q_decayed, k_decayed, b, 8 >> level)
        A, M = gl.where(across, a, A), gl.where(across, m, M)
    return A, M


@gluon.jit
def _across_halves(q_tile, k_tile, q_decayed, k_decayed, b, m: gl.constexpr):
    """Returns A and M [C, 16] for the pairs in the two halves of a block of 2 m rows; other elements are undefined.

    k_decayed has both factors of M. Rows of q_decayed in second halves are those of A.
    """
    C: gl.constexpr = b.shape[0]
    layout: gl.constexpr = b.type.layout
    second = (gl.arange(0, C, gl.SliceLayout(1, layout))[:, None] & m) != 0  # [C, 1]
    x = relative_to_middle(b, m)  # [C, K]
    decay = gl.exp2(gl.where(second, x, -x))  # [C, K]
    k_decayed.store((k_tile.load(layout).to(gl.float32) * decay).to(k_tile.dtype))
    q_decayed.store((q_tile.load(layout).to(gl.float32) * gl.where(second, decay, 0.0)).to(q_tile.dtype))
    fence_async_shared()
    return pairs_of(q_decayed, k_decayed, k_decayed)


@gluon.jit
def by_blocks(x, factor):
    """Returns x [C, K] times factor [C / 16, K], one for each block of 16 rows; see `sums_of_blocks`."""
    blocks = _blocks(x)
    return gl.convert_layout((blocks * factor[:, None, :]).reshape(x.shape), x.type.layout, assert_trivial=True)


@gluon.jit
def minus_of_blocks(end, x):
    """Returns end [C / 16, K], one for each block of 16 rows, minus x [C, K]; see `sums_of_blocks`."""
    blocks = _blocks(x)
    return gl.convert_layout((end[:, None, :] - blocks).reshape(x.shape), x.type.layout, assert_trivial=True)


@gluon.jit
def _blocks(x):
    """Returns x [C, K] as blocks of 16 rows [C / 16, 16, K]."""
    C: gl.constexpr = x.shape[0]
    K: gl.constexpr = x.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([1, 16, K // 32], [1, 1, 32], [4, 1, 1], [2, 1, 0])
    return gl.convert_layout(x.reshape([C // 16, 16, K]), layout, assert_trivial=True)
