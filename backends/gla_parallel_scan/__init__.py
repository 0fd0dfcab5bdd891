"""Sequences in segments, all at once: states are built side by side, spilled, scanned, and outputs made from them.

Each op stands in the file of its name, which says how it is composed of Triton kernels in gla_triton_kernels, and in
that of the same name under `pytorch`, which has the same algorithm for a CPU. Triton is imported when an op is first
called with tensors on a GPU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import gla_triton_kernels as kernels
from gla_core.dispatch.backend import Backend, Capabilities, CostModel, OpCall, Reason, hookimpl, shipped_constants
from gla_parallel_scan import (
    chunk_gla,
    chunk_gla_summary,
    online_softmax,
    pytorch,
    recurrent_gla_step,
    softmax_attention,
)
from gla_parallel_scan.cost import predicted_seconds
from gla_triton_kernels.runtime.architecture import interpreted


@hookimpl
def gla_register_backends() -> list[Backend]:
    capabilities = Capabilities(
        devices=frozenset({"cpu", "cuda"}),
        dtypes=kernels.dtypes() | (set() if interpreted() else {torch.float64}),
        min_compute_capability=(8, 0),
        checkpoints=True,
        swapped_states=True,
        cuda_graphs=not interpreted(),
        batch_invariant=frozenset({"cuda", "cpu"} if interpreted() else {"cuda"}),
    )
    by_triton_alone = replace(
        capabilities,
        devices=None if interpreted() else frozenset({"cuda"}),
        dtypes=kernels.dtypes(),
        key_widths=range(1, kernels.MAX_WIDTH + 1),
        value_widths=range(1, kernels.MAX_WIDTH + 1),
    )
    return [
        Backend(
            name="parallel_scan",
            version="0.1.0",
            ops={
                "chunk_gla_fwd": _by_device(chunk_gla.chunk_gla_fwd, pytorch.chunk_gla.chunk_gla_fwd),
                "chunk_gla_bwd": chunk_gla.chunk_gla_bwd,
                "chunk_gla_summary": chunk_gla_summary.chunk_gla_summary,
                "recurrent_gla_step": _by_device(
                    recurrent_gla_step.recurrent_gla_step, pytorch.recurrent_gla_step.recurrent_gla_step
                ),
                "online_softmax": _by_device(online_softmax.online_softmax, pytorch.online_softmax.online_softmax),
                "softmax_attention": _by_device(
                    softmax_attention.softmax_attention, pytorch.softmax_attention.softmax_attention
                ),
            },
            capabilities=capabilities,
            # On a CPU a summary has no second pass that scanning would spare: there is the reference's.
            op_capabilities={"chunk_gla_bwd": by_triton_alone, "chunk_gla_summary": by_triton_alone},
            supports=_supports,
            cost=CostModel(predicted_seconds, shipped_constants("gla_parallel_scan"), kernels=kernels.COMMON),
            notes=kernels.notes,
        )
    ]


def _by_device(by_triton: Callable, in_pytorch: Callable) -> Callable:
    """An op that is computed in PyTorch on a CPU, unless Triton's kernels are to be interpreted there."""

    @functools.wraps(by_triton)
    def op(x: Tensor, *args: Any) -> Any:
        return by_triton(x, *args) if x.is_cuda or interpreted() else in_pytorch(x, *args)

    return op


def _supports(call: OpCall) -> Reason | None:
    if call.device.type == "cpu" and not interpreted():
        return None
    if call.dtype == torch.float64:
        return "computes float64 on a CPU only"
    for name in ("K", "V"):
        if call.dims.get(name, 0) > kernels.MAX_WIDTH:
            return f"computes {name} up to {kernels.MAX_WIDTH} on a GPU; {name} is {call.dims[name]}"
    return kernels.refusal(call)
