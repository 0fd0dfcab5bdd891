"""The public ops, one file each."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor

from gla_core.dispatch.errors import UnknownOpError, nearest
from gla_core.dispatch.request import current_request
from gla_core.dispatch.selection import Explanation, explain_call
from gla_core.ops._abstract_op import needs_gradient
from gla_core.ops.chunk_gla import BACKWARD, FORWARD, chunk_gla
from gla_core.ops.linear_attention import linear_attention
from gla_core.ops.online_softmax import SOFTMAX, online_softmax
from gla_core.ops.recurrent_gla_step import STEP, recurrent_gla_step
from gla_core.ops.softmax_attention import ATTENTION, merge_attention, softmax_attention

__all__ = [
    "ABSTRACT_OPS",
    "chunk_gla",
    "explain",
    "linear_attention",
    "merge_attention",
    "online_softmax",
    "recurrent_gla_step",
    "softmax_attention",
]

ABSTRACT_OPS = {op.name: op for op in (FORWARD, BACKWARD, STEP, SOFTMAX, ATTENTION)}


def explain(op: str, *args: Any, backend: str | None = None, **kwargs: Any) -> Explanation:
    """Say who would run an abstract op on these arguments, who would not, and why; runs nothing.

    Args:
        op: name of an abstract op, such as "chunk_gla_fwd".
        *args, **kwargs: its arguments, as a backend receives them; those with a default may be left out, and so may
            the gradients of chunk_gla_bwd.
        backend: a request, as in a call.

    Returns:
        An `Explanation`; printing it gives a short report.

    Raises:
        UnknownOpError: no such op. ValueError, TypeError: bad arguments, as in a call.

    Example:
        >>> print(gla.explain("chunk_gla_fwd", q, k, v, g))
    """
    if op not in ABSTRACT_OPS:
        raise UnknownOpError(f"unknown op {op!r}{nearest(op, ABSTRACT_OPS)} (there are {', '.join(ABSTRACT_OPS)})")
    needs_grad = needs_gradient(*(x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)))
    request, call = current_request(backend), ABSTRACT_OPS[op].call(*args, needs_grad=needs_grad, **kwargs)
    explanation = explain_call(call, request)
    if needs_grad and ABSTRACT_OPS[op].backward is not None and explanation.winner is not None:
        backward = explain_call(dataclasses.replace(call, op=ABSTRACT_OPS[op].backward), request)
        if backward.winner is None:  # a call finds this out before it launches the forward
            return dataclasses.replace(explanation, winner=None, why=backward.why)
    return explanation
