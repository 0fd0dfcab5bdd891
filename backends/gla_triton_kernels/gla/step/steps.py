"""Computes up to S tokens of gated linear attention for each sequence, and writes the state after each to its own slot.

    S_t = diag(exp g_t) S_t-1 + k_t^T v_t        o_t = scale * q_t S_t

A state stays in registers, in float32, from token to token. Each copy that is written to a slot is rounded from it.

B batch   T tokens of a row   N sequences   P states of the pool
COLUMNS slots of a sequence   S most tokens of a sequence: COLUMNS for packed sequences, else min(COLUMNS, T)
H key heads   Hq query heads   Hv heads of values, states and gates   Ho = max(Hq, Hv) heads of o
G = Ho / Hv query heads of a state   R = Hv / H value heads of a key head   K, V key and value width
BK K rounded up to a power of two   BV values of a block

The grid has one program per sequence, value head and BV values.

Source: Yang et al., "Gated Linear Attention Transformers with Hardware-Efficient Training" (arXiv 2312.06635).
"""

# pyright: reportGeneralTypeIssues=false
from __future__ import annotations

import dataclasses
from collections.abc import Callable

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from gla_core.dispatch.backend import OpCall
from gla_core.dispatch.tensors import ceil_div
from gla_triton_kernels.gla.step.plan import Plan, plan
from gla_triton_kernels.gla.step.tokens import decayed, load_gates, locate, strides, write_outputs
from gla_triton_kernels.slots import is_slot
from gla_triton_runtime.architecture import gpu_of_call
from gla_triton_runtime.launch import Launch, overlapping
from gla_triton_runtime.prepared import Launches, rehearsed

Tensors = tuple[
    Tensor,
    Tensor,
    Tensor,
    Tensor | None,
    Tensor,
    Tensor,
    Tensor | None,
    Tensor | None,
    Tensor | None,
    Tensor | None,
    Tensor,
]
"""q, k, v, g, pool, slots, cu_seqlens, num_accepted, read_slots, has_state, o."""


def prepare(call: OpCall) -> Callable[..., Tensor]:
    """Plans a call, compiles its kernel, and returns the function that computes calls of the same signature.

    Raises:
        LaunchError: the kernel does not compile for this device, or does not fit it.
    """
    of_step = dataclasses.replace(call, dims={**call.dims, "B": call.dims["N"]})
    planned, scalars = plan(of_step, gpu_of_call(call)), call.scalars
    launched = Launches(
        call.device,
        lambda x, scale: launch_steps(planned, x, scale, scalars["pad_slot"], scalars["gate_normalizer"]),
    )

    def run(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor | None,
        pool: Tensor,
        slots: Tensor,
        scale: float,
        cu_seqlens: Tensor | None,
        num_accepted: Tensor | None,
        read_slots: Tensor | None,
        has_state: Tensor | None,
        pad_slot: int,
        gate_normalizer: int | None,
        out: Tensor | None,
    ) -> Tensor:
        o = v.new_empty(*q.shape[:2], max(q.shape[2], v.shape[2]), v.shape[3]) if out is None else out
        if len(slots) == 0:
            return o.zero_()
        if o.numel():
            launched.start((q, k, v, g, pool, slots, cu_seqlens, num_accepted, read_slots, has_state, o), scale)
        return o

    return rehearsed(run, call)


