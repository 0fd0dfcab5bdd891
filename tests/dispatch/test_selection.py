"""Who runs a call: ranking, launch failures, the backward of a forward, and their explanation."""

from __future__ import annotations

import contextlib
import threading
import warnings

import pytest
import torch

import gla_core as gla
from gla_core.dispatch.backend import LaunchError

pytestmark = pytest.mark.usefixtures("only_reference")


def warnings_of(action):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        action()
    return [str(w.message) for w in caught]


def grads_of(inputs, o):
    return torch.autograd.grad(o.sum(), inputs)


# auto: the ranking


def test_auto_takes_the_least_predicted_time(spy, x):
    slow, fast, middle = (spy(name, cost=lambda call, s=s: s) for name, s in (("a", 3e-3), ("b", 1e-3), ("c", 2e-3)))
    gla.online_softmax(x)
    assert (slow.calls, fast.calls, middle.calls) == ([], ["online_softmax"], [])


def test_auto_ranks_anew_for_every_shape(spy):
    spy("short", cost=lambda call: call.dims["columns"] * 1.0)
    spy("long", cost=lambda call: 100.0)
    winners = [gla.explain("online_softmax", torch.zeros(2, columns)).winner for columns in (1, 99, 100, 101, 1000)]
    assert winners == ["short", "short", "long", "long", "long"]  # a tie goes by name


def test_a_cheaper_backend_that_cannot_run_is_passed_over(spy, x):
    spy("half", cost=lambda call: 1e-9, dtypes=frozenset({torch.float16}))
    spy("picky", cost=lambda call: 1e-8, supports=lambda call: "only on Sundays")
    able = spy("able", cost=lambda call: 1.0)
    gla.online_softmax(x)
    assert able.calls == ["online_softmax"]


def test_those_that_predict_come_before_those_that_do_not(spy, x):
    named = frozenset({"cpu"})
    spy("a", devices=named)
    spy("b", cost=lambda call: None, devices=named)
    spy("c", cost=lambda call: float("nan"), devices=named)
    spy("d", cost=lambda call: 1 / 0, devices=named)
    spy("z", cost=lambda call: 1e9)
    assert [c.name for c in gla.explain("online_softmax", x).candidates] == ["z", "a", "b", "c", "d", "reference"]


def test_without_predictions_those_for_named_devices_come_first_then_by_name(spy, x):
    spy("z_named", devices=frozenset({"cpu", "cuda"}))
    spy("y_named", devices=frozenset({"cpu"}))
    spy("z_any")
    spy("a_any")
    assert [c.name for c in gla.explain("online_softmax", x).candidates] == [
        "y_named",
        "z_named",
        "a_any",
        "reference",
        "z_any",
    ]


def test_equal_predictions_go_by_named_devices_then_name(spy, x):
    for name, devices in (("a", None), ("c", frozenset({"cpu"})), ("b", frozenset({"cpu"}))):
        spy(name, cost=lambda call: 1.0, devices=devices)
    assert [c.name for c in gla.explain("online_softmax", x).candidates][:3] == ["b", "c", "a"]


def test_the_order_of_registration_does_not_matter(spy, x):
    for names in ("abc", "cba"):
        made = [spy(name) for name in names]
        assert gla.explain("online_softmax", x).winner == "a"
        for each in made:
            each.handle.unregister()


def test_auto_that_none_can_serve_is_an_error_with_every_refusal(spy, x, monkeypatch, own_backends):
    spy("gpu", devices=frozenset({"cuda"}))
    spy("half", dtypes=frozenset({torch.float16}))
    spy("other", ops=["chunk_gla_fwd"])
    monkeypatch.setenv("GLA_BLOCK_PLUGINS", ",".join(own_backends))
    gla.reload_environment()
    with pytest.raises(gla.NoBackendError) as error:
        gla.online_softmax(x)
    assert str(error.value) == (
        "no backend can run online_softmax (request: auto, from default):\n"
        "  gpu: needs a cuda device; x is on cpu\n"
        "  half: computes float16; x is float32\n"
        "  other: does not implement online_softmax; it implements chunk_gla_fwd"
    )


def test_one_faulty_backend_does_not_take_the_others_down(spy, x):
    def fault(call):
        raise RuntimeError("a bug")

    spy("a", supports=fault, devices=frozenset({"cpu"}))
    b = spy("b", cost=fault)
    gla.online_softmax(x)
    assert b.calls == ["online_softmax"]
    refusals = {c.name: c.refusal for c in gla.explain("online_softmax", x).candidates}
    assert refusals["a"] == "its supports() raised RuntimeError: a bug"


