"""One token of gated linear attention: every state is read once and written once.

    S' = diag(exp g) S + k^T v        o = scale * q S'

B batch   P states in the pool   H key/value heads   G query heads per key/value head   K, V key and value width
BK the K rows of a state, rounded up to a power of two   BV those of its V columns that one program holds

Source: Yang et al., "Gated Linear Attention Transformers with Hardware-Efficient Training" (arXiv 2312.06635).
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from gla_triton_kernels.runtime.architecture import gpu_of
from gla_triton_kernels.runtime.launch import launch, on_device_of
from gla_triton_kernels.runtime.replay import record, replay
from gla_triton_kernels.runtime.sizes import power_of_two


def recurrent_gla_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    state: Tensor,
    scale: float,
    state_indices: Tensor | None,
    inplace: bool,
) -> tuple[Tensor, Tensor]:
    """See gla_core/ops/recurrent_gla_step.py."""
    if state_indices is not None and not inplace:  # rows that nobody addresses are copied too
        state, inplace = state.clone(memory_format=torch.contiguous_format), True
    new = None if inplace else torch.empty_like(state, memory_format=torch.contiguous_format)
    B, Hq, _ = q.shape
    o = torch.empty(B, Hq, v.shape[2], dtype=v.dtype, device=v.device)
    if o.numel():
        _step(q, k, v, g, state, state_indices, new, o, scale)
    return o, state if new is None else new


def _step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    state: Tensor,
    state_indices: Tensor | None,
    new: Tensor | None,
    o: Tensor,
    scale: float,
) -> None:
    """Write o, and the states into `new`, or into `state` where `new` is None."""
    tensors = (q, k, v, g, state, state_indices, new, o)
    key: Hashable = (
        *("recurrent_gla_step", q.device, q.dtype, q.shape, q.stride(), k.stride(), v.stride()),
        *(state.shape, state.dtype, state.stride(), new is None),
        None if g is None else (g.dtype, g.stride()),
        None if state_indices is None else state_indices.dtype,
    )
    if replay(key, tensors, scale):
        return
    with on_device_of(q):
        grid, integers, options = _parameters(q, k, v, g, state)
        launched = launch(_recurrent_gla_step, grid, tensors, (scale,), integers, **options)
        record(key, tensors, [launched])


def _parameters(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, state: Tensor
) -> tuple[tuple[int, int, int], tuple[int, ...], dict[str, Any]]:
    """Grid, integer arguments of the kernel in their order, and options of its compilation."""
    (B, Hq, K), (P, H, _, V) = q.shape, state.shape
    BK = power_of_two(K)
    BV, num_warps = _tile(B * H, BK, power_of_two(V), state)
    strides = [stride for x in (q, k, v, q if g is None else g) for stride in x.stride()[:2]]
    # From Hopper on, a kernel may be launched while the one before it ends (programmatic dependent launch).
    overlaps = gpu_of(q.device).architecture.overlaps_kernels
    integers = (P, *strides, *state.stride()[:3], H, Hq // H, K, V, BK, BV, overlaps)
    options = {"num_warps": num_warps, **({"launch_pdl": True} if overlaps else {})}
    return (B * H * -(-V // BV), 1, 1), integers, options


def _tile(heads: int, BK: int, V: int, state: Tensor) -> tuple[int, int]:
    """BV and warps, as measured on an H200 to be best for so many states of [BK, V]."""
    wide = min(V, (256 if BK <= 256 else 128) // state.itemsize)
    multiprocessors = torch.cuda.get_device_properties(state.device).multi_processor_count if state.is_cuda else 1
    if heads * (V // wide) >= 3 * multiprocessors:
        return wide, 4 if BK <= 128 else 8
    # Few states: more and smaller programs, for all multiprocessors to have some.
    narrow = min(V, (128 if BK <= 64 else 64) // state.itemsize)
    return narrow, 2 if BK <= 64 else 1 if BK <= 128 else 4


@triton.jit(do_not_specialize=["scale", "P"])
def _recurrent_gla_step(
    q_ptr,  # [B, H * G, K]
    k_ptr,  # [B, H, K]
    v_ptr,  # [B, H, V]
    g_ptr,  # [B, H, K] or None
    state_ptr,  # [P, H, K, V]
    indices_ptr,  # [B] or None: row b has state b
    new_ptr,  # [B, H, K, V], contiguous, or None: in place
    o_ptr,  # [B, H * G, V], contiguous
    scale,
    P,
    q_stride_b,
    q_stride_h,
    k_stride_b,
    k_stride_h,
    v_stride_b,
    v_stride_h,
    g_stride_b,
    g_stride_h,
    state_stride_p,
    state_stride_h,
    state_stride_k: tl.constexpr,
    H: tl.constexpr,
    G: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program: BV columns of the state of one head of one row of the batch."""
    tile, head = tl.program_id(0) % tl.cdiv(V, BV), tl.program_id(0) // tl.cdiv(V, BV)
    b, h = (head // H).to(tl.int64), (head % H).to(tl.int64)  # strides times these may exceed 32 bits
    rows = tl.arange(0, BK)  # [BK]
    columns = tile * BV + tl.arange(0, BV)  # [BV]
    in_k, in_v = rows < K, columns < V
    in_state = in_k[:, None] & in_v[None, :]  # [BK, BV]
    o_block = o_ptr + (b * H + h) * G * V + columns  # [BV], of the first query head
    if PDL:  # what the kernels before this one write is there only after the wait; nothing is read or written before
        gdc_wait()
        gdc_launch_dependents()

    p = b
    if indices_ptr is not None:
        p = tl.load(indices_ptr + b).to(tl.int64)
        if (p < 0) | (p >= P):
            for i in range(G):
                tl.store(o_block + i * V, tl.zeros([BV], o_ptr.dtype.element_ty), mask=in_v)
            return

    state_block = state_ptr + p * state_stride_p + h * state_stride_h  # [BK, BV]
    state_block += rows[:, None].to(tl.int64) * state_stride_k + columns[None, :]
    q_block = q_ptr + b * q_stride_b + h * G * q_stride_h + rows  # [BK], of the first query head
    # Everything is loaded before anything is converted: a conversion waits for its operand, and would hold up what
    # is loaded after it.
    state = tl.load(state_block, mask=in_state, other=0.0)  # [BK, BV]
    k = tl.load(k_ptr + b * k_stride_b + h * k_stride_h + rows, mask=in_k, other=0.0)  # [BK]
    v = tl.load(v_ptr + b * v_stride_b + h * v_stride_h + columns, mask=in_v, other=0.0)  # [BV]
    q = tl.load(q_block, mask=in_k, other=0.0)  # [BK]
    if g_ptr is not None:
        g = tl.load(g_ptr + b * g_stride_b + h * g_stride_h + rows, mask=in_k, other=0.0)  # [BK]
        state = tl.exp(g.to(tl.float32))[:, None] * state.to(tl.float32)
    state = state.to(tl.float32) + k.to(tl.float32)[:, None] * v.to(tl.float32)[None, :]

    for i in range(G):
        # One head ahead of its use.
        following = tl.load(q_block + tl.minimum(i + 1, G - 1).to(tl.int64) * q_stride_h, mask=in_k, other=0.0)
        o = scale * tl.sum(q.to(tl.float32)[:, None] * state, axis=0)  # [BV]
        tl.store(o_block + i * V, o.to(o_ptr.dtype.element_ty), mask=in_v)
        q = following

    if new_ptr is not None:
        state_block = new_ptr + (b * H + h) * K * V + rows[:, None] * V + columns[None, :]
    tl.store(state_block, state.to(state_ptr.dtype.element_ty), mask=in_state)