def launch_steps(plan: Plan, tensors: Tensors, scale: float, pad_slot: int, normalizer: int | None) -> list[Launch]:
    """Returns the launch that computes all tokens; see `launch_step` for `normalizer`."""
    q, k, v, g, pool, slots, cu_seqlens, num_accepted, read_slots, has_state, o = tensors
    (_, T, Hq, K), (P, Hv, _, V), (N, S) = q.shape, pool.shape, slots.shape
    arguments = {
        "q_ptr": q,
        "k_ptr": k,
        "v_ptr": v,
        "g_ptr": g,
        "pool_ptr": pool,
        "slots_ptr": slots,
        "offsets_ptr": cu_seqlens,
        "accepted_ptr": num_accepted,
        "read_ptr": read_slots,
        "has_ptr": has_state,
        "o_ptr": o,
        "scale": scale,
        "P": P,
        "PAD": pad_slot,
        "N": N,
        "T": T,
        **strides("q", q),
        **strides("k", k),
        **strides("v", v),
        **strides("g", q if g is None else g),
        "slots_n": slots.stride(0),
        "slots_s": slots.stride(1),
        "accepted_n": 0 if num_accepted is None else num_accepted.stride(0),
        "read_n": 0 if read_slots is None else read_slots.stride(0),
        "has_n": 0 if has_state is None else has_state.stride(0),
        "pool_p": pool.stride(0),
        "pool_h": pool.stride(1),
        "pool_k": pool.stride(2),
        "pool_v": pool.stride(3),
        "OF_KEYS": g is not None and g.ndim == 4,
        "NORMALIZER": normalizer,
        "Hv": Hv,
        "G": max(Hq // Hv, 1),
        "R": Hv // k.shape[2],
        "K": K,
        "V": V,
        "S": S if cu_seqlens is not None else min(S, T),
        "COLUMNS": S,
        "BK": plan.BK,
        "BV": plan.BV,
        "OVERLAPS": plan.overlaps,
    }
    options = {"num_warps": plan.warps, **overlapping(plan.overlaps)}
    return [Launch(_recurrent_gla_steps, (N * Hv * ceil_div(V, plan.BV), 1, 1), arguments, options)]


@triton.jit(
    do_not_specialize=["scale", "P", "PAD", "N", "T", "slots_n", "accepted_n", "read_n", "has_n"],
    do_not_specialize_on_alignment=["slots_ptr", "offsets_ptr", "accepted_ptr", "read_ptr", "has_ptr"],
)
def _recurrent_gla_steps(
    q_ptr,  # [B, T, Hq, K]
    k_ptr,  # [B, T, H, K]
    v_ptr,  # [B, T, Hv, V]
    g_ptr,  # [B, T, Hv, K] if OF_KEYS, else [B, T, Hv] or [Hv], or None
    pool_ptr,  # [P, Hv, K, V]
    slots_ptr,  # [N, COLUMNS]
    offsets_ptr,  # [N+1], or None if sequence n is row n
    accepted_ptr,  # [N] or None
    read_ptr,  # [N] or None
    has_ptr,  # [N] or None
    o_ptr,  # [B, T, Ho, V], contiguous
    scale,
    P,
    PAD,
    N,
    T,
    q_b,
    q_t,
    q_h,
    k_b,
    k_t,
    k_h,
    v_b,
    v_t,
    v_h,
    g_b,
    g_t,
    g_h,
    slots_n,
    slots_s: tl.constexpr,
    accepted_n,
    read_n,
    has_n,
    pool_p,
    pool_h,
    pool_k: tl.constexpr,
    pool_v: tl.constexpr,
    OF_KEYS: tl.constexpr,
    NORMALIZER: tl.constexpr,
    Hv: tl.constexpr,
    G: tl.constexpr,
    R: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    S: tl.constexpr,
    COLUMNS: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Computes BV columns of the states of one head after each token of one sequence."""
    tile, head = tl.program_id(0) % tl.cdiv(V, BV), tl.program_id(0) // tl.cdiv(V, BV)
    n, h = (head // Hv).to(tl.int64), (head % Hv).to(tl.int64)  # strides times these may exceed 32 bits
    rows = tl.arange(0, BK)  # [BK]
    columns = tile * BV + tl.arange(0, BV)  # [BV]
    in_k, in_v = rows < K, columns < V
    in_state = in_k[:, None] & in_v[None, :]  # [BK, BV]
    if OVERLAPS:  # the results of earlier kernels are visible only after the wait
        gdc_wait()
        gdc_launch_dependents()

    b, start, length = locate(o_ptr, offsets_ptr, n, N, T, h, columns, S, Hv, G, V)

    slots_ptr += n * slots_n
    first = tl.load(slots_ptr).to(tl.int64)
    if read_ptr is not None:
        p = tl.load(read_ptr + n * read_n).to(tl.int64)
    elif accepted_ptr is not None:
        accepted = tl.load(accepted_ptr + n * accepted_n).to(tl.int32)
        p = tl.load(slots_ptr + (tl.minimum(tl.maximum(accepted, 1), COLUMNS) - 1) * slots_s).to(tl.int64)
    else:
        p = first
    begins = is_slot(p, P, PAD)  # whether the sequence starts from a state
    served = begins
    if has_ptr is not None:
        has_state = tl.load(has_ptr + n * has_n) != 0
        served = tl.where(has_state, begins, is_slot(first, P, PAD))
        begins = begins & has_state

    pool_block = pool_ptr + h * pool_h + rows[:, None].to(tl.int64) * pool_k + columns[None, :] * pool_v  # [BK, BV]
    state = tl.load(pool_block + p * pool_p, mask=in_state & begins, other=0.0).to(tl.float32)  # [BK, BV]
    for j in tl.static_range(S):
        there = j < length
        live = there & served
        t = start + j
        k = tl.load(k_ptr + b * k_b + t * k_t + h // R * k_h + rows, mask=in_k & live, other=0.0)  # [BK]
        v = tl.load(v_ptr + b * v_b + t * v_t + h * v_h + columns, mask=in_v & live, other=0.0)  # [BV]
        to = tl.load(slots_ptr + j * slots_s).to(tl.int64)
        if g_ptr is not None:
            g = load_gates(g_ptr + b * g_b + t * g_t + h * g_h, rows, in_k, live, OF_KEYS, NORMALIZER)  # [BK] or []
            state = decayed(state, g, OF_KEYS)  # [BK, BV]
        state += k.to(tl.float32)[:, None] * v.to(tl.float32)[None, :]
        q_block = q_ptr + b * q_b + t * q_t + h * G // R * q_h + rows  # [BK], of the first query head
        o_block = o_ptr + ((b * T + t) * Hv + h) * G * V + columns  # [BV], of the first query head
        write_outputs(o_block, q_block, q_h, state, scale, in_k, in_v, live, there, G, V)
        writes = in_state & live & is_slot(to, P, PAD)
        tl.store(pool_block + to * pool_p, state.to(pool_ptr.dtype.element_ty), mask=writes)
