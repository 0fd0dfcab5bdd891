"""`gla explain`: which backend would run a call of given sizes, and why."""

from __future__ import annotations

import dataclasses
import math
import os
from typing import Any

import torch

import gla_core as gla
from gla_core.cli.calls import device_here
from gla_core.cli.path import path_of
from gla_core.dispatch.backend import OpCall
from gla_core.dispatch.request import current_request
from gla_core.dispatch.selection import explain_call
from gla_core.explanation import with_measured_times
from gla_core.ops import ABSTRACT_OPS
from gla_core.terminal import new_console, print_explanation, print_json, print_text
from gla_core.workloads.inputs import random_arguments


def explain(call: OpCall, backend: str | None, measure: bool, as_json: bool, path: bool = False) -> bool:
    """Prints which backend would run a call; returns whether any can.

    Args:
        path: print the functions that the call enters, and its launches, instead of the reasons.

    Raises:
        ValueError, LookupError: the request cannot be read, or names an op or a backend that does not exist; or the
            call cannot be measured here.
    """
    if path and measure:
        raise ValueError("--path runs nothing; leave out --measure")
    explanation = explain_call(call, current_request(backend))
    if measure:
        explanation = _measured(explanation)
    taken = path_of(call, backend, explanation.winner) if path and explanation.winner is not None else None
    if as_json:
        print_json(_fields(explanation) | (taken.fields() if taken is not None else {}))
    elif taken is not None:
        (kernels,) = (each.kernels for each in explanation.candidates if each.name == explanation.winner)
        print_text(new_console(), "\n".join((explanation.title, explanation.why, *kernels, str(taken))))
    else:
        print_explanation(new_console(), explanation)
    return explanation.winner is not None


def _measured(explanation: gla.Explanation) -> gla.Explanation:
    call = explanation.call
    if call.assumed is not None:
        raise ValueError(f"nothing can be measured on a {call.assumed.name} that is not here; leave out --measure")
    device_here(str(call.device))
    needed, memory = sum(ABSTRACT_OPS[call.op].floor_bytes(call)), _memory(call.device)
    if needed > memory:
        raise ValueError(
            f"this call needs at least {needed / 2**30:,.1f} GiB and {call.device} has {memory / 2**30:,.1f} GiB; "
            "leave out --measure, or choose a smaller --shape"
        )
    try:
        arguments = random_arguments(call)
    except RuntimeError as error:  # other programs use the memory
        raise ValueError(f"this call cannot be measured: {str(error).strip().splitlines()[0]}") from None
    return with_measured_times(explanation, arguments)


def _memory(device: torch.device) -> float:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    if not hasattr(os, "sysconf"):  # Windows has no sysconf
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
        "gate_form": call.gate_form,
        "gate_normalizer": call.scalars.get("gate_normalizer"),
        "variable_length": call.variable_length,
        "longest": call.longest,
        "request": explanation.request,
        "source": explanation.source,
        "candidates": [dataclasses.asdict(candidate) for candidate in explanation.candidates],
        "winner": explanation.winner,
        "fastest": explanation.fastest,
        "why": explanation.why,
    }
