"""softmax_attention: queries without keys, large scores, and merging."""

from __future__ import annotations

import pytest

import gla_core as gla
from gla_core.conformance.calls import call_arguments, check, compare, oracle_results, run, twice
from gla_core.conformance.cases import over
from gla_core.conformance.tolerances import FORWARD

ATTENTION = "softmax_attention"


@over(ATTENTION, "small", "grouped")
def test_a_query_without_keys(backend, case, measure):
    """With more queries than keys the first queries see no key: their o is NaN and their lse is -inf."""
    x = call_arguments(case)
    out = check(ATTENTION, {**x, "k": x["k"][:, :-7], "v": x["v"][:, :-7], "causal": True}, backend.name, measure)
    assert bool(out["o"][:, :7].isnan().all())
    assert bool(out["lse"][:, :7].isneginf().all())


@over(ATTENTION, "small", "not_causal")
def test_large_scores(backend, case, measure):
    """Checks scores of several hundred, whose exponentials overflow unless the maximum is subtracted."""
    x = call_arguments(case)
    check(ATTENTION, {**x, "q": 100 * x["q"]}, backend.name, measure)


@over(ATTENTION, "not_causal", "one_query", dtypes="rotating")
@pytest.mark.parametrize("cut", [1, 40])
def test_merged_parts_equal_the_whole(backend, case, cut, measure):
    x = {**call_arguments(case), "causal": False}
    keys = ({**x, "k": x["k"][:, rows], "v": x["v"][:, rows]} for rows in (slice(cut), slice(cut, None)))
    parts = [run(ATTENTION, part, backend.name) for part in keys]
    o, lse = gla.merge_attention(*parts[0].values(), *parts[1].values())
    compare(ATTENTION, x, {"o": o, "lse": lse}, oracle_results(ATTENTION, x), measure, twice(FORWARD))
