"""Computes one token of gated linear attention, an RMS norm of each head of the output, and an output gate.

    S' = diag(exp g) S + k^T v        u = scale * q S'        o = u / sqrt(mean(u^2) + eps) * w * f(output gate)

f is sigma(x) or x * sigma(x). The norm needs all values of a head. If a block of BV values holds them, one kernel
computes everything. Otherwise several programs share a head, and a second kernel, which starts while the first ends,
computes the norms. u goes through memory, in float32.

B batch   P states of the pool   H key heads   Hq query heads   Hv heads of values, states and gates
Ho = max(Hq, Hv) heads of o   G = Ho / Hv query heads of a state   R = Hv / H value heads of a key head
K, V key and value width   BK K rounded up to a power of two   BV values of a block
PARTS programs of a head   ALL V rounded up to a power of two

Sources: Yang et al., "Gated Linear Attention Transformers with Hardware-Efficient Training" (arXiv 2312.06635); Zhang
and Sennrich, "Root Mean Square Layer Normalization" (arXiv 1910.07467).
"""

# pyright: reportGeneralTypeIssues=false
from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from gla_core.dispatch.backend import OpCall
from gla_core.dispatch.tensors import ceil_div
from gla_triton_kernels.gla.step.plan import Plan, plan
from gla_triton_kernels.gla.step.step import advance, step_arguments, token_strides
from gla_triton_runtime.architecture import gpu_of_call
from gla_triton_runtime.launch import Launch, overlapping
from gla_triton_runtime.prepared import Launches, rehearsed
from gla_triton_runtime.sizes import power_of_two

Tensors = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor]
"""q, k, v, g, state, output_gate, norm_weight, state_indices and o. The step writes o and the state."""


def prepare(call: OpCall) -> Callable[..., Tensor]:
    """Plans a call, compiles its kernels, and returns the function that computes calls of the same signature.

    Raises:
        LaunchError: a kernel does not compile for this device, or does not fit it.
    """
    planned, launched = plan(call, gpu_of_call(call)), Launches(call.device)

    def run(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor | None,
        state: Tensor,
        output_gate: Tensor | None,
        norm_weight: Tensor | None,
        scale: float,
        norm_eps: float,
        activation: str,
        state_indices: Tensor | None,
        gate_normalizer: int | None,
    ) -> Tensor:
        o = v.new_empty(len(q), max(q.shape[1], v.shape[1]), v.shape[2])
        if o.numel():
            tensors = (q, k, v, g, state, output_gate, norm_weight, state_indices, o)
            if unrecorded := launched.replay(tensors, scale, norm_eps):
                made = launch_layer_step(planned, tensors, scale, norm_eps, activation, gate_normalizer)
                unrecorded.start(made)
        return o

    return rehearsed(run, call)


def launch_layer_step(
    plan: Plan, tensors: Tensors, scale: float, norm_eps: float, activation: str, normalizer: int | None
) -> list[Launch]:
    """Returns the launches of a step: one launch, or one for the states and one for the norms.

    Args:
        normalizer: the number by which log sigma is divided if g holds logits; None if g holds log gates.
    """
    q, k, v, g, state, output_gate, norm_weight, state_indices, o = tensors
    B, (P, Hv, _, V), Ho = len(q), state.shape, o.shape[1]
    parts = ceil_div(V, plan.BV)
    u = o.new_empty(o.shape, dtype=torch.float32)
    for_norms = {
        "gate_ptr": output_gate,
        "weight_ptr": norm_weight,
        "indices_ptr": state_indices,
        "u_ptr": u,
        "o_ptr": o,
        "scale": scale,
        "norm_eps": norm_eps,
        "P": P,
        **token_strides("gate", q if output_gate is None else output_gate),
        "SIGMOID": activation == "sigmoid",
        "V": V,
        "ALL": power_of_two(V),
        "OVERLAPS": plan.overlaps,
    }
    arguments = {**step_arguments(plan, q, k, v, g, state, normalizer), **for_norms, "PARTS": parts}
    overlaps = overlapping(plan.overlaps)
    grid = (B * Hv * parts, 1, 1)
    launches = [Launch(_layer_step, grid, arguments, {"num_warps": plan.warps, **overlaps})]
    if parts > 1:
        launches.append(Launch(_norms, (B * Ho, 1, 1), {**for_norms, "Ho": Ho}, {"num_warps": 1, **overlaps}))
    return launches


