"""A backend that cannot launch: `auto` skips it, with one warning."""

from __future__ import annotations

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
    assert warnings_of(lambda: torch.autograd.grad(o.sum(), inputs)) == [
        "chunk_gla_bwd: backend 'flaky' could not launch and is skipped: too much shared memory"
    ]
    assert sound.calls == ["chunk_gla_bwd"]
