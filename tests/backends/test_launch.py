"""Launches are started together: what they need is compiled at once, and before the first of them."""

from __future__ import annotations

import os
import threading

import pytest
import torch

from gla_core.dispatch.backend import LaunchError

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="interpreted kernels are not compiled"
)


@pytest.fixture(autouse=True)
def prepared(monkeypatch):
    """What has been asked of Triton before it compiles: there may be no device here."""
    from gla_triton_kernels.runtime import launch

    asked = []
    monkeypatch.setattr(launch, "triton_key", lambda: asked.append("key"))
    monkeypatch.setattr(launch, "driver", type("driver", (), {"active": property(lambda _: asked.append("driver"))})())
    launch._prepare_compiler.cache_clear()
    yield asked
    launch._prepare_compiler.cache_clear()


class Kernel:
    """Stands for a function of triton.jit, and notes what is asked of it."""

    def __init__(self, name, told, error=None):
        self.fn, self.told, self.error = type(name, (), {}), told, error
        self.arg_names = ["x_ptr", "y_ptr", "scale", "T"]

    def warmup(self, *arguments, grid, **options):
        self.told.append(("warmup", self.fn.__name__, arguments, grid, options))

    def __getitem__(self, grid):
        def launch(*arguments, **options):
            if self.error is not None:
                raise self.error
            self.told.append(("launch", self.fn.__name__, arguments, grid, options))
            return f"{self.fn.__name__} compiled"

        return launch


def launches(*kernels):
    from gla_triton_kernels.runtime.launch import Launch

    arguments = {"x_ptr": "x", "y_ptr": None, "scale": 0.5}
    return [Launch(kernel, (i, 1, 1), {**arguments, "T": i}, {"num_warps": 4}) for i, kernel in enumerate(kernels)]


def test_what_takes_long_once_is_begun_first(prepared):
    from gla_triton_kernels.runtime.launch import start

    for _ in range(2):
        start(launches(Kernel("a", [])))
    assert sorted(prepared) == ["driver", "key"]


def test_all_are_compiled_before_the_first_is_launched():
    from gla_triton_kernels.runtime.launch import start

    told = []
    made = launches(Kernel("a", told), Kernel("b", told))
    start(made)
    expected = [(name, ("x", None, 0.5, i), (i, 1, 1), {"num_warps": 4}) for i, name in enumerate("ab")]
    assert told == [("warmup", *what) for what in expected] + [("launch", *what) for what in expected]
    assert [x.compiled for x in made] == ["a compiled", "b compiled"]


def test_one_is_compiled_as_it_is_launched():
    from gla_triton_kernels.runtime.launch import start

    told = []
    start(launches(Kernel("a", told)))
    assert [what for what, *_ in told] == ["launch"]


def test_a_kernel_that_does_not_fit_is_named():
    from triton.runtime.errors import OutOfResources

    from gla_triton_kernels.runtime.launch import start

    error = OutOfResources(300_000, 232_448, "shared memory")
    with pytest.raises(LaunchError, match=r"^b cannot be launched on this device: OutOfResources: .*300000"):
        start(launches(Kernel("a", []), Kernel("b", [], error)))


@pytest.mark.parametrize("error", [KeyError("maxnreg"), RuntimeError("PassManager::run failed"), AssertionError()])
@pytest.mark.parametrize("beside", [[], ["a"]])
def test_whatever_the_compiler_raises_is_a_failed_launch(error, beside):
    """Alone, and where others are compiled beside it, which asks the compiler before the launch does."""
    import triton.runtime._async_compile as mode

    from gla_triton_kernels.runtime.launch import start

    class Uncompiled(Kernel):
        def warmup(self, *_, **__):
            raise self.error

    with pytest.raises(LaunchError, match=f"^b cannot be launched on this device: {type(error).__name__}") as raised:
        start(launches(*(Kernel(name, []) for name in beside), Uncompiled("b", [], error)))
    assert raised.value.__cause__ is error
    assert mode.active_mode.get() is None


def test_without_a_driver_there_is_no_launch(monkeypatch):
    from gla_triton_kernels.runtime import launch

    class NoDriver:
        @property
        def active(self):
            raise RuntimeError("0 active drivers ([]). There should only be one.")

    monkeypatch.setattr(launch, "driver", NoDriver())
    with pytest.raises(LaunchError, match=r"^Triton cannot be launched on this device: RuntimeError: 0 active drivers"):
        launch.start(launches(Kernel("a", [])))


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
def test_errors_of_the_device_are_no_failed_launch(error):
    """They may be those of a kernel that ran before, whose results would be taken for right."""
    from gla_triton_kernels.runtime.launch import start

    with pytest.raises(type(error)) as raised:
        start(launches(Kernel("a", [], error)))
    assert raised.value is error


def test_triton_compiles_side_by_side_and_keeps_errors_for_the_launch():
    """Two kernels that each wait until the other is being compiled; one that cannot be compiled holds up none."""
    import triton.runtime._async_compile as mode

    from gla_triton_kernels.runtime.launch import start

    both, told = threading.Barrier(2, timeout=20), []

    class Compiling(Kernel):
        def warmup(self, *_, **__):
            mode.active_mode.get().submit(self.fn.__name__, self.compile, told.append)

        def compile(self):
            both.wait()
            if self.error is not None:
                raise self.error
            return self.fn.__name__

    with pytest.raises(LaunchError, match=r"^b cannot be launched.*ValueError: wrong"):
        start(launches(Compiling("a", []), Compiling("b", [], ValueError("wrong"))))
    assert told == ["a"]
    assert mode.active_mode.get() is None
