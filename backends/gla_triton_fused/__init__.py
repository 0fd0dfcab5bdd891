"""Triton kernels that make one pass over their inputs and keep the state on chip.

Sequences stay whole: a program goes through a sequence of a head in chunks, and keeps a block of the state S [K, V] in
registers. q, k, v and g are read once and o is written once, which is the least possible memory traffic. The chunks of
a sequence are computed one after another. To fill a device, a call therefore needs many heads and sequences.

The kernels are in gla_triton_kernels, in one folder per op. Triton is imported when an op is first called.
"""

from __future__ import annotations

from dataclasses import replace

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
from gla_triton_kernels import delta, gla
from gla_triton_kernels.online_softmax import ONE_PASS
from gla_triton_kernels.online_softmax import cost as online_softmax_cost
from gla_triton_kernels.softmax_attention import GRADIENTS, softmax_attention
from gla_triton_kernels.softmax_attention import cost as softmax_attention_cost
from gla_triton_kernels.softmax_attention.plan import plan_one_pass
from gla_triton_runtime.architecture import interpreted

_RECURRENT = {**gla.ops(cut=False), **delta.ops(cut=False)}
"""The ops of families with a recurrent state. Both Triton backends have the same kernels for them."""


@hookimpl
def gla_register_backends() -> list[Backend]:
    capabilities = Capabilities(
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
    )
    return [
        Backend(
            name="triton_fused",
            version="0.1.0",
            ops={
                **_RECURRENT,
                **ONE_PASS,
                "softmax_attention": softmax_attention(plan_one_pass),
                "softmax_attention_bwd": GRADIENTS,
            },
            capabilities=capabilities,
            op_capabilities=dict.fromkeys(delta.OVER_SEQUENCES, replace(capabilities, key_widths=delta.KEY_WIDTHS)),
            supports=kernels.refusal,
            cost=CostModel(
                predicted_seconds,
                shipped_constants("gla_triton_fused"),
                kernels=dict.fromkeys((*_RECURRENT, "softmax_attention_bwd"), kernels.__name__),
            ),
            notes=kernels.notes,
        )
    ]


_SECONDS = {
    **gla.seconds(cut=False),
    **delta.seconds(cut=False),
    "online_softmax": online_softmax_cost.one_pass,
    "online_softmax_bwd": online_softmax_cost.one_pass,
    "softmax_attention": softmax_attention_cost.one_pass,
    "softmax_attention_bwd": softmax_attention_cost.gradients,
}


def predicted_seconds(call: OpCall, c: Constants) -> float | None:
    """Returns the predicted seconds of a call from the constants of its op and device; None on a CPU."""
    return _SECONDS[call.op](call, c) if call.device.type == "cuda" else None
