"""Computes up to S tokens of gated linear attention for each sequence, in two ways.

    S_t = diag(exp g_t) S_t-1 + k_t^T v_t        o_t = scale * q_t S_t

With beta they are those of a delta rule: u_t = beta_t (v_t - k_t diag(exp g_t) S_t-1) takes the place of v_t; see
delta.py. Then the ring for v holds u, so accepted tokens are replayed in the same way.

A state stays in registers, in float32, from the first token to the last. Each copy that is written is rounded from it.

    steps     writes the state after each token to a slot of its own
    replay    first goes through the a accepted tokens of the last call, whose k, v and gates are in rings and whose
              outputs are known, and writes the state after them to the only slot of the sequence. Then it goes through
              the new tokens, and writes their k, v and log gates into the rings. With r the start of a ring, it has
              these tokens, modulo L:

        .. | r .. r+a-1: accepted, read | r+a .. r+a+T-1: new, written | ..

B batch   T tokens of a row   N sequences   P slots of the pool and of the rings
COLUMNS slots of a sequence (steps)   L tokens of a ring (replay)
S most tokens of a sequence. Steps: COLUMNS for packed sequences, else min(COLUMNS, T). Replay: L / 2 for packed
sequences, else T
H key heads   Hq query heads   Hv heads of values, states and gates   Ho = max(Hq, Hv) heads of o
G = Ho / Hv query heads of a state   R = Hv / H value heads of a key head   K, V key and value width
BK K rounded up to a power of two   BV values of a block

The grid has one program per sequence, value head and BV values. Several programs read the same key; the first of them
writes it into the ring.

Source: Yang et al., "Gated Linear Attention Transformers with Hardware-Efficient Training" (arXiv 2312.06635). The
rings come from ReplaySSM; see the op in gla_core/ops/gla/.
"""

# pyright: reportGeneralTypeIssues=false
from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from gla_core.dispatch.backend import OpCall
from gla_core.dispatch.tensors import ceil_div
from gla_triton_kernels.gla.step.delta import (
    Inputs,
    activated,
    added,
    delta_arguments,
    floats_of,
    inputs_of,
    learnt,
    load_bias,
    unit,
)
from gla_triton_kernels.gla.step.plan import Plan, plan
from gla_triton_kernels.slots import is_slot
from gla_triton_runtime.architecture import gpu_of_call
from gla_triton_runtime.launch import Launch, overlapping
from gla_triton_runtime.prepared import Launches, rehearsed


class Tensors(NamedTuple):
    """The tensors of a call, results included; those of the rings are None for steps."""

    q: Tensor  # [B, T, Hq, K]
    k: Tensor  # [B, T, H, K]
    v: Tensor  # [B, T, Hv, V]
    g: Tensor | None  # [B, T, Hv, K], [B, T, Hv] or [Hv]
    pool: Tensor  # [P, Hv, K, V]
    slots: Tensor  # [N, COLUMNS], or [N] with rings
    cu_seqlens: Tensor | None  # [N+1]
    num_accepted: Tensor | None  # [N]
    has_state: Tensor | None  # [N]
    o: Tensor  # [B, T, Ho, V]
    read_slots: Tensor | None = None  # [N]
    ring_k: Tensor | None = None  # [P, L, H, K]
    ring_v: Tensor | None = None  # [P, L, Hv, V]
    ring_g: Tensor | None = None  # [P, L, Hv, K] or [P, L, Hv]
    ring_start: Tensor | None = None  # [N]


