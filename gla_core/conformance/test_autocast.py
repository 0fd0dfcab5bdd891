"""Under torch.autocast, float32 inputs give the same bits as inputs cast by hand, and the documented dtypes."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from gla_core.conformance.calls import (
    attention,
    autocast_dtype,
    cast,
    chunk,
    differentiable,
    expected_attention,
    expected_pool,
    expected_step,
    expected_summary,
    forward,
    given,
    gradients,
    oracle_forward,
    oracle_gradients,
    output_shape,
    pool,
    results,
    run_attention,
    run_pool,
    run_step,
    run_summary,
    step,
    summary,
    training_request,
    with_gradients,
)
from gla_core.conformance.cases import DIFFERENTIATED, FORWARDS, WRITING, over
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
    x, dtype = given(case, dtype=torch.float32), autocast_dtype(case)
    x = cast(case.op, x, case.dtype) if is_cast else x
    with torch.autocast(case.device, case.dtype):
        out = results(case.op, x, backend.name)
    expected = results(case.op, cast(case.op, x, dtype), backend.name)
    assert dtypes(out) == dtypes(expected)
    measure(out, expected, same(backend.can(case.op), FORWARD[dtype]))


@over(WRITING, dtypes="half", forms=True)
def test_autocast_inplace(backend, case, measure):
    x, y = (given(case, dtype=torch.float32) | {"inplace": True} for _ in range(2))
    with torch.autocast(case.device, case.dtype):
        out = results(case.op, x, backend.name)
    expected = results(case.op, cast(case.op, y, autocast_dtype(case)), backend.name)
    assert dtypes(out) == dtypes(expected)
    assert {id(z) for z in out.values()} & {id(z) for z in x.values()}, "an argument is written, and returned"
    measure(out, expected, same(backend.can(case.op), FORWARD[case.dtype]))


@over(DIFFERENTIATED, dtypes="half", forms=True, requires="gradients")
def test_autocast_of_gradients(backend, case, measure):
    """Gradients have the dtype of their inputs, float32."""
    x, dtype, request = given(case, dtype=torch.float32), autocast_dtype(case), training_request(backend, case.op)

    def under_autocast(y):
        with torch.autocast(case.device, case.dtype):
            return results(case.op, y, request)

    out = with_gradients(case.op, x, under_autocast)
    expected = with_gradients(case.op, cast(case.op, x, dtype), lambda y: results(case.op, y, request))
    assert {out[f"d{name}"].dtype for name in differentiable(case.op, x)} == {torch.float32}
    measure(out, expected, same(backend.can(case.op), GRADIENT[dtype]))


# ---- values under autocast, compared with the oracle


def by_hand(x, dtype):
    return dataclasses.replace(x, q=x.q.to(dtype), k=x.k.to(dtype), v=x.v.to(dtype))


@over("chunk_gla_fwd", "short", "ungated", "packed", dtypes="half")
def test_autocast_of_chunk_gla(backend, case, measure):
    x = chunk(case, dtype=torch.float32)
    expected = oracle_forward(by_hand(x, case.dtype))
    with torch.autocast(case.device, case.dtype):
        out = forward(x, backend.name)
    measure(out, expected, FORWARD[case.dtype])
    if x.g is None:  # products of two half-precision numbers are exact in float32; only their sum is rounded
        measure(out, {"state": expected["state"]}, FORWARD[torch.float32])


@over("chunk_gla_bwd", "short", "ungated", "packed", dtypes="half")
def test_autocast_of_gradients_of_chunk_gla(backend, case, measure):
    x = chunk(case, dtype=torch.float32)
    with torch.autocast(case.device, case.dtype):
        out = gradients(x, training_request(backend))
    measure(out, oracle_gradients(by_hand(x, case.dtype)), GRADIENT[case.dtype])


@over("chunk_gla_pool", "small", "per_head", dtypes="half")
def test_autocast_of_chunk_gla_pool(backend, case, measure):
    """The pool keeps its dtype. `out` has the dtype of autocast."""
    x = pool(case, dtype=torch.float32, pool_dtype=torch.float32)
    expected = expected_pool(cast(case.op, x, case.dtype))
    out = torch.empty(output_shape(x["q"], x["v"]), dtype=case.dtype, device=case.device)
    with torch.autocast(case.device, case.dtype):
        found = run_pool(x, backend.name, out=out)
    assert found["o"] is out
    assert x["pool"].dtype == torch.float32
    measure(found, expected, FORWARD[case.dtype])


@over("chunk_gla_summary", "short", "ungated", "packed", dtypes="half")
def test_autocast_of_chunk_gla_summary(backend, case, measure):
    x = summary(case, dtype=torch.float32)
    expected = expected_summary(cast(case.op, x, case.dtype))
    with torch.autocast(case.device, case.dtype):
        out = run_summary(x, backend.name)
    measure(out, {"state": expected["state"]}, FORWARD[case.dtype])


@over("recurrent_gla_step", "small", "ungated", "pool", dtypes="half")
@pytest.mark.parametrize("inplace", [False, True], ids=["new", "inplace"])
def test_autocast_of_recurrent_gla_step(backend, case, inplace, measure):
    x = step(case, dtype=torch.float32)
    expected = expected_step(cast(case.op, x, case.dtype))
    with torch.autocast(case.device, case.dtype):
        out = run_step(x, backend.name, inplace=inplace)
    assert (out["state"] is x["state"]) == inplace
    measure(out, {"o": expected["o"]}, FORWARD[case.dtype])
    measure(out, {"state": expected["state"]}, FORWARD[torch.float32])


@over("softmax_attention", "small", "not_causal", dtypes="half")
def test_autocast_of_softmax_attention(backend, case, measure):
    *qkv, causal = attention(case, dtype=torch.float32)
    with torch.autocast(case.device, case.dtype):
        out = run_attention(*qkv, causal, backend.name)
    measure(out, expected_attention(*(y.to(case.dtype) for y in qkv), causal), FORWARD[case.dtype])