def test_a_backend_with_unreadable_widths_does_not_take_the_others_down(spy, qkvg):
    with contextlib.suppress(gla.BackendError):  # to refuse it at registration is just as well
        spy("odd", key_widths=frozenset({64, 128}))
    assert gla.chunk_gla(*qkvg())[0].shape == (1, 5, 2, 3)


# auto: a backend that cannot launch

OUT_OF_RESOURCES = type("OutOfResources", (Exception,), {"__module__": "triton.runtime.errors"})
LAUNCH_FAILURES = [
    LaunchError("needs 300 KB of shared memory"),
    ImportError("no module named triton"),
    ModuleNotFoundError("no module named triton"),
    OUT_OF_RESOURCES("out of resource: shared memory"),
    type("PTXASError", (Exception,), {"__module__": "triton.runtime.errors"})("ptxas failed"),
    type("CompilationError", (Exception,), {"__module__": "triton.compiler.errors"})("at 3:1"),
    RuntimeError("Failed to find C compiler. Please specify via CC environment variable."),
]
OTHER_FAILURES = [
    ValueError("wrong"),
    RuntimeError("CUDA error: an illegal memory access was encountered"),
    torch.OutOfMemoryError("CUDA out of memory"),
    AssertionError("wrong"),
    ZeroDivisionError("wrong"),
    type("OutOfResources", (Exception,), {"__module__": "elsewhere"})("wrong"),
    type("Interrupted", (Exception,), {"__module__": "triton.runtime.errors"})("wrong"),
    KeyboardInterrupt(),
]


@pytest.fixture
def flaky(spy):
    """A backend that auto prefers and that cannot be launched, and the one that comes next."""
    return spy("flaky", cost=lambda call: 1.0, error=LAUNCH_FAILURES[0]), spy("sound", cost=lambda call: 2.0)


@pytest.mark.parametrize("failure", LAUNCH_FAILURES, ids=lambda e: type(e).__name__)
def test_auto_skips_a_backend_that_cannot_launch_with_one_warning(flaky, failure, x):
    cannot, sound = flaky
    cannot.error = failure
    caught = warnings_of(lambda: [gla.online_softmax(x) for _ in range(3)])
    assert caught == [f"online_softmax: backend 'flaky' could not launch and is skipped: {failure}"]
    assert (len(cannot.calls), len(sound.calls)) == (1, 3)


@pytest.mark.parametrize("failure", OTHER_FAILURES, ids=lambda e: f"{type(e).__module__}.{type(e).__name__}")
def test_any_other_failure_reaches_the_user_every_time(flaky, failure, x):
    faulty, sound = flaky
    faulty.error = failure
    for _ in range(2):
        with pytest.raises(type(failure)) as error:
            gla.online_softmax(x)
        assert error.value is failure
    assert (len(faulty.calls), len(sound.calls)) == (2, 0)


def test_a_wrong_result_is_not_papered_over(flaky, x):
    wrong, sound = flaky
    wrong.error = None
    wrong.result = lambda y: y * torch.nan
    assert warnings_of(lambda: gla.online_softmax(x)) == []
    assert gla.online_softmax(x).isnan().all()
    assert sound.calls == []


@pytest.mark.filterwarnings("ignore:.*could not launch")
def test_a_launch_failure_is_remembered_by_width_and_dtype_not_by_length(flaky, qkvg):
    cannot, sound = flaky
    for _ in range(2):
        gla.chunk_gla(*qkvg(K=4))
    assert (len(cannot.calls), len(sound.calls)) == (1, 2)
    gla.chunk_gla(*qkvg(K=4, T=9, B=2))
    assert (len(cannot.calls), len(sound.calls)) == (1, 3)
    cannot.error = None
    gla.chunk_gla(*qkvg(K=8))  # another width is tried
    assert (len(cannot.calls), len(sound.calls)) == (2, 3)
    gla.chunk_gla(*(t.half() for t in qkvg(K=4)))  # and another dtype
    assert (len(cannot.calls), len(sound.calls)) == (3, 3)
    gla.online_softmax(torch.zeros(2, 3))  # and another op
    assert (len(cannot.calls), len(sound.calls)) == (4, 3)
    gla.chunk_gla(*qkvg(K=4))
    assert (len(cannot.calls), len(sound.calls)) == (4, 4)


