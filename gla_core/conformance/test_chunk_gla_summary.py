"""chunk_gla_summary: decays and states in both directions, joined summaries, gradients, packing, layouts, memory."""

from __future__ import annotations

import pytest
import torch

from gla_core.conformance import oracle
from gla_core.conformance.calls import (
    expected_summary,
    heads_first,
    poisoned,
    rows_of_no_sequence,
    run_summary,
    summary,
    three_runs,
    training_request,
)
from gla_core.conformance.cases import over
from gla_core.conformance.tolerances import FORWARD, GRADIENT
from gla_core.workloads.inputs import normal

SUMMARY = "chunk_gla_summary"
both_directions = pytest.mark.parametrize("backwards", [False, True], ids=["forwards", "backwards"])


def tensors(x):
    return {name: y for name, y in x.items() if isinstance(y, torch.Tensor)}


def check(out, expected, measure, budget):
    """Compares decays and states.

    Decays are factors of states, so their absolute error counts. No matrix product computes them, so their budget is
    at most the budget of float32.
    """
    decays = ({"decay": 1 + x["decay"].double()} for x in (out, expected))
    measure(*decays, min(budget, FORWARD[torch.float32]))
    measure(out, {"state": expected["state"]}, budget)


@both_directions
@over(SUMMARY)
def test_values(backend, case, backwards, measure, layout):
    x = summary(case, backwards)
    out, expected = run_summary(x, backend.name), expected_summary(x)
    check(out, expected, measure, FORWARD[case.dtype])
    wide = torch.float64 if case.dtype == torch.float64 else torch.float32
    layout(out, {name: (y.shape, wide) for name, y in expected.items()}, case.device, tensors(x))


@both_directions
@over(SUMMARY, at_size=True)
def test_values_at_size(backend, case, backwards, measure):
    """The reference in float64 gives the expected values, one row of the batch at a time."""
    x = summary(case, backwards)
    parts = []
    for b in range(len(x["left"])):
        given = {name: y for name in ("left", "right", "g") if (y := x[name]) is not None}
        row = {name: (y if y.ndim == 1 else y[b : b + 1]).double() for name, y in given.items()}
        parts.append(run_summary({**x, **row}, "reference"))
    expected = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    check(run_summary(x, backend.name), expected, measure, FORWARD[case.dtype])


@both_directions
@over(SUMMARY, "short", "packed", "extreme")
def test_float32_gates(backend, case, backwards, measure):
    x = summary(case, backwards, gate_dtype=torch.float32)
    check(run_summary(x, backend.name), expected_summary(x), measure, FORWARD[case.dtype])


@over(SUMMARY, "short", "last_chunk_partial", "minus_infinity", "packed", "ungated")
def test_grouped_queries_backwards(backend, case, measure):
    """The query heads of a group give one state; without gates each query head has its own state."""
    x = summary(case, backwards=True, G=3)
    check(run_summary(x, backend.name), expected_summary(x), measure, FORWARD[case.dtype])


@both_directions
@over(SUMMARY, "last_chunk_partial", "minus_infinity", "ungated", "per_head", dtypes="in_turn")
@pytest.mark.parametrize("cut", [1, 64, 77])
def test_two_parts_equal_the_whole(backend, case, backwards, cut, measure):
    x = summary(case, backwards)
    parts = []
    for rows in (slice(cut), slice(cut, None)):
        part = {name: y if name == "backwards" or y is None else y[:, rows] for name, y in x.items()}
        parts.append(run_summary(part, backend.name))
    first, then = reversed(parts) if backwards else parts
    joined = {
        "decay": first["decay"] * then["decay"],
        "state": then["decay"][..., None] * first["state"] + then["state"],
    }
    check(joined, expected_summary(x), measure, 2 * FORWARD[case.dtype])


@both_directions
@over(SUMMARY, "padded", "per_head_padded", "constant_packed")
def test_padding(backend, case, backwards, measure):
    """Rows before the first sequence and after the last one may hold anything and have no effect."""
    x = summary(case, backwards)
    rows = rows_of_no_sequence(x["cu_seqlens"], x["left"].shape[1])
    for name in ("left", "right", "g"):
        if x[name].ndim > 1:  # a constant gate has no rows
            x[name][:, rows] = torch.nan
    with poisoned(backend.can(case.op), case.device):
        out = run_summary(x, backend.name)
    check(out, expected_summary(x), measure, FORWARD[case.dtype])


@both_directions
@over(SUMMARY, "short", "packed", dtypes="in_turn")
def test_strided_views(backend, case, backwards, measure):
    x = summary(case, backwards)
    strided = {name: heads_first(y) if name in ("left", "right", "g") else y for name, y in x.items()}
    check(run_summary(strided, backend.name), expected_summary(x), measure, FORWARD[case.dtype])


@both_directions
@over(SUMMARY, dtypes="in_turn")
def test_no_uninitialised_output(backend, case, backwards, measure):
    x = summary(case, backwards)
    with poisoned(backend.can(case.op), case.device):
        out = run_summary(x, backend.name)
    check(out, expected_summary(x), measure, FORWARD[case.dtype])


@both_directions
@over(SUMMARY, dtypes="in_turn", requires="deterministic")
def test_same_bits(backend, case, backwards, measure):
    x = summary(case, backwards)
    first, *again = three_runs(lambda: run_summary(x, backend.name), case.device)
    for out in again:
        measure(out, first, 0)


@both_directions
@over(SUMMARY, dtypes="in_turn")
def test_inputs_unchanged(backend, case, backwards, measure):
    x, before = summary(case, backwards), summary(case, backwards)
    run_summary(x, backend.name)
    measure(tensors(x), tensors(before), 0)


@over(SUMMARY, requires="gradients")
def test_gradients(backend, case, measure):
    """Gradients of both results are right; at a gate of -inf the gradient through the decay is exactly 0.

    Extreme gates of float16 calls are float32: float16 has no numbers as small as the gradients of some of them.
    """
    too_small = case.dtype == torch.float16 and case.workload.sizes.get("gates") == "extreme"
    x = summary(case, **({"gate_dtype": torch.float32} if too_small else {}))
    leaves = {name: x[name].detach().requires_grad_() for name in ("left", "right", "g") if x[name] is not None}
    out = tuple(run_summary({**x, **leaves}, training_request(backend, SUMMARY)).values())
    wide = {name: y.detach().double().requires_grad_() for name, y in leaves.items()}
    ref = oracle.chunk_gla_summary(**{**x, **wide})
    nothing = sum(0 * y.sum() for y in wide.values())  # without tokens the oracle's results depend on no input
    generator = torch.Generator(case.device).manual_seed(1)
    seeds = [normal(tuple(y.shape), y.dtype, generator) for y in out]
    at = slice(0 if "g" in leaves else 1, None)  # without gates the decay depends on no input
    found = torch.autograd.grad(out[at], list(leaves.values()), seeds[at])
    expected = torch.autograd.grad([y + nothing for y in ref], list(wide.values()), [d.double() for d in seeds])
    names = [f"d{name}" for name in leaves]
    expected = {name: torch.where(d.isnan(), 0, d) for name, d in zip(names, expected, strict=True)}
    measure(dict(zip(names, found, strict=True)), expected, GRADIENT[case.dtype])
