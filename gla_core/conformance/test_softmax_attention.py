"""softmax_attention: queries without keys, large scores, merging, and gradients through either result."""

from __future__ import annotations

import pytest
import torch

import gla_core as gla
from gla_core.conformance.calls import (
    call_arguments,
    check,
    compare,
    gradients,
    heads_first,
    inputs,
    loss_gradients,
    oracle_gradients,
    oracle_results,
    repeated,
    run,
    training_request,
    twice,
    with_loss,
)
from gla_core.conformance.cases import over
from gla_core.conformance.tolerances import FORWARD, GRADIENT

ATTENTION, GRADIENTS = "softmax_attention", "softmax_attention_bwd"


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


# ---- gradients


@over(GRADIENTS, dtypes="rotating")
def test_gradients_through_one_result(backend, case, measure):
    """A missing gradient of lse means a gradient of zeros, and so does a missing gradient of o; dv is then 0."""
    x = call_arguments(case)
    zeros = run(GRADIENTS, {**x, "dlse": torch.zeros_like(x["dlse"])}, backend.name)
    compare(GRADIENTS, x, run(GRADIENTS, {**x, "dlse": None}, backend.name), zeros, measure, twice(GRADIENT))
    y, loss = inputs(case), {"lse": x["dlse"]}
    out = gradients(ATTENTION, y, training_request(backend, ATTENTION), ("q", "k"), loss)
    ref = oracle_gradients(ATTENTION, y, loss)
    compare(GRADIENTS, y, out, {n: ref[n] for n in out}, measure)


@over(GRADIENTS, dtypes="rotating")
def test_gradients_of_attention_to_views(backend, case, measure):
    """Inputs and incoming gradients may be strided views; the gradient of a sum has stride 0 in all dimensions."""
    x, loss = inputs(case), loss_gradients(ATTENTION, inputs(case))
    views = {n: heads_first(x[n]) for n in ("q", "k", "v")}
    for lse in (heads_first(loss["lse"]), repeated(loss["lse"], 0, 1, 2)):
        seen = {"o": heads_first(loss["o"]), "lse": lse}
        out = gradients(ATTENTION, {**x, **views}, training_request(backend, ATTENTION), loss=seen)
        compare(GRADIENTS, x, out, oracle_gradients(ATTENTION, x, seen), measure)


@over(GRADIENTS, "small", "grouped")
def test_gradients_of_queries_without_keys(backend, case, measure):
    """The first queries see no key: their dq is 0, and they change no other gradient."""
    x = inputs(case)
    x = {**x, "k": x["k"][:, :-7], "v": x["v"][:, :-7], "causal": True}
    y = with_loss(GRADIENTS, x)
    ref = oracle_gradients(ATTENTION, {**x, "q": x["q"][:, 7:]}, {"o": y["do"][:, 7:], "lse": y["dlse"][:, 7:]})
    ref["dq"] = torch.nn.functional.pad(ref["dq"], (0, 0, 0, 0, 7, 0))
    compare(GRADIENTS, y, run(GRADIENTS, y, backend.name), ref, measure)
