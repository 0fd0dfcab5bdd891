"""Errors that show only after thousands of tokens, keys, queries or columns, in calls narrow enough for a CPU."""

from __future__ import annotations

import os

import torch

import gla_core as gla
from gla_core.conformance import oracle
from gla_core.conformance.calls import (
    attention,
    backward,
    chunk,
    expected_attention,
    expected_pool,
    expected_summary,
    forward,
    loss_gradients,
    oracle_forward,
    oracle_gradients,
    pool,
    run_attention,
    run_pool,
    run_summary,
    softmax,
    summary,
    tokens,
)
from gla_core.conformance.cases import over
from gla_core.conformance.tolerances import FORWARD, GRADIENT

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DTYPES = "half" if INTERPRETED else "one"
"""Interpreted Triton kernels take milliseconds per token, and the fewest in half precision."""


def long_inputs(case):
    """Returns inputs of thousands of tokens; on a CUDA device more tokens than 16 bits can count."""
    if case.device == "cuda":
        return chunk(case, T=70_001)
    return chunk(case, T=1100) if INTERPRETED else chunk(case)


def with_ends(out):
    """Returns the results, and both ends as further results: a norm over all tokens hides errors in a few.

    A forward goes wrong at the last tokens, and a backward also at the first ones.
    """
    along = {name: x for name, x in out.items() if "state" not in name and name != "pool"}
    ends = {f"first of {name}": x[:, :50] for name, x in along.items()}
    return out | ends | {f"last of {name}": x[:, -50:] for name, x in along.items()}


@over("chunk_gla_fwd", tag="narrow", dtypes=DTYPES)
def test_long_sequence(backend, case, measure):
    x = long_inputs(case)
    measure(with_ends(forward(x, backend.name)), with_ends(oracle_forward(x)), FORWARD[case.dtype])


@over("chunk_gla_fwd", "narrow_mild", tag="narrow", dtypes=DTYPES)
def test_long_sequence_in_two_calls(backend, case, measure):
    x = long_inputs(case)
    cut = x.q.shape[1] - 700
    before = forward(tokens(x, None, cut, x.initial_state), backend.name)
    after = forward(tokens(x, cut, None, before["state"]), backend.name)
    joined = {"o": torch.cat([before["o"], after["o"]], dim=1), "state": after["state"]}
    measure(with_ends(joined), with_ends(forward(x, backend.name)), 2 * FORWARD[case.dtype])


@over("chunk_gla_pool", tag="narrow", dtypes=DTYPES)
def test_long_sequences_in_a_pool(backend, case, measure):
    x = pool(case, lengths=(900, 300)) if INTERPRETED else pool(case)
    expected = expected_pool(x)
    measure(with_ends(run_pool(x, backend.name)), with_ends(expected), FORWARD[case.dtype])


@over("chunk_gla_bwd", tag="narrow", dtypes=DTYPES)
def test_gradients_of_long_sequence(backend, case, measure):
    x = long_inputs(case)
    out = backward(x, backend, *loss_gradients(x))
    measure(with_ends(out), with_ends(oracle_gradients(x)), GRADIENT[case.dtype])


@over("chunk_gla_summary", tag="narrow", dtypes=DTYPES)
def test_summary_of_long_sequence(backend, case, measure):
    """Without gates every token counts. With gates only the last tokens would count, or backwards the first ones."""
    changes = {"T": long_inputs(case).q.shape[1], "gates": "none"}
    for x in (summary(case, **changes), summary(case, backwards=True, **changes)):
        measure(run_summary(x, backend.name), {"state": expected_summary(x)["state"]}, FORWARD[case.dtype])


@over("online_softmax", tag="narrow", dtypes="one")
def test_long_rows(backend, case, measure):
    x, dim = softmax(case)
    y = gla.online_softmax(x, dim, backend=backend.name)
    measure(with_ends({"y": y}), with_ends({"y": oracle.softmax(x, dim)}), FORWARD[case.dtype])


@over("softmax_attention", tag="narrow", dtypes="one")
def test_many_keys_or_queries(backend, case, measure):
    q, k, v, causal = attention(case)
    out, expected = run_attention(q, k, v, causal, backend.name), expected_attention(q, k, v, causal)
    measure(with_ends(out), with_ends(expected), FORWARD[case.dtype])
