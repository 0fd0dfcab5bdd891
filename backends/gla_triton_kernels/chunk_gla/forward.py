"""Gated linear attention in one pass over sequences, or over segments of them, the state on chip.

One program computes V block BV of one key/value head of one segment. It walks the segment in chunks of C tokens and
carries the state S [K, BV] in float32. With b_t the sum of log gates g from the chunk's start through t, and
r = b_C / 2 (all per channel of K),

    qg = q exp(b - r)              kg = k exp(r - b)
    o  = scale * (qg (exp(r) S) + tril(qg kg^T) v)
    S' = exp(r) (exp(r) S + kg^T v)

so that two exponentials per element serve scores, state and output. The outer exp(r) waits for the next chunk's inner
one, so the state is scaled once a chunk. b - r is one product of g with a triangle, +1/2 on and below the diagonal and
-1/2 above it, or a scan.

The frame r puts every exponent into [b_C / 2, -b_C / 2]. Where some channel decays by more than `MAX_DECAY` in a
chunk, the chunk leaves the state as it is (kg is 0 and exp(r) is 1), and is then worked off token by token,

    S_t = diag(exp g_t) S_{t-1} + k_t^T v_t        o_t = scale * q_t S_t

in float32: exact for any gate down to -inf, which always leads there, as it divides nothing and subtracts nothing.
float32 inputs go token by token throughout, unless TF32 is allowed: without a matrix unit chunks only add work.

All matrix products stand in the loop over chunks itself and none in a branch: where a branch still reads v, Triton 3.6
fetches the next chunk's v over it. The state is multiplied as S^T += v^T kg, since the product kg^T v goes wrong on
Hopper in blocks of fewer than 64 values (Triton 3.6), and is used for K = 256 only, where it is faster.

Why 60 nats for `MAX_DECAY`: exponents within +-30 keep the largest score that the mask discards, q k K exp(60), finite
for |q| and |k| up to 1e4 and K up to 512 (float32 and bfloat16 reach 3.4e38), keep what the mask leaves far above the
least normal number, and b is then good to 2^-18 in float32. The mask selects and does not multiply, so that not even
an infinite score gets past it. float16 reaches 65504 only: its operands are float32 and multiplied as TF32, which has
float16's precision.

B batch   T tokens   H key/value heads   G query heads per key/value head   N sequences or segments
K, V key and value width   C tokens a chunk   BK width K padded to a power of two   BV width of a V block

Source: Yang et al., "Gated Linear Attention Transformers with Hardware-Efficient Training" (arXiv 2312.06635), sec. 4.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from gla_triton_kernels.runtime.architecture import gpu_of, tf32_allowed
from gla_triton_kernels.runtime.launch import Launch, launch
from gla_triton_kernels.runtime.sizes import power_of_two
from gla_triton_kernels.runtime.tf32 import nearest_tf32
from gla_triton_kernels.runtime.tma import addressable, tiles

LOG2E = tl.constexpr(1.4426950408889634)
MAX_DECAY = tl.constexpr(60.0)
WORTH_TILING = 2**22
"""Elements of v from which on faster loads outweigh the host's time for tensor maps."""


