"""Triton kernels that make one pass over their inputs and keep the state on chip.

Sequences stay whole: a program goes through a sequence of a head in chunks, and keeps a block of the state S [K, V] in
registers. q, k, v and g are read once and o is written once, which is the least possible memory traffic. The chunks of
a sequence are computed one after another. To fill a device, a call therefore needs many heads and sequences.

The kernels are in gla_triton_kernels, in one folder per op. Triton is imported when an op is first called.
"""

from __future__ import annotations

import gla_triton_kernels as kernels
from gla_core.dispatch.backend import (
    GATES,
    Backend,
    Capabilities,
    Constants,
    CostModel,
    OpCall,
    hookimpl,
    shipped_constants,
)
from gla_triton_kernels.gla import (
    backward,
    chunk_gla_bwd,
    chunk_gla_fwd,
    chunk_gla_pool,
    chunk_gla_summary,
    forward,
    summary,
)
from gla_triton_kernels.gla.cost import backward_prices, forward_prices, pool_predictor, predictor, summary_prices
from gla_triton_kernels.gla.step import LAYER_STEP, REPLAY, STEP, STEPS
from gla_triton_kernels.gla.step import cost as recurrent_gla_step_cost
from gla_triton_kernels.online_softmax import ONE_PASS
from gla_triton_kernels.online_softmax import cost as online_softmax_cost
from gla_triton_kernels.softmax_attention import cost as softmax_attention_cost
from gla_triton_kernels.softmax_attention import softmax_attention
from gla_triton_kernels.softmax_attention.plan import plan_one_pass
from gla_triton_runtime.architecture import interpreted


@hookimpl
def gla_register_backends() -> list[Backend]:
    return [
        Backend(
            name="triton_fused",
            version="0.1.0",
            ops={
                "chunk_gla_fwd": chunk_gla_fwd(forward.plan_whole),
                "chunk_gla_bwd": chunk_gla_bwd(backward.plan_whole),
                "chunk_gla_pool": chunk_gla_pool(forward.plan_whole),
                "chunk_gla_summary": chunk_gla_summary(summary.plan_whole),
                "recurrent_gla_step": STEP,
                "recurrent_gla_layer_step": LAYER_STEP,
                "recurrent_gla_steps": STEPS,
                "recurrent_gla_replay": REPLAY,
                "online_softmax": ONE_PASS,
                "softmax_attention": softmax_attention(plan_one_pass),
            },
            capabilities=Capabilities(
                devices=None if interpreted() else frozenset({"cuda"}),
                dtypes=kernels.dtypes(),
                min_compute_capability=(8, 0),
                key_widths=range(1, kernels.MAX_WIDTH + 1),
                value_widths=range(1, kernels.MAX_WIDTH + 1),
                grouped_values=True,
                gates=frozenset(GATES),
                checkpoints=True,
                swapped_states=True,
                cuda_graphs=not interpreted(),
            ),
            supports=kernels.refusal,
            cost=CostModel(predicted_seconds, shipped_constants("gla_triton_fused"), kernels=kernels.COMMON),
            notes=kernels.notes,
        )
    ]


_SECONDS = {
    "chunk_gla_fwd": predictor(forward.plan_whole, forward_prices),
    "chunk_gla_bwd": predictor(backward.plan_whole, backward_prices),
    "chunk_gla_pool": pool_predictor(forward.plan_whole),
    "chunk_gla_summary": predictor(summary.plan_whole, summary_prices),
    "recurrent_gla_step": recurrent_gla_step_cost.seconds,
    "recurrent_gla_layer_step": recurrent_gla_step_cost.seconds,
    "recurrent_gla_steps": recurrent_gla_step_cost.seconds_of_steps,
    "recurrent_gla_replay": recurrent_gla_step_cost.seconds_of_replay,
    "online_softmax": online_softmax_cost.one_pass,
    "softmax_attention": softmax_attention_cost.one_pass,
}


def predicted_seconds(call: OpCall, c: Constants) -> float | None:
    """Returns the predicted seconds of a call from the constants of its op and device; None on a CPU."""
    return _SECONDS[call.op](call, c) if call.device.type == "cuda" else None
