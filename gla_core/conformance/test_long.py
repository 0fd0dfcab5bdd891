"""Errors that show only after thousands of tokens, keys, queries or columns, in calls narrow enough for a CPU."""

from __future__ import annotations

import os

import torch

from gla_core.conformance.calls import call_arguments, compare, expected, run, span, twice
from gla_core.conformance.cases import BACKWARDS, FORWARDS, SEQUENCES, SERVING, WITH_STATES, over
from gla_core.conformance.tolerances import FORWARD
from gla_core.ops import ABSTRACT_OPS

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DTYPES = "half" if INTERPRETED else "one"
"""Interpreted Triton kernels take milliseconds per token, and the fewest in half precision."""


def changes_of(case):
    """Returns the sizes of a call of thousands of tokens; on a CUDA device there are more than 16 bits can count."""
    if case.op in SERVING:
        return {"lengths": (900, 300)} if INTERPRETED else {}
    # without gates every token counts in a summary; with gates only the last tokens would, or the first ones
    gates = {"gates": "none"} if "decay" in (result.name for result in ABSTRACT_OPS[case.op].results) else {}
    return gates | ({"T": 70_001} if case.device == "cuda" else {"T": 1100} if INTERPRETED else {})


def with_ends(out):
    """Returns the results, and both ends as further results: a norm over all tokens hides errors in a few.

    A forward goes wrong at the last tokens, and a backward also at the first ones.
    """
    along = {n: y for n, y in out.items() if y.ndim > 1 and not any(word in n for word in ("state", "pool", "decay"))}
    ends = {f"first of {n}": y[:, :50] for n, y in along.items()}
    return out | ends | {f"last of {n}": y[:, -50:] for n, y in along.items()}


@over((*SEQUENCES, *SERVING, *BACKWARDS), tag="narrow", functions=True, dtypes=DTYPES)
def test_long_sequences(backend, case, measure):
    x = call_arguments(case, **changes_of(case))
    ref = with_ends(expected(case.call, x).results)
    compare(case.call, x, with_ends(run(case.call, x, backend.name)), ref, measure)


@over(WITH_STATES, "narrow_mild", tag="narrow", dtypes=DTYPES)
def test_long_sequence_in_two_calls(backend, case, measure):
    x = call_arguments(case, **changes_of(case))
    cut = x["q"].shape[1] - 700
    before = run(case.op, span(case.op, x, None, cut), backend.name)
    after = run(case.op, span(case.op, x, cut, None, initial_state=before["state"]), backend.name)
    joined = {"o": torch.cat([before["o"], after["o"]], dim=1), "state": after["state"]}
    ref = with_ends(run(case.op, x, backend.name))
    compare(case.op, x, with_ends(joined), ref, measure, twice(FORWARD))


@over(tuple(op for op in FORWARDS if op not in (*SEQUENCES, *SERVING)), tag="narrow", dtypes="one")
def test_many_columns_keys_or_queries(backend, case, measure):
    x = call_arguments(case)
    ref = with_ends(expected(case.op, x).results)
    compare(case.op, x, with_ends(run(case.op, x, backend.name)), ref, measure)
