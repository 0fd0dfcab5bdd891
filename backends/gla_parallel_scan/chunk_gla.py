"""Gated linear attention over segments of sequences, all at once.

With g_t the log gates of a segment of tokens 1 to L,

    (1)  D = exp(sum over t of g_t)        S = sum over s of (k_s * exp(sum over t > s of g_t))^T v_s
    (2)  running = initial state; then for the segments i of a sequence in order:
             running, S_i = diag(D_i) running + S_i, running
    (3)  the outputs of every segment, from the state S_i that enters it

where (1) builds every segment's state from zero and its decay, to memory, (2) scans them in place, and (3) is one pass
over every segment. Sequences that fill the device stay whole and take (3) alone; of a batch that fills it, and a little
more, the rows that are left over are cut.

The kernels are those of gla_triton_kernels/chunk_gla, and plan.py there says which of them a call takes.

Source: Yang et al., "Gated Linear Attention Transformers with Hardware-Efficient Training" (arXiv 2312.06635), sec. 4.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from gla_core.dispatch.backend import OpCall
from gla_triton_kernels import chunk_gla as kernels
from gla_triton_kernels.chunk_gla.plan import plan_rows
from gla_triton_kernels.chunk_gla.plan_backward import plan_rows_backward
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
    return kernels.call.forward(_segments, q, k, v, g, scale, *states, cu_seqlens, checkpoint_every)


def _segments(call: OpCall, gpu: Gpu, aligned: bool, x: Tensors, scale: float) -> list[Launch]:
    """The launches that fill the results in x."""
    parts, every = kernels.call.by_rows(plan_rows(call, gpu, aligned), x), call.scalars["checkpoint_every"]
    return [launch for plan, y in parts for launch in kernels.outputs.launch_forward(plan, y, scale, every)]


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
    return kernels.call.backward(_segments_backward, q, k, v, g, scale, *states, do, dstate)


def _segments_backward(call: OpCall, gpu: Gpu, aligned: bool, x: BackwardTensors, scale: float) -> list[Launch]:
    """The launches that fill the gradients in x."""
    parts = kernels.call.by_rows(plan_rows_backward(call, gpu, aligned), x)
    return [launch for plan, y in parts for launch in kernels.gradients.launch_backward(plan, y, scale)]
