"""Computes one token of gated linear attention. The kernel reads every state once and writes it once.

    S' = diag(exp g) S + k^T v        o = scale * q S'

With a bonus u, o = scale * q (S + diag(u) k^T v).

With beta it computes a delta rule, in which u = beta (v - k diag(exp g) S) takes the place of v; see delta.py.

B batch   P states of the pool   H key heads   Hq query heads   Hv heads of values, states and gates
Ho = max(Hq, Hv) heads of o   G = Ho / Hv query heads of a state   R = Hv / H value heads of a key head
K, V key and value width   BK K rounded up to a power of two   BV values of a block

The grid has one program per row of the batch, value head and BV values.

Source: Yang et al., "Gated Linear Attention Transformers with Hardware-Efficient Training" (arXiv 2312.06635); of the
bonus, Peng et al., "Eagle and Finch" (arXiv 2404.05892).
"""

# pyright: reportGeneralTypeIssues=false
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from gla_core.dispatch.backend import OpCall
from gla_core.dispatch.tensors import ceil_div, new_state
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
from gla_triton_runtime.architecture import gpu_of_call
from gla_triton_runtime.launch import Launch, overlapping
from gla_triton_runtime.prepared import Launches, rehearsed

Tensors = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor, Tensor | None, Tensor | None, Tensor]
"""q, k, v, g, state, state_indices, new and o. The step writes o, and states to new, or to state if new is None."""


def prepare(call: OpCall) -> Callable[..., tuple[Tensor, Tensor]]:
    """Plans a call, compiles its kernel, and returns the function that computes calls of the same signature.

    Raises:
        LaunchError: the kernel does not compile for this device, or does not fit it.
    """
    planned, launched = plan(call, gpu_of_call(call)), Launches(call.device)

    def run(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor | None,
        state: Tensor,
        scale: float,
        state_indices: Tensor | None,
        gate_normalizer: int | None,
        bonus: Tensor | None,
        inplace: bool,
    ) -> tuple[Tensor, Tensor]:
        state, new, o = _results(q, v, state, state_indices, inplace)
        if o.numel():
            tensors = (q, k, v, g, state, state_indices, new, o)
            if unrecorded := launched.replay((*tensors, bonus), scale):
                unrecorded.start(launch_step(planned, tensors, scale, gate_normalizer, bonus=bonus))
        return o, state if new is None else new

    return rehearsed(run, call)


