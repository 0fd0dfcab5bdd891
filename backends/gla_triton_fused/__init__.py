"""Triton kernels that make one pass over their inputs and keep the state on chip.

Each op stands in the file of its name, which says how it is composed of kernels in gla_triton_kernels. Triton is
imported when an op is first called.
"""

from __future__ import annotations

import gla_triton_kernels as kernels
from gla_core.dispatch.backend import Backend, Capabilities, CostModel, hookimpl, shipped_constants
from gla_triton_fused import chunk_gla, chunk_gla_summary, online_softmax, recurrent_gla_step, softmax_attention
from gla_triton_fused.cost import predicted_seconds
from gla_triton_kernels.runtime.architecture import interpreted


@hookimpl
def gla_register_backends() -> list[Backend]:
    return [
        Backend(
            name="triton_fused",
            version="0.1.0",
            ops={
                "chunk_gla_fwd": chunk_gla.chunk_gla_fwd,
                "chunk_gla_bwd": chunk_gla.chunk_gla_bwd,
                "chunk_gla_summary": chunk_gla_summary.chunk_gla_summary,
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
                checkpoints=True,
                swapped_states=True,
                cuda_graphs=not interpreted(),
            ),
            supports=kernels.refusal,
            cost=CostModel(predicted_seconds, shipped_constants("gla_triton_fused"), kernels=kernels.COMMON),
            notes=kernels.notes,
        )
    ]
