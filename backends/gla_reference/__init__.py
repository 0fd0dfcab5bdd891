"""The reference backend: abstract ops in pure PyTorch, on any device, to be read together with the equations.

The core computes the ops of pools, of several tokens and of a layer by these; see gla_core/dispatch/lowering.py.
"""

from __future__ import annotations

import torch

from gla_core.dispatch.backend import GATES, Backend, Capabilities, CostModel, hookimpl, shipped_constants
from gla_reference.cost import predicted_seconds


@hookimpl
def gla_register_backends() -> list[Backend]:
    from gla_reference.chunk_delta import chunk_delta_bwd, chunk_delta_fwd
    from gla_reference.chunk_gla import chunk_gla_bwd, chunk_gla_fwd, chunk_gla_summary
    from gla_reference.online_softmax import online_softmax
    from gla_reference.recurrent_delta_step import recurrent_delta_step
    from gla_reference.recurrent_gla_step import recurrent_gla_step
    from gla_reference.softmax_attention import softmax_attention

    return [
        Backend(
            name="reference",
            version="0.1.0",
            ops={
                "chunk_gla_fwd": chunk_gla_fwd,
                "chunk_gla_bwd": chunk_gla_bwd,
                "chunk_gla_summary": chunk_gla_summary,
                "recurrent_gla_step": recurrent_gla_step,
                "chunk_delta_fwd": chunk_delta_fwd,
                "chunk_delta_bwd": chunk_delta_bwd,
                "recurrent_delta_step": recurrent_delta_step,
                "online_softmax": online_softmax,
                "softmax_attention": softmax_attention,
            },
            capabilities=Capabilities(
                dtypes=frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16}),
                grouped_values=True,
                gates=frozenset(GATES),
                checkpoints=True,
                swapped_states=True,
                cuda_graphs=True,
            ),
            cost=CostModel(predicted_seconds, shipped_constants("gla_reference")),
        )
    ]
