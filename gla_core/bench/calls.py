"""Makes tensors for calls of abstract ops by one backend, and measures the times of the calls.

An `OpCall` describes a call. If its `capturing` is set, the call runs in a CUDA graph.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gla_core.bench import measure
from gla_core.dispatch.backend import OpCall
from gla_core.dispatch.request import current_request
from gla_core.ops import ABSTRACT_OPS
from gla_core.ops.calls import run
from gla_core.workloads.inputs import random_arguments

Arguments = tuple[Any, ...]
"""All arguments of an op in order: the arguments that a backend receives, and hints."""


def complete(call: OpCall, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Arguments:
    """Returns all arguments of `call` in order. A required tensor that was left out gets random values."""
    spec = ABSTRACT_OPS[call.op]
    present = [
        torch.randn(spec.shape(argument, call), dtype=call.dtype, device=call.device)
        if x is None and argument.type == "Tensor"
        else x
        for argument, x in zip(spec.arguments, spec.complete(tuple(args), kwargs), strict=True)
    ]
    return spec.prepared(tuple(present))


def run_once(backend: str, call: OpCall) -> None:
    """Runs a call once, so that everything is compiled."""
    _run(call.op, backend, random_arguments(call))
    measure.synchronize(call.device)


def time_call(backend: str, call: OpCall, budget: float = 0.2) -> measure.Timing:
    """Measures a call on random arguments; see `time_arguments`."""
    return time_arguments(backend, call, random_arguments(call), budget)


def time_arguments(backend: str, call: OpCall, arguments: Arguments, budget: float = 0.2) -> measure.Timing:
    """Measures a call on copies of these arguments: in a CUDA graph if `call.capturing`, otherwise eagerly.

    Args:
        budget: seconds of timed calls.

    Raises:
        NoBackendError, UnknownBackendError: the backend cannot run the call. Exceptions of the backend pass through.
    """
    calls = calls_for(backend, call, arguments)
    return (measure.time_graph if call.capturing else measure.time_calls)(calls, call.device, budget)


def calls_for(backend: str, call: OpCall, arguments: Arguments) -> list[measure.Call]:
    """Returns the call on several copies of its arguments, so that no call finds them in the device's cache."""
    size = sum(x.numel() * x.element_size() for x in arguments if isinstance(x, Tensor))
    sets = (tuple(map(_copy, arguments)) for _ in range(measure.rotations(size, call.device)))
    return [functools.partial(_run, call.op, backend, each) for each in sets]


def _run(op: str, backend: str, arguments: Arguments) -> Any:
    return run(ABSTRACT_OPS[op], arguments, current_request(backend))


def _copy(x: Any) -> Any:
    """Copies a tensor without requires_grad, so that calls need no `torch.no_grad()`, which costs the host 2 us."""
    return x.detach().clone() if isinstance(x, Tensor) else x
