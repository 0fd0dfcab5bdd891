"""`explain`: the backend that would run a call, the refusals of the others, measured times beside predicted ones."""

import itertools
import warnings

import pytest
import torch

import gla_core as gla
from gla_core.bench import measure
from gla_core.dispatch.selection import Candidate

pytestmark = pytest.mark.usefixtures("only_reference")


# the backend that would run a call


def summary(explanation):
    return explanation.request, explanation.source, explanation.winner, explanation.why


def test_explain_auto_by_time(spy, x):
    spy("fast", cost=lambda call: 1.5e-6)
    spy("slow", cost=lambda call: 2e-3)
    spy("half", dtypes=frozenset({torch.float16}), cost=lambda call: 1e-9)
    explanation = gla.explain("online_softmax", x)
    assert summary(explanation) == ("auto", "default", "fast", "fast: the least predicted time")
    assert [(c.name, c.seconds, c.refusal) for c in explanation.candidates if c.name != "half"] == [
        ("fast", 1.5e-6, None),
        ("slow", 2e-3, None),
        ("reference", None, None),
    ]
    assert explanation.candidates[-1].name == "half"
    assert str(explanation).splitlines() == [
        "online_softmax  rows=2 columns=3  float32 on cpu",
        "request: auto (default)",
        " -> fast             can run; predicts 1.5 us",
        "    slow             can run; predicts 2.00 ms",
        "    reference        can run; predicts no time",
        "    half             computes float16; x is float32",
        "fast: the least predicted time",
    ]


def test_explain_auto_with_one_backend(x):
    assert summary(gla.explain("online_softmax", x)) == (
        "auto",
        "default",
        "reference",
        "reference: the only backend that can run this",
    )


def test_explain_auto_without_predictions(spy, x):
    spy("mine", devices=frozenset({"cpu"}))
    explanation = gla.explain("online_softmax", x)
    assert explanation.winner == "mine"
    assert explanation.why == (
        "mine: no backend predicts its time; "
        "the one written for the fewest types of device is first, then the first by name"
    )


def test_explain_one_name(spy, x):
    spy("mine")
    explanation = gla.explain("online_softmax", x, backend="mine")
    assert summary(explanation) == ("mine", "backend=", "mine", "mine: the one asked for, by backend=")
    assert [c.name for c in explanation.candidates] == ["mine"]


def test_explain_a_list(spy, x):
    spy("half", dtypes=frozenset({torch.float16}))
    spy("mine")
    with gla.use_backend("online_softmax=half,mine,reference"):
        explanation = gla.explain("online_softmax", x)
    assert summary(explanation) == (
        "half,mine,reference",
        "use_backend",
        "mine",
        "mine: the first of the list that can run, by use_backend",
    )
    assert [(c.name, c.refusal) for c in explanation.candidates] == [
        ("mine", None),
        ("reference", None),
        ("half", "computes float16; x is float32"),
    ]


def test_explain_when_none_can_run_says_what_the_call_would(spy, x):
    spy("half", dtypes=frozenset({torch.float16}))
    spy("gpu", devices=frozenset({"cuda"}))
    explanation = gla.explain("online_softmax", x, backend="half,gpu")
    assert explanation.winner is None
    assert "->" not in str(explanation)
    assert "half             computes float16; x is float32" in str(explanation)
    with pytest.raises(gla.NoBackendError) as error:
        gla.online_softmax(x, backend="half,gpu")
    assert explanation.why == str(error.value)


def test_explain_says_that_sequences_are_packed(qkvg):
    explanation = gla.explain("chunk_gla_fwd", *qkvg(T=6), cu_seqlens=torch.tensor([0, 2, 6]))
    first = str(explanation).splitlines()[0]
    assert first == "chunk_gla_fwd  B=1 T=6 H=2 Hq=2 Hv=2 K=4 V=3 N=2  float32 on cpu, packed"
    assert explanation.call.variable_length


@pytest.mark.parametrize(("shape", "says"), [((2,), ", constant gates"), ((1, 6, 2), ", gates per head"), (None, "")])
def test_explain_says_the_form_of_the_gates(qkvg, shape, says):
    g = None if shape is None else -torch.ones(shape)
    first = str(gla.explain("chunk_gla_fwd", *qkvg(T=6)[:3], g)).splitlines()[0]
    assert first.endswith(f"float32 on cpu{says}")


def test_explain_runs_nothing_and_warns_of_nothing(flaky, x, qkvg):
    cannot, sound = flaky
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gla.explain("online_softmax", x)
        gla.explain("chunk_gla_bwd", *qkvg())
    assert cannot.calls == sound.calls == []


@pytest.mark.parametrize(
    ("op", "nearest"),
    [("chunk_gla_fw", "chunk_gla_fwd"), ("chunk_glaa", "chunk_gla"), ("sofmax_attention", "softmax_")],
)
def test_explain_an_unknown_op_is_an_error_with_the_nearest_spelling(op, nearest, qkvg):
    message = f"unknown op '{op}'; did you mean '{nearest}.*there are .*online_softmax"
    with pytest.raises(gla.UnknownOpError, match=message):
        gla.explain(op, *qkvg())


def test_explain_takes_public_names(qkvg):
    q, k, v, g = qkvg()
    names = ("chunk_gla", "chunk_gla_fwd")
    by_public, by_abstract = (gla.explain(name, q, k, v, g, output_final_state=True) for name in names)
    assert by_public == by_abstract
    assert gla.explain("chunk_gla_summary", k, v, g).call == gla.explain("chunk_gla_summary", k=k, v=v, g=g).call
    forwards, backwards = (gla.explain(f"chunk_gla_{name}", q, v, g) for name in ("summary", "gradient_summary"))
    assert backwards.call == gla.explain("chunk_gla_summary", left=q, right=v, g=g, backwards=True).call
    assert [x.call.scalars["backwards"] for x in (forwards, backwards)] == [False, True]


