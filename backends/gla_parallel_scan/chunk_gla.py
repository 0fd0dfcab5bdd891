"""Gated linear attention over segments of sequences, all at once.

With g_t the log gates of a segment of tokens 1 to L,

    (1)  D = exp(sum over t of g_t)        S = sum over s of (k_s * exp(sum over t > s of g_t))^T v_s
    (2)  running = initial state; then for the segments i of a sequence in order:
             running, S_i = diag(D_i) running + S_i, running
    (3)  the outputs of every segment, from the state S_i that enters it

where (1) builds every segment's state from zero and its decay, to memory, (2) scans them in place, and (3) is a
kernel of gla_triton_kernels. Sequences that fill the device stay whole and take (3) alone.

A program of (1) computes a block [BK, BV] of S. It walks its segment backwards in chunks of C tokens, so that S is
never scaled: with W the sum of the gates of the chunks after this one, and x_s that of the gates in the chunk after s,

    S += (k * exp(x + W))^T v        W += sum of the chunk's gates

No exponent is above 0, so any gate is exact; a gate below -`FORGET`, whose exp is 0 in float32, counts as -`FORGET`,
which keeps the sums finite. float32 inputs go token by token, unless TF32 is allowed.

B batch   T tokens   H key/value heads   N sequences   I segments   K, V key and value width   C tokens a chunk
BK, BV keys and values of a block of a state

Source: Yang et al., "Gated Linear Attention Transformers with Hardware-Efficient Training" (arXiv 2312.06635), sec. 4.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from gla_triton_kernels.chunk_gla import forward as general
from gla_triton_kernels.chunk_gla import one_pass as whole
from gla_triton_kernels.chunk_gla.segment_length import blocks_of, segment_length
from gla_triton_kernels.chunk_gla.segments import Segments, plan
from gla_triton_kernels.runtime.architecture import gpu_of, tf32_allowed
from gla_triton_kernels.runtime.launch import Launch, launch
from gla_triton_kernels.runtime.sizes import power_of_two
from gla_triton_kernels.runtime.tma import addressable, tiles

LOG2E = tl.constexpr(1.4426950408889634)
FORGET = tl.constexpr(120.0)
INTERPRETED_LENGTH = 32
"""Tokens of a segment where kernels are interpreted: few, so that short sequences are cut as well."""


def chunk_gla_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    scale: float,
    initial_state: Tensor | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """See gla_core/ops/chunk_gla.py."""
    settings = (_length, _suits_hopper)
    return whole.chunk_gla_fwd(_fill, settings, q, k, v, g, scale, initial_state, output_final_state, cu_seqlens)


def _fill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    scale: float,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    o: Tensor,
    final: Tensor | None,
) -> list[Launch]:
    """Fill o, and the final state if there is one, and return what was launched."""
    B, T, Hq, K = q.shape
    H, V = v.shape[2:]
    N = B if cu_seqlens is None else len(cu_seqlens) - 1
    on_hopper = _suits_hopper(q, k, v, g)
    length = _length(N, T, H, Hq, K, V, on_hopper, cu_seqlens is not None, q.device)
    if length >= T:
        return whole.run(q, k, v, g, scale, initial_state, cu_seqlens, o, final)
    segments = plan(B, T, length, cu_seqlens)
    S = torch.empty(segments.count, H, K, V, dtype=torch.float32, device=v.device)
    D = None if g is None else torch.empty(segments.count, H, K, dtype=torch.float32, device=v.device)
    build = _hopper().build_states if on_hopper else build_states
    built = build(k, v, g, segments, S, D, skip_last=final is None)
    scanned = scan_states(S, D, segments, initial_state, final)
    overlap = (_overlaps(q.device),) if on_hopper else ()
    written = _outputs(on_hopper, q, k, v, g, scale, S, segments.bounds, o, None, length, *overlap)
    return [*segments.launches, *built, *scanned, *written]


def _outputs(on_hopper: bool, *args: Any) -> list[Launch]:
    run = _hopper().outputs.run if on_hopper else general.run
    return run(*args)


def _suits_hopper(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None) -> bool:
    return gpu_of(q.device).architecture.has_wgmma and _hopper().suits(q, k, v, g)


@functools.cache
def _hopper() -> ModuleType:
    """The module for Hopper, imported where it can be used."""
    from gla_triton_kernels.chunk_gla import states_sm90 as chunk_gla_hopper

    return chunk_gla_hopper


def _length(
    N: int, T: int, H: int, Hq: int, K: int, V: int, on_hopper: bool, packed: bool, device: torch.device
) -> int:
    """Tokens of a segment."""
    if device.type != "cuda":
        return INTERPRETED_LENGTH
    blocks, at_once = blocks_of(H, Hq, K, V, on_hopper)
    return segment_length(N, T, blocks, at_once * gpu_of(device).multiprocessors, packed)


def _overlaps(device: torch.device) -> bool:
    """Whether a kernel may be launched while the one before it ends (programmatic dependent launch)."""
    return gpu_of(device).architecture.overlaps_kernels


# ---- (1) states of segments from zero


def build_states(
    k: Tensor, v: Tensor, g: Tensor | None, segments: Segments, S: Tensor, D: Tensor | None, skip_last: bool = False
) -> list[Launch]:
    """Fill the segments' states from zero S [I, H, K, V] and decays D [I, H, K], and return what was launched.

    Args:
        skip_last: whether those of a sequence's last segment may be left out.
    """
    bounds, length = segments.bounds, segments.length
    tokenwise = k.dtype == torch.float32 and not tf32_allowed()
    tileable = bounds is None and v.numel() >= general.WORTH_TILING and gpu_of(k.device).architecture.has_tma
    tiled = (k, v, g) if tileable and all(x is None or addressable(x) for x in (k, v, g)) else (None,) * 3
    H, K, V = *k.shape[2:], v.shape[3]
    config = _configure(K, V, k.dtype, length)
    C, BK, BV = config.C, config.BK, config.BV
    maps = [None if x is None else tiles(x, C, width) for x, width in zip(tiled, (BK, BV, BK), strict=True)]
    strides = [stride for x in (k, v, g) for stride in ((0, 0, 0) if x is None else x.stride()[:3])]
    grid = (-(-K // BK) * -(-V // BV) * segments.count * H, 1, 1)
    constants = (K, V, C, BK, BV, config.operand, tokenwise, skip_last, config.stages, _overlaps(k.device))
    integers = (k.shape[1], length, segments.per_sequence, H, *strides, *constants)
    return [launch(_states_kernel, grid, (k, v, g, bounds, S, D, *maps), (), integers, num_warps=config.warps)]


@dataclass(frozen=True, slots=True)
class _Config:
    """C tokens a chunk, blocks of a state, the type that matrices are multiplied in, warps, chunks in flight."""

    C: int
    BK: int
    BV: int
    operand: tl.dtype
    warps: int
    stages: int


def _configure(K: int, V: int, dtype: torch.dtype, length: int) -> _Config:
    """Validated launch parameters."""
    C, BK, BV = min(32, power_of_two(length, 16)), min(64, power_of_two(K, 16)), min(64, power_of_two(V, 16))
    if dtype == torch.bfloat16:
        return _Config(C, BK, BV, tl.bfloat16, warps=4, stages=3)
    if dtype == torch.float32 and not tf32_allowed():
        return _Config(C, min(128, power_of_two(K, 16)), BV, tl.float32, warps=4, stages=4)
    # At most 32 wide: with 64 rows, wgmma would take TF32 operands from registers, which Triton 3.6 gets wrong.
    return _Config(C, BK, min(32, BV), tl.float32, warps=4, stages=3)


@triton.jit(do_not_specialize=["T", "segment", "segments", "H"])
def _states_kernel(
    k_ptr,  # [B, T, H, K]
    v_ptr,  # [B, T, H, V]
    g_ptr,  # [B, T, H, K] or None
    bounds_ptr,  # [I+1] or None
    S_ptr,  # [I, H, K, V]
    D_ptr,  # [I, H, K] or None
    k_tiles,  # the same tensors as tiles [C, BK or BV], or None
    v_tiles,
    g_tiles,
    T,
    segment,
    segments,
    H,
    stride_kb,
    stride_kt,
    stride_kh,
    stride_vb,
    stride_vt,
    stride_vh,
    stride_gb,
    stride_gt,
    stride_gh,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    OPERAND: tl.constexpr,
    TOKENWISE: tl.constexpr,
    SKIP_LAST: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Program: block [BK, BV] of the state of one head of one segment."""
    if OVERLAPS:  # the scan may be launched, and then waits
        gdc_launch_dependents()
    blocks_v: tl.constexpr = (V + BV - 1) // BV
    blocks_k: tl.constexpr = (K + BK - 1) // BK
    pid = tl.program_id(0)  # neighbours share k and g
    v0 = pid % blocks_v * BV
    k0 = pid // blocks_v % blocks_k * BK
    ih = pid // (blocks_v * blocks_k)
    i, h = ih // H, ih % H
    if bounds_ptr is None:
        b, start = i // segments, i % segments * segment
        end = tl.minimum(start + segment, T)
        last = i % segments == segments - 1
    else:
        b = 0
        start = tl.load(bounds_ptr + i)
        end = tl.load(bounds_ptr + i + 1)
        last = end - start < segment  # a sequence's last one that is not cut short is built for nothing
    if SKIP_LAST and last:
        return

    b64 = tl.cast(b, tl.int64)
    k_ptr += b64 * stride_kb
    v_ptr += b64 * stride_vb
    if g_ptr is not None:
        g_ptr += b64 * stride_gb

    i_c = tl.arange(0, C)  # [C]
    later = (i_c[:, None] < i_c[None, :]).to(tl.float16)  # [C, C]
    S = tl.zeros([BV, BK], tl.float32)
    W = tl.zeros([BK], tl.float32)
    if TOKENWISE:
        for s in tl.range(0, end - start, num_stages=STAGES):
            t = end - 1 - s
            k = general._load_row(k_ptr, stride_kt, stride_kh, t, h, k0, K, BK)  # [BK]
            v = general._load_row(v_ptr, stride_vt, stride_vh, t, h, v0, V, BV)  # [BV]
            if g_ptr is not None:
                g = general._load_row(g_ptr, stride_gt, stride_gh, t, h, k0, K, BK)  # [BK]
                k *= tl.exp2(W)
                W += tl.maximum(g, -FORGET) * LOG2E
            S += v[:, None] * k[None, :]
    else:
        chunks = tl.cdiv(end - start, C)
        for c in tl.range(0, chunks, num_stages=STAGES):
            t = start + (chunks - 1 - c) * C
            k = general._load_tile(k_tiles, k_ptr, stride_kt, stride_kh, b, t, h, k0, end, K, C, BK)  # [C, BK]
            v = general._load_tile(v_tiles, v_ptr, stride_vt, stride_vh, b, t, h, v0, end, V, C, BV)  # [C, BV]
            v = general._operand(v, OPERAND)
            if g_ptr is not None:
                g = general._load_tile(g_tiles, g_ptr, stride_gt, stride_gh, b, t, h, k0, end, K, C, BK)  # [C, BK]
                g = tl.maximum(g.to(tl.float32), -FORGET) * LOG2E
                k = k * tl.exp2(_sum_of_later(g, later) + W[None, :])
                W += tl.sum(g, 0)
            S = tl.dot(tl.trans(v), general._operand(k, OPERAND), S, input_precision="tf32")

    i_k = k0 + tl.arange(0, BK)  # [BK]
    i_v = v0 + tl.arange(0, BV)  # [BV]
    S_block = S_ptr + ih.to(tl.int64) * K * V + i_k[None, :] * V + i_v[:, None]  # [BV, BK]
    tl.store(S_block, S, mask=(i_k < K)[None, :] & (i_v < V)[:, None])
    if D_ptr is not None and v0 == 0:
        tl.store(D_ptr + ih.to(tl.int64) * K + i_k, tl.exp2(W), mask=i_k < K)


