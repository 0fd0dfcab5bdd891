"""Computes an op by another op, for a backend that implements only the other one.

Ops declare how (`OP_LOWERINGS`). The core completes each backend that is registered: one with `chunk_gla_fwd`, for
example, serves `chunk_gla_pool` without naming it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from gla_core.dispatch.backend import (
    OP_LOWERINGS,
    OP_PARAMETERS,
    OP_RAW_INPUTS,
    Backend,
    Op,
    OpCall,
    Prepared,
    Reason,
    arguments_of,
    as_received,
    by_keyword,
    has_raw_inputs,
    prepared,
)
from gla_core.dispatch.tensors import log_gates, wide


def completed(backend: Backend) -> Backend:
    """Returns the backend with each op that it lacks and that can be computed by one that it implements."""
    missing = {
        op: lowering.by for op, lowering in OP_LOWERINGS.items() if op not in backend.ops and lowering.by in backend.ops
    }
    ops = {op: lowered(op, backend.ops[by]) for op, by in missing.items()}
    can = {op: backend.op_capabilities[by] for op, by in missing.items() if by in backend.op_capabilities}
    return dataclasses.replace(backend, ops={**backend.ops, **ops}, op_capabilities={**can, **backend.op_capabilities})


def lowered(
    op: str, part: Op, direct: Prepared | None = None, refusal: Callable[[OpCall], Reason | None] = lambda call: None
) -> Prepared:
    """Returns an implementation of an op that computes by `part`, an implementation of the op in its lowering.

    A backend that is registered gets it without asking. A backend with a kernel for some devices alone may call it for
    the others. For each call it is refused, and its time is predicted, as the part is.

    Args:
        direct: an implementation of the op itself, for the calls that `refusal` does not refuse. It takes all arguments
            of the op, in order.
        refusal: takes a call, returns why `direct` cannot compute it, so that `part` does; None if it can.

    Example:
        >>> pool = lowered("chunk_gla_pool", chunk_gla_fwd)
        >>> ops = {"chunk_gla_fwd": chunk_gla_fwd, "chunk_gla_pool": pool}
        >>> Backend("mine", "1.0", ops)
    """
    lowering, takes = OP_LOWERINGS[op], arguments_of(part)

    def prepare(call: OpCall) -> Callable[..., Any]:
        """Returns the function that computes calls of one signature, directly or by the other op."""
        if direct is not None and refusal(call) is None:
            return direct.prepare(call)
        return with_plain_inputs(call, by_part)  # they are computed once, and not in every part

    def by_part(call: OpCall) -> Callable[..., Any]:
        if not isinstance(part, Prepared):
            return lowering.function(_by_name(part, takes, by_keyword(part)))
        functions = (prepared(part, as_received(part, each)) for each, _ in lowering.parts(call))
        return lowering.function(*(_by_name(function, takes, False) for function in functions))

    def kernels(call: OpCall) -> list[str]:
        reason = None if direct is None else refusal(call)
        if direct is not None and reason is None:
            return _lines(direct, call)
        by_part = _lines(part, as_received(part, lowering.parts(call)[0][0]))
        return by_part if reason is None else [*by_part, f"by {lowering.by}: {reason}"]

    return Prepared(prepare, OP_PARAMETERS[op], kernels, lowering.parts)


def with_plain_inputs(call: OpCall, prepare: Callable[[OpCall], Callable[..., Any]]) -> Callable[..., Any]:
    """Returns what `prepare` returns for the call with plain inputs, after a function that computes these inputs.

    Functions take all arguments of the op in order. If the call has no raw inputs, `prepare` gets the call itself.
    """
    if not has_raw_inputs(call):
        return prepare(call)
    raw, names = OP_RAW_INPUTS[call.op], OP_PARAMETERS[call.op]
    function = prepare(raw.plain_call(call))
    return lambda *args: function(*raw.plain(dict(zip(names, args, strict=True))).values())


def _lines(op: Op, call: OpCall) -> list[str]:
    """Returns the lines of an implementation for `explain`; see `Prepared.kernels`."""
    return op.kernels(call) if isinstance(op, Prepared) and op.kernels is not None else []


def _by_name(function: Callable[..., Any], takes: tuple[str, ...], keywords: bool) -> Callable[..., Any]:
    """Returns a function that takes arguments of an op by name, and passes `function` those that it takes.

    An argument that the op may lack, and that the function that calls it does not have, is None.
    """

    def run(**x: Any) -> Any:
        if "gate_normalizer" not in takes and x.get("gate_normalizer") is not None:
            x["g"] = log_gates(x["g"], x["gate_normalizer"], wide(x["q"].dtype)).contiguous()
        return function(**{name: x.get(name) for name in takes}) if keywords else function(*map(x.get, takes))

    return run
