"""Says which calls the backward kernels for SM90 compute. Imports no Triton."""

from __future__ import annotations

import torch

from gla_core.dispatch.backend import CHUNK, OpCall, Reason
from gla_triton_kernels.delta.plan import plan_pass
from gla_triton_runtime.architecture import Gpu
from gla_triton_runtime.tma import addressable

WIDTH = 128
"""The key and value width of the kernels."""


def refusal(call: OpCall, gpu: Gpu, cut: bool) -> Reason | None:
    """Returns the reason why the backward kernels for SM90 cannot compute a call, or None."""
    if not gpu.facts.has_wgmma:
        return f"needs Hopper (compute capability 9.0); the GPU is of the kind {gpu.facts.known_as}"
    if call.dtype != torch.bfloat16:
        return f"computes bfloat16; q is {str(call.dtype).removeprefix('torch.')}"
    K, V = call.dims["K"], call.dims["V"]
    if (K, V) != (WIDTH, WIDTH):
        return f"computes K and V of {WIDTH}; K is {K} and V is {V}"
    if call.variable_length:
        return "computes batches; sequences are packed"
    if call.gate_form == "constant":
        return "computes a gate for each key or each head, or none; g has one constant gate for each head"
    if call.scalars["gate_normalizer"] is not None:
        return "computes log gates; g holds logits"
    if call.scalars["checkpoint_every"] != CHUNK:
        return f"reads checkpoints every {CHUNK} tokens; checkpoint_every is {call.scalars['checkpoint_every']}"
    if call.batch_invariant is not None:
        return "is not batch-invariant"
    if plan_pass(call, gpu, cut).length is not None:
        return "computes whole sequences; those of this call are cut into segments"
    return _not_addressable(call)


def _not_addressable(call: OpCall) -> Reason | None:
    names = ["q", "k", "v", "do", *(["g"] if call.gate_form == "key" else [])]
    layouts = {name: call.layouts[name] for name in names if name in call.layouts}
    wrong = next((name for name, layout in layouts.items() if not addressable(layout)), None)
    saved = call.layouts.get("checkpoints")
    if saved is not None and not (saved.aligned and saved.is_contiguous):
        wrong = "checkpoints"
    if wrong is None:
        return None
    return f"needs tensors that TMA can address: addresses and strides are multiples of 16 bytes; {wrong} is not one"