def prepare_steps(call: OpCall) -> Callable[..., Tensor]:
    """Plans a call, compiles its kernel, and returns the function that computes calls of the same signature.

    Its arguments are those of the op, and behind them those that only a delta rule has.

    Raises:
        LaunchError: the kernel does not compile for this device, or does not fit it.
    """
    planned, launched, floats_of_call = plan_tokens(call), Launches(call.device), floats_of(call)

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
        beta: Tensor | None = None,
        normalize: float | None = None,
        beta_limit: float | None = None,
        gate_activation: str | None = None,
        bound: float | None = None,
        A_log: Tensor | None = None,
        dt_bias: Tensor | None = None,
    ) -> Tensor:
        o = v.new_empty(*q.shape[:2], max(q.shape[2], v.shape[2]), v.shape[3]) if out is None else out
        if len(slots) == 0:
            return o.zero_()
        if o.numel():
            x = (q, k, v, g, pool, slots, cu_seqlens, num_accepted, has_state, o, read_slots)
            floats = floats_of_call(normalize, beta_limit, bound)
            if unrecorded := launched.replay((*x, beta, A_log, dt_bias), scale, *floats):
                delta = inputs_of(beta, floats, normalize, beta_limit, gate_activation, A_log, dt_bias)
                unrecorded.start(launch_tokens(planned, Tensors(*x), scale, pad_slot, gate_normalizer, delta))
        return o

    return rehearsed(run, call)


def prepare_replay(call: OpCall) -> Callable[..., Tensor]:
    """Prepares a replay; see `prepare_steps`."""
    planned, launched, floats_of_call = plan_tokens(call), Launches(call.device), floats_of(call)

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
        beta: Tensor | None = None,
        normalize: float | None = None,
        beta_limit: float | None = None,
        gate_activation: str | None = None,
        bound: float | None = None,
        A_log: Tensor | None = None,
        dt_bias: Tensor | None = None,
    ) -> Tensor:
        o = v.new_empty(*q.shape[:2], max(q.shape[2], v.shape[2]), v.shape[3]) if out is None else out
        if len(slots) == 0:
            return o.zero_()
        rings = (ring_k, ring_v, ring_g, ring_start)  # without new tokens, the kernel still updates states
        x = (q, k, v, g, pool, slots, cu_seqlens, num_accepted, has_state, o, None, *rings)
        floats = floats_of_call(normalize, beta_limit, bound)
        if unrecorded := launched.replay((*x, beta, A_log, dt_bias), scale, *floats):
            delta = inputs_of(beta, floats, normalize, beta_limit, gate_activation, A_log, dt_bias)
            unrecorded.start(launch_tokens(planned, Tensors(*x), scale, pad_slot, gate_normalizer, delta))
        return o

    return rehearsed(run, call)


def plan_tokens(call: OpCall) -> Plan:
    """Plans a call as a step in which each sequence is a row."""
    return plan(dataclasses.replace(call, dims={**call.dims, "B": call.dims["N"]}), gpu_of_call(call))


