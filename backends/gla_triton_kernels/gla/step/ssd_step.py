"""Computes one token of Mamba-2. The kernel reads every input once, and reads and writes every state once.

    dt' = softplus(dt + dt_bias)        S' = exp(dt' A) S + k^T (dt' v)        o = (scale * q S' + D v) * silu(z)

B batch   P states of the pool   H key heads   Hv heads of values and states   R = Hv / H value heads of a key head
K, V key and value width   BK K rounded up to a power of two   BV values of a block
WIDTH keys of a piece

The grid has one program per row of the batch, value head and BV values. States of Mamba-2 are V-first in memory, so the
keys of a value are contiguous. Pieces [BV, WIDTH] make a warp read lines of several values, and give each thread a part
of every piece of few values. A sum over keys is then mostly within a thread, and few threads load what belongs to a
value. The registers that this saves hold states: twice as many bytes are on their way at a time.

Source: Dao and Gu, "Transformers are SSMs: Generalized Models and Efficient Algorithms Through Structured State Space
Duality" (arXiv 2405.21060).
"""

# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
from __future__ import annotations

from collections.abc import Callable

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from gla_core.dispatch.backend import OpCall
from gla_core.dispatch.tensors import ceil_div
from gla_triton_kernels.gla.step.plan import Plan, plan_ssd
from gla_triton_kernels.gla.step.step import token_strides
from gla_triton_runtime.architecture import gpu_of_call
from gla_triton_runtime.gates import log_gates
from gla_triton_runtime.launch import Launch, overlapping
from gla_triton_runtime.prepared import Launches, rehearsed

PIECE = 128
"""The number of contiguous bytes of a state that neighbouring threads read: a line of the cache."""

Tensors = tuple[
    Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor
]
"""q, k, v, state, dt, A, dt_bias, D, z, state_indices and o. The step writes o and the state."""


def prepare(call: OpCall) -> Callable[..., Tensor]:
    """Plans a call, compiles its kernel, and returns the function that computes calls of the same signature.

    Raises:
        LaunchError: the kernel does not compile for this device, or does not fit it.
    """
    planned, launched = plan_ssd(call, gpu_of_call(call)), Launches(call.device)

    def run(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state: Tensor,
        dt: Tensor,
        A: Tensor,
        dt_bias: Tensor | None,
        D: Tensor | None,
        z: Tensor | None,
        scale: float,
        dt_softplus: bool,
        A_is_log: bool,
        state_indices: Tensor | None,
    ) -> Tensor:
        o = v.new_empty(v.shape)
        if o.numel():
            tensors = (q, k, v, state, dt, A, dt_bias, D, z, state_indices, o)
            if unrecorded := launched.replay(tensors, scale):
                unrecorded.start(launch_ssd_step(planned, tensors, scale, dt_softplus, A_is_log))
        return o

    return rehearsed(run, call)


def launch_ssd_step(plan: Plan, tensors: Tensors, scale: float, softplus: bool, A_is_log: bool) -> list[Launch]:
    """Returns the launch of a step."""
    q, k, v, state, dt, A, dt_bias, D, z, state_indices, o = tensors
    P, Hv, K, V = state.shape
    width = PIECE // state.element_size() if state.stride(2) == 1 else plan.BK
    arguments = {
        "q_ptr": q,
        "k_ptr": k,
        "v_ptr": v,
        "state_ptr": state,
        "dt_ptr": dt,
        "A_ptr": A,
        "bias_ptr": dt_bias,
        "D_ptr": D,
        "z_ptr": z,
        "indices_ptr": state_indices,
        "o_ptr": o,
        "scale": scale,
        "P": P,
        **token_strides("q", q),
        **token_strides("k", k),
        **token_strides("v", v),
        **token_strides("z", v if z is None else z),
        "dt_stride_b": dt.stride(0),
        "state_stride_p": state.stride(0),
        "state_stride_h": state.stride(1),
        "state_stride_k": state.stride(2),
        "state_stride_v": state.stride(3),
        "SOFTPLUS": softplus,
        "A_IS_LOG": A_is_log,
        "Hv": Hv,
        "R": Hv // k.shape[1],
        "K": K,
        "V": V,
        "BK": plan.BK,
        "BV": plan.BV,
        "WIDTH": min(width, plan.BK),
        "OVERLAPS": plan.overlaps,
    }
    options = {"num_warps": plan.warps, **overlapping(plan.overlaps)}
    return [Launch(_recurrent_ssd_step, (len(q) * Hv * ceil_div(V, plan.BV), 1, 1), arguments, options)]