@pytest.mark.filterwarnings("ignore:.*could not launch")
def test_a_remembered_failure_is_a_refusal(flaky, x):
    assert gla.explain("online_softmax", x).winner == "flaky"
    gla.online_softmax(x)
    explanation = gla.explain("online_softmax", x)
    refusal = "could not launch: LaunchError: needs 300 KB of shared memory"
    assert {c.name: c.refusal for c in explanation.candidates} == {"flaky": refusal, "sound": None, "reference": None}
    assert explanation.winner == "sound"
    assert refusal in str(explanation)
    with pytest.raises(LaunchError, match="needs 300 KB of shared memory"):
        gla.online_softmax(x, backend="flaky")  # an explicit request is tried again, and shows its own error


@pytest.mark.filterwarnings("ignore:.*could not launch")
@pytest.mark.parametrize("change", ["register", "unregister", "reload"])
def test_a_launch_failure_is_forgotten_when_the_backends_change(flaky, change, x, spy):
    extra = spy("extra", ops=[])
    cannot, _ = flaky
    gla.online_softmax(x)
    {
        "register": lambda: spy("another", ops=[]),
        "unregister": extra.handle.unregister,
        "reload": gla.reload_environment,
    }[change]()
    gla.online_softmax(x)
    assert len(cannot.calls) == 2


def test_when_none_can_launch_the_error_holds_every_failure(spy, x, monkeypatch, own_backends):
    one, two = spy("one", error=LaunchError("no one")), spy("two", error=ImportError("no two"))
    monkeypatch.setenv("GLA_BLOCK_PLUGINS", ",".join(own_backends))
    gla.reload_environment()

    def call():
        with pytest.raises(gla.NoBackendError) as error:
            gla.online_softmax(x)
        assert "one: could not launch: LaunchError: no one" in str(error.value)
        assert "two: could not launch: ImportError: no two" in str(error.value)

    assert len(warnings_of(call)) == 2
    assert warnings_of(call) == []
    assert (len(one.calls), len(two.calls)) == (1, 1)


def test_a_backward_that_cannot_launch_falls_back_too(spy, qkvg):
    inputs = qkvg(grad=True)
    flaky, sound = spy("flaky", cost=lambda call: 1.0), spy("sound", cost=lambda call: 2.0)
    o, _ = gla.chunk_gla(*inputs)
    flaky.error = LaunchError("too much shared memory")
    assert warnings_of(lambda: grads_of(inputs, o)) == [
        "chunk_gla_bwd: backend 'flaky' could not launch and is skipped: too much shared memory"
    ]
    assert sound.calls == ["chunk_gla_bwd"]


# what a call needs decides who may run it


def test_a_call_that_needs_a_gradient_passes_over_a_backend_without(spy, x):
    no_gradient = spy("no_gradient", cost=lambda call: 1.0, gradients=False)
    gla.online_softmax(x)
    gla.online_softmax(x.clone().requires_grad_())
    with torch.no_grad():
        gla.online_softmax(x.clone().requires_grad_())
    assert len(no_gradient.calls) == 2


def test_deterministic_algorithms_pass_over_a_backend_that_is_not(spy, x):
    atomics = spy("atomics", cost=lambda call: 1.0, deterministic=False)
    gla.online_softmax(x)
    torch.use_deterministic_algorithms(True)
    try:
        gla.online_softmax(x)
        with pytest.raises(gla.NoBackendError, match="is not deterministic"):
            gla.online_softmax(x, backend="atomics")
    finally:
        torch.use_deterministic_algorithms(False)
    gla.online_softmax(x)
    assert len(atomics.calls) == 2


def test_packed_sequences_and_grouped_queries_pass_over_a_backend_without(spy, qkvg):
    dense = spy("dense", cost=lambda call: 1.0, variable_length=False)
    plain = spy("plain", cost=lambda call: 2.0, grouped_queries=False)
    q, k, v, g = qkvg(T=6)
    gla.chunk_gla(q, k, v, g)
    gla.chunk_gla(q, k, v, g, cu_seqlens=torch.tensor([0, 2, 6]))
    gla.chunk_gla(*qkvg(H=2, Hq=4), cu_seqlens=torch.tensor([0, 5]))
    assert (len(dense.calls), len(plain.calls)) == (1, 1)


