"""Gated linear attention over whole sequences in one pass, the state on chip.

A block of values of a head goes through its sequence in chunks and carries the state S [K, V] in registers. Within a
chunk, with b_t the sum of the log gates from its start through t,

    o_t = scale * [ (q_t * exp b_t) S  +  ( sum over s <= t and d of q_td k_sd exp(b_td - b_sd) ) v_s ]
    S'  = diag(exp b_C) S + sum over s of (k_s * exp(b_C - b_s))^T v_s

q, k, v and g are read once and o is written once: the least that memory has to move. The work of a sequence is one
chunk after the other, so it takes many heads and sequences to fill a device.

The kernels are those of gla_triton_kernels/chunk_gla, and plan.py there says which of them a call takes.

Source: Yang et al., "Gated Linear Attention Transformers with Hardware-Efficient Training" (arXiv 2312.06635), sec. 4.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from gla_core.dispatch.backend import OpCall
from gla_triton_kernels import chunk_gla as kernels
from gla_triton_kernels.chunk_gla.plan import plan_one_pass
from gla_triton_kernels.chunk_gla.plan_backward import plan_whole_sequences
from gla_triton_kernels.runtime.architecture import Gpu

if TYPE_CHECKING:
    from gla_triton_kernels.chunk_gla.call import BackwardTensors, Tensors
    from gla_triton_kernels.runtime.launch import Launch


def chunk_gla_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    scale: float,
    initial_state: Tensor | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
    checkpoint_every: int | None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """See gla_core/ops/chunk_gla.py."""
    states = (initial_state, output_final_state)
    return kernels.call.forward(_one_pass, q, k, v, g, scale, *states, cu_seqlens, checkpoint_every)


def _one_pass(call: OpCall, gpu: Gpu, aligned: bool, x: Tensors, scale: float) -> list[Launch]:
    """The launches that fill the results in x."""
    return kernels.outputs.launch_forward(plan_one_pass(call, gpu, aligned), x, scale, call.scalars["checkpoint_every"])


def chunk_gla_bwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    scale: float,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    checkpoints: Tensor | None,
    checkpoint_every: int | None,
    do: Tensor,
    dstate: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """See gla_core/ops/chunk_gla.py."""
    states = (initial_state, cu_seqlens, checkpoints, checkpoint_every)
    return kernels.call.backward(_one_pass_backward, q, k, v, g, scale, *states, do, dstate)


def _one_pass_backward(call: OpCall, gpu: Gpu, aligned: bool, x: BackwardTensors, scale: float) -> list[Launch]:
    """The launches that fill the gradients in x."""
    return kernels.gradients.launch_backward(plan_whole_sequences(call, gpu, aligned), x, scale)
