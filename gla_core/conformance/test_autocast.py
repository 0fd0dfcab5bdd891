"""Under torch.autocast, float32 inputs give the same bits as inputs cast by hand, and the documented dtypes."""

from __future__ import annotations

import pytest
import torch

from gla_core.conformance.calls import (
    autocast_dtype,
    cast,
    compare,
    differentiable,
    expected,
    gradients,
    inputs,
    oracle_gradients,
    output_shape,
    public_op,
    results,
    run,
    training_request,
    with_gradients,
)
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
    x, dtype = inputs(case, dtype=torch.float32), autocast_dtype(case)
    x = cast(case.op, x, case.dtype) if is_cast else x
    with torch.autocast(case.device, case.dtype):
        out = results(case.op, x, backend.name)
    ref = results(case.op, cast(case.op, x, dtype), backend.name)
    assert dtypes(out) == dtypes(ref)
    measure(out, ref, same(backend.can(case.op), FORWARD[dtype]))


@over(WRITING, dtypes="half", forms=True)
def test_autocast_inplace(backend, case, measure):
    x, y = (inputs(case, dtype=torch.float32) | {"inplace": True} for _ in range(2))
    with torch.autocast(case.device, case.dtype):
        out = results(case.op, x, backend.name)
    ref = results(case.op, cast(case.op, y, autocast_dtype(case)), backend.name)
    assert dtypes(out) == dtypes(ref)
    assert {id(z) for z in out.values()} & {id(z) for z in x.values()}, "an argument is written, and returned"
    measure(out, ref, same(backend.can(case.op), FORWARD[case.dtype]))


@over(DIFFERENTIATED, dtypes="half", forms=True, requires="gradients")
def test_autocast_of_gradients(backend, case, measure):
    """Gradients have the dtype of their inputs, float32."""
    x, dtype, request = inputs(case, dtype=torch.float32), autocast_dtype(case), training_request(backend, case.op)
    forward = public_op(case.op).name

    def under_autocast(y):
        with torch.autocast(case.device, case.dtype):
            return results(forward, y, request)

    out = with_gradients(case.op, x, under_autocast)
    ref = with_gradients(case.op, cast(case.op, x, dtype), lambda y: results(forward, y, request))
    assert {out[f"d{name}"].dtype for name in differentiable(case.op, x)} == {torch.float32}
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
    tokens, and of calls without gates, are as exact as in float32.
    """
    x = inputs(case, dtype=torch.float32, **({"pool_dtype": torch.float32} if case.op in SERVING else {}))
    y = cast(case.op, x, autocast_dtype(case))
    ref = expected(case.op, y).results
    if case.op in having("out"):
        options["out"] = torch.empty(output_shape(x["q"], x["v"]), dtype=case.dtype, device=case.device)
    with torch.autocast(case.device, case.dtype):
        out = run(case.op, x, backend.name, **options)
    assert "out" not in options or out["o"] is options["out"]
    compare(case.op, y, out, ref, measure)
    if "state" in ref and ("state" in x or x.get("g", x) is None):
        measure(out, {"state": ref["state"]}, FORWARD[torch.float32])
    return x, out


@over(GRADIENTS_OF_STATES, "short", "ungated", "packed", dtypes="half")
def test_gradients_under_autocast(backend, case, measure):
    x = inputs(case, dtype=torch.float32)
    with torch.autocast(case.device, case.dtype):
        out = gradients(case.op, x, training_request(backend, case.op))
    y = cast(case.op, x, case.dtype)
    compare(case.op, y, out, oracle_gradients(case.op, y), measure)
