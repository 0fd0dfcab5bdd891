"""Says which calls the backward kernels for SM90 compute. Imports no Triton.

B batch   T tokens   H heads of q and k   Hv value heads   K, V key and value width
"""

from __future__ import annotations

from gla_core.dispatch.backend import OpCall, Reason, contiguous_layout
from gla_triton_kernels.delta.plan import has_key_gates
from gla_triton_kernels.delta.sm90 import LEAST, MOST_KEYS, moved_by_tma, refusal_of_kind
from gla_triton_runtime.architecture import Gpu
from gla_triton_runtime.tma import addressable

MOST_WIDTH, WIDTH_UNIT = 128, 8
"""The most keys or values of a head whose gradients are all computed here, and the number of which widths are
multiples: rows of bfloat16 are then multiples of 16 bytes."""


def refusal(call: OpCall, gpu: Gpu) -> Reason | None:
    """Returns the reason why the backward kernels for SM90 cannot compute a call, or None."""
    if (reason := _refusal(call, gpu)) is not None:
        return reason
    K, V = call.dims["K"], call.dims["V"]
    if max(K, V) > MOST_WIDTH:
        return f"computes at most {MOST_WIDTH} keys and values; K is {K} and V is {V}"
    if call.gate_form == "constant":
        return "computes a gate for each key or each head, or none; g has one constant gate for each head"
    if call.scalars.get("gate_normalizer") is not None:
        return "computes log gates; g holds logits"
    return None


def computes_passes(call: OpCall, gpu: Gpu) -> bool:
    """Returns whether kernels for SM90 carry the gradients of states where general/gradients.py computes the others."""
    return _refusal(call, gpu) is None and call.dims["K"] <= MOST_KEYS and not has_key_gates(call)


def _refusal(call: OpCall, gpu: Gpu) -> Reason | None:
    """Returns the reason why none of these kernels computes a call, or None."""
    if (reason := refusal_of_kind(call, gpu)) is not None:
        return reason
    K, V = call.dims["K"], call.dims["V"]
    if min(K, V) < LEAST or K % WIDTH_UNIT or V % WIDTH_UNIT:
        return f"computes K and V from {LEAST} in multiples of {WIDTH_UNIT}; K is {K} and V is {V}"
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
