"""The summary of a run: counts, the worst error of each property, and the reasons of failed and open cases.

A row is one case: test, id, op, workload, dtype, size, facts, outcome (passed, failed or open), reason, errors, and
wrong. An error is a quantity, the error found and its budget; `divergence` makes the entries of wrong.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

Row = dict[str, Any]

NAMED = 3
"""Number of cases that are named for each reason."""


def counts(rows: list[Row]) -> dict[str, int]:
    """Returns the number of cases that passed, failed and stayed open; refusals are among the passed ones."""
    total = {outcome: sum(row["outcome"] == outcome for row in rows) for outcome in ("passed", "failed", "open")}
    return {**total, "refusals": sum(row["test"].startswith("test_refusals.py") for row in rows)}


def properties(rows: list[Row]) -> list[dict[str, Any]]:
    """Returns, per op and property, the cases, failures, open cases, and the worst error relative to its budget."""
    judged = []
    for group in by_property(rows):
        errors = [{"case": case_name(row), **error} for row in group for error in row["errors"]]
        numbers = {outcome: sum(row["outcome"] == outcome for row in group) for outcome in ("failed", "open")}
        worst = finite(max(errors, key=_ratio)) if errors else None
        named = {"op": group[0]["op"], "property": property_of(group[0])}
        judged.append({**named, "cases": len(group), **numbers, "worst": worst})
    return judged


def by_property(rows: Iterable[Row]) -> list[list[Row]]:
    """Returns the rows of each op and property, in the order in which these occur first."""
    groups = defaultdict(list)
    for row in rows:
        groups[row["op"], property_of(row)].append(row)
    return list(groups.values())


def reasons(rows: list[Row], outcome: str) -> list[dict[str, Any]]:
    """Returns each reason why cases failed or stayed open, with the number of these cases and the names of a few."""
    groups = defaultdict(list)
    for row in rows:
        if row["outcome"] == outcome:
            groups[row["reason"]].append(case_name(row))
    return [{"reason": why, "cases": len(names), "such as": names[:NAMED]} for why, names in groups.items()]


def table(rows: list[Row]) -> list[str]:
    """Returns the properties as lines of text, grouped by op."""
    judged = properties(rows)
    widest = max((len(row["property"]) for row in judged), default=0)
    lines = []
    for op in dict.fromkeys(row["op"] for row in judged):
        lines.append(f"{op:<{widest + 2}} cases  failed  open  error/budget")
        for row in (row for row in judged if row["op"] == op):
            ratio = "-" if row["worst"] is None else ratio_text(row["worst"])
            failed, still_open = row["failed"] or "-", row["open"] or "-"
            lines.append(f"  {row['property']:<{widest}} {row['cases']:>5}  {failed:>6}  {still_open:>4}  {ratio:>12}")
    return lines


def property_of(row: Row) -> str:
    """Returns the property that a case checks: the name of its test, in words."""
    return row["test"].split("::")[-1].removeprefix("test_").replace("_", " ")


def complaint(row: Row) -> str:
    """Returns the reason of a failed case, without the exception's name if that adds nothing."""
    return re.sub(r"^([\w.]+\.)?(AssertionError|BackendError): ", "", row["reason"] or "no reason given")


def case_name(row: Row) -> str:
    """Returns the file, the test and the parameters of a case."""
    return f"{row['test'].split('::')[0]}::{row['id']}"


def ratio_text(error: dict[str, Any]) -> str:
    """Returns an error as a fraction of its budget."""
    ratio = _ratio(error)
    return f"{ratio:.2f}" if math.isfinite(ratio) else "infinite"


def finite(error: dict[str, Any]) -> dict[str, Any]:
    """Returns the error as JSON values: its number is None if it is infinite or NaN."""
    value = error["error"]
    return {**error, "error": value if value is not None and math.isfinite(value) else None}


def _ratio(error: dict[str, Any]) -> float:
    value, budget = error["error"], error["budget"]
    if value is None or not math.isfinite(value):
        return math.inf
    if budget == 0:
        return math.inf if value else 0.0
    return value / budget
