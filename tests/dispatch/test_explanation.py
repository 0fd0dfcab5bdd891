"""explain(measure=True): measured times beside predicted ones."""

from __future__ import annotations

import time

import pytest
import torch

import gla_core as gla
from gla_core.dispatch.selection import Candidate

pytestmark = pytest.mark.usefixtures("only_reference")


@pytest.fixture
def sleeper(spy):
    """`sleeper(name, sleeps, cost)` registers a backend that takes so many seconds and predicts `cost`."""

    def make(name, sleeps, cost, **fields):
        made = spy(name, cost=lambda call: cost, **fields)
        made.result = lambda out: (time.sleep(sleeps), out)[1]
        return made

    return make


def softmax(x, **kwargs):
    return gla.explain("online_softmax", x, measure=True, **kwargs)


def test_a_right_prediction(sleeper, x):
    sleeper("slow", 0.02, cost=2.0)
    sleeper("fast", 0.005, cost=1.0)
    explanation = softmax(x, backend="fast,slow")
    assert (explanation.winner, explanation.fastest) == ("fast", "fast")
    fast, slow = (c.measured for c in explanation.candidates)
    assert 0.005 < fast < 0.02 < slow
    assert [line.split(" measured ")[1].split()[1:] for line in str(explanation).splitlines() if "measured " in line][
        :2
    ] == [
        ["ms", "<-", "the", "fastest"],
        ["ms"],
    ]
    assert str(explanation).endswith(
        "fast: the first of the list that can run, by backend=\nmeasured: fast is the fastest"
    )


def test_a_wrong_prediction(sleeper, x):
    sleeper("slow", 0.02, cost=1e-9)
    sleeper("fast", 0.001, cost=10.0)
    explanation = softmax(x)
    assert explanation.winner == "slow"
    assert explanation.fastest == "reference"
    assert {c.name for c in explanation.candidates if c.measured is not None} == {"slow", "fast", "reference"}
    lines = str(explanation).splitlines()
    assert lines[2].startswith(" -> slow             can run; predicts 0.0 us; measured 2")
    assert lines[4].startswith("    reference        can run; predicts no time; measured ")
    assert lines[4].endswith(" us  <- the fastest")
    assert lines[-1].startswith("measured: reference is faster, slow takes ")


def test_without_measure_nothing_runs(sleeper, x):
    a = sleeper("a", 0, cost=1.0)
    explanation = gla.explain("online_softmax", x)
    assert a.calls == []
    assert explanation.fastest is None
    assert "measured" not in str(explanation)


def test_a_backend_that_cannot_run_is_not_run(spy, x):
    picky = spy("picky", supports=lambda call: "only on Sundays")
    assert Candidate("picky", None, "only on Sundays") in softmax(x).candidates
    assert picky.calls == []


def test_a_backend_that_fails_is_said_to(spy, x):
    spy("broken", cost=lambda call: 1.0, error=RuntimeError("out of paper\nand ink"))
    explanation = softmax(x)
    assert (explanation.winner, explanation.fastest) == ("broken", "reference")
    assert "can run; predicts 1.00 s; not measured: RuntimeError: out of paper\n" in str(explanation)
    assert str(explanation).endswith("measured: reference is the fastest of those that ran")


def test_where_all_fail_there_is_no_verdict(spy, x):
    spy("broken", error=RuntimeError(""))
    explanation = softmax(x, backend="broken")
    assert explanation.fastest is None
    assert str(explanation).endswith("broken: the one asked for, by backend=")


def test_the_arguments_stay_as_they_are(qkvg):
    q, k, v, g = (t[:, 0] for t in qkvg())
    state = torch.randn(1, 2, 4, 3)
    before = state.clone()
    explanation = gla.explain("recurrent_gla_step", q, k, v, g, state, inplace=True, measure=True)
    assert explanation.fastest == "reference"
    assert state.equal(before)
    assert state._version == 0


@pytest.mark.parametrize("op", ["chunk_gla_fwd", "chunk_gla_bwd"])
def test_arguments_may_be_left_out_and_may_require_a_gradient(qkvg, op):
    inputs = qkvg(grad=True, Hq=4)
    explanation = gla.explain(op, *inputs, measure=True)
    assert explanation.fastest == "reference"
    assert all(t.grad is None for t in inputs)
    assert explanation.call == gla.explain(op, *inputs).call


def test_attention_and_softmax_by_keyword(qkvg):
    q, k, v, _ = qkvg()
    assert gla.explain("softmax_attention", q, k=k, v=v, causal=True, measure=True).fastest == "reference"
    assert gla.explain("online_softmax", x=q, dim=-2, measure=True).fastest == "reference"


def test_what_captures_is_asked_for_a_graph(spy, x):
    spy("a", cost=lambda call: 1.0, cuda_graphs=False)
    assert gla.explain("online_softmax", x).winner == "a"
    assert gla.explain("online_softmax", x, capturing=True).winner == "reference"
