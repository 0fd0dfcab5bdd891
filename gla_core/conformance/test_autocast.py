"""Under torch.autocast, float32 inputs give the same bits as inputs cast by hand, and the documented dtypes."""

from __future__ import annotations

import pytest
import torch

from gla_core.conformance import calls
from gla_core.conformance.cases import (
    DIFFERENTIATED,
    FORWARDS,
    GRADIENTS_OF_STATES,
    PROMPTS,
    SERVING,
    STEPS,
    WITH_STATES,
    WRITING,
    having,
    over,
)
from gla_core.conformance.tolerances import FORWARD, GRADIENT

# In these cases the dtype is the dtype of autocast; the inputs are float32.


def same(can, budget):
    """Returns the budget for the difference between two runs on equal inputs."""
    return 0 if can.deterministic else 2 * budget


def dtypes(out):
    return {name: x.dtype for name, x in out.items()}


@over(FORWARDS, dtypes="half", forms=True)
@pytest.mark.parametrize("is_cast", [False, True], ids=["float32", "cast"])
def test_autocast(backend, case, is_cast, measure):
    """Float32 inputs, and inputs that are cast already, give the same results."""
    x, dtype = calls.inputs(case, dtype=torch.float32), calls.autocast_dtype(case)
    x = calls.cast(case.op, x, case.dtype) if is_cast else x
    with torch.autocast(case.device, case.dtype):
        out = calls.results(case.op, x, backend.name)
    ref = calls.results(case.op, calls.cast(case.op, x, dtype), backend.name)
    assert dtypes(out) == dtypes(ref)
    measure(out, ref, same(backend.can(case.op), FORWARD[dtype]))


@over(WRITING, dtypes="half", forms=True)
def test_autocast_inplace(backend, case, measure):
    x, y = (calls.inputs(case, dtype=torch.float32) | {"inplace": True} for _ in range(2))
    with torch.autocast(case.device, case.dtype):
        out = calls.results(case.op, x, backend.name)
    ref = calls.results(case.op, calls.cast(case.op, y, calls.autocast_dtype(case)), backend.name)
    assert dtypes(out) == dtypes(ref)
    assert {id(z) for z in out.values()} & {id(z) for z in x.values()}, "an argument is written, and returned"
    measure(out, ref, same(backend.can(case.op), FORWARD[case.dtype]))


@over(DIFFERENTIATED, dtypes="half", forms=True, requires="gradients")
def test_autocast_of_gradients(backend, case, measure):
    """Gradients have the dtype of their inputs, float32."""
    x, dtype, request = (
        calls.inputs(case, dtype=torch.float32),
        calls.autocast_dtype(case),
        calls.training_request(backend, case.op),
    )
    forward = calls.public_op(case.op).name

    def under_autocast(y):
        with torch.autocast(case.device, case.dtype):
            return calls.results(forward, y, request)

    out = calls.with_gradients(case.op, x, under_autocast)
    ref = calls.with_gradients(case.op, calls.cast(case.op, x, dtype), lambda y: calls.results(forward, y, request))
    assert {out[f"d{name}"].dtype for name in calls.differentiable(case.op, x)} == {torch.float32}
    measure(out, ref, same(backend.can(case.op), GRADIENT[dtype]))


# ---- values under autocast, compared with the oracle


@over(
    FORWARDS,
    "small",
    few={
        WITH_STATES: "short ungated packed",
        PROMPTS: "small per_head",
        "chunk_gla_summary": "short ungated packed",
        STEPS: "small ungated pool",
        "softmax_attention": "small not_causal",
    },
    dtypes="half",
)
def test_values_under_autocast(backend, case, measure):
    check_values(backend, case, measure)


@over(WRITING, "small", "ungated", "pool", dtypes="half")
def test_values_under_autocast_inplace(backend, case, measure):
    x, out = check_values(backend, case, measure, inplace=True)
    assert out["state"] is x["state"]


def check_values(backend, case, measure, **options):
    """Compares a call with the oracle. `out` has the dtype of autocast; states and pools keep theirs.

    Products of two half-precision numbers are exact in float32, and only their sum is rounded: the states of single
    tokens, and of calls without gates, are as exact as in float32. A delta rule also multiplies its u of many tokens,
    which are no half-precision numbers.
    """
    x = calls.inputs(case, dtype=torch.float32, **({"pool_dtype": torch.float32} if case.op in SERVING else {}))
    y = calls.cast(case.op, x, calls.autocast_dtype(case))
    ref = calls.expected(case.op, y).results
    if case.op in having("out"):
        options["out"] = torch.empty(calls.output_shape(x["q"], x["v"]), dtype=case.dtype, device=case.device)
    with torch.autocast(case.device, case.dtype):
        out = calls.run(case.op, x, backend.name, **options)
    assert "out" not in options or out["o"] is options["out"]
    calls.compare(case.op, y, out, ref, measure)
    sums_products_of_inputs = x.get("g", x) is None and "beta" not in x
    if "state" in ref and ("state" in x or sums_products_of_inputs):
        measure(out, {"state": ref["state"]}, FORWARD[torch.float32])
    return x, out


@over(GRADIENTS_OF_STATES, "short", "ungated", "packed", dtypes="half")
def test_gradients_under_autocast(backend, case, measure):
    x = calls.inputs(case, dtype=torch.float32)
    with torch.autocast(case.device, case.dtype):
        out = calls.gradients(case.op, x, calls.training_request(backend, case.op))
    y = calls.cast(case.op, x, case.dtype)
    calls.compare(case.op, y, out, calls.oracle_gradients(case.op, y), measure)
