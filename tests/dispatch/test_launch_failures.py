"""A backend that cannot launch: `auto` skips it, with one warning."""

from types import SimpleNamespace

import pytest
import torch

import gla_core as gla
from gla_core.dispatch import calibration
from gla_core.dispatch.backend import Backend, LaunchError, Prepared, known_device
from gla_triton_kernels.cost import gpu_of_constants
from gla_triton_runtime.architecture import Architecture, Gpu, gpu_of

pytestmark = pytest.mark.usefixtures("only_reference")


LAUNCH_FAILURES = [
    LaunchError("needs 300 KB of shared memory"),
    ImportError("no module named triton"),
    ModuleNotFoundError("no module named triton"),
]
OTHER_FAILURES = [
    ValueError("wrong"),
    RuntimeError("CUDA error: an illegal memory access was encountered"),
    torch.OutOfMemoryError("CUDA out of memory"),
    AssertionError("wrong"),
    ZeroDivisionError("wrong"),
    type("OutOfResources", (Exception,), {"__module__": "triton.runtime.errors"})("a backend has to say so"),
    KeyboardInterrupt(),
]


def test_a_wrong_result_is_not_papered_over(flaky, x, warnings_of):
    wrong, sound = flaky
    wrong.error = None
    wrong.result = lambda y: y * torch.nan
    assert warnings_of(lambda: gla.online_softmax(x)) == []
    assert gla.online_softmax(x).isnan().all()
    assert sound.calls == []


@pytest.mark.filterwarnings("ignore:.*could not launch")
def test_a_launch_failure_is_remembered_by_width_dtype_and_form_not_by_length(flaky, qkvg):
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
    gla.chunk_gla(*qkvg(K=4)[:3])  # and another form of gates, here none
    assert (len(cannot.calls), len(sound.calls)) == (4, 3)
    gla.online_softmax(torch.zeros(2, 3))  # and another op
    assert (len(cannot.calls), len(sound.calls)) == (5, 3)
    gla.chunk_gla(*qkvg(K=4))
    assert (len(cannot.calls), len(sound.calls)) == (5, 4)


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


def test_a_backward_that_cannot_launch_falls_back_too(spy, qkvg, warnings_of):
    inputs = qkvg(grad=True)
    flaky, sound = spy("flaky", cost=lambda call: 1.0), spy("sound", cost=lambda call: 2.0)
    o, _ = gla.chunk_gla(*inputs)
    flaky.error = LaunchError("too much shared memory")
    assert warnings_of(lambda: torch.autograd.grad(o.sum(), inputs)) == [
        "chunk_gla_bwd: backend 'flaky' could not launch and is skipped: too much shared memory"
    ]
    assert sound.calls == ["chunk_gla_bwd"]


# ---- ops that are prepared


class Preparing:
    """Registers a backend whose online_softmax raises `error` when it is prepared, when it is run, or as a function."""

    def __init__(self, name, seconds, error=None, when="prepared"):
        self.error, self.when, self.prepared, self.run = error, when, 0, 0
        op = self.softmax if when == "a function" else Prepared(self.prepare, ("x", "dim"))
        self.handle = gla.register(Backend(name, "1.0", {"online_softmax": op}, cost=lambda call: seconds))

    def prepare(self, call):
        self.prepared += 1
        if self.error is not None and self.when == "prepared":
            raise self.error
        return self.softmax

    def softmax(self, x, dim):
        self.run += 1
        if self.error is not None:
            raise self.error
        return torch.softmax(x, dim)


@pytest.fixture
def preparing():
    """Returns a function that registers two backends: auto prefers one that raises an error; the other one is sound."""
    made = []

    def registered(error, when="prepared"):
        made.extend([Preparing("flaky", 1.0, error, when), Preparing("sound", 2.0, when=when)])
        return made

    yield registered
    for each in made:
        each.handle.unregister()


@pytest.mark.parametrize("when", ["prepared", "run", "a function"])
@pytest.mark.parametrize("failure", LAUNCH_FAILURES, ids=lambda e: type(e).__name__)
def test_auto_skips_a_backend_that_cannot_launch_with_one_warning(preparing, failure, when, x, warnings_of):
    cannot, sound = preparing(failure, when)
    results = []
    caught = warnings_of(lambda: results.extend(gla.online_softmax(x) for _ in range(3)))
    assert caught == [f"online_softmax: backend 'flaky' could not launch and is skipped: {failure}"]
    assert (cannot.prepared, cannot.run) == {"prepared": (1, 0), "run": (1, 1), "a function": (0, 1)}[when]
    assert (sound.prepared, sound.run) == (0 if when == "a function" else 1, 3)
    assert all(torch.equal(y, torch.softmax(x, -1)) for y in results)


