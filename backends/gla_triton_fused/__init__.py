"""Triton kernels that make one pass over their inputs and keep the state on chip.

Each op stands in the file of its name, which says how it is composed of kernels in gla_triton_kernels. Triton is
imported when an op is first called.
"""

from __future__ import annotations

from torch import Tensor

import gla_triton_kernels as kernels
from gla_core.dispatch.backend import Backend, Capabilities, CostModel, OpCall, Reason, hookimpl, shipped_constants
from gla_triton_fused import online_softmax, recurrent_gla_step, softmax_attention
from gla_triton_fused.cost import predicted_seconds
from gla_triton_kernels.runtime.architecture import interpreted


@hookimpl
def gla_register_backends() -> list[Backend]:
    return [
        Backend(
            name="triton_fused",
            version="0.1.0",
            ops={
                "chunk_gla_fwd": _chunk_gla_fwd,
                "recurrent_gla_step": recurrent_gla_step.recurrent_gla_step,
                "online_softmax": online_softmax.online_softmax,
                "softmax_attention": softmax_attention.softmax_attention,
            },
            capabilities=Capabilities(
                devices=None if interpreted() else frozenset({"cuda"}),
                dtypes=kernels.dtypes(),
                min_compute_capability=(8, 0),
                key_widths=range(1, kernels.MAX_WIDTH + 1),
                value_widths=range(1, kernels.MAX_WIDTH + 1),
                cuda_graphs=not interpreted(),
            ),
            supports=_supports,
            cost=CostModel(predicted_seconds, shipped_constants("gla_triton_fused")),
            notes=kernels.notes,
        )
    ]


def _supports(call: OpCall) -> Reason | None:
    return kernels.missing()


def _chunk_gla_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    scale: float,
    initial_state: Tensor | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """That of chunk_gla.py, which imports Triton."""
    from gla_triton_fused.chunk_gla import chunk_gla_fwd

    return chunk_gla_fwd(q, k, v, g, scale, initial_state, output_final_state, cu_seqlens)
