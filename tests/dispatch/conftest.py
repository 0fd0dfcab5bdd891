"""Spy backends, installed plugins, and a registry that every test finds as a fresh process would."""

import dataclasses
import functools
import sys
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch

import gla_core as gla
import gla_parallel_scan
import gla_reference
import gla_triton_fused
from gla_core.dispatch.backend import OP_PARAMETERS, Backend, Capabilities, LaunchError, hookimpl
from tests.reference import function


@pytest.fixture(autouse=True)
def isolated(fresh_registry, monkeypatch):
    """Isolates every test here: nothing is calibrated, our own backends predict no time, no kernel is interpreted."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    for module in (gla_parallel_scan, gla_reference, gla_triton_fused):
        without_cost = [dataclasses.replace(each, cost=None) for each in module.gla_register_backends()]
        monkeypatch.setattr(module, "gla_register_backends", hookimpl(lambda backends=without_cost: list(backends)))
    gla.reload_environment()


@dataclass
class Spy:
    """A backend that records the ops it runs and leaves the arithmetic to the reference.

    If `error` is set, its functions raise it. `result` is a function that may change the reference's results.
    """

    backend: Backend
    handle: gla.Registration
    calls: list[str] = field(default_factory=list)
    error: BaseException | None = None
    result: Callable = lambda out: out


@pytest.fixture
def spy():
    """`spy(name, ops=..., error=..., supports=..., cost=..., **capabilities)` registers a `Spy`."""
    made: list[Spy] = []

    def make(name, ops=tuple(OP_PARAMETERS), error=None, **fields):
        others = {key: fields.pop(key) for key in ("supports", "cost") if key in fields}
        functions: dict[str, Callable] = {}
        backend = Backend(name, "1.0", functions, Capabilities(**fields), **others)
        new = Spy(backend, gla.Registration(backend), error=error)
        functions.update((op, _recording(op, new)) for op in ops)
        new.handle = gla.register(backend)
        made.append(new)
        return new

    yield make
    for each in made:
        each.handle.unregister()


def _recording(op, spy):
    reference = function(op)

    @functools.wraps(reference)
    def run(*args):
        spy.calls.append(op)
        if spy.error is not None:
            raise spy.error
        return spy.result(reference(*args))

    return run


@pytest.fixture
def install(tmp_path, monkeypatch):
    """`install(plugin, source)` installs a distribution with one module and one entry point, as pip would.

    Returns the module's name. The registry sees it, unless `seen` is False: then it does after a reload.
    """
    modules: list[str] = []
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def write(plugin, source, distribution="", seen=True):
        distribution = distribution or f"dist_{plugin}"
        module = f"module_of_{distribution}"
        (tmp_path / f"{module}.py").write_text(source)
        info = tmp_path / f"{distribution}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[gla_core.backends]\n{plugin} = {module}\n")
        monkeypatch.syspath_prepend(tmp_path)
        modules.append(module)
        if seen:
            gla.reload_environment()
        return module

    yield write
    for module in modules:
        sys.modules.pop(module, None)


@pytest.fixture
def plugin_source():
    """`plugin_source(backends)` is the text of a plugin whose hook evaluates `backends`, a Python expression.

    The module has `softmax`, a correct implementation of online_softmax that counts its calls in `softmax_calls`. It
    counts the calls of its hook in `hook_calls`.
    """

    def source(backends):
        return f"""
import torch
from gla_core.dispatch.backend import Backend, Capabilities, hookimpl

hook_calls = softmax_calls = 0

def softmax(x, dim):
    global softmax_calls
    softmax_calls += 1
    return torch.softmax(x, dim)

@hookimpl
def gla_register_backends():
    global hook_calls
    hook_calls += 1
    return {backends}
"""

    return source


@pytest.fixture
def in_time():
    """`in_time(work)` runs `work` in another thread and returns its result. After a deadlock it fails within 10 s."""

    def run(work):
        returned: list[object] = []
        thread = threading.Thread(target=lambda: returned.append(work()), daemon=True)
        thread.start()
        thread.join(timeout=10)
        assert returned, "it hangs" if thread.is_alive() else "it raised"
        return returned[0]

    return run


@pytest.fixture
def warnings_of():
    """`warnings_of(action)` is the text of the warnings of an action, of each as often as it comes."""

    def texts(action):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            action()
        return [str(warning.message) for warning in caught]

    return texts


@pytest.fixture
def at_once():
    """`at_once(work, each)` runs `work` in a thread for each argument, all at the same time, until all have ended."""

    def run(work, each):
        threads = [threading.Thread(target=work, args=(argument,)) for argument in each]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    return run


@pytest.fixture
def x():
    return torch.tensor([[1.0, 2.0, 3.0], [0.0, 0.0, 0.0]])


@pytest.fixture
def qkvg():
    """`qkvg(K=..., T=..., ...)` makes small inputs of chunk_gla."""

    def make(B=1, T=5, H=2, Hq=0, K=4, V=3, grad=False):
        generator = torch.Generator().manual_seed(0)
        shapes = ((B, T, Hq or H, K), (B, T, H, K), (B, T, H, V))
        q, k, v = (torch.randn(*shape, generator=generator) for shape in shapes)
        g = torch.nn.functional.logsigmoid(torch.randn(B, T, H, K, generator=generator))
        return tuple(t.requires_grad_(grad) for t in (q, k, v, g))

    return make


@pytest.fixture
def spies(spy):
    return {name: spy(name) for name in "abcd"}


@pytest.fixture
def ran(spies, x):
    """`ran(call)` is the name of the spy that ran online_softmax during `call`, "reference" if none did."""

    def run(call=lambda: gla.online_softmax(x)):
        for each in spies.values():
            each.calls.clear()
        call()
        names = [name for name, each in spies.items() for _ in each.calls]
        assert len(names) <= 1
        return names[0] if names else "reference"

    return run


@pytest.fixture
def flaky(spy):
    """A backend that auto prefers but that cannot launch, and the backend that auto tries next."""
    cannot = LaunchError("needs 300 KB of shared memory")
    return spy("flaky", cost=lambda call: 1.0, error=cannot), spy("sound", cost=lambda call: 2.0)


@pytest.fixture
def info():
    """`info(name)` is the entry of `gla.backends()` with this name, or None if there is none."""

    def find(name):
        actual = [b for b in gla.backends() if b.name == name]
        assert len(actual) <= 1
        return actual[0] if actual else None

    return find