@triton.jit(
    do_not_specialize=["scale", "P"],
    do_not_specialize_on_alignment=["dt_ptr", "A_ptr", "bias_ptr", "D_ptr", "indices_ptr"],
)
def _recurrent_ssd_step(
    q_ptr,  # [B, H, K]
    k_ptr,  # [B, H, K]
    v_ptr,  # [B, Hv, V]
    state_ptr,  # [P, Hv, K, V], updated in place
    dt_ptr,  # [B, Hv]
    A_ptr,  # [Hv]
    bias_ptr,  # [Hv] or None
    D_ptr,  # [Hv] or None
    z_ptr,  # [B, Hv, V] or None
    indices_ptr,  # [B], or None if row b has state b
    o_ptr,  # [B, Hv, V], contiguous
    scale,
    P,
    q_stride_b,
    q_stride_h,
    k_stride_b,
    k_stride_h,
    v_stride_b,
    v_stride_h,
    z_stride_b,
    z_stride_h,
    dt_stride_b,
    state_stride_p,
    state_stride_h,
    state_stride_k: tl.constexpr,
    state_stride_v: tl.constexpr,
    SOFTPLUS: tl.constexpr,
    A_IS_LOG: tl.constexpr,
    Hv: tl.constexpr,
    R: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    WIDTH: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Computes BV columns of the state of one head and one row of the batch."""
    tile, head = tl.program_id(0) % tl.cdiv(V, BV), tl.program_id(0) // tl.cdiv(V, BV)
    b, h = (head // Hv).to(tl.int64), (head % Hv).to(tl.int64)  # strides times these may exceed 32 bits
    columns = tile * BV + tl.arange(0, BV)  # [BV]
    in_v = columns < V
    o_block = o_ptr + (b * Hv + h) * V + columns  # [BV]
    if OVERLAPS:  # the results of earlier kernels are visible only after the wait
        gdc_wait()
        gdc_launch_dependents()

    p = b
    if indices_ptr is not None:
        p = tl.load(indices_ptr + b).to(tl.int64)
        if (p < 0) | (p >= P):
            tl.store(o_block, tl.zeros([BV], o_ptr.dtype.element_ty), mask=in_v)
            return

    state_ptr += p * state_stride_p + h * state_stride_h
    # All loads come before all conversions, because a conversion waits for its operand and would delay later loads.
    blocks, masks, states, ks, qs = (), (), (), (), ()  # of each piece
    for piece in tl.static_range(BK // WIDTH):
        rows = piece * WIDTH + tl.arange(0, WIDTH)  # [WIDTH]
        blocks += (state_ptr + columns[:, None] * state_stride_v + rows[None, :].to(tl.int64) * state_stride_k,)
        masks += (in_v[:, None] & (rows < K)[None, :],)
        states += (tl.load(blocks[piece], mask=masks[piece], other=0.0),)  # [BV, WIDTH], as the two before
    dt = tl.load(dt_ptr + b * dt_stride_b + h)
    A = tl.load(A_ptr + h)
    v = tl.load(v_ptr + b * v_stride_b + h * v_stride_h + columns, mask=in_v, other=0.0)  # [BV]
    for piece in tl.static_range(BK // WIDTH):
        rows = piece * WIDTH + tl.arange(0, WIDTH)  # [WIDTH]
        ks += (tl.load(k_ptr + b * k_stride_b + h // R * k_stride_h + rows, mask=rows < K, other=0.0),)  # [WIDTH]
        qs += (tl.load(q_ptr + b * q_stride_b + h // R * q_stride_h + rows, mask=rows < K, other=0.0),)  # [WIDTH]
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + h)
    if D_ptr is not None:
        D = tl.load(D_ptr + h)
    if z_ptr is not None:
        z = tl.load(z_ptr + b * z_stride_b + h * z_stride_h + columns, mask=in_v, other=0.0)  # [BV]

    dt, A, v = dt.to(tl.float32), A.to(tl.float32), v.to(tl.float32)
    if bias_ptr is not None:
        dt += bias.to(tl.float32)
    if SOFTPLUS:
        dt = -log_gates(-dt, 1)
    if A_IS_LOG:
        A = -tl.exp(A)
    decay, u = tl.exp(dt * A), (dt * v)[:, None]  # [BV, 1]
    products = tl.zeros([BV, WIDTH], tl.float32)  # of q and the state, summed over pieces
    for piece in tl.static_range(BK // WIDTH):
        state = decay * states[piece].to(tl.float32) + u * ks[piece].to(tl.float32)[None, :]  # [BV, WIDTH]
        tl.store(blocks[piece], state.to(state_ptr.dtype.element_ty), mask=masks[piece])
        products += qs[piece].to(tl.float32)[None, :] * state
    o = scale * tl.sum(products, axis=1)  # [BV]
    if D_ptr is not None:
        o += D.to(tl.float32) * v
    if z_ptr is not None:
        z = z.to(tl.float32)
        o *= z / (1.0 + tl.exp(-z))
    tl.store(o_block, o.to(o_ptr.dtype.element_ty), mask=in_v)
