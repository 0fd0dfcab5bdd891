"""Computes log gates from logits for a backend whose function takes no gate_normalizer.

Such a function receives a tensor of log gates. Its gradient of g, if it returns one, becomes that of the logits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from gla_core.dispatch.tensors import gradient_of_logits, log_gates, wide
from gla_core.ops.spec import OpSpec


def with_log_gates(spec: OpSpec, function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that computes log gates before it calls `function`, and the gradient of the logits after it.

    Both take all arguments of the contract in order.
    """
    q_at, g_at, number_at = (spec.contract.index(name) for name in (spec.contract[0], "g", "gate_normalizer"))
    dg_at = next((i for i, result in enumerate(spec.results) if result.name == "dg"), None)

    def run(*args: Any) -> Any:
        logits, number = args[g_at], args[number_at]
        arguments = list(args)
        arguments[g_at], arguments[number_at] = log_gates(logits, number, wide(args[q_at].dtype)).contiguous(), None
        results = function(*arguments)
        return results if dg_at is None else _with_gradient_of_logits(results, dg_at, logits, number)

    return run


def _with_gradient_of_logits(results: Any, dg_at: int, logits: Tensor, number: int) -> Any:
    """Returns the results of a backward with the gradient of the logits in place of that of the log gates.

    Results that are not as the contract says are returned unchanged, and the check of results refuses them.
    """
    dg = results[dg_at] if isinstance(results, tuple | list) and len(results) > dg_at else None
    if not isinstance(dg, Tensor) or dg.shape != logits.shape:
        return results
    dg = gradient_of_logits(dg, logits, number).to(logits.dtype)
    return (*results[:dg_at], dg, *results[dg_at + 1 :])
