"""Computes log gates from logits for a backend whose function takes no gate_normalizer.

Such a function receives a tensor of log gates. Its gradient of g, if it returns one, becomes that of the logits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from gla_core.dispatch.backend import (
    Op,
    OpCall,
    arguments_of,
    contiguous_layout,
    gradient_of_logits,
    log_gates,
    wide,
)
from gla_core.ops.spec import OpSpec

_NUMBER = "gate_normalizer"


def needs_log_gates(op: Op, call: OpCall) -> bool:
    """Returns whether a call gives logits that an implementation does not take."""
    return call.scalars.get(_NUMBER) is not None and _NUMBER not in arguments_of(op)


def described(spec: OpSpec, call: OpCall) -> OpCall:
    """Returns the call with log gates in place of logits."""
    dtype, layouts = wide(call.dtype), dict(call.layouts)
    if "g" in layouts:
        layouts["g"] = contiguous_layout(layouts["g"].shape, dtype)
    scalars, given = {**call.scalars, _NUMBER: None}, call.given - {_NUMBER}
    return dataclasses.replace(call, gate_dtype=dtype, scalars=scalars, given=given, layouts=layouts)


def with_log_gates(spec: OpSpec, function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that computes log gates before it calls `function`, and the gradient of the logits after it.

    Both take all arguments of the contract in order.
    """
    q_at, g_at, number_at = (spec.contract.index(name) for name in (spec.contract[0], "g", _NUMBER))
    dg_at = next((i for i, result in enumerate(spec.results) if result.name == "dg"), None)

    def run(*args: Any) -> Any:
        logits, number = args[g_at], args[number_at]
        given = list(args)
        given[g_at], given[number_at] = log_gates(logits, number, wide(args[q_at].dtype)).contiguous(), None
        found = function(*given)
        if dg_at is None or not isinstance(found, tuple | list):
            return found
        gradients = list(found)
        gradients[dg_at] = gradient_of_logits(gradients[dg_at], logits, number).to(logits.dtype)
        return tuple(gradients)

    return run