def test_explain_an_unknown_backend_is_an_error(x):
    with pytest.raises(gla.UnknownBackendError, match="did you mean 'reference'"):
        gla.explain("online_softmax", x, backend="refrence")


@pytest.mark.parametrize(
    "change",
    [
        lambda q, k, v, g: (q[0], k, v, g),
        lambda q, k, v, g: (q, k[:, 1:], v, g),
        lambda q, k, v, g: (q, k, v.half(), g),
        lambda q, k, v, g: (q, k, v, g.transpose(2, 3)),
        lambda q, k, v, g: (q, k, [v], g),
        lambda q, k, v, g: (q.int(), k.int(), v.int(), g),
        lambda q, k, v, g: (q, k, v, g, "scale"),
    ],
)
def test_explain_raises_for_bad_arguments_as_the_call_does(qkvg, change):
    args = change(*qkvg())
    with pytest.raises((ValueError, TypeError)) as by_call:
        gla.chunk_gla(*args)
    with pytest.raises(type(by_call.value)) as by_explain:
        gla.explain("chunk_gla_fwd", *args)
    assert str(by_explain.value) == str(by_call.value)


def test_explain_agrees_with_who_runs(spy, qkvg):
    spies = {
        "short": spy("short", cost=lambda call: call.dims["T"] * 1e-6),
        "long": spy("long", cost=lambda call: 50e-6, key_widths=range(8, 65, 8)),
        "dense": spy("dense", cost=lambda call: 20e-6, variable_length=False, grouped_queries=False),
        "trained": spy("trained", cost=lambda call: 1e-9, supports=lambda c: None if c.needs_grad else "train first"),
        "untrained": spy("untrained", cost=lambda call: 1e-8, gradients=False, value_widths=range(7, 8)),
    }
    winners = set()
    for T in (0, 1, 19, 21, 70):
        for K, V, Hq in ((4, 3, 2), (8, 3, 2), (8, 3, 4), (4, 7, 2), (256, 3, 4)):
            for packed in (None, torch.tensor([0, T])):
                for request in (None, "dense,long,reference"):
                    inputs = qkvg(T=T, K=K, V=V, Hq=Hq)
                    winner = gla.explain("chunk_gla_fwd", *inputs, cu_seqlens=packed, backend=request).winner
                    gla.chunk_gla(*inputs, cu_seqlens=packed, backend=request)
                    ran = [name for name, each in spies.items() if each.calls] or ["reference"]
                    assert ran == [winner], (T, K, V, Hq, packed, request)
                    winners.add(winner)
                    for each in spies.values():
                        each.calls.clear()
    assert winners == {"short", "long", "dense", "untrained", "reference"}


@pytest.mark.parametrize("grad_mode", [True, False])
def test_explain_agrees_with_who_runs_where_inputs_require_a_gradient(spy, qkvg, grad_mode):
    no_gradient = spy("no_gradient", cost=lambda call: 1.0, gradients=False)
    inputs = qkvg(grad=True)
    with torch.set_grad_enabled(grad_mode):
        winner = gla.explain("chunk_gla_fwd", *inputs).winner
        gla.chunk_gla(*inputs)
    assert winner == ("no_gradient" if no_gradient.calls else "reference")


def test_explain_agrees_with_who_runs_under_deterministic_algorithms(spy, x):
    atomics = spy("atomics", cost=lambda call: 1.0, deterministic=False)
    torch.use_deterministic_algorithms(True)
    try:
        winner = gla.explain("online_softmax", x).winner
        gla.online_softmax(x)
    finally:
        torch.use_deterministic_algorithms(False)
    assert winner == ("atomics" if atomics.calls else "reference")


def test_explain_agrees_that_none_can_run_where_the_backward_is_missing(spy, qkvg):
    spy("forward_only", ops=["chunk_gla_fwd"])
    inputs = qkvg(grad=True)
    explanation = gla.explain("chunk_gla_fwd", *inputs, backend="forward_only")
    with pytest.raises(gla.NoBackendError, match="does not implement chunk_gla_bwd"):
        gla.chunk_gla(*inputs, backend="forward_only")
    assert explanation.winner is None
    assert "does not implement chunk_gla_bwd" in str(explanation)


# explain(measure=True)


@pytest.fixture
def sleeper(spy, monkeypatch):
    """`sleeper(name, takes, cost)` registers a backend that takes `takes` seconds and predicts `cost`.

    The clock is fake: only these backends move it, and each reading of it takes a microsecond.
    """
    slept, ticks = [0.0], itertools.count()
    monkeypatch.setattr(measure, "clock", lambda: slept[0] + 1e-6 * next(ticks))

    def make(name, takes, cost, **fields):
        def result(out):
            slept[0] += takes
            return out

        made = spy(name, cost=lambda call: cost, **fields)
        made.result = result
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
    assert (fast, slow) == pytest.approx((0.005, 0.02), rel=0.01)
    assert [line.split(" measured ")[1].split()[1:] for line in str(explanation).splitlines() if "measured " in line][
        :2
    ] == [["ms", "<-", "the", "fastest"], ["ms"]]
    last = "fast: the first of the list that can run, by backend=\nmeasured: fast is the fastest"
    assert str(explanation).endswith(last)


def test_one_backend_is_measured_and_not_called_the_fastest(sleeper, spy, x):
    sleeper("mine", 0.001, cost=1.0)
    spy("picky", supports=lambda call: "only on Sundays")
    for request in ("mine", "picky,mine"):
        text = str(softmax(x, backend=request))
        assert "measured 1" in text
        assert "fastest" not in text


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
