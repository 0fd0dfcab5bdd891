"""Triton kernels that make one pass over their inputs and keep the state on chip.

Sequences stay whole: a block of values of a head goes through its sequence in chunks, and carries the state S [K, V] in
registers. q, k, v and g are read once and o is written once, which is the least that memory has to move. The work of a
sequence is one chunk after the other, so it takes many heads and sequences to fill a device.

The kernels are in gla_triton_kernels, a folder for each op. Triton is imported when an op is first called.
"""

from __future__ import annotations

import gla_triton_kernels as kernels
from gla_core.dispatch.backend import Backend, Capabilities, Constants, CostModel, OpCall, hookimpl, shipped_constants
from gla_triton_kernels.chunk_gla import backward, chunk_gla_bwd, chunk_gla_fwd, chunk_gla_summary, forward, summary
from gla_triton_kernels.chunk_gla import cost as chunk_gla_cost
from gla_triton_kernels.online_softmax import ONE_PASS
from gla_triton_kernels.online_softmax import cost as online_softmax_cost
from gla_triton_kernels.recurrent_gla_step import STEP
from gla_triton_kernels.recurrent_gla_step import cost as recurrent_gla_step_cost
from gla_triton_kernels.runtime.architecture import interpreted
from gla_triton_kernels.softmax_attention import cost as softmax_attention_cost
from gla_triton_kernels.softmax_attention import softmax_attention
from gla_triton_kernels.softmax_attention.plan import plan_one_pass


@hookimpl
def gla_register_backends() -> list[Backend]:
    return [
        Backend(
            name="triton_fused",
            version="0.1.0",
            ops={
                "chunk_gla_fwd": chunk_gla_fwd(forward.plan_whole),
                "chunk_gla_bwd": chunk_gla_bwd(backward.plan_whole),
                "chunk_gla_summary": chunk_gla_summary(summary.plan_whole),
                "recurrent_gla_step": STEP,
                "online_softmax": ONE_PASS,
                "softmax_attention": softmax_attention(plan_one_pass),
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


def predicted_seconds(call: OpCall, c: Constants) -> float | None:
    """Returns the predicted seconds of a call, by the constants of its op and device; None on a CPU."""
    if call.device.type != "cuda":
        return None
    match call.op:
        case "chunk_gla_fwd":
            return chunk_gla_cost.forward_seconds(forward.plan_whole, call, c)
        case "chunk_gla_bwd":
            return chunk_gla_cost.backward_seconds(backward.plan_whole, call, c)
        case "chunk_gla_summary":
            return chunk_gla_cost.summary_seconds(summary.plan_whole, call, c)
        case "recurrent_gla_step":
            return recurrent_gla_step_cost.seconds(call, c)
        case "online_softmax":
            return online_softmax_cost.one_pass(call, c)
    return softmax_attention_cost.one_pass(call, c)