def run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    scale: float,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    o: Tensor,
    final_state: Tensor | None,
    segment: int | None = None,
) -> list[Launch]:
    """Fill o, and final_state if there is one, and return what was launched; see gla_core/ops/chunk_gla.py.

    Args:
        segment: tokens of a segment. The states are then those of segments, N = B * ceil(T / segment) in order. Whole
            sequences by default; with cu_seqlens it is that which tells where segments begin.
    """
    tokenwise = q.dtype == torch.float32 and not tf32_allowed()
    tileable = cu_seqlens is None and v.numel() >= WORTH_TILING and gpu_of(q.device).architecture.has_tma
    plain = (q, k, v, g, initial_state, cu_seqlens, o, final_state)
    tiled = (q, k, v, g, o) if tileable and all(x is None or addressable(x) for x in (q, k, v, g, o)) else (None,) * 5
    B, T, Hq, K = q.shape
    H, V = v.shape[2:]
    segment = segment or max(T, 1)
    segments = max(1, -(-T // segment))
    N = B * segments if cu_seqlens is None else len(cu_seqlens) - 1
    BK = power_of_two(K, 16)
    in_bfloat16 = _in_bfloat16(q.dtype, BK, B * T // N)
    config = configure(BK, V, B * T // N, N * H, in_bfloat16, q.device)
    C, BV = config.C, config.BV
    maps = [None if x is None else tiles(x, C, width) for x, width in zip(tiled, (BK, BK, BV, BK, BV), strict=True)]
    strides = [stride for x in (q, k, v, g, initial_state) for stride in ((0, 0, 0) if x is None else x.stride()[:3])]
    operand = tl.bfloat16 if in_bfloat16 else tl.float32
    grid, constants = (-(-V // BV) * N * H, 1, 1), (K, V, C, BK, BV, Hq != H, operand, tokenwise)
    integers = (
        T,
        segment,
        segments,
        H,
        Hq // H,
        *strides,
        *constants,
        config.triangle,
        config.keys_first,
        config.stages,
    )
    return [launch(_chunk_gla_fwd_kernel, grid, (*plain, *maps), (scale,), integers, num_warps=config.warps)]


# ---- launch parameters


@dataclass(frozen=True, slots=True)
class Config:
    """C tokens a chunk, BV wide V blocks, warps a program, chunks in flight; the last two as in the kernel."""

    C: int
    BV: int
    warps: int
    stages: int
    triangle: bool = False
    keys_first: bool = False


def configure(BK: int, V: int, length: int, heads: int, in_bfloat16: bool, device: torch.device) -> Config:
    """Validated launch parameters.

    Args:
        length: tokens of an average sequence. heads: key/value heads of all sequences.
    """
    config = _widest(BK, V, heads, in_bfloat16)
    if gpu_of(device).architecture.has_little_shared_memory:
        config = replace(config, C=min(config.C, 32), stages=1)
    return replace(config, C=min(config.C, power_of_two(length, 16)), BV=min(config.BV, power_of_two(V, 16)))


def _in_bfloat16(dtype: torch.dtype, BK: int, length: int) -> bool:
    """Whether matrices are multiplied in bfloat16; what it costs in accuracy does not average out over few terms."""
    return dtype == torch.bfloat16 and BK > 32 and (length > 16 or BK > 128)


def _widest(BK: int, V: int, heads: int, in_bfloat16: bool) -> Config:
    """For long sequences and wide values. Measured on an H200 (132 multiprocessors); other devices take the same."""
    if not in_bfloat16:
        # At most 32 wide: with 64 rows, wgmma would take TF32 operands from registers, which Triton 3.6 gets wrong.
        if BK <= 128:
            return Config(C=16, BV=32, warps=4, stages=2)
        return Config(C=16, BV=32, warps=8, stages=2) if BK == 256 else Config(C=16, BV=16, warps=8, stages=1)
    if BK == 512:
        return Config(C=16, BV=32, warps=8, stages=2)
    if BK == 256:
        return Config(C=16, BV=128, warps=8, stages=3, triangle=True, keys_first=V > 64)
    programs = heads * -(-V // 64)
    if programs <= 66:  # too few to fill a device: more of them, each with less of V
        return Config(C=32 if BK == 128 else 64, BV=32, warps=4, stages=3, triangle=True)
    if BK == 128 and V > 64 and programs >= 512:
        return Config(C=32, BV=128, warps=4, stages=2, triangle=True)
    return Config(C=64, BV=64, warps=4, stages=2 if BK == 128 else 3, triangle=True)


# ---- the kernel


@triton.jit(do_not_specialize=["scale", "T", "segment", "segments", "H", "G"])
def _chunk_gla_fwd_kernel(
    q_ptr,  # [B, T, H*G, K]
    k_ptr,  # [B, T, H, K]
    v_ptr,  # [B, T, H, V]
    g_ptr,  # [B, T, H, K] or None
    initial_ptr,  # [N, H, K, V] or None
    cu_seqlens_ptr,  # [N+1] or None
    o_ptr,  # [B, T, H*G, V]
    final_ptr,  # [N, H, K, V] or None
    q_tiles,  # the same tensors as tiles [C, BK or BV], or None
    k_tiles,
    v_tiles,
    g_tiles,
    o_tiles,
    scale,
    T,
    segment,
    segments,
    H,
    G,
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
    stride_sn,
    stride_sh,
    stride_sk,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    GROUPED: tl.constexpr,
    OPERAND: tl.constexpr,
    TOKENWISE: tl.constexpr,
    TRIANGLE: tl.constexpr,
    KEYS_FIRST: tl.constexpr,
    STAGES: tl.constexpr,
):
    blocks: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)  # neighbours share q, k and g, so V blocks come first
    v0 = pid % blocks * BV
    nh = pid // blocks
    n, h = nh // H, nh % H
    if cu_seqlens_ptr is None:
        b, start = n // segments, n % segments * segment
        end = tl.minimum(start + segment, T)
    else:
        b = 0
        start = tl.load(cu_seqlens_ptr + n).to(tl.int32)
        end = tl.load(cu_seqlens_ptr + n + 1).to(tl.int32)

    b64 = tl.cast(b, tl.int64)
    stride_ot = H * G * V
    q_ptr += b64 * stride_qb
    k_ptr += b64 * stride_kb
    v_ptr += b64 * stride_vb
    o_ptr += b64 * T * stride_ot
    if g_ptr is not None:
        g_ptr += b64 * stride_gb

    i_k = tl.arange(0, BK)  # [BK]
    i_v = v0 + tl.arange(0, BV)  # [BV]
    # S is [BK, BV] with KEYS_FIRST, else [BV, BK]: its first axis makes the rows of the matrix instruction.
    KEYS: tl.constexpr = 1 - KEYS_FIRST
    VALUES: tl.constexpr = 1 - KEYS
    s_k, s_v = tl.expand_dims(i_k, VALUES).to(tl.int64), tl.expand_dims(i_v, KEYS)
    m_s = (s_k < K) & (s_v < V)
    if initial_ptr is None:
        S = tl.zeros([BK, BV] if KEYS_FIRST else [BV, BK], tl.float32)
    else:
        initial_ptr += n.to(tl.int64) * stride_sn + h.to(tl.int64) * stride_sh
        S = tl.load(initial_ptr + s_k * stride_sk + s_v, mask=m_s, other=0.0)

    i_c = tl.arange(0, C)  # [C]
    causal = i_c[:, None] >= i_c[None, :]  # [C, C]
    waiting = tl.expand_dims(tl.full([BK], 1.0, tl.float32), VALUES)  # the outer exp(r) of the chunk before
    for t in tl.range(start, end, C, num_stages=STAGES):  # pyright: ignore
        if TOKENWISE:
            fast: tl.constexpr = False  # pyright: ignore
        else:
            if not GROUPED:
                q = _load_tile(q_tiles, q_ptr, stride_qt, stride_qh, b, t, h, 0, end, K, C, BK)  # [C, BK]
            k = _load_tile(k_tiles, k_ptr, stride_kt, stride_kh, b, t, h, 0, end, K, C, BK)  # [C, BK]
            v = _load_tile(v_tiles, v_ptr, stride_vt, stride_vh, b, t, h, v0, end, V, C, BV)  # [C, BV]
            v = _operand(v, OPERAND)
            if g_ptr is None:
                fast: tl.constexpr = True  # pyright: ignore
                q_decay: tl.constexpr = None  # pyright: ignore
                kg = _operand(k, OPERAND)  # [C, BK]
            else:
                g = _load_tile(g_tiles, g_ptr, stride_gt, stride_gh, b, t, h, 0, end, K, C, BK)  # [C, BK]
                g = g.to(tl.float32) * LOG2E
                r = 0.5 * tl.sum(g, 0)  # [BK]
                fast = tl.min(r, 0) > -0.5 * LOG2E * MAX_DECAY
                x = _prefix_sum(g, r, causal, TRIANGLE)  # [C, BK]
                q_decay = tl.exp2(x)  # [C, BK]
                kg = _operand(tl.where(fast, k * tl.exp2(-x), 0.0), OPERAND)  # [C, BK]
                half = tl.expand_dims(tl.where(fast, tl.exp2(r), 1.0), VALUES)  # [1, BK] or [BK, 1]
                S *= half * waiting
                waiting = half
            state = S if KEYS_FIRST else tl.trans(S)  # [BK, BV]
            if GROUPED:
                for i in range(G):
                    i_q = h * G + i
                    q_i = _load_tile(q_tiles, q_ptr, stride_qt, stride_qh, b, t, i_q, 0, end, K, C, BK)  # [C, BK]
                    o = _output(q_i, q_decay, kg, v, state, causal, scale)  # [C, BV]
                    if fast:
                        _store_tile(o_tiles, o_ptr, stride_ot, V, b, t, i_q, v0, end, o, V, C, BV)
            else:
                o = _output(q, q_decay, kg, v, state, causal, scale)  # [C, BV]
                if fast:
                    _store_tile(o_tiles, o_ptr, stride_ot, V, b, t, h, v0, end, o, V, C, BV)
            if KEYS_FIRST:
                S = tl.dot(tl.trans(kg), v, S, input_precision="tf32")
            else:
                S = tl.dot(tl.trans(v), kg, S, input_precision="tf32")
        if not fast:
            for s in range(t, min(t + C, end)):
                k_s = _load_row(k_ptr, stride_kt, stride_kh, s, h, 0, K, BK)  # [BK]
                v_s = _load_row(v_ptr, stride_vt, stride_vh, s, h, v0, V, BV)  # [BV]
                if g_ptr is not None:
                    g_s = _load_row(g_ptr, stride_gt, stride_gh, s, h, 0, K, BK)  # [BK]
                    S *= tl.expand_dims(tl.exp2(g_s * LOG2E), VALUES)
                S += tl.expand_dims(k_s, VALUES) * tl.expand_dims(v_s, KEYS)
                for i in range(G):
                    i_q = h * G + i
                    q_s = _load_row(q_ptr, stride_qt, stride_qh, s, i_q, 0, K, BK)  # [BK]
                    o_s = tl.sum(tl.expand_dims(q_s, VALUES) * S, KEYS) * scale  # [BV]
                    o_row = o_ptr + tl.cast(s, tl.int64) * stride_ot + i_q * V
                    tl.store(o_row + i_v, o_s.to(o_ptr.dtype.element_ty), mask=i_v < V)

    if final_ptr is not None:
        if g_ptr is not None:
            S *= waiting
        final_ptr += nh.to(tl.int64) * K * V
        tl.store(final_ptr + s_k * V + s_v, S, mask=m_s)


@triton.jit
def _output(q, q_decay, kg, v, S, causal, scale):
    """Outputs [C, BV] of queries q [C, BK], by keys kg [C, BK], values v [C, BV] and the state S [BK, BV] so far."""
    qg = _operand(q if q_decay is None else q * q_decay, kg.dtype)  # [C, BK]
    A = tl.dot(qg, tl.trans(kg), input_precision="tf32")  # [C, C]
    A = _operand(tl.where(causal, A, 0.0), kg.dtype)
    o = tl.dot(qg, _operand(S, kg.dtype), input_precision="tf32")  # [C, BV]
    return tl.dot(A, v, o, input_precision="tf32") * scale


@triton.jit
def _operand(x, dtype: tl.constexpr):
    """Round x to what the matrix units take: dtype, or TF32 where that is float32."""
    x = x.to(dtype)
    return nearest_tf32(x) if dtype == tl.float32 else x


@triton.jit
def _prefix_sum(g, r, causal, TRIANGLE: tl.constexpr):
    """The exponents b - r [C, K] from g [C, K]: b_t sums its rows up to and including t, r [K] is half of the last sum.

    TRIANGLE makes it a product, with g split into two bfloat16 parts: 16 bits of it.
    """
    if not TRIANGLE:
        return tl.cumsum(g, 0) - r[None, :]
    else:  # noqa: RET505 -- one branch is compiled
        halves = tl.where(causal, 0.5, -0.5).to(tl.bfloat16)  # [C, C]
        high = g.to(tl.bfloat16)
        low = (g - high.to(tl.float32)).to(tl.bfloat16)
        return tl.dot(halves, low, tl.dot(halves, high))


# ---- memory: a tensor [B, T, heads, D] is met as tiles, or as a pointer to its row b of the batch with two strides


@triton.jit
def _load_tile(
    tiles, ptr, stride_t, stride_h, b, t, head, column, end, D: tl.constexpr, C: tl.constexpr, BD: tl.constexpr
):
    """Rows t to t + C and columns from `column` on of one head, [C, BD]; 0 from row `end` and column D on."""
    if tiles is not None:
        return tiles.load([b, head, t, column]).reshape(C, BD)
    else:  # noqa: RET505 -- one branch is compiled
        offsets = _offsets(stride_t, stride_h, t, head, column, C, BD)  # [C, BD]
        return tl.load(ptr + offsets, mask=_inside(t, column, end, D, C, BD), other=0.0)


@triton.jit
def _store_tile(
    tiles, ptr, stride_t, stride_h, b, t, head, column, end, x, D: tl.constexpr, C: tl.constexpr, BD: tl.constexpr
):
    """Write x [C, BD] where `_load_tile` would read it."""
    x = x.to(ptr.dtype.element_ty)
    if tiles is not None:
        tiles.store([b, head, t, column], x.reshape(1, 1, C, BD))
    else:
        offsets = _offsets(stride_t, stride_h, t, head, column, C, BD)  # [C, BD]
        tl.store(ptr + offsets, x, mask=_inside(t, column, end, D, C, BD))


@triton.jit
def _offsets(stride_t, stride_h, t, head, column, C: tl.constexpr, BD: tl.constexpr):
    """Offsets of a tile [C, BD]."""
    rows = (t + tl.arange(0, C)).to(tl.int64)[:, None]  # [C, 1]
    return tl.cast(head, tl.int64) * stride_h + rows * stride_t + (column + tl.arange(0, BD))[None, :]


@triton.jit
def _inside(t, column, end, D: tl.constexpr, C: tl.constexpr, BD: tl.constexpr):
    """What of a tile [C, BD] lies before row `end` and column D."""
    rows = (t + tl.arange(0, C) < end)[:, None]  # [C, 1]
    if D % BD == 0:
        return rows
    else:  # noqa: RET505 -- one branch is compiled
        return rows & (column + tl.arange(0, BD) < D)[None, :]  # [C, BD]


@triton.jit
def _load_row(ptr, stride_t, stride_h, t, head, column, D: tl.constexpr, BD: tl.constexpr):
    """Row t of one head from `column` on, [BD], in float32; 0 from column D on."""
    columns = column + tl.arange(0, BD)  # [BD]
    row = ptr + tl.cast(t, tl.int64) * stride_t + tl.cast(head, tl.int64) * stride_h
    return tl.load(row + columns, mask=columns < D, other=0.0).to(tl.float32)
