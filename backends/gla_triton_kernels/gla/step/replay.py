"""Computes up to S new tokens of gated linear attention for each sequence, after the accepted tokens of its last call.

    S_t = diag(exp g_t) S_t-1 + k_t^T v_t        o_t = scale * q_t S_t

t first goes through the a accepted tokens, whose k, v and gates are in rings and whose outputs are known, and then
through the new tokens. The kernel writes the state after the accepted tokens into the pool, and k, v and the log gates
of the new tokens into the rings. With r the start of a ring, it has these tokens, modulo L:

    .. | r .. r+a-1: accepted, read | r+a .. r+a+T-1: new, written | ..

A state stays in registers, in float32, from the first token to the last. It is read once and written once.

B batch   T tokens of a row   N sequences   P slots of the pool and of the rings   L tokens of a ring
S most new tokens of a sequence: L / 2 for packed sequences, else T
H key heads   Hq query heads   Hv heads of values, states and gates   Ho = max(Hq, Hv) heads of o
G = Ho / Hv query heads of a state   R = Hv / H value heads of a key head   K, V key and value width
BK K rounded up to a power of two   BV values of a block

The grid has one program per sequence, value head and BV values. Several programs read the same key; the first of them
writes it into the ring.

Source: Yang et al., "Gated Linear Attention Transformers with Hardware-Efficient Training" (arXiv 2312.06635). The
rings come from ReplaySSM; see gla_core/ops/gla/recurrent_gla_replay.py.
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
    Tensor,
    Tensor | None,
    Tensor,
    Tensor,
    Tensor,
    Tensor | None,
    Tensor | None,
    Tensor,
]
"""q, k, v, g, pool, ring_k, ring_v, ring_g, slots, ring_start, num_accepted, cu_seqlens, has_state, o."""


def prepare(call: OpCall) -> Callable[..., Tensor]:
    """Plans a call, compiles its kernel, and returns the function that computes calls of the same signature.

    Raises:
        LaunchError: the kernel does not compile for this device, or does not fit it.
    """
    of_step = dataclasses.replace(call, dims={**call.dims, "B": call.dims["N"]})
    planned, scalars = plan(of_step, gpu_of_call(call)), call.scalars
    launched = Launches(
        call.device,
        lambda x, scale: launch_replay(planned, x, scale, scalars["pad_slot"], scalars["gate_normalizer"]),
    )

    def run(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor | None,
        pool: Tensor,
        ring_k: Tensor,
        ring_v: Tensor,
        ring_g: Tensor | None,
        slots: Tensor,
        ring_start: Tensor,
        num_accepted: Tensor,
        scale: float,
        cu_seqlens: Tensor | None,
        has_state: Tensor | None,
        pad_slot: int,
        gate_normalizer: int | None,
        out: Tensor | None,
    ) -> Tensor:
        o = v.new_empty(*q.shape[:2], max(q.shape[2], v.shape[2]), v.shape[3]) if out is None else out
        if len(slots) == 0:
            return o.zero_()
        memory, of_sequences = (pool, ring_k, ring_v, ring_g), (slots, ring_start, num_accepted, cu_seqlens, has_state)
        launched.start((q, k, v, g, *memory, *of_sequences, o), scale)  # without new tokens, it still updates states
        return o

    return rehearsed(run, call)


def launch_replay(plan: Plan, tensors: Tensors, scale: float, pad_slot: int, normalizer: int | None) -> list[Launch]:
    """Returns the launch that computes the accepted and the new tokens; see `launch_step` for `normalizer`."""
    q, k, v, g, pool, ring_k, ring_v, ring_g, slots, ring_start, num_accepted, cu_seqlens, has_state, o = tensors
    (_, T, Hq, K), (P, Hv, _, V), N, L = q.shape, pool.shape, len(slots), ring_k.shape[1]
    arguments = {
        "q_ptr": q,
        "k_ptr": k,
        "v_ptr": v,
        "g_ptr": g,
        "pool_ptr": pool,
        "ring_k_ptr": ring_k,
        "ring_v_ptr": ring_v,
        "ring_g_ptr": ring_g,
        "slots_ptr": slots,
        "start_ptr": ring_start,
        "accepted_ptr": num_accepted,
        "offsets_ptr": cu_seqlens,
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
        **strides("ring_k", ring_k),
        **strides("ring_v", ring_v),
        **strides("ring_g", ring_k if ring_g is None else ring_g),
        "slots_n": slots.stride(0),
        "start_n": ring_start.stride(0),
        "accepted_n": num_accepted.stride(0),
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
        "S": T if cu_seqlens is None else L // 2,
        "L": L,
        "BK": plan.BK,
        "BV": plan.BV,
        "OVERLAPS": plan.overlaps,
    }
    options = {"num_warps": plan.warps, **overlapping(plan.overlaps)}
    return [Launch(_recurrent_gla_replay, (N * Hv * ceil_div(V, plan.BV), 1, 1), arguments, options)]


@triton.jit(
    do_not_specialize=["scale", "P", "PAD", "N", "T", "slots_n", "start_n", "accepted_n", "has_n"],
    do_not_specialize_on_alignment=["slots_ptr", "start_ptr", "accepted_ptr", "offsets_ptr", "has_ptr"],
)
def _recurrent_gla_replay(
    q_ptr,  # [B, T, Hq, K]
    k_ptr,  # [B, T, H, K]
    v_ptr,  # [B, T, Hv, V]
    g_ptr,  # [B, T, Hv, K] if OF_KEYS, else [B, T, Hv] or [Hv], or None
    pool_ptr,  # [P, Hv, K, V]
    ring_k_ptr,  # [P, L, H, K]
    ring_v_ptr,  # [P, L, Hv, V]
    ring_g_ptr,  # [P, L, Hv, K] if OF_KEYS, else [P, L, Hv]; None if g is None or [Hv]
    slots_ptr,  # [N]
    start_ptr,  # [N]
    accepted_ptr,  # [N]
    offsets_ptr,  # [N+1], or None if sequence n is row n
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
    ring_k_b,
    ring_k_t,
    ring_k_h,
    ring_v_b,
    ring_v_t,
    ring_v_h,
    ring_g_b,
    ring_g_t,
    ring_g_h,
    slots_n,
    start_n,
    accepted_n,
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
    L: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Computes BV columns of the state of one head after the accepted and the new tokens of one sequence."""
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

    p = tl.load(slots_ptr + n * slots_n).to(tl.int64)
    served = is_slot(p, P, PAD)
    first = (tl.load(start_ptr + n * start_n).to(tl.int64) % L + L) % L  # in Triton, % keeps the sign
    accepted = tl.load(accepted_ptr + n * accepted_n).to(tl.int32)
    accepted = tl.where(served, tl.minimum(tl.maximum(accepted, 0), L // 2), 0)
    begins, writes = served, served & (accepted > 0)
    if has_ptr is not None:
        has_state = tl.load(has_ptr + n * has_n) != 0
        begins, writes = served & has_state, writes | (served & (not has_state))

    pool_block = pool_ptr + h * pool_h + rows[:, None].to(tl.int64) * pool_k + columns[None, :] * pool_v  # [BK, BV]
    ring_k_block = ring_k_ptr + p * ring_k_b + h // R * ring_k_h + rows  # [BK], of the first token
    ring_v_block = ring_v_ptr + p * ring_v_b + h * ring_v_h + columns  # [BV], of the first token
    state = tl.load(pool_block + p * pool_p, mask=in_state & begins, other=0.0).to(tl.float32)  # [BK, BV]
    for i in range(accepted):
        at = (first + i) % L
        k = tl.load(ring_k_block + at * ring_k_t, mask=in_k, other=0.0)  # [BK]
        v = tl.load(ring_v_block + at * ring_v_t, mask=in_v, other=0.0)  # [BV]
        if ring_g_ptr is not None:
            ring_g_block = ring_g_ptr + p * ring_g_b + at * ring_g_t + h * ring_g_h
            state = decayed(state, load_gates(ring_g_block, rows, in_k, True, OF_KEYS, None), OF_KEYS)  # [BK, BV]
        elif g_ptr is not None:
            state = decayed(state, load_gates(g_ptr + h * g_h, rows, in_k, True, OF_KEYS, NORMALIZER), OF_KEYS)
        state += k.to(tl.float32)[:, None] * v.to(tl.float32)[None, :]
    tl.store(pool_block + p * pool_p, state.to(pool_ptr.dtype.element_ty), mask=in_state & writes)

    for j in tl.static_range(S):
        there = j < length
        live = there & served
        t, at = start + j, (first + accepted + j) % L
        k = tl.load(k_ptr + b * k_b + t * k_t + h // R * k_h + rows, mask=in_k & live, other=0.0)  # [BK]
        v = tl.load(v_ptr + b * v_b + t * v_t + h * v_h + columns, mask=in_v & live, other=0.0)  # [BV]
        of_key = live & (tile == 0)
        keys = in_k & of_key & (h % R == 0)
        tl.store(ring_k_block + at * ring_k_t, k.to(ring_k_ptr.dtype.element_ty), mask=keys)
        tl.store(ring_v_block + at * ring_v_t, v.to(ring_v_ptr.dtype.element_ty), mask=in_v & live)
        if g_ptr is not None:
            g = load_gates(g_ptr + b * g_b + t * g_t + h * g_h, rows, in_k, live, OF_KEYS, NORMALIZER)  # [BK] or []
            state = decayed(state, g, OF_KEYS)  # [BK, BV]
            if ring_g_ptr is not None:
                ring_g_block = ring_g_ptr + p * ring_g_b + at * ring_g_t + h * ring_g_h
                if OF_KEYS:
                    tl.store(ring_g_block + rows, g, mask=in_k & of_key)
                else:
                    tl.store(ring_g_block, g, mask=of_key)
        state += k.to(tl.float32)[:, None] * v.to(tl.float32)[None, :]
        q_block = q_ptr + b * q_b + t * q_t + h * G // R * q_h + rows  # [BK], of the first query head
        o_block = o_ptr + ((b * T + t) * Hv + h) * G * V + columns  # [BV], of the first query head
        write_outputs(o_block, q_block, q_h, state, scale, in_k, in_v, live, there, G, V)
