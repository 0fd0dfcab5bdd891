"""`gla.explain`: shows which backend would run a call and why, and on request the measured times of all."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor

from gla_core.dispatch.backend import OpCall
from gla_core.dispatch.errors import UnknownOpError, attempt, check_known
from gla_core.dispatch.request import current_request
from gla_core.dispatch.selection import Candidate, Explanation, explain_call
from gla_core.ops import RUNS, OpSpec, checks
from gla_core.ops.calls import backward_of, needs_gradient


def explain(
    op: str, *args: Any, backend: str | None = None, measure: bool = False, capturing: bool = False, **kwargs: Any
) -> Explanation:
    """Explains which backend would run an op on these arguments, and why the others would not.

    Nothing is run unless `measure` is set.

    Args:
        op: a public name, such as "chunk_gla", which stands for its forward; or the name of an abstract op, such as
            "online_softmax_bwd".
        *args: arguments of the abstract op, as a backend receives them. Arguments with a default may be left out, and
            so may the gradients that a backward receives.
        **kwargs: the same arguments by name, as in the abstract op or in the public function.
        backend: a request, as in a call.
        measure: also run every backend that can run the call, on copies of the arguments, for a few tenths of a second
            each, and show the measured times beside the predicted ones.
        capturing: explain the call as a part of a CUDA graph.

    Returns:
        An `Explanation`; printing it gives a short report.

    Raises:
        UnknownOpError: no op has this name. ValueError, TypeError: the arguments are wrong, as in a call.

    Example:
        >>> print(gla.explain("chunk_gla", q, k, v, g))
    """
    check_known("op", op, RUNS, UnknownOpError)
    needs_grad = needs_gradient(*(x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)))
    request = current_request(backend)
    spec, decided = RUNS[op]
    kwargs = _as_in_contract(spec, args, kwargs | decided)
    asked: Any = {"needs_grad": needs_grad, "capturing": capturing, "batch_invariant": request.batch_invariant}
    call = spec.describe(*spec.complete(args, kwargs), **asked)
    explanation = explain_call(call, request)
    if needs_grad and spec.backward is not None and explanation.winner is not None:
        backward = explain_call(backward_of(call, spec.backward), request)
        if backward.winner is None:  # a call finds this out before it launches the forward
            explanation = dataclasses.replace(explanation, winner=None, why=backward.why)
    if not measure:
        return explanation
    from gla_core.bench.calls import complete  # its imports are needed here only

    return with_measured_times(explanation, complete(call, args, kwargs))


def _as_in_contract(spec: OpSpec, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Returns named arguments with gate_normalizer as a backend receives it, if the argument `gate` is given."""
    if "gate" not in kwargs or "gate_normalizer" not in spec.parameters:
        return kwargs
    gate, number = kwargs.pop("gate"), kwargs.pop("gate_normalizer", 16)
    g = dict(zip(spec.parameters, args, strict=False)).get("g", kwargs.get("g"))
    return {**kwargs, "gate_normalizer": None if gate is None else checks.normalizer(gate, number, g)}


def with_measured_times(explanation: Explanation, arguments: tuple) -> Explanation:
    """Returns the explanation with the measured time of every backend that can run the call.

    Args:
        arguments: arguments of the call, in the order in which a backend receives them; they are not changed.
    """
    return dataclasses.replace(
        explanation, candidates=tuple(_measured(c, explanation.call, arguments) for c in explanation.candidates)
    )


def _measured(candidate: Candidate, call: OpCall, arguments: tuple) -> Candidate:
    from gla_core.bench.calls import time_arguments

    if candidate.refusal is not None:
        return candidate
    timing, error = attempt(time_arguments, candidate.name, call, arguments)
    if timing is None:  # out of memory, or a kernel that cannot be built; the other backends are still measured
        first_line = str(error).strip().split("\n")[0]
        return dataclasses.replace(candidate, failure=f"{type(error).__name__}: {first_line}")
    return dataclasses.replace(candidate, measured=timing.seconds)