def prepare_delta(call: OpCall) -> Callable[..., tuple[Tensor, Tensor]]:
    """Prepares a step of a delta rule; see `prepare`."""
    planned, launched, floats_of_call = plan(call, gpu_of_call(call)), Launches(call.device), floats_of(call)

    def run(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor | None,
        state: Tensor,
        scale: float,
        state_indices: Tensor | None,
        gate_normalizer: int | None,
        inplace: bool,
        beta: Tensor,
        normalize: float | None,
        beta_limit: float | None,
        gate_activation: str | None,
        bound: float | None,
        A_log: Tensor | None,
        dt_bias: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        state, new, o = _results(q, v, state, state_indices, inplace)
        if o.numel():
            tensors, floats = (q, k, v, g, state, state_indices, new, o), floats_of_call(normalize, beta_limit, bound)
            if unrecorded := launched.replay((*tensors, beta, A_log, dt_bias), scale, *floats):
                delta = inputs_of(beta, floats, normalize, beta_limit, gate_activation, A_log, dt_bias)
                unrecorded.start(launch_step(planned, tensors, scale, gate_normalizer, delta))
        return o, state if new is None else new

    return rehearsed(run, call)


def _results(
    q: Tensor, v: Tensor, state: Tensor, indices: Tensor | None, inplace: bool
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Returns the states that are read, the new ones, or None if those are written in place, and o."""
    if indices is not None and not inplace:  # rows without an index are also copied
        state, inplace = new_state(state).copy_(state), True
    o = v.new_empty(len(q), max(q.shape[1], v.shape[1]), v.shape[2])
    return state, None if inplace else new_state(state), o


def launch_step(
    plan: Plan,
    tensors: Tensors,
    scale: float,
    normalizer: int | None,
    delta: Inputs | None = None,
    bonus: Tensor | None = None,
) -> list[Launch]:
    """Returns the launch of a step.

    Args:
        normalizer: the number by which log sigma is divided if g holds logits of it, else None.
        delta: the other inputs of a delta rule, else None.
    """
    q, k, v, g, state, state_indices, new, o = tensors
    B, (P, Hv, _, V) = len(q), state.shape
    written = state if new is None else new
    arguments = {
        **step_arguments(plan, q, k, v, g, state, normalizer),
        "indices_ptr": state_indices,
        "new_ptr": new,
        "o_ptr": o,
        **delta_arguments(delta),
        "bonus_ptr": bonus,
        "bonus_h": None if bonus is None else bonus.stride(0),
        "scale": scale,
        "P": P,
        **token_strides("beta", None if delta is None else delta.beta),
        "new_stride_k": written.stride(2),
        "new_stride_v": written.stride(3),
        "V": V,
        "OVERLAPS": plan.overlaps,
    }
    options = {"num_warps": plan.warps, **overlapping(plan.overlaps)}
    return [Launch(_gla_step_kernel, (B * Hv * ceil_div(V, plan.BV), 1, 1), arguments, options)]


def step_arguments(
    plan: Plan, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, state: Tensor, normalizer: int | None
) -> dict[str, Any]:
    """Returns the arguments that kernels with `advance` share: tensors, strides, and sizes of a token and a state."""
    (_, Hq, K), Hv = q.shape, state.shape[1]
    return {
        "q_ptr": q,
        "k_ptr": k,
        "v_ptr": v,
        "g_ptr": g,
        "state_ptr": state,
        **token_strides("q", q),
        **token_strides("k", k),
        **token_strides("v", v),
        **token_strides("g", q if g is None else g),
        "KEY_GATES": g is not None and g.ndim == 3,
        "NORMALIZER": normalizer,
        "state_stride_p": state.stride(0),
        "state_stride_h": state.stride(1),
        "state_stride_k": state.stride(2),
        "state_stride_v": state.stride(3),
        "Hv": Hv,
        "G": max(Hq // Hv, 1),
        "R": Hv // k.shape[1],
        "K": K,
        "BK": plan.BK,
        "BV": plan.BV,
    }


def token_strides(name: str, x: Tensor | None) -> dict[str, int | None]:
    """Returns the strides of rows and heads of x [B, heads, width] or [B, heads], as arguments of a kernel.

    All rows share a gate [heads], so its stride of rows is 0. The strides are None if x is None.
    """
    b, h = (None, None) if x is None else (0, x.stride(0)) if x.ndim == 1 else x.stride()[:2]
    return {f"{name}_stride_b": b, f"{name}_stride_h": h}


@triton.jit(
    do_not_specialize=["scale", "eps", "limit", "bound", "P"],
    do_not_specialize_on_alignment=["indices_ptr", "A_log_ptr"],
)
def _gla_step_kernel(
    q_ptr,  # [B, Hq, K]
    k_ptr,  # [B, H, K]
    v_ptr,  # [B, Hv, V]
    g_ptr,  # [B, Hv, K] if KEY_GATES, else [B, Hv] or [Hv], or None
    state_ptr,  # [P, Hv, K, V]
    indices_ptr,  # [B], or None if row b has state b
    new_ptr,  # [B, Hv, K, V], dense, or None to update state_ptr in place
    o_ptr,  # [B, Ho, V], contiguous
    beta_ptr,  # [B, Hv] for a delta rule, or None, and so are all its other arguments
    A_log_ptr,  # [Hv] or None
    bias_ptr,  # [Hv, K] if KEY_BIAS, else [Hv], or None
    bonus_ptr,  # [H, K] or None
    scale,
    eps,
    limit,
    bound,
    P,
    bias_h,
    bonus_h,
    beta_stride_b,
    beta_stride_h,
    q_stride_b,
    q_stride_h,
    k_stride_b,
    k_stride_h,
    v_stride_b,
    v_stride_h,
    g_stride_b,
    g_stride_h,
    KEY_GATES: tl.constexpr,
    NORMALIZER: tl.constexpr,
    KEY_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    NORMALIZE: tl.constexpr,
    LIMITED: tl.constexpr,
    state_stride_p,
    state_stride_h,
    state_stride_k: tl.constexpr,
    state_stride_v: tl.constexpr,
    new_stride_k: tl.constexpr,
    new_stride_v: tl.constexpr,
    Hv: tl.constexpr,
    G: tl.constexpr,
    R: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Computes BV columns of the state of one head and one row of the batch."""
    tile, head = tl.program_id(0) % tl.cdiv(V, BV), tl.program_id(0) // tl.cdiv(V, BV)
    b, h = (head // Hv).to(tl.int64), (head % Hv).to(tl.int64)  # strides times these may exceed 32 bits
    rows = tl.arange(0, BK)  # [BK]
    columns = tile * BV + tl.arange(0, BV)  # [BV]
    o_block = o_ptr + (b * Hv + h) * G * V + columns  # [BV], of the first query head
    if OVERLAPS:  # the results of earlier kernels are visible only after the wait
        gdc_wait()
        gdc_launch_dependents()

    p = b
    if indices_ptr is not None:
        p = tl.load(indices_ptr + b).to(tl.int64)
        if (p < 0) | (p >= P):
            for i in range(G):
                tl.store(o_block + i * V, tl.zeros([BV], o_ptr.dtype.element_ty), mask=columns < V)
            return

    state_block = state_ptr + p * state_stride_p + h * state_stride_h  # [BK, BV]
    state_block += rows[:, None].to(tl.int64) * state_stride_k + columns[None, :] * state_stride_v
    new_block = state_block
    if new_ptr is not None:
        new_block = new_ptr + (b * Hv + h) * K * V + rows[:, None] * new_stride_k + columns[None, :] * new_stride_v
    token = (q_ptr, k_ptr, v_ptr, g_ptr)
    strides = (q_stride_b, q_stride_h, k_stride_b, k_stride_h, v_stride_b, v_stride_h, g_stride_b, g_stride_h)
    blocks = (state_block, new_block, o_block)
    if beta_ptr is not None:
        beta_ptr += b * beta_stride_b + h * beta_stride_h
    if bonus_ptr is not None:
        bonus_ptr += h // R * bonus_h + rows  # [BK]
    advance(
        token,
        strides,
        (b, h, rows, columns),
        blocks,
        scale,
        KEY_GATES,
        NORMALIZER,
        G,
        R,
        K,
        V,
        beta_ptr,
        A_log_ptr,
        bias_ptr,
        bias_h,
        eps,
        limit,
        bound,
        KEY_BIAS,
        ACTIVATION,
        NORMALIZE,
        LIMITED,
        bonus_ptr,
    )


@triton.jit
def advance(
    token,
    strides,
    place,
    blocks,
    scale,
    KEY_GATES: tl.constexpr,
    NORMALIZER: tl.constexpr,
    G: tl.constexpr,
    R: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    beta_block=None,
    A_log_ptr=None,
    bias_ptr=None,
    bias_h=None,
    eps=None,
    limit=None,
    bound=None,
    KEY_BIAS=False,
    ACTIVATION=None,
    NORMALIZE=False,
    LIMITED=False,
    bonus_block=None,
):
    """Computes BV columns of a state after a token, and the same columns of the outputs of its G query heads.

    Args:
        token: q, k, v and g, the last of which may be None.
        strides: the strides of rows and of heads of each of them.
        place: the row, the head of values, the keys [BK] and the values [BV].
        blocks: pointers [BK, BV] from which the state is read, pointers [BK, BV] to which it is written, and pointers
            to the output of the first query head [BV].
        beta_block: pointer to the beta of a delta rule, or None. The arguments from A_log_ptr to LIMITED are those of
            the kernel.
        bonus_block: pointers to the bonus of the keys [BK], or None.
    """
    q_ptr, k_ptr, v_ptr, g_ptr = token
    q_stride_b, q_stride_h, k_stride_b, k_stride_h, v_stride_b, v_stride_h, g_stride_b, g_stride_h = strides
    b, h, rows, columns = place
    state_block, new_block, o_block = blocks
    q_block = q_ptr + b * q_stride_b + h * G // R * q_stride_h + rows  # [BK], of the first query head
    k_block = k_ptr + b * k_stride_b + h // R * k_stride_h + rows  # [BK]
    v_block = v_ptr + b * v_stride_b + h * v_stride_h + columns  # [BV]
    g_block = g_ptr
    if g_ptr is not None:
        g_block = g_ptr + b * g_stride_b + h * g_stride_h + (rows if KEY_GATES else 0)  # [BK] if KEY_GATES, else []
    in_k, in_v = rows < K, columns < V  # [BK], [BV]
    in_state = in_k[:, None] & in_v[None, :]  # [BK, BV]
    # All loads come before all conversions, because a conversion waits for its operand and would delay later loads.
    state = tl.load(state_block, mask=in_state, other=0.0)  # [BK, BV]
    k = tl.load(k_block, mask=in_k, other=0.0)  # [BK]
    v = tl.load(v_block, mask=in_v, other=0.0)  # [BV]
    q = tl.load(q_block, mask=in_k, other=0.0)  # [BK]
    beta = beta_block
    if beta_block is not None:
        beta = tl.load(beta_block)
    A_log, bias = A_log_ptr, bias_ptr  # in Triton 3.6, no function returns None
    if A_log_ptr is not None:
        A_log = tl.load(A_log_ptr + h)
    if bias_ptr is not None:
        bias = load_bias(bias_ptr, bias_h, h, rows, in_k, KEY_BIAS)
    bonus, before = bonus_block, state
    if bonus_block is not None:
        bonus = tl.load(bonus_block, mask=in_k, other=0.0)  # [BK]
    if g_ptr is not None:
        if KEY_GATES:
            g = tl.load(g_block, mask=in_k, other=0.0)  # [BK]
            g = activated(g, A_log, bias, bound, ACTIVATION, NORMALIZER)
            state = tl.exp(g)[:, None] * state.to(tl.float32)
        else:
            g = activated(tl.load(g_block), A_log, bias, bound, ACTIVATION, NORMALIZER)
            state = tl.exp(g) * state.to(tl.float32)
    q, k = unit(q, eps, NORMALIZE), unit(k, eps, NORMALIZE)
    if beta_block is not None:
        state = state.to(tl.float32)
        v = added(state, k, v, learnt(beta, limit, LIMITED))
    state = state.to(tl.float32) + k.to(tl.float32)[:, None] * v.to(tl.float32)[None, :]
    read = state
    if bonus_block is not None:
        keys = bonus.to(tl.float32) * k.to(tl.float32)  # [BK]
        read = before.to(tl.float32) + keys[:, None] * v.to(tl.float32)[None, :]

    for i in range(G):
        # The query of the next head is loaded before the query of this head is used.
        following = tl.load(q_block + tl.minimum(i + 1, G - 1).to(tl.int64) * q_stride_h, mask=in_k, other=0.0)  # [BK]
        o = scale * tl.sum(q.to(tl.float32)[:, None] * read, axis=0)  # [BV]
        tl.store(o_block + i * V, o.to(o_block.dtype.element_ty), mask=in_v)
        q = following

    tl.store(new_block, state.to(new_block.dtype.element_ty), mask=in_state)
