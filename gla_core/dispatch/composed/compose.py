"""Makes an implementation of one op from an implementation of another, be it a function or a `Prepared`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from gla_core.dispatch.backend import (
    OP_PARAMETERS,
    Op,
    OpCall,
    Prepared,
    arguments_of,
    as_received,
    by_keyword,
    prepared,
)
from gla_core.dispatch.tensors import log_gates, wide

Kind = TypeVar("Kind", Prepared, Callable[..., Any], Op)
"""A kind of implementation. What is made from a function is a function, and what is made from a `Prepared` is one."""


def compose(
    name: str,
    part: Op,
    calls: Callable[[OpCall], Iterable[OpCall]],
    function_of: Callable[..., Callable[..., Any]],
    kernels: Callable[[OpCall], list[str]] | None = None,
) -> Any:
    """Returns an implementation of an op that computes by an implementation of another op.

    Args:
        name: the op.
        part: the implementation of the other op.
        calls: returns the calls of the other op by which a call of the op is computed.
        function_of: takes a function for each of these calls, or one for all of them, and returns the function that
            computes the op. The functions that it takes have the arguments of the other op, by name.
        kernels: the lines for `explain`, if `part` is a `Prepared`.
    """
    takes = arguments_of(part)
    if not isinstance(part, Prepared):
        return function_of(_by_name(part, takes, by_keyword(part)))

    def prepare(call: OpCall) -> Callable[..., Any]:
        return function_of(*(_by_name(prepared(part, as_received(part, each)), takes, False) for each in calls(call)))

    return Prepared(prepare, OP_PARAMETERS[name], kernels)


def _by_name(function: Callable[..., Any], takes: tuple[str, ...], keywords: bool) -> Callable[..., Any]:
    """Returns a function that takes all arguments of an op by name, and gives `function` those that it takes."""

    def run(**x: Any) -> Any:
        if "gate_normalizer" not in takes and x["gate_normalizer"] is not None:
            x["g"] = log_gates(x["g"], x["gate_normalizer"], wide(x["q"].dtype)).contiguous()
        return function(**{name: x[name] for name in takes}) if keywords else function(*(x[name] for name in takes))

    return run