@triton.jit(do_not_specialize=["scale", "norm_eps", "P"], do_not_specialize_on_alignment=["indices_ptr"])
def _layer_step(
    q_ptr,  # [B, Hq, K]
    k_ptr,  # [B, H, K]
    v_ptr,  # [B, Hv, V]
    g_ptr,  # [B, Hv, K] if KEY_GATES, else [B, Hv] or [Hv], or None
    state_ptr,  # [P, Hv, K, V], updated in place
    gate_ptr,  # [B, Ho, V] or None
    weight_ptr,  # [V] or None
    indices_ptr,  # [B], or None if row b has state b
    u_ptr,  # [B, Ho, V], contiguous, float32
    o_ptr,  # [B, Ho, V], contiguous
    scale,
    norm_eps,
    P,
    q_stride_b,
    q_stride_h,
    k_stride_b,
    k_stride_h,
    v_stride_b,
    v_stride_h,
    g_stride_b,
    g_stride_h,
    gate_stride_b,
    gate_stride_h,
    state_stride_p,
    state_stride_h,
    state_stride_k: tl.constexpr,
    state_stride_v: tl.constexpr,
    KEY_GATES: tl.constexpr,
    NORMALIZER: tl.constexpr,
    SIGMOID: tl.constexpr,
    Hv: tl.constexpr,
    G: tl.constexpr,
    R: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    PARTS: tl.constexpr,
    ALL: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Computes BV columns of the state of one head and one row, and the norms if PARTS is 1."""
    part, head = tl.program_id(0) % PARTS, tl.program_id(0) // PARTS
    b, h = (head // Hv).to(tl.int64), (head % Hv).to(tl.int64)  # strides times these may exceed 32 bits
    rows = tl.arange(0, BK)  # [BK]
    if OVERLAPS:  # the results of earlier kernels are visible only after the wait
        gdc_wait()
        gdc_launch_dependents()

    p = b
    if indices_ptr is not None:
        p = tl.load(indices_ptr + b).to(tl.int64)
        if (p < 0) | (p >= P):
            if PARTS == 1:
                for i in range(G):
                    skip(o_ptr + ((b * Hv + h) * G + i) * V, V, ALL)
            return

    state_rows = state_ptr + p * state_stride_p + h * state_stride_h + rows[:, None].to(tl.int64) * state_stride_k
    columns = part * BV + tl.arange(0, BV)  # [BV]
    state_block = state_rows + columns[None, :] * state_stride_v  # [BK, BV]
    u_block = u_ptr + (b * Hv + h) * G * V + columns  # [BV], of the first query head
    token = (q_ptr, k_ptr, v_ptr, g_ptr)
    strides = (q_stride_b, q_stride_h, k_stride_b, k_stride_h, v_stride_b, v_stride_h, g_stride_b, g_stride_h)
    blocks = (state_block, state_block, u_block)
    advance(token, strides, (b, h, rows, columns), blocks, scale, KEY_GATES, NORMALIZER, G, R, K, V)

    if PARTS == 1:
        tl.debug_barrier()  # other threads have written values of u that a thread reads now
        for i in range(G):
            row = (b * Hv + h) * G + i
            gate_row = gate_ptr
            if gate_ptr is not None:
                gate_row = gate_ptr + b * gate_stride_b + (h * G + i) * gate_stride_h
            norm(u_ptr + row * V, gate_row, weight_ptr, o_ptr + row * V, norm_eps, SIGMOID, V, ALL)


@triton.jit(do_not_specialize=["scale", "norm_eps", "P"], do_not_specialize_on_alignment=["indices_ptr"])
def _norms(
    gate_ptr,  # [B, Ho, V] or None
    weight_ptr,  # [V] or None
    indices_ptr,  # [B] or None
    u_ptr,  # [B, Ho, V], contiguous, float32
    o_ptr,  # [B, Ho, V], contiguous
    scale,  # not used; replayed launches take all floats of the call
    norm_eps,
    P,
    gate_stride_b,
    gate_stride_h,
    SIGMOID: tl.constexpr,
    Ho: tl.constexpr,
    V: tl.constexpr,
    ALL: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Computes the norm and the gate of one head of one row."""
    row = tl.program_id(0).to(tl.int64)
    b, h = row // Ho, row % Ho
    if OVERLAPS:
        gdc_wait()
        gdc_launch_dependents()
    if indices_ptr is not None:
        p = tl.load(indices_ptr + b).to(tl.int64)
        if (p < 0) | (p >= P):
            skip(o_ptr + row * V, V, ALL)
            return
    gate_row = gate_ptr
    if gate_ptr is not None:
        gate_row = gate_ptr + b * gate_stride_b + h * gate_stride_h
    norm(u_ptr + row * V, gate_row, weight_ptr, o_ptr + row * V, norm_eps, SIGMOID, V, ALL)


@triton.jit
def norm(u_row, gate_row, weight_ptr, o_row, norm_eps, SIGMOID: tl.constexpr, V: tl.constexpr, ALL: tl.constexpr):
    """Computes a head of o [V] from the same head of u and of the output gate.

    Args:
        u_row, gate_row, o_row: pointers to the first values of the head; gate_row is None without an output gate.
    """
    columns = tl.arange(0, ALL)  # [ALL]
    in_v = columns < V
    u = tl.load(u_row + columns, mask=in_v, other=0.0)  # [ALL]
    y = u * tl.rsqrt(tl.sum(u * u, axis=0) / V + norm_eps)  # [ALL]
    if weight_ptr is not None:
        y *= tl.load(weight_ptr + columns, mask=in_v, other=0.0).to(tl.float32)
    if gate_row is not None:
        x = tl.load(gate_row + columns, mask=in_v, other=0.0).to(tl.float32)  # [ALL]
        factor = 1.0 / (1.0 + tl.exp(-x))
        y *= factor if SIGMOID else x * factor
    tl.store(o_row + columns, y.to(o_row.dtype.element_ty), mask=in_v)


@triton.jit
def skip(o_row, V: tl.constexpr, ALL: tl.constexpr):
    """Writes zeros to a head of o."""
    columns = tl.arange(0, ALL)  # [ALL]
    tl.store(o_row + columns, tl.zeros([ALL], o_row.dtype.element_ty), mask=columns < V)
