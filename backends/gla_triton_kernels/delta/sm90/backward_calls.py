"""Says which calls the backward kernels for SM90 compute. Imports no Triton.

B batch   T tokens   H heads of q and k   Hv value heads   K, V key and value width
"""

from __future__ import annotations

import torch

from gla_core.dispatch.backend import OpCall, Reason, contiguous_layout
from gla_triton_kernels.delta.sm90 import LEAST, moved_by_tma
from gla_triton_runtime.architecture import Gpu
from gla_triton_runtime.tma import addressable

MOST_WIDTH, WIDTH_UNIT = 128, 8
"""The most keys or values of a head, and the number of which these are multiples: rows of bfloat16 are then multiples
of 16 bytes."""


def refusal(call: OpCall, gpu: Gpu) -> Reason | None:
    """Returns the reason why the backward kernels for SM90 cannot compute a call, or None."""
    if not gpu.facts.has_wgmma:
        return f"needs Hopper (compute capability 9.0); the GPU is of the kind {gpu.facts.known_as}"
    if call.dtype != torch.bfloat16:
        return f"computes bfloat16; q is {str(call.dtype).removeprefix('torch.')}"
    K, V = call.dims["K"], call.dims["V"]
    if not (LEAST <= K <= MOST_WIDTH and LEAST <= V <= MOST_WIDTH) or K % WIDTH_UNIT or V % WIDTH_UNIT:
        widths = f"K and V from {LEAST} to {MOST_WIDTH} in multiples of {WIDTH_UNIT}"
        return f"computes {widths}; K is {K} and V is {V}"
    if call.gate_form == "constant":
        return "computes a gate for each key or each head, or none; g has one constant gate for each head"
    if call.scalars.get("gate_normalizer") is not None:
        return "computes log gates; g holds logits"
    if call.batch_invariant is None and (names := sorted(_not_addressable(call))):
        return f"needs tensors that TMA can address: addresses and strides are multiples of 16 bytes; {names[0]} is not"
    return None


def copied(call: OpCall) -> frozenset[str]:
    """Returns the names of tensors that are copied so that TMA can address them, under batch invariance.

    The results of a sequence would otherwise depend on the addresses of tensors.
    """
    return frozenset() if call.batch_invariant is None else _not_addressable(call)


def _not_addressable(call: OpCall) -> frozenset[str]:
    """Returns the names of tensors that TMA cannot address. One whose layout is not known counts as contiguous."""
    B, T, Hv, V = (call.dims[name] for name in ("B", "T", "Hv", "V"))
    do = call.layouts.get("do") or contiguous_layout((B, T, Hv, V), call.dtype)
    layouts = {**moved_by_tma(call), "do": do}
    return frozenset(name for name, layout in layouts.items() if not addressable(layout))
