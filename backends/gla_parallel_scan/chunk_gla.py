"""Gated linear attention over segments of sequences, all at once.

With g_t the log gates of a segment of tokens 1 to L,

    (1)  D = exp(sum over t of g_t)        S = sum over s of (k_s * exp(sum over t > s of g_t))^T v_s
    (2)  running = initial state; then for the segments i of a sequence in order:
             running, S_i = diag(D_i) running + S_i, running
    (3)  the outputs of every segment, from the state S_i that enters it

where (1) builds every segment's state from zero and its decay, to memory, (2) scans them in place, and (3) is one pass
over every segment. Sequences that fill the device stay whole and take (3) alone.

The kernels are those of gla_triton_kernels/chunk_gla, and plan.py there says which of them a call takes.

Source: Yang et al., "Gated Linear Attention Transformers with Hardware-Efficient Training" (arXiv 2312.06635), sec. 4.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gla_core.dispatch.backend import OpCall
from gla_triton_kernels import chunk_gla as kernels
from gla_triton_kernels.chunk_gla.plan import plan_segments
from gla_triton_kernels.runtime.architecture import Gpu

if TYPE_CHECKING:
    from gla_triton_kernels.chunk_gla.call import Tensors
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
) -> tuple[Tensor, Tensor | None, None]:
    """See gla_core/ops/chunk_gla.py."""
    results = kernels.call.forward(_segments, q, k, v, g, scale, initial_state, output_final_state, cu_seqlens)
    return *results, None  # no checkpoints, by the capabilities


def _segments(call: OpCall, gpu: Gpu, aligned: bool, x: Tensors, scale: float) -> list[Launch]:
    """Fill the results in x, and return what was launched."""
    plan = plan_segments(call, gpu, aligned)
    outputs = getattr(kernels, plan.outputs.kernel)
    if plan.segments is None:
        return outputs.run(plan, x, scale)
    B, T, H, K = x.k.shape
    segments = kernels.segments.cut(B, T, plan.segments.length, x.cu_seqlens)
    S = torch.empty(segments.count, H, K, x.v.shape[3], dtype=torch.float32, device=x.v.device)
    D = None if x.g is None else torch.empty(segments.count, H, K, dtype=torch.float32, device=x.v.device)
    states = getattr(kernels, plan.segments.states.kernel)
    built = states.run(plan.segments, x, segments, S, D)
    scanned = kernels.scan.run(plan.segments, x, segments, S, D)
    entering = x._replace(initial_state=S, cu_seqlens=segments.bounds, final_state=None)
    written = outputs.run(plan, entering, scale)
    return [*segments.launches, *built, *scanned, *written]