def test_what_the_backend_is_asked_describes_the_call(spy, qkvg):
    asked = []
    spy("curious", cost=lambda call: 1.0, supports=lambda call: asked.append(call))
    q, k, v, g = qkvg(B=2, T=7, H=2, Hq=4, K=4, V=3)
    gla.chunk_gla(q.half(), k.half(), v.half(), g, initial_state=torch.zeros(2, 2, 4, 3), backend="curious")
    (call,) = asked
    assert call.op == "chunk_gla_fwd"
    assert (call.device, call.dtype) == (torch.device("cpu"), torch.float16)
    assert dict(call.dims) == {"B": 2, "T": 7, "H": 2, "Hq": 4, "K": 4, "V": 3, "N": 2}
    assert (call.gate_dtype, call.state_dtype) == (torch.float32, torch.float32)
    assert (call.variable_length, call.needs_grad, call.deterministic, call.capturing) == (False,) * 4


def test_a_choice_is_made_once_per_signature(spy, x):
    asked = []
    spy("curious", cost=lambda call: asked.append(call) or 1.0)
    for _ in range(3):
        gla.online_softmax(x)
    once = len(asked)
    assert once >= 1
    gla.online_softmax(torch.zeros(9, 9))
    assert len(asked) == 2 * once


@pytest.mark.parametrize(
    ("good", "bad"),
    [
        ({"g": None}, {"g": 0.5}),
        ({"initial_state": None}, {"initial_state": 1.0}),
        ({"cu_seqlens": None}, {"cu_seqlens": 2.0}),
        ({"output_final_state": True}, {"output_final_state": 1}),
        ({"scale": 1}, {"scale": True}),
    ],
)
def test_a_bad_argument_is_refused_though_a_good_call_like_it_was_made_before(spy, qkvg, good, bad):
    q, k, v, _ = qkvg()
    (name,) = bad
    mine = spy("mine")
    gla.chunk_gla(q, k, v, **good, backend="mine")
    with pytest.raises(TypeError, match=name):
        gla.chunk_gla(q, k, v, **bad, backend="mine")
    assert len(mine.calls) == 1


# the backward of a forward


def test_a_backward_runs_under_the_request_of_its_forward(spy, qkvg):
    a, b = spy("a"), spy("b")
    inputs = qkvg(grad=True)
    with gla.use_backend("b"):
        o, _ = gla.chunk_gla(*inputs)
    grads_of(inputs, o)  # the block has ended
    assert (a.calls, b.calls) == ([], ["chunk_gla_fwd", "chunk_gla_bwd"])


@pytest.mark.parametrize("how", ["argument", "inner", "variable"])
def test_whatever_the_request_came_from(monkeypatch, spy, qkvg, how):
    a, b = spy("a"), spy("b")
    inputs = qkvg(grad=True)
    if how == "variable":
        monkeypatch.setenv("GLA_BACKEND", "b")
        gla.reload_environment()
    with gla.use_backend("b" if how == "inner" else "chunk_gla_fwd=b"):
        o, _ = gla.chunk_gla(*inputs, backend="b" if how == "argument" else None)
    monkeypatch.setenv("GLA_BACKEND", "a")
    gla.reload_environment()
    grads_of(inputs, o)
    assert (a.calls, b.calls) == ([], ["chunk_gla_fwd", "chunk_gla_bwd"])


def test_a_request_in_force_at_the_backward_does_not_count(spy, qkvg):
    a, b, c = spy("a"), spy("b"), spy("c")
    inputs = qkvg(grad=True)
    with gla.use_backend("c"):
        o, _ = gla.chunk_gla(*inputs)
    under_auto, _ = gla.chunk_gla(*inputs)
    with gla.use_backend("b"):
        grads_of(inputs, o)
        grads_of(inputs, under_auto)
    assert (a.calls, b.calls) == (["chunk_gla_fwd", "chunk_gla_bwd"], [])
    assert c.calls == ["chunk_gla_fwd", "chunk_gla_bwd"]


def test_a_backward_in_another_thread_keeps_the_request(spy, qkvg):
    a, b = spy("a"), spy("b")
    inputs = qkvg(grad=True)
    with gla.use_backend("b"):
        o, _ = gla.chunk_gla(*inputs)
    thread = threading.Thread(target=lambda: o.sum().backward())
    thread.start()
    thread.join()
    assert inputs[0].grad is not None
    assert (a.calls, b.calls) == ([], ["chunk_gla_fwd", "chunk_gla_bwd"])


