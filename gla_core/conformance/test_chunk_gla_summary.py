"""chunk_gla_summary: summaries of parts are joined, and the query heads of a group give one state."""

from __future__ import annotations

import dataclasses

import pytest

from gla_core.conformance.calls import call_arguments, check, compare, expected, run, span, twice
from gla_core.conformance.cases import over
from gla_core.conformance.tolerances import FORWARD

SUMMARY, BACKWARDS = "chunk_gla_summary", "chunk_gla_gradient_summary"


@over(SUMMARY, "short", "last_chunk_partial", "minus_infinity", "packed", "ungated")
def test_grouped_queries_backwards(backend, case, measure):
    """The query heads of a group give one state; without gates each query head has its own state."""
    backwards = dataclasses.replace(case, function=BACKWARDS)
    check(BACKWARDS, call_arguments(backwards, G=3), backend.name, measure)


@over(SUMMARY, "last_chunk_partial", "minus_infinity", "ungated", "per_head", functions=True, dtypes="rotating")
@pytest.mark.parametrize("cut", [1, 64, 77])
def test_two_parts_equal_the_whole(backend, case, cut, measure):
    x = call_arguments(case)
    parts = [run(case.call, span(case.call, x, *rows), backend.name) for rows in ((None, cut), (cut, None))]
    first, then = reversed(parts) if case.function == BACKWARDS else parts
    joined = {
        "decay": first["decay"] * then["decay"],
        "state": then["decay"][..., None] * first["state"] + then["state"],
    }
    compare(case.call, x, joined, expected(case.call, x).results, measure, twice(FORWARD))
