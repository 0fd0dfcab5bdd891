"""What goes wrong only far along: thousands of tokens, keys, queries or columns, narrow, so that a CPU can afford them.

A long sequence is judged by the oracle where it begins and where it ends, and as a whole by the same sequence in two
calls. Its gates leave nothing of a state after `FORGOTTEN` tokens, so the oracle starts as far before the end.
"""

from __future__ import annotations

import torch

import gla_core as gla
from gla_core.conformance import oracle
from gla_core.conformance.calls import (
    attention,
    backward,
    chunk,
    expected_attention,
    forward,
    loss_gradients,
    oracle_forward,
    oracle_gradients,
    run_attention,
    softmax,
    tokens,
    training_request,
)
from gla_core.conformance.cases import over
from gla_core.conformance.tolerances import FORWARD, GRADIENT

FORGOTTEN = 600
"""Tokens over which mild gates, about exp(-0.05) each, multiply to less than 1e-12."""

BEYOND_16_BITS = 70_001


def long_inputs(case):
    """Thousands of tokens; on a CUDA device more than 16 bits can count. Also where to cut them in two."""
    x = chunk(case, T=BEYOND_16_BITS) if case.device == "cuda" else chunk(case)
    return x, x.q.shape[1] * 2 // 5


def first(out):
    return {name: y[:, :FORGOTTEN] for name, y in out.items() if "state" not in name}


def last(out):
    return {name: y[:, -FORGOTTEN:] for name, y in out.items() if "state" not in name}


@over("chunk_gla_fwd", tag="narrow", one_dtype=True)
def test_long_sequence(backend, case, measure):
    x, cut = long_inputs(case)
    out = forward(x, backend.name)
    before = forward(tokens(x, None, cut, x.initial_state), backend.name)
    after = forward(tokens(x, cut, None, before["state"]), backend.name)
    joined = {"o": torch.cat([before["o"], after["o"]], dim=1), "state": after["state"]}
    measure(out, joined, 2 * FORWARD[case.dtype])
    start = oracle_forward(tokens(x, None, FORGOTTEN, x.initial_state))
    end = oracle_forward(tokens(x, -2 * FORGOTTEN, None))
    measure(first(out), first(start), FORWARD[case.dtype])
    measure({**last(out), "state": out["state"]}, {**last(end), "state": end["state"]}, FORWARD[case.dtype])


@over("chunk_gla_bwd", tag="narrow", one_dtype=True)
def test_gradients_of_long_sequence(backend, case, measure):
    x, cut = long_inputs(case)
    do, dstate = loss_gradients(x)
    out = backward(x, backend, do, dstate)
    state = forward(tokens(x, None, cut, x.initial_state), training_request(backend))["state"]
    after = backward(tokens(x, cut, None, state), backend, do[:, cut:], dstate)
    before = backward(tokens(x, None, cut, x.initial_state), backend, do[:, :cut], after.pop("dinitial_state"))
    joined = {name: torch.cat([before[name], d], dim=1) for name, d in after.items()}
    joined["dinitial_state"] = before["dinitial_state"]
    measure(out, joined, 2 * GRADIENT[case.dtype])
    span = 2 * FORGOTTEN
    start = oracle_gradients(tokens(x, None, span, x.initial_state), (do[:, :span], torch.zeros_like(dstate)))
    end = oracle_gradients(tokens(x, -span, None), (do[:, -span:], dstate))
    measure(first(out), first(start), GRADIENT[case.dtype])
    measure(last(out), last(end), GRADIENT[case.dtype])


@over("online_softmax", tag="narrow", one_dtype=True)
def test_long_rows(backend, case, measure):
    x, dim = softmax(case)
    y, ref = gla.online_softmax(x, dim, backend=backend.name), oracle.softmax(x, dim)
    measure({"y": y, "last y": y[:, -1000:]}, {"y": ref, "last y": ref[:, -1000:]}, FORWARD[case.dtype])


@over("softmax_attention", tag="narrow", one_dtype=True)
def test_many_keys_or_queries(backend, case, measure):
    q, k, v, causal = attention(case)
    measure(run_attention(q, k, v, causal, backend.name), expected_attention(q, k, v, causal), FORWARD[case.dtype])
