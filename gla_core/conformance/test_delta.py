"""Delta rules: every beta, equal and correlated keys, keys of any length, inputs as layers project them, summaries."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from gla_core.conformance.calls import (
    call_arguments,
    check,
    compare,
    expected,
    gradients,
    inputs,
    oracle_gradients,
    projected,
    public_op,
    run,
    span,
    training_request,
    twice,
)
from gla_core.conformance.cases import FORWARDS, PAIRS, differentiated, having, over
from gla_core.conformance.tolerances import FORWARD, GRADIENT
from gla_core.workloads.inputs import normal

DELTA = having("beta", among=PAIRS)
BACKWARDS = tuple(differentiated(op) for op in DELTA)
ALL = (*DELTA, *BACKWARDS)
SUMMARY, GRADIENT_SUMMARY = "chunk_delta_summary", "chunk_delta_gradient_summary"


@over(ALL, "short", "last_chunk_partial", "grouped", "packed", "minus_infinity", "per_head", dtypes="rotating")
@pytest.mark.parametrize("beta", [0.0, 1.0, 2.0])
def test_every_beta(backend, case, beta, measure):
    """With 0 nothing is learnt, with 1 a key is overwritten, and with 2 a transition has the eigenvalue -1."""
    x = call_arguments(case)
    x["beta"][:] = beta
    check(case.op, x, backend.name, measure)


@over(ALL, "short", "last_chunk_partial", "packed", "extreme", dtypes="rotating")
def test_some_betas_of_0(backend, case, measure):
    x = call_arguments(case)
    x["beta"][:, ::3] = 0
    check(case.op, x, backend.name, measure)


@over(ALL, "last_chunk_partial", "grouped_values", "packed", "ungated", "constant", dtypes="rotating")
@pytest.mark.parametrize("share", [0.7, 1.0])
def test_keys_that_are_alike(backend, case, share, measure):
    """Keys have a direction in common, or are all equal: then each token overwrites what the one before wrote."""
    x = call_arguments(case)
    k = share * x["k"][:, :1].double() + (1 - share) * x["k"].double()
    x["k"] = F.normalize(k, dim=-1).to(x["k"].dtype)
    check(case.op, x, backend.name, measure)


@over(ALL, "last_chunk_partial", "grouped_values", "per_head", "ungated", dtypes="rotating")
@pytest.mark.parametrize(("length", "beta"), [(4.0, 0.125), (2.0**-6, 1.0), (0.0, 1.0)])
def test_keys_of_any_length(backend, case, length, beta, measure):
    """A state is bounded if beta |k|^2 is at most 2."""
    x = call_arguments(case)
    x["k"] *= length
    x["beta"] *= beta
    check(case.op, x, backend.name, measure)


@over(BACKWARDS, "short", "grouped_values", "packed", "per_head", "constant", dtypes="one")
def test_gradient_of_beta_alone(backend, case, measure):
    x, request = inputs(case), training_request(backend, case.op)
    ref = oracle_gradients(case.op, x)
    compare(case.op, x, gradients(case.op, x, request, ("beta",)), {"dbeta": ref["dbeta"]}, measure)


# ---- inputs as layers project them: no unit vectors, log gates or betas


@over(
    having("beta", "v", among=FORWARDS),
    *("short", "packed", "grouped_values", "per_head", "ungated", "small", "constant_values"),
    dtypes="rotating",
)
@pytest.mark.parametrize("gate", ["softplus", "bounded"])
def test_projected_inputs(backend, case, gate, measure):
    raw, plain = projected(case.dtype, gate, call_arguments(case))
    ref, out = expected(case.op, plain), run(case.op, raw, backend.name)
    results = {name: y for name, y in ref.results.items() if name not in ref.written}
    compare(case.op, raw, out, results, measure, twice(FORWARD))
    if "pool" in ref.written:
        states = [{"pool": pool[ref.written["pool"]]} for pool in (raw["pool"], ref.results["pool"])]
        compare(case.op, raw, *states, measure, twice(FORWARD))  # the budget is that of the pool's dtype, if it is more


@over(BACKWARDS, "short", "packed", "grouped_values", "per_head", dtypes="rotating")
@pytest.mark.parametrize("gate", ["softplus", "bounded"])
def test_gradients_of_projected_inputs(backend, case, gate, measure):
    """They reach the projections and the parameters of the gates."""
    x = inputs(case)
    raw, _ = projected(case.dtype, gate, x)
    name, (form, *parameters) = public_op(case.op).name, raw["gate"]
    results = []
    for request, as_dtype in ((training_request(backend, case.op), lambda y: y), ("reference", in_float64)):
        y, loss = ({n: as_dtype(z) for n, z in each.items()} for each in (raw, gradient_of_o(case, x)))
        leaves = [as_dtype(p).clone().requires_grad_() for p in parameters[:2]]
        y["gate"] = (form, *leaves, *parameters[2:])
        out = run(name, y, request)
        ds = torch.autograd.grad([out[n] for n in loss], leaves, list(loss.values()))
        results.append({**gradients(name, y, request, loss=loss), **dict(zip(("dA_log", "ddt_bias"), ds, strict=True))})
    compare(case.op, raw, *results, measure, twice(GRADIENT))


def in_float64(x):
    """Returns a tensor of floating-point numbers in float64, and anything else as it is."""
    return x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x


def gradient_of_o(case, x):
    return {"o": normal(x["v"].shape, x["v"].dtype, torch.Generator(case.device).manual_seed(6))}


# ---- summaries


@over(
    (SUMMARY, GRADIENT_SUMMARY),
    "last_chunk_partial",
    "minus_infinity",
    "ungated",
    "per_head",
    "grouped_values",
    dtypes="rotating",
)
@pytest.mark.parametrize("cut", [1, 64, 77])
def test_two_parts_equal_the_whole(backend, case, cut, measure):
    x = call_arguments(case)
    parts = [run(case.op, span(case.op, x, *rows), backend.name) for rows in ((None, cut), (cut, None))]
    first, then = reversed(parts) if case.op == GRADIENT_SUMMARY else parts
    state = "dstate" if case.op == GRADIENT_SUMMARY else "state"
    joined = {
        "transition": then["transition"] @ first["transition"],
        state: then["transition"] @ first[state] + then[state],
    }
    compare(case.op, x, joined, expected(case.op, x).results, measure, twice(FORWARD))
