"""Computes the segments of sequences in parallel: computes their states, scans the states, and computes the outputs.

Let a segment have the tokens 1 to L, with log gates g_t.

    (1)  D = exp(sum over t of g_t)        S = sum over s of (k_s * exp(sum over t > s of g_t))^T v_s
    (2)  running = initial state; then for the segments i of a sequence in order:
             running, S_i = diag(D_i) running + S_i, running
    (3)  the outputs of every segment, from the state S_i that enters it

(1) computes the decay of each segment and its state from a zero initial state, and writes them to memory. (2) scans
the states in place. (3) is one pass over each segment. If there are enough sequences to fill the device, they stay
whole, and only (3) is computed. If some rows of a batch fill the device and a few remain, only the remaining rows are
cut.

The Triton kernels are in gla_triton_kernels, in one folder per op. Triton is imported when an op is first called with
tensors on a GPU. On a CPU, `pytorch` computes steps and softmaxes; the ops over segments need a GPU.

Source: Yang et al., "Gated Linear Attention Transformers with Hardware-Efficient Training" (arXiv 2312.06635), sec. 4.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

import gla_triton_kernels as kernels
from gla_core.dispatch.backend import (
    GATES,
    Backend,
    Capabilities,
    Constants,
    CostModel,
    Op,
    OpCall,
    Parts,
    Prepared,
    Reason,
    hookimpl,
    parts_of,
    shipped_constants,
)
from gla_parallel_scan import pytorch
from gla_triton_kernels import delta, gla
from gla_triton_kernels.online_softmax import SPLITS
from gla_triton_kernels.online_softmax import cost as online_softmax_cost
from gla_triton_kernels.softmax_attention import GRADIENTS, softmax_attention
from gla_triton_kernels.softmax_attention import cost as softmax_attention_cost
from gla_triton_kernels.softmax_attention.plan import plan_splits
from gla_triton_runtime.architecture import interpreted

_RECURRENT = {**gla.ops(cut=True), **delta.ops(cut=True)}
"""The ops of families with a recurrent state. Both Triton backends have the same kernels for them."""
_BY_TRITON = {
    **_RECURRENT,
    **SPLITS,
    "softmax_attention": softmax_attention(plan_splits),
    "softmax_attention_bwd": GRADIENTS,
}


@hookimpl
def gla_register_backends() -> list[Backend]:
    capabilities = Capabilities(
        devices=frozenset({"cpu", "cuda"}),
        dtypes=kernels.dtypes() | (set() if interpreted() else {torch.float64}),
        min_compute_capability=(8, 0),
        grouped_values=True,
        gates=frozenset(GATES),
        checkpoints=True,
        swapped_states=True,
        cuda_graphs=not interpreted(),
        batch_invariant=frozenset({"cuda", "cpu"} if interpreted() else {"cuda"}),
    )
    triton_only = replace(
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
            ops={op: _by_device(x, pytorch.OPS[op]) if op in pytorch.OPS else x for op, x in _BY_TRITON.items()},
            capabilities=capabilities,
            op_capabilities={
                **dict.fromkeys(_BY_TRITON.keys() - pytorch.OPS.keys(), triton_only),
                **dict.fromkeys(delta.OVER_SEQUENCES, replace(triton_only, key_widths=delta.KEY_WIDTHS)),
            },
            supports=_supports,
            cost=CostModel(
                predicted_seconds,
                shipped_constants("gla_parallel_scan"),
                kernels=dict.fromkeys((*_RECURRENT, "softmax_attention_bwd"), kernels.__name__),
            ),
            notes=kernels.notes,
        )
    ]


def _by_device(by_triton: Prepared, in_pytorch: Op) -> Prepared:
    """Returns an op that is computed in PyTorch on a CPU, unless Triton's kernels are interpreted there."""

    def prepare(call: OpCall) -> Callable[..., Any]:
        if _by_kernels(call):
            return by_triton.prepare(call)
        return in_pytorch.prepare(call) if isinstance(in_pytorch, Prepared) else in_pytorch

    def lines(call: OpCall) -> list[str]:
        return by_triton.kernels(call) if by_triton.kernels is not None and _by_kernels(call) else []

    def parts(call: OpCall) -> Parts:
        return () if _by_kernels(call) else parts_of(in_pytorch, call)

    return Prepared(prepare, by_triton.takes, lines, parts)


def _by_kernels(call: OpCall) -> bool:
    """Returns whether Triton's kernels compute a call."""
    return call.device.type == "cuda" or interpreted()


def _supports(call: OpCall) -> Reason | None:
    if not _by_kernels(call):
        return None
    if call.dtype == torch.float64:
        return "computes float64 on a CPU only"
    for name in ("K", "V"):
        if call.dims.get(name, 0) > kernels.MAX_WIDTH:
            return f"computes {name} up to {kernels.MAX_WIDTH} on a GPU; {name} is {call.dims[name]}"
    return kernels.refusal(call)


_SECONDS = {
    **gla.seconds(cut=True),
    **delta.seconds(cut=True),
    "online_softmax": online_softmax_cost.splits,
    "online_softmax_bwd": online_softmax_cost.splits,
    "softmax_attention": softmax_attention_cost.splits,
    "softmax_attention_bwd": softmax_attention_cost.gradients,
}


def predicted_seconds(call: OpCall, c: Constants) -> float | None:
    """Returns the predicted seconds of a call from the constants of its op and device; None for interpreted kernels."""
    if call.device.type != "cuda":
        return None if interpreted() else pytorch.predicted_seconds(call, c)
    return _SECONDS[call.op](call, c)
