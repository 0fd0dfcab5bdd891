"""`gla explain`: who would run a call that numbers describe, and why."""

from __future__ import annotations

import dataclasses
import math
import os
from typing import Any

import torch

import gla_core as gla
from gla_core.bench.calls import arguments_for
from gla_core.bench.floor import floor_bytes
from gla_core.cli.calls import device_here, public_op
from gla_core.dispatch.backend import OpCall
from gla_core.dispatch.request import current_request
from gla_core.dispatch.selection import explain_call
from gla_core.explanation import with_measured_times
from gla_core.terminal import print_json


def explain(call: OpCall, backend: str | None, measure: bool, as_json: bool) -> bool:
    """Print who would run a call; whether anybody can.

    Raises:
        ValueError, LookupError: a request that cannot be read or met; a call that cannot be measured here.
    """
    explanation = explain_call(call, current_request(backend))
    if measure:
        explanation = _measured(explanation)
    if as_json:
        print_json(_fields(explanation))
    else:
        print(explanation)
    return explanation.winner is not None


def _measured(explanation: gla.Explanation) -> gla.Explanation:
    call = explanation.call
    if call.assumed is not None:
        raise ValueError(f"nothing can be measured on a {call.assumed.name} that is not here; leave out --measure")
    device_here(str(call.device))
    needed, memory = _least_bytes(call), _memory(call.device)
    if needed > memory:
        raise ValueError(
            f"this call needs at least {needed / 2**30:,.1f} GiB and {call.device} has {memory / 2**30:,.1f} GiB; "
            "leave out --measure, or choose a smaller --shape"
        )
    try:
        arguments = arguments_for(call)
    except RuntimeError as error:  # others hold the memory
        raise ValueError(f"this call cannot be measured: {str(error).strip().splitlines()[0]}") from None
    return with_measured_times(explanation, arguments)


def _least_bytes(call: OpCall) -> int:
    """Of the inputs and outputs."""
    sizes: dict[str, Any] = {**call.dims, "dtype": call.dtype, "gate_dtype": call.gate_dtype}
    if call.op == "online_softmax":
        sizes["shape"] = (call.dims["rows"], call.dims["columns"])
    else:
        sizes["G"] = call.dims["Hq"] // call.dims["H"]
    return floor_bytes(public_op(call.op), sizes, backward=call.op == "chunk_gla_bwd")


def _memory(device: torch.device) -> float:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    if not hasattr(os, "sysconf"):  # Windows does not say
        return math.inf
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _fields(explanation: gla.Explanation) -> dict[str, Any]:
    call = explanation.call
    return {
        "op": call.op,
        "dims": dict(call.dims),
        "dtype": str(call.dtype).removeprefix("torch."),
        "device": str(call.device),
        "assumed": call.assumed and call.assumed.name,
        "variable_length": call.variable_length,
        "request": explanation.request,
        "source": explanation.source,
        "candidates": [dataclasses.asdict(candidate) for candidate in explanation.candidates],
        "winner": explanation.winner,
        "fastest": explanation.fastest,
        "why": explanation.why,
    }
