"""Diagnoses a run in at most five lines: what its failures have in common, where to look first, how to repeat it.

It reads the rows of `summary.py`. A row holds the case's facts (`facts.py`), its size, and the place where its result
is wrong (`divergence.py`).
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from gla_core.conformance.summary import Row, complaint, property_of
from gla_core.conformance.tolerances import number
from gla_core.ops import ABSTRACT_OPS

KINDS = ("changed inputs", "errors", "results", "NaN", "values", "opcheck")
"""The kinds of failure, root causes first: a later kind may be the consequence of an earlier one."""
MOST = 0.25
"""Largest share of passed cases that may have a fact which is said to distinguish the failed ones."""
FEW = 2
"""Largest number of properties, and of facts, that are named one by one."""


def kind(row: Row) -> str:
    """Returns the kind of a failed case, one of `KINDS`."""
    over = [error for error in row["errors"] if not error["error"] <= error["budget"]]
    if over and property_of(row).startswith("inputs unchanged"):
        return "changed inputs"
    if over:
        return "values" if all(wrong["finite"] for wrong in row["wrong"]) else "NaN"
    reason = row["reason"] or ""
    if "OpCheckError" in reason:
        return "opcheck"
    return "results" if reason.startswith(("AssertionError", "assert")) or "BackendError" in reason else "errors"


def diagnosis(rows: Sequence[Row], command: str) -> list[str]:
    """Returns the diagnosis, line by line; empty if no case failed.

    Args:
        rows: all cases of a run.
        command: the command that runs the kit on this backend, such as "gla conformance mine".
    """
    failed = [row for row in rows if row["outcome"] == "failed"]
    if not failed:
        return []
    op = min((row["op"] for row in failed), key=lambda op: [*ABSTRACT_OPS, op].index(op))
    op_rows = [row for row in rows if row["op"] == op]
    kinds = Counter(kind(row) for row in failed if row["op"] == op)
    # If more cases have wrong values, NaN is their consequence: some tests put NaN where a wrong kernel reads.
    worst = min((name for name in kinds if name != "NaN" or kinds["NaN"] >= kinds["values"]), key=KINDS.index)
    culprits = [row for row in failed if row["op"] == op and kind(row) == worst]
    examined, passed = experiment(op_rows, culprits)
    smallest = min(examined, key=lambda row: (row["size"], row["dtype"] != "float32", row["id"]))
    file, _ = smallest["test"].split("::")
    lines = {
        "begin with": _cause(op, worst, culprits, failed),
        "in common": _in_common(op_rows, examined, passed),
        "smallest": _first_wrong(smallest),
        "factor": _factor(smallest, worst),
        "to see it": f'{command} -k "{file} and {smallest["id"]}" -- --tb=short',
    }
    return [f"{label:<10}  {text}" for label, text in lines.items() if text]


def experiment(rows: Iterable[Row], culprits: Iterable[Row]) -> tuple[list[Row], list[Row]]:
    """Returns the failed and the passed cases of the most telling property.

    This is the property with the most workloads, among those with a passed case if there are any. Cases with nothing
    to compute do not count as passed.
    """
    failed, passed = defaultdict(list), defaultdict(list)
    for row in culprits:
        failed[property_of(row)].append(row)
    for row in rows:
        if row["outcome"] == "passed" and row["size"]:
            passed[property_of(row)].append(row)

    def tells(name: str) -> tuple:
        workloads = {(row["workload"], row["dtype"]) for row in failed[name] + passed[name]}
        return bool(passed[name]), len(workloads), -len(name)  # among equals the shortest name: prefers "values"

    name = max(failed, key=tells)
    return failed[name], passed[name]


def distinct(failed: Sequence[Row], passed: Sequence[Row]) -> tuple[list[str], int]:
    """Returns facts that all failed cases have, and the number of passed cases that have all of them.

    These are a few single facts that no passed case has, or else such a pair, or else one fact that few of them have.
    """
    shared = [fact for fact in failed[0]["facts"] if all(fact in row["facts"] for row in failed)]
    number = {fact: sum(fact in row["facts"] for row in passed) for fact in shared}
    single = [fact for fact in shared if not number[fact]]
    if single:
        return single[:FEW], 0
    for pair in itertools.combinations(shared, 2):
        if not any(set(pair) <= set(row["facts"]) for row in passed):
            return list(pair), 0
    rarest = min(shared, key=number.__getitem__, default=None)
    if rarest is None or number[rarest] > MOST * len(passed):
        return [], 0
    return [rarest], number[rarest]


def _cause(op: str, worst: str, culprits: Sequence[Row], failed: Sequence[Row]) -> str:
    """Returns the fault to mend first, or an empty text if wrong values of this op are the only failures."""
    quantities = ", ".join(dict.fromkeys(wrong["quantity"] for row in culprits for wrong in row["wrong"]))
    (reason, _), *_ = Counter(complaint(row).removeprefix(f"{op}: ") for row in culprits).most_common(1)
    text = {
        "changed inputs": f"{op} changes its inputs: {quantities}",
        "errors": f"{op}: {reason}",
        "results": f"{op}: {reason}",
        "NaN": f"{op} gives NaN or infinity where there should be none: {quantities}",
        "values": f"{op} gives wrong values",
        "opcheck": f"{op}: {reason}",
    }[worst]
    rest = len(failed) - len(culprits)
    if worst == "values" and not rest:
        return ""
    cases = f"{len(culprits)} case{'s' * (len(culprits) != 1)}"
    return f"{text} ({cases})" + (f"; the other failures ({rest}) may follow from this" if rest else "")


def _in_common(rows: Sequence[Row], failed: Sequence[Row], passed: Sequence[Row]) -> str:
    """Names facts that distinguish failed cases of a property from passed ones, and says if other properties fail."""
    name = property_of(failed[0])
    broken = dict.fromkeys(property_of(row) for row in rows if row["outcome"] == "failed")
    whole = {property_of(row) for row in rows} - set(broken)
    parts = []
    if len(broken) <= FEW < len(whole):
        fail = "fails" if len(broken) == 1 else "fail"
        parts.append(f"only {' and '.join(map(repr, broken))} {fail}; {len(whole)} other properties of the op pass")
    if not passed:
        return "; ".join([*parts, f"every case of {name!r} fails"]) if len(failed) > 1 else "".join(parts)
    facts, number = distinct(failed, passed)
    if facts:
        which = f"every failing case of {name!r} ({len(failed)}) runs {' and '.join(facts)}"
        others = f"{number} of {len(passed)} passing ones do" if number else f"no passing one ({len(passed)}) does"
        parts.append(f"{which}; {others}")
    return "; ".join(parts)


def _first_wrong(row: Row) -> str:
    name = row["id"]
    if not row["wrong"]:
        return name
    wrong = row["wrong"][0]
    return f"{name}: {wrong['quantity']} is first wrong at {wrong['at']}: {wrong['found']}, not {wrong['expected']}"


def _factor(row: Row, worst: str) -> str:
    wrong = next((wrong for wrong in row["wrong"] if wrong["ratio"] is not None), None)
    if wrong is None:
        return ""
    quantity, times = wrong["quantity"], f"{number(wrong['ratio'])} x" if wrong["ratio"] else ""
    if worst == "changed inputs":
        return f"{quantity} is {times} what it was before" if times else f"{quantity} is set to 0"
    where = "everywhere" if wrong["everywhere"] else "where it is wrong"
    hint = f": {wrong['hint']}" if wrong["hint"] else ""
    return f"{quantity} is {times} what is expected, {where}{hint}" if times else f"{quantity} is 0 {where}"