@triton.jit
def _sum_of_later(g, later):
    """For each row of g [C, K] the sum of those after it; `later` [C, C] is 1 for those, else 0.

    A product, with g split into two float16 parts: 22 bits of it, or all to 2^-25.
    """
    high = g.to(tl.float16)
    low = (g - high.to(tl.float32)).to(tl.float16)
    return tl.dot(later, low, tl.dot(later, high))


# ---- (2) the scan


def scan_states(
    S: Tensor, D: Tensor | None, segments: Segments, initial_state: Tensor | None, final_state: Tensor | None
) -> list[Launch]:
    """Replace states from zero S [I, H, K, V] by entering states, and fill final_state if there is one."""
    _, H, K, V = S.shape
    N = segments.count // segments.per_sequence if segments.first is None else len(segments.first) - 1
    strides = (0, 0, 0) if initial_state is None else initial_state.stride()[:3]
    BV = min(128, power_of_two(V))
    BK = min(256 // BV, power_of_two(K))
    group = min(16, power_of_two(segments.per_sequence or 16))
    overlaps = _overlaps(S.device)
    tensors = (S, D, segments.first, initial_state, final_state)
    integers = (segments.per_sequence, *strides, H, K, V, BK, BV, group, overlaps)
    grid = (-(-K // BK) * -(-V // BV) * N * H, 1, 1)
    options = {"launch_pdl": True} if overlaps else {}
    return [launch(_scan_kernel, grid, tensors, (), integers, num_warps=4, **options)]


@triton.jit(do_not_specialize=["segments", "H"])
def _scan_kernel(
    S_ptr,  # [I, H, K, V]
    D_ptr,  # [I, H, K] or None
    first_ptr,  # [N+1] or None
    initial_ptr,  # [N, H, K, V] or None
    final_ptr,  # [N, H, K, V] or None
    segments,
    stride_n,
    stride_h,
    stride_k,
    H,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    GROUP: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Program: block [BK, BV] of the states of one head of one sequence, GROUP segments on their way at a time."""
    blocks_v: tl.constexpr = (V + BV - 1) // BV
    blocks_k: tl.constexpr = (K + BK - 1) // BK
    pid = tl.program_id(0)
    nh = pid // (blocks_v * blocks_k)
    n, h = nh // H, nh % H
    i_v = pid % blocks_v * BV + tl.arange(0, BV)  # [BV]
    i_k = pid // blocks_v % blocks_k * BK + tl.arange(0, BK)  # [BK]
    m_k = i_k < K  # [BK]
    inside = m_k[:, None] & (i_v < V)[None, :]  # [BK, BV]
    block = i_k[:, None] * V + i_v[None, :]  # [BK, BV]
    if OVERLAPS:  # what the kernel before writes is there only after the wait
        gdc_launch_dependents()
        gdc_wait()

    if first_ptr is None:
        begin = n * segments
        end = begin + segments
    else:
        begin = tl.load(first_ptr + n)
        end = tl.load(first_ptr + n + 1)
    built = end if final_ptr is not None else end - 1  # nobody asks for the last segment's state
    if initial_ptr is None:
        running = tl.zeros([BK, BV], tl.float32)
    else:
        initial_ptr += n.to(tl.int64) * stride_n + h.to(tl.int64) * stride_h
        running = tl.load(initial_ptr + i_k[:, None].to(tl.int64) * stride_k + i_v[None, :], mask=inside, other=0.0)
    for i0 in range(begin, end, GROUP):
        S, D = (), ()
        for j in tl.static_range(GROUP):  # pyright: ignore
            ih = tl.cast(i0 + j, tl.int64) * H + h
            there = i0 + j < built
            S += (tl.load(S_ptr + ih * (K * V) + block, mask=inside & there, other=0.0),)  # [BK, BV]
            if D_ptr is not None:
                D += (tl.load(D_ptr + ih * K + i_k, mask=m_k & there, other=1.0),)  # [BK]
        for j in tl.static_range(GROUP):  # pyright: ignore
            ih = tl.cast(i0 + j, tl.int64) * H + h
            tl.store(S_ptr + ih * (K * V) + block, running, mask=inside & (i0 + j < end))
            if D_ptr is not None:
                running *= tl.expand_dims(D[j], 1)
            running += S[j]
    if final_ptr is not None:
        tl.store(final_ptr + nh.to(tl.int64) * (K * V) + block, running, mask=inside)
