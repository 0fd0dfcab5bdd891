"""Facts of a call in a few words each, such as "with cu_seqlens" or "with K > 1".

They serve to choose calls that cover all forms of an op's arguments, and to diagnose a failed run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from gla_core.dispatch.backend import CHUNK, GATE_NAMES, OpCall
from gla_core.ops import ABSTRACT_OPS
from gla_core.ops.spec import Argument, Role
from gla_core.workloads.inputs import left_out

ALONG_TIME = {"T": "tokens", "Tq": "queries", "Tk": "keys"}
ALIGNED = 16
"""Multiples of this width suit every kernel."""
MANY = 16
"""A call with more sequences than this has many."""


def forms(call: OpCall, sizes: Mapping[str, Any]) -> Iterator[str]:
    """Yields the form of a workload's call.

    It is which optional arguments the call gives or leaves out, the form of its gates, and whether its query heads or
    its value heads are grouped.
    """
    for argument in ABSTRACT_OPS[call.op].arguments:
        words = _words(argument, call, sizes)
        if words is not None:
            yield f"with {words}" if words else f"without {argument.name}"
    if call.gate_form is not None:
        yield f"with {GATE_NAMES[call.gate_form]}"
    for name, grouped in (("Hq", "grouped queries"), ("Hv", "groups of value heads")):
        if name in call.dims:
            yield f"with {grouped}" if call.dims[name] > call.dims["H"] else f"without {grouped}"


def facts(call: OpCall, sizes: Mapping[str, Any]) -> Iterator[str]:
    """Yields facts by which a workload's call may differ from others: the most telling first, its plain sizes last."""
    yield from forms(call, sizes)
    lengths = sizes.get("lengths") or ()
    if sizes.get("gates") not in (None, "none"):
        yield f"with {'gates of -inf' if sizes['gates'] == '-inf' else sizes['gates'] + ' gates'}"
    if 0 in lengths:
        yield "with empty sequences"
    if sizes.get("leading"):
        yield "with rows before the first sequence"
    if sizes.get("padding"):
        yield "with rows after the last sequence"
    if len(lengths) > MANY:
        yield f"with more than {MANY} sequences"
    if sizes.get("masked"):
        yield "with values of -inf"
    for name, things in ALONG_TIME.items():
        if name in call.dims:
            longest = max(lengths) if name == "T" and lengths else call.dims[name]
            yield f"with {'more than' if longest > CHUNK else 'at most'} {CHUNK} {things} in a sequence"
    if any(call.dims[name] % ALIGNED for name in ("K", "V") if name in call.dims):
        yield f"with K or V that is no multiple of {ALIGNED}"
    yield from (f"with {name} {'> 1' if size > 1 else f'= {size}'}" for name, size in call.dims.items())


def is_empty(call: OpCall) -> bool:
    """Returns whether there is nothing to compute."""
    return 0 in call.dims.values()


def _words(argument: Argument, call: OpCall, sizes: Mapping[str, Any]) -> str | None:
    """Returns the argument in words if the call gives it, "" if it leaves it out, None if workloads do not decide."""
    spec = ABSTRACT_OPS[call.op]
    if argument.role is Role.STATE and (spec.requires(Role.STATE) or argument is not spec.has(Role.STATE)):
        return None
    passed = {
        Role.GATE: call.gate_dtype is not None,
        Role.STATE: call.state_dtype is not None,
        Role.OFFSETS: call.variable_length,
        Role.SLOTS: call.indexed,
    }
    if argument.role in passed:
        return argument.name if passed[argument.role] else ""
    if argument.is_optional_input:
        return "" if argument.name in left_out(sizes) else argument.name
    if argument.role is Role.MARKS:
        return argument.name if sizes.get(argument.name) is not None else ""
    if argument.dtype is not None or argument.hint:
        return None
    if argument.name not in sizes:
        return ""
    value = sizes[argument.name]
    return f"{argument.name}={value}" if isinstance(value, str) else argument.name