def launch_tokens(
    plan: Plan, x: Tensors, scale: float, pad_slot: int, normalizer: int | None, delta: Inputs | None = None
) -> list[Launch]:
    """Returns the launch that computes all tokens; see `launch_step` for `normalizer` and `delta`."""
    (_, T, Hq, K), (P, Hv, _, V), N = x.q.shape, x.pool.shape, len(x.slots)
    arguments = {
        **dict.fromkeys(_gla_tokens_kernel.arg_names),  # what only the other op has is None, and is not compiled
        "q_ptr": x.q,
        "k_ptr": x.k,
        "v_ptr": x.v,
        "g_ptr": x.g,
        "pool_ptr": x.pool,
        "slots_ptr": x.slots,
        "offsets_ptr": x.cu_seqlens,
        "has_ptr": x.has_state,
        "o_ptr": x.o,
        **delta_arguments(delta),
        "scale": scale,
        "P": P,
        "PAD": pad_slot,
        "N": N,
        "T": T,
        **_strides("q", x.q),
        **_strides("k", x.k),
        **_strides("v", x.v),
        **_strides("g", x.q if x.g is None else x.g),
        **_strides("beta", None if delta is None else delta.beta),
        "slots_n": x.slots.stride(0),
        "has_n": _stride(x.has_state),
        "pool_p": x.pool.stride(0),
        "pool_h": x.pool.stride(1),
        "pool_k": x.pool.stride(2),
        "pool_v": x.pool.stride(3),
        "KEY_GATES": x.g is not None and x.g.ndim == 4,
        "NORMALIZER": normalizer,
        "Hv": Hv,
        "G": max(Hq // Hv, 1),
        "R": Hv // x.k.shape[2],
        "K": K,
        "V": V,
        "BK": plan.BK,
        "BV": plan.BV,
        "OVERLAPS": plan.overlaps,
        **(_steps_arguments(x) if x.ring_k is None else _replay_arguments(x)),
    }
    options = {"num_warps": plan.warps, **overlapping(plan.overlaps)}
    return [Launch(_gla_tokens_kernel, (N * Hv * ceil_div(V, plan.BV), 1, 1), arguments, options)]


def _steps_arguments(x: Tensors) -> dict[str, Any]:
    """Returns the arguments that only steps have."""
    T, COLUMNS = x.q.shape[1], x.slots.shape[1]
    return {
        "accepted_ptr": x.num_accepted,
        "read_ptr": x.read_slots,
        "slots_s": x.slots.stride(1),
        "accepted_n": _stride(x.num_accepted),
        "read_n": _stride(x.read_slots),
        "S": COLUMNS if x.cu_seqlens is not None else min(COLUMNS, T),
        "COLUMNS": COLUMNS,
    }


def _replay_arguments(x: Tensors) -> dict[str, Any]:
    """Returns the arguments that only a replay has."""
    assert x.ring_k is not None
    assert x.ring_v is not None
    T, L = x.q.shape[1], x.ring_k.shape[1]
    return {
        "ring_k_ptr": x.ring_k,
        "ring_v_ptr": x.ring_v,
        "ring_g_ptr": x.ring_g,
        "start_ptr": x.ring_start,
        "replayed_ptr": x.num_accepted,
        **_strides("ring_k", x.ring_k),
        **_strides("ring_v", x.ring_v),
        **_strides("ring_g", x.ring_k if x.ring_g is None else x.ring_g),
        "start_n": _stride(x.ring_start),
        "replayed_n": _stride(x.num_accepted),
        "S": T if x.cu_seqlens is None else L // 2,
        "L": L,
    }


def _strides(name: str, x: Tensor | None) -> dict[str, int | None]:
    """Returns the strides of rows, tokens and heads of x [B, T, heads, width] or [B, T, heads], as arguments.

    All tokens share a gate [heads], so its strides of rows and tokens are 0. The strides are None if x is None.
    """
    b, t, h = (None, None, None) if x is None else (0, 0, x.stride(0)) if x.ndim == 1 else x.stride()[:3]
    return {f"{name}_b": b, f"{name}_t": t, f"{name}_h": h}


def _stride(x: Tensor | None) -> int:
    """Returns the stride of x [N], as an argument; 0 if x is None."""
    return 0 if x is None else x.stride(0)


@triton.jit(
    do_not_specialize=[
        *("scale", "eps", "limit", "bound", "P", "PAD", "N", "T"),
        *("slots_n", "start_n", "replayed_n", "accepted_n", "read_n", "has_n"),
    ],
    do_not_specialize_on_alignment=[
        *("slots_ptr", "start_ptr", "replayed_ptr", "offsets_ptr", "accepted_ptr", "read_ptr", "has_ptr", "A_log_ptr")
    ],
)
def _gla_tokens_kernel(
    q_ptr,  # [B, T, Hq, K]
    k_ptr,  # [B, T, H, K]
    v_ptr,  # [B, T, Hv, V]
    g_ptr,  # [B, T, Hv, K] if KEY_GATES, else [B, T, Hv] or [Hv], or None
    pool_ptr,  # [P, Hv, K, V]
    ring_k_ptr,  # [P, L, H, K]; None without rings, as all arguments of rings
    ring_v_ptr,  # [P, L, Hv, V]
    ring_g_ptr,  # [P, L, Hv, K] if KEY_GATES, else [P, L, Hv]; None if g is None or [Hv]
    slots_ptr,  # [N, COLUMNS], or [N] with rings
    start_ptr,  # [N], the start of a ring
    replayed_ptr,  # [N], the number of accepted tokens in a ring
    offsets_ptr,  # [N+1], or None if sequence n is row n
    accepted_ptr,  # [N] or None: the slot of the last accepted token is read; None with rings, as read_ptr
    read_ptr,  # [N] or None
    has_ptr,  # [N] or None
    o_ptr,  # [B, T, Ho, V], contiguous
    beta_ptr,  # [B, T, Hv] for a delta rule, or None, and so are all its other arguments
    A_log_ptr,  # [Hv] or None
    bias_ptr,  # [Hv, K] if KEY_BIAS, else [Hv], or None
    scale,
    eps,
    limit,
    bound,
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
    beta_b,
    beta_t,
    beta_h,
    bias_h,
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
    slots_s: tl.constexpr,
    start_n,
    replayed_n,
    accepted_n,
    read_n,
    has_n,
    pool_p,
    pool_h,
    pool_k: tl.constexpr,
    pool_v: tl.constexpr,
    KEY_GATES: tl.constexpr,
    NORMALIZER: tl.constexpr,
    KEY_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    NORMALIZE: tl.constexpr,
    LIMITED: tl.constexpr,
    Hv: tl.constexpr,
    G: tl.constexpr,
    R: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    S: tl.constexpr,
    COLUMNS: tl.constexpr,
    L: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Computes BV columns of the state of one head through the tokens of one sequence, and their outputs."""
    RINGS: tl.constexpr = ring_k_ptr is not None  # pyright: ignore
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

    # p is the slot of the state. It is read if the sequence begins from a state, and all tokens of a sequence that is
    # not served have outputs of 0.
    slots_ptr += n * slots_n
    p = tl.load(slots_ptr).to(tl.int64)
    if RINGS:
        served = is_slot(p, P, PAD)
        first = (tl.load(start_ptr + n * start_n).to(tl.int64) % L + L) % L  # in Triton, % keeps the sign
        accepted = tl.load(replayed_ptr + n * replayed_n).to(tl.int32)
        accepted = tl.where(served, tl.minimum(tl.maximum(accepted, 0), L // 2), 0)
        begins, writes = served, served & (accepted > 0)
        if has_ptr is not None:
            has_state = tl.load(has_ptr + n * has_n) != 0
            begins, writes = served & has_state, writes | (served & (not has_state))
    else:
        first_slot = p
        if read_ptr is not None:
            p = tl.load(read_ptr + n * read_n).to(tl.int64)
        elif accepted_ptr is not None:
            accepted = tl.load(accepted_ptr + n * accepted_n).to(tl.int32)
            p = tl.load(slots_ptr + (tl.minimum(tl.maximum(accepted, 1), COLUMNS) - 1) * slots_s).to(tl.int64)
        begins = is_slot(p, P, PAD)
        served = begins
        if has_ptr is not None:
            has_state = tl.load(has_ptr + n * has_n) != 0
            served = tl.where(has_state, begins, is_slot(first_slot, P, PAD))
            begins = begins & has_state

    pool_block = pool_ptr + h * pool_h + rows[:, None].to(tl.int64) * pool_k + columns[None, :] * pool_v  # [BK, BV]
    if RINGS:
        ring_k_block = ring_k_ptr + p * ring_k_b + h // R * ring_k_h + rows  # [BK], of the first token
        ring_v_block = ring_v_ptr + p * ring_v_b + h * ring_v_h + columns  # [BV], of the first token
    state = tl.load(pool_block + p * pool_p, mask=in_state & begins, other=0.0).to(tl.float32)  # [BK, BV]
    A_log, bias = A_log_ptr, bias_ptr  # in Triton 3.6, no function returns None
    if A_log_ptr is not None:
        A_log = tl.load(A_log_ptr + h)
    if bias_ptr is not None:
        bias = load_bias(bias_ptr, bias_h, h, rows, in_k, KEY_BIAS)
    if RINGS:
        for i in range(accepted):
            at = (first + i) % L
            k = tl.load(ring_k_block + at * ring_k_t, mask=in_k, other=0.0)  # [BK]
            v = tl.load(ring_v_block + at * ring_v_t, mask=in_v, other=0.0)  # [BV]
            if ring_g_ptr is not None:
                ring_g_block = ring_g_ptr + p * ring_g_b + at * ring_g_t + h * ring_g_h
                g = load_gates(ring_g_block, rows, in_k, True, KEY_GATES).to(tl.float32)
                state = decayed(state, g, KEY_GATES)
            elif g_ptr is not None:
                g = load_gates(g_ptr + h * g_h, rows, in_k, True, KEY_GATES)
                g = activated(g, A_log, bias, bound, ACTIVATION, NORMALIZER)
                state = decayed(state, g, KEY_GATES)  # [BK, BV]
            state += k.to(tl.float32)[:, None] * v.to(tl.float32)[None, :]
        tl.store(pool_block + p * pool_p, state.to(pool_ptr.dtype.element_ty), mask=in_state & writes)

    for j in tl.static_range(S):
        there = j < length
        live = there & served
        t = start + j
        if RINGS:
            at = (first + accepted + j) % L
        k = tl.load(k_ptr + b * k_b + t * k_t + h // R * k_h + rows, mask=in_k & live, other=0.0)  # [BK]
        v = tl.load(v_ptr + b * v_b + t * v_t + h * v_h + columns, mask=in_v & live, other=0.0)  # [BV]
        k = unit(k, eps, NORMALIZE)
        if RINGS:
            writes_key = live & (tile == 0)
            keys = in_k & writes_key & (h % R == 0)
            tl.store(ring_k_block + at * ring_k_t, k.to(ring_k_ptr.dtype.element_ty), mask=keys)
            if beta_ptr is None:
                tl.store(ring_v_block + at * ring_v_t, v.to(ring_v_ptr.dtype.element_ty), mask=in_v & live)
        else:
            to = tl.load(slots_ptr + j * slots_s).to(tl.int64)
        if g_ptr is not None:
            g = load_gates(g_ptr + b * g_b + t * g_t + h * g_h, rows, in_k, live, KEY_GATES)  # [BK] or []
            g = activated(g, A_log, bias, bound, ACTIVATION, NORMALIZER)
            state = decayed(state, g, KEY_GATES)  # [BK, BV]
            if ring_g_ptr is not None:
                ring_g_block = ring_g_ptr + p * ring_g_b + at * ring_g_t + h * ring_g_h
                if KEY_GATES:
                    tl.store(ring_g_block + rows, g, mask=in_k & writes_key)
                else:
                    tl.store(ring_g_block, g, mask=writes_key)
        if beta_ptr is not None:
            beta = tl.load(beta_ptr + b * beta_b + t * beta_t + h * beta_h, mask=live, other=0.0)
            v = added(state, k, v, learnt(beta, limit, LIMITED))
            if RINGS:
                tl.store(ring_v_block + at * ring_v_t, v.to(ring_v_ptr.dtype.element_ty), mask=in_v & live)
        state += k.to(tl.float32)[:, None] * v.to(tl.float32)[None, :]
        q_block = q_ptr + b * q_b + t * q_t + h * G // R * q_h + rows  # [BK], of the first query head
        o_block = o_ptr + ((b * T + t) * Hv + h) * G * V + columns  # [BV], of the first query head
        write_outputs(o_block, q_block, q_h, state, scale, in_k, in_v, live, there, eps, NORMALIZE, G, V)
        if not RINGS:
            writes = in_state & live & is_slot(to, P, PAD)
            tl.store(pool_block + to * pool_p, state.to(pool_ptr.dtype.element_ty), mask=writes)


@triton.jit
def locate(
    o_ptr, offsets_ptr, n, N, T, h, columns, S: tl.constexpr, Hv: tl.constexpr, G: tl.constexpr, V: tl.constexpr
):
    """Returns the row of the batch, the first token (int64) and the number of tokens of sequence n.

    Also writes 0 to two kinds of outputs: of tokens of the sequence after the first S, and of tokens before the first
    sequence or after the last one.

    Args:
        offsets_ptr: [N+1], or None if sequence n is row n.
        columns: the columns of outputs that this program writes, [BV].
    """
    b, start, length = n, n * 0, T
    if offsets_ptr is not None:
        start = tl.load(offsets_ptr + n).to(tl.int64)
        end = tl.load(offsets_ptr + n + 1).to(tl.int64)
        b, length = n * 0, (end - start).to(tl.int32)
        _clear(o_ptr, start + S, end, h, columns, Hv, G, V)
        if n == 0:
            _clear(o_ptr, n, start, h, columns, Hv, G, V)
        if n == N - 1:
            _clear(o_ptr, end, T, h, columns, Hv, G, V)
    return b, start, length


@triton.jit
def _clear(o_ptr, first, end, h, columns, Hv: tl.constexpr, G: tl.constexpr, V: tl.constexpr):
    """Writes 0 to `columns` [BV] of the outputs of a head for tokens `first` (int64) to `end` - 1."""
    o_block = o_ptr + (first * Hv + h) * G * V + columns  # [BV]
    for _ in range((end - first).to(tl.int32)):
        for i in range(G):
            tl.store(o_block + i * V, tl.zeros(columns.shape, o_ptr.dtype.element_ty), mask=columns < V)
        o_block += Hv * G * V


@triton.jit
def load_gates(g_block, rows, in_k, live, KEY_GATES: tl.constexpr):
    """Returns what g holds of a token, [BK] if KEY_GATES, else a number; 0 if not `live`."""
    if KEY_GATES:
        return tl.load(g_block + rows, mask=in_k & live, other=0.0)
    else:  # noqa: RET505 -- one branch is compiled
        return tl.load(g_block, mask=live, other=0.0)


@triton.jit
def decayed(state, g, KEY_GATES: tl.constexpr):
    """Returns a state [BK, BV] after the decay by log gates g, [BK] if KEY_GATES, else one number."""
    if KEY_GATES:
        return state * tl.exp(g)[:, None]
    else:  # noqa: RET505 -- one branch is compiled
        return state * tl.exp(g)


@triton.jit
def write_outputs(
    o_block,
    q_block,
    q_h,
    state,
    scale,
    in_k,
    in_v,
    live,
    there,
    eps,
    NORMALIZE: tl.constexpr,
    G: tl.constexpr,
    V: tl.constexpr,
):
    """Writes the outputs of a token for the G query heads of a state.

    Args:
        o_block: pointers to the output of the first query head [BV].
        q_block: pointers to the first query head [BK].
        state: the state after the token [BK, BV].
        in_k, in_v: masks of the keys [BK] and the values [BV] that exist.
        live: whether the token is computed; otherwise its outputs are 0.
        there: whether the token exists; otherwise nothing is written.
        eps, NORMALIZE: as in `unit`, for queries.
    """
    for _ in range(G):
        q = unit(tl.load(q_block, mask=in_k & live, other=0.0), eps, NORMALIZE)  # [BK]
        o = tl.where(live, scale * tl.sum(q.to(tl.float32)[:, None] * state, axis=0), 0.0)  # [BV]
        tl.store(o_block, o.to(o_block.dtype.element_ty), mask=in_v & there)
        q_block += q_h
        o_block += V