@pytest.mark.parametrize("when", ["prepared", "run"])
def test_the_warning_is_of_the_line_that_calls(preparing, when, x):
    preparing(LaunchError("needs 300 KB of shared memory"), when)
    with pytest.warns(UserWarning, match="could not launch") as caught:
        gla.online_softmax(x)
    assert [warning.filename for warning in caught] == [__file__]


@pytest.mark.filterwarnings("ignore:.*could not launch")
def test_a_failure_to_prepare_is_a_refusal_and_an_explicit_request_shows_it(preparing, x):
    cannot, sound = preparing(LaunchError("needs 300 KB of shared memory"))
    for i in range(2):
        with pytest.raises(LaunchError, match="needs 300 KB of shared memory") as raised:
            gla.online_softmax(x, backend="flaky")
        assert raised.value is cannot.error
        assert (cannot.prepared, sound.prepared) == (i + 1, 0)
    assert gla.explain("online_softmax", x).winner == "flaky"  # an explicit request is not remembered
    gla.online_softmax(x)
    refusals = {c.name: c.refusal for c in gla.explain("online_softmax", x).candidates}
    assert refusals["flaky"] == "could not launch: LaunchError: needs 300 KB of shared memory"
    with pytest.raises(LaunchError, match="needs 300 KB of shared memory"):
        gla.online_softmax(x, backend="flaky,sound")
    cannot.error = None
    assert torch.equal(gla.online_softmax(x, backend="flaky"), torch.softmax(x, -1))


@pytest.mark.parametrize("when", ["prepared", "a function"])
@pytest.mark.parametrize("failure", OTHER_FAILURES, ids=lambda e: f"{type(e).__module__}.{type(e).__name__}")
def test_any_other_failure_reaches_the_user_every_time(preparing, failure, when, x):
    faulty, sound = preparing(failure, when)
    for _ in range(2):
        with pytest.raises(type(failure)) as error:
            gla.online_softmax(x)
        assert error.value is failure
    assert (faulty.prepared, faulty.run) == ((2, 0) if when == "prepared" else (0, 2))
    assert (sound.prepared, sound.run) == (0, 0)


@pytest.mark.parametrize("when", ["prepared", "a function"])
def test_when_none_can_launch_the_error_holds_every_failure(
    preparing, when, x, set_environment, own_backends, warnings_of
):
    one, two = preparing(LaunchError("no one"), when)
    two.error = ImportError("no two")
    set_environment(GLA_BLOCK_PLUGINS=",".join(own_backends))

    def call():
        with pytest.raises(gla.NoBackendError) as error:
            gla.online_softmax(x)
        assert "flaky: could not launch: LaunchError: no one" in str(error.value)
        assert "sound: could not launch: ImportError: no two" in str(error.value)

    assert len(warnings_of(call)) == 2
    assert warnings_of(call) == []
    assert (one.prepared + one.run, two.prepared + two.run) == (1, 1)


# ---- AMD GPUs


@pytest.fixture
def amd_gpu(monkeypatch):
    """Makes PyTorch look like a build for AMD GPUs that sees an MI300X."""
    properties = SimpleNamespace(name="AMD Instinct MI300X", multi_processor_count=304, major=9, minor=4)
    monkeypatch.setattr(torch.version, "hip", "6.4.0")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _=None: properties)
    gpu_of.cache_clear()
    yield properties
    gpu_of.cache_clear()


def test_an_amd_gpu_is_not_taken_for_hopper(amd_gpu, monkeypatch):
    """PyTorch reports compute capability 9.4 for it."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert known_device(torch.device("cuda", 0)).vendor == "AMD"
    assert gpu_of(torch.device("cuda", 0)) == Gpu(Architecture.AMD, 304)
    monkeypatch.setattr(torch.version, "hip", None)
    gpu_of.cache_clear()
    assert gpu_of(torch.device("cuda", 0)) == Gpu(Architecture.SM90, 304)


def test_cost_models_know_an_amd_gpu_by_the_compute_capability_of_none(amd_gpu):
    described = calibration._described(known_device(torch.device("cuda", 0)))
    assert described == ("AMD Instinct MI300X", {"multiprocessors": 304.0, "compute_capability": 0.0})
    assert gpu_of_constants(described[1]) == Gpu(Architecture.AMD, 304)