def test_forward_and_backward_by_different_backends(spy, qkvg):
    a, b = spy("a"), spy("b")
    inputs, again = qkvg(grad=True), qkvg(grad=True)
    o, state = gla.chunk_gla(*inputs, output_final_state=True, backend="chunk_gla_fwd=a;chunk_gla_bwd=b")
    grads = torch.autograd.grad(o.sum() + state.sum(), inputs)
    assert (a.calls, b.calls) == (["chunk_gla_fwd"], ["chunk_gla_bwd"])
    o, state = gla.chunk_gla(*again, output_final_state=True, backend="reference")
    for ours, theirs in zip(grads, torch.autograd.grad(o.sum() + state.sum(), again), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_a_strict_backend_without_backward_is_refused_before_the_forward(spy, qkvg):
    forward_only = spy("forward_only", ops=["chunk_gla_fwd"])
    with pytest.raises(gla.NoBackendError) as error:
        gla.chunk_gla(*qkvg(grad=True), backend="forward_only")
    assert "forward_only: does not implement chunk_gla_bwd; it implements chunk_gla_fwd" in str(error.value)
    assert forward_only.calls == []
    gla.chunk_gla(*qkvg(), backend="forward_only")  # without a gradient it serves
    with torch.no_grad():
        gla.chunk_gla(*qkvg(grad=True), backend="forward_only")
    assert len(forward_only.calls) == 2


@pytest.mark.parametrize(
    ("request_", "proposed"),
    [
        ("forward_only", "forward_only,whole"),
        ("chunk_gla_fwd=forward_only;*=forward_only", "chunk_gla_fwd=forward_only;*=forward_only,whole"),
        ("*=auto;chunk_gla_bwd=forward_only", "*=auto;chunk_gla_bwd=forward_only,whole"),
        ("chunk_gla_bwd=forward_only", "chunk_gla_bwd=forward_only,whole"),
    ],
)
def test_a_strict_request_that_cannot_train_is_refused_with_one_that_can(spy, qkvg, request_, proposed):
    forward_only = spy("forward_only", ops=["chunk_gla_fwd"], cost=lambda call: 1.0)
    whole = spy("whole", cost=lambda call: 2.0)
    inputs = qkvg(grad=True)
    with pytest.raises(gla.NoBackendError) as error:
        gla.chunk_gla(*inputs, backend=request_)
    assert f"; {proposed!r} would run it:\n" in str(error.value)
    grads_of(inputs, gla.chunk_gla(*inputs, backend=proposed)[0])
    assert (forward_only.calls, whole.calls) == (["chunk_gla_fwd"], ["chunk_gla_bwd"])


def test_where_nobody_can_run_a_call_no_request_is_proposed(spy, x, monkeypatch, own_backends):
    spy("half", dtypes=frozenset({torch.float16}))
    monkeypatch.setenv("GLA_BLOCK_PLUGINS", ",".join(own_backends))
    gla.reload_environment()
    with pytest.raises(gla.NoBackendError, match=r"\(request: half, from backend=\):\n"):
        gla.online_softmax(x, backend="half")


@pytest.mark.parametrize("request_", ["auto", "forward_only,whole", "chunk_gla_fwd=forward_only;chunk_gla_bwd=whole"])
def test_a_backend_without_backward_serves_where_the_request_leaves_the_backward_to_another(spy, qkvg, request_):
    forward_only = spy("forward_only", ops=["chunk_gla_fwd"], cost=lambda call: 1.0)
    whole = spy("whole", cost=lambda call: 2.0)
    inputs = qkvg(grad=True)
    grads_of(inputs, gla.chunk_gla(*inputs, backend=request_)[0])
    assert (forward_only.calls, whole.calls) == (["chunk_gla_fwd"], ["chunk_gla_bwd"])


def test_without_the_forwards_backend_the_backward_is_an_error(spy, qkvg):
    b = spy("b")
    inputs = qkvg(grad=True)
    o, _ = gla.chunk_gla(*inputs, backend="b")
    b.handle.unregister()
    with pytest.raises(gla.UnknownBackendError, match="'b'"):
        grads_of(inputs, o)


# explain


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
        "mine: no backend predicts its time; one written for named devices comes first, then by name"
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
    assert str(explanation).splitlines()[0] == "chunk_gla_fwd  B=1 T=6 H=2 Hq=2 K=4 V=3 N=2  float32 on cpu, packed"
    assert explanation.call.variable_length


def test_explain_runs_nothing_and_warns_of_nothing(flaky, x, qkvg):
    cannot, sound = flaky
    assert warnings_of(lambda: [gla.explain("online_softmax", x), gla.explain("chunk_gla_bwd", *qkvg())]) == []
    assert cannot.calls == sound.calls == []


def test_explain_an_unknown_op_is_an_error_with_the_nearest_spelling(qkvg):
    with pytest.raises(gla.UnknownOpError, match=r"'chunk_gla'; did you mean 'chunk_gla_(fwd|bwd)'\?.*online_softmax"):
        gla.explain("chunk_gla", *qkvg())


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
