"""The kernels of a call are compiled in parallel before its first launch; errors name the kernel that failed."""

import os
import threading

import pytest
import torch

from gla_core.dispatch.backend import LaunchError
from tests.backends.fake_kernels import Compiled, Kernel

pytest.importorskip("triton")

import triton.runtime._async_compile as mode
from triton.runtime.errors import OutOfResources

from gla_triton_runtime import launch
from gla_triton_runtime.launch import Launch, compile_launches, start

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="interpreted kernels are not built")


@pytest.fixture(autouse=True)
def prepared(monkeypatch):
    """Returns a list of the requests to Triton before it compiles. They are faked, because there may be no device."""
    asked = []
    monkeypatch.setattr(launch, "triton_key", lambda: asked.append("key"))
    monkeypatch.setattr(launch, "driver", type("driver", (), {"active": property(lambda _: asked.append("driver"))})())
    launch._prepare_compiler.cache_clear()
    yield asked
    launch._prepare_compiler.cache_clear()


def launches(*kernels):
    arguments = {"x_ptr": "x", "y_ptr": None, "scale": 0.5}
    return [Launch(kernel, (i, 1, 1), {**arguments, "T": i}, {"num_warps": 4}) for i, kernel in enumerate(kernels)]


@pytest.fixture(params=["start", "compile_launches"])
def act(request):
    """Starts launches, or compiles them."""
    return getattr(launch, request.param)


def test_what_takes_long_once_is_begun_first(prepared):
    for _ in range(2):
        compile_launches(launches(Kernel("a", [])))
    assert sorted(prepared) == ["driver", "key"]


def test_all_are_compiled_before_the_first_is_launched():
    """All kernels are compiled in parallel. Once all are compiled, each is loaded on the device."""
    told = []
    made = launches(Kernel("a", told), Kernel("b", told))
    compile_launches(made)
    expected = [(name, ("x", None, 0.5, i), (i, 1, 1), {"num_warps": 4}) for i, name in enumerate("ab")]
    compiled = [("warmup", *what) for what in expected]
    assert told == [*compiled, compiled[0], ("load", "a"), compiled[1], ("load", "b")]
    told.clear()
    start(made)
    assert told == [("launch", *what) for what in expected]
    assert [x.compiled for x in made] == ["a compiled", "b compiled"]


def test_one_is_compiled_as_it_is_launched():
    told = []
    start(launches(Kernel("a", told)))
    assert [what for what, *_ in told] == ["launch"]


def test_one_that_is_compiled_by_itself_needs_no_threads(monkeypatch):
    told = []
    monkeypatch.setattr(launch, "_compile_side_by_side", lambda made: told.append("threads"))
    launch.compile_launches(launches(Kernel("a", told)))
    assert [what for what, *_ in told] == ["warmup", "load"]


def test_a_kernel_that_does_not_fit_is_named(act):
    error = OutOfResources(300_000, 232_448, "shared memory")
    with pytest.raises(LaunchError, match=r"^b cannot be launched on this device: OutOfResources: .*300000"):
        act(launches(Kernel("a", []), Kernel("b", [], error)))


@pytest.mark.parametrize("error", [KeyError("maxnreg"), RuntimeError("PassManager::run failed"), AssertionError()])
@pytest.mark.parametrize("beside", [[], ["a"]])
def test_whatever_the_compiler_raises_is_a_failed_launch(error, beside, act):
    """The kernel is compiled alone, or in a thread beside others; the thread's error is raised later, in the caller."""

    class Uncompiled(Kernel):
        def warmup(self, *_, **__):
            raise self.error

    with pytest.raises(LaunchError, match=f"^b cannot be launched on this device: {type(error).__name__}") as raised:
        act(launches(*(Kernel(name, []) for name in beside), Uncompiled("b", [], error)))
    assert raised.value.__cause__ is error
    assert mode.active_mode.get() is None


def test_without_a_driver_there_is_no_launch(monkeypatch):
    class NoDriver:
        @property
        def active(self):
            raise RuntimeError("0 active drivers ([]). There should only be one.")

    monkeypatch.setattr(launch, "driver", NoDriver())
    with pytest.raises(LaunchError, match=r"^Triton cannot be launched on this device: RuntimeError: 0 active drivers"):
        launch.compile_launches(launches(Kernel("a", [])))


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
        torch.AcceleratorError("CUDA error: an illegal memory access was encountered"),
        torch.OutOfMemoryError("CUDA out of memory"),
        KeyboardInterrupt(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_of_the_device_are_no_failed_launch(error, act):
    """They may be errors of an earlier kernel. If they were caught, its wrong results would be used."""
    with pytest.raises(type(error)) as raised:
        act(launches(Kernel("a", [], error)))
    assert raised.value is error


def test_triton_compiles_side_by_side_and_keeps_errors_for_later():
    """Two kernels each wait until the other is being compiled. A kernel that cannot be compiled delays no other one."""
    both, told = threading.Barrier(2, timeout=20), []

    class Compiling(Kernel):
        def warmup(self, *_, **__):
            if (beside := mode.active_mode.get()) is None:
                return self.compile()
            return beside.submit(self.fn.__name__, self.compile_beside, told.append)

        def compile_beside(self):
            both.wait()
            self.compile()
            return self.fn.__name__

        def compile(self):
            if self.error is not None:
                raise self.error
            return Compiled(self.fn.__name__, [])

    with pytest.raises(LaunchError, match=r"^b cannot be launched.*ValueError: wrong"):
        compile_launches(launches(Compiling("a", []), Compiling("b", [], ValueError("wrong"))))
    assert told == ["a"]
    assert mode.active_mode.get() is None
