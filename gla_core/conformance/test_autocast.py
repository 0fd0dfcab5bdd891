"""Under torch.autocast, float32 inputs give what they give once cast by hand: same bits, dtypes as documented."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import gla_core as gla
from gla_core.conformance.calls import (
    attention,
    chunk,
    expected_attention,
    expected_step,
    expected_summary,
    forward,
    gradients,
    oracle_forward,
    oracle_gradients,
    run_attention,
    run_step,
    run_summary,
    softmax,
    step,
    summary,
    training_request,
)
from gla_core.conformance.cases import over
from gla_core.conformance.tolerances import FORWARD, GRADIENT

# In these cases the dtype is that of the autocast; the inputs are float32.


def by_hand(x, dtype):
    return dataclasses.replace(x, q=x.q.to(dtype), k=x.k.to(dtype), v=x.v.to(dtype))


def same(can, budget):
    """Two runs on the same numbers."""
    return 0 if can.deterministic else 2 * budget


def dtypes(out):
    return {name: x.dtype for name, x in out.items()}


@over("chunk_gla_fwd", "short", "ungated", "packed", half=True)
def test_autocast_of_chunk_gla(backend, case, measure):
    x = chunk(case, dtype=torch.float32)
    cast = by_hand(x, case.dtype)
    with torch.autocast(case.device, case.dtype):
        out = forward(x, backend.name)
    assert dtypes(out) == {"o": case.dtype, "state": torch.float32}
    measure(out, forward(cast, backend.name), same(backend.can(case.op), FORWARD[case.dtype]))
    expected = oracle_forward(cast)
    measure(out, expected, FORWARD[case.dtype])
    if x.g is None:  # products of two numbers in half precision are exact in float32, and only their sum is rounded
        measure(out, {"state": expected["state"]}, FORWARD[torch.float32])


@over("chunk_gla_bwd", "short", "ungated", "packed", half=True)
def test_autocast_of_gradients(backend, case, measure):
    """Forward and backward under autocast; gradients have the dtype of what was given, float32."""
    x, request = chunk(case, dtype=torch.float32), training_request(backend)
    cast = by_hand(x, case.dtype)
    with torch.autocast(case.device, case.dtype):
        out = gradients(x, request)
    assert set(dtypes(out).values()) == {torch.float32}
    measure(out, gradients(cast, request), same(backend.can(case.op), GRADIENT[case.dtype]))
    measure(out, oracle_gradients(cast), GRADIENT[case.dtype])


@over("chunk_gla_summary", "short", "ungated", "packed", half=True)
def test_autocast_of_chunk_gla_summary(backend, case, measure):
    x = summary(case, dtype=torch.float32)
    cast = {**x, "k": x["k"].to(case.dtype), "v": x["v"].to(case.dtype)}
    with torch.autocast(case.device, case.dtype):
        out = run_summary(x, backend.name)
    assert dtypes(out) == {"decay": torch.float32, "state": torch.float32}
    measure(out, run_summary(cast, backend.name), same(backend.can(case.op), FORWARD[case.dtype]))
    measure(out, {"state": expected_summary(cast)["state"]}, FORWARD[case.dtype])


@over("recurrent_gla_step", "small", "ungated", "pool", half=True)
@pytest.mark.parametrize("inplace", [False, True], ids=["new", "inplace"])
def test_autocast_of_recurrent_gla_step(backend, case, inplace, measure):
    x, cast = step(case, dtype=torch.float32), step(case, dtype=torch.float32)
    cast |= {name: cast[name].to(case.dtype) for name in "qkv"}
    expected = expected_step(cast)
    with torch.autocast(case.device, case.dtype):
        out = run_step(x, backend.name, inplace=inplace)
    assert dtypes(out) == {"o": case.dtype, "state": torch.float32}
    assert (out["state"] is x["state"]) == inplace
    measure(out, run_step(cast, backend.name, inplace=inplace), same(backend.can(case.op), FORWARD[case.dtype]))
    measure(out, {"o": expected["o"]}, FORWARD[case.dtype])
    measure(out, {"state": expected["state"]}, FORWARD[torch.float32])


@over("online_softmax", "small", "other_dimension", half=True)
@pytest.mark.parametrize("given", ["float32", "cast"])
def test_autocast_of_online_softmax(backend, case, given, measure):
    """Computed and returned in float32, as torch.softmax is under autocast on CUDA."""
    x, dim = softmax(case, dtype=torch.float32 if given == "float32" else case.dtype)
    with torch.autocast(case.device, case.dtype):
        y = gla.online_softmax(x, dim, backend=backend.name)
    assert y.dtype == torch.float32
    by_hand = gla.online_softmax(x.float(), dim, backend=backend.name)
    measure({"y": y}, {"y": by_hand}, same(backend.can(case.op), FORWARD[torch.float32]))


@over("softmax_attention", "small", "not_causal", half=True)
def test_autocast_of_softmax_attention(backend, case, measure):
    *qkv, causal = attention(case, dtype=torch.float32)
    cast = [y.to(case.dtype) for y in qkv]
    with torch.autocast(case.device, case.dtype):
        out = run_attention(*qkv, causal, backend.name)
    assert dtypes(out) == {"o": case.dtype, "lse": torch.float32}
    measure(out, run_attention(*cast, causal, backend.name), same(backend.can(case.op), FORWARD[case.dtype]))
    measure(out, expected_attention(*cast, causal), FORWARD[case.dtype])


@over("softmax_attention", "small", half=True, gradients=True)
def test_autocast_of_gradients_of_softmax_attention(backend, case, measure):
    *qkv, causal = attention(case, dtype=torch.float32)

    def gradients(*inputs):
        leaves = [y.detach().requires_grad_() for y in inputs]
        o, lse = gla.softmax_attention(*leaves, None, causal, backend=backend.name)
        found = torch.autograd.grad((o, lse), leaves, (torch.ones_like(o), torch.ones_like(lse)))
        return dict(zip(("dq", "dk", "dv"), found, strict=True))

    with torch.autocast(case.device, case.dtype):
        out = gradients(*qkv)
    assert set(dtypes(out).values()) == {torch.float32}
    measure(out, gradients(*(y.to(case.dtype) for y in qkv)), same(backend.can(case.op), GRADIENT[case.dtype]))
