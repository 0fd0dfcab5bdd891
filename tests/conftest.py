"""Shared fixtures, and the rules by which tests are selected.

Tests marked `kernels` launch Triton kernels: compiled on a GPU, interpreted elsewhere. Triton decides whether to
interpret when the kernels are imported, and it changes the picks of `auto`. So interpreted tests need a run of their
own, with TRITON_INTERPRET=1, and all other tests see what users see. Tests marked `gpu` need a CUDA device. Tests
marked `thorough` are variations of other tests, and take seconds: `pytest --thorough` and `make conformance` run them.
"""

import functools
import gc
import importlib
import importlib.metadata
import importlib.util
import itertools
import logging
import os
import re
import runpy
import sys
from pathlib import Path

import hypothesis
import pytest
import torch

import gla_core as gla
from gla_core.conformance.conftest import prepare_threads
from gla_core.conformance.conftest import pytest_runtest_teardown as pytest_runtest_teardown  # frees memory
from gla_core.dispatch import hookspecs, registry
from gla_core.ops import _run

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
TESTS = Path(__file__).parent
GPU = torch.cuda.is_available() and not INTERPRETED
KERNELS_ALONE = re.compile(r"^pytestmark = .*\bmark\.(kernels|gpu)\b", re.MULTILINE)
"""Matches modules all of whose tests launch kernels."""

if INTERPRETED and "quick_interpreter" not in sys.modules:  # as after -p quick_interpreter
    runpy.run_path(str(TESTS / "quick_interpreter.py"))


ANY = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.function_scoped_fixture]}
hypothesis.settings.register_profile("any speed", **ANY)  # a slow machine fails no test
hypothesis.settings.load_profile("any speed")


def pytest_addoption(parser):
    parser.addoption("--thorough", action="store_true", help="run the tests marked `thorough` as well")
    forms = ("none", "key", "head", "constant")
    parser.addoption("--gate-form", choices=forms, help="form of every gate in random cases")
    parser.addoption("--random-cases", type=int, metavar="N", help="number of random cases without a GPU")


def pytest_configure(config):
    prepare_threads()
    if not config.getoption("gla_backend"):  # the conformance kit runs on backends of other packages
        hide_other_backends()


def hide_other_backends():
    """Hides the backends of other packages that are installed, so that tests know all backends.

    Backends that a test puts on the path are seen. The rest of the path is read once, as it does not change.
    """
    entry_points, group, path = importlib.metadata.entry_points, hookspecs.ENTRY_POINTS, set(sys.path)
    points = entry_points(group=group)
    ours = importlib.metadata.EntryPoints(x for x in points if x.dist.name == registry.OWN_DISTRIBUTION)
    others = {place(x) for x in points if x not in ours}

    def visible(**select):
        if select.get("group") != group:
            return entry_points(**select)
        if len(select) == 1 and path >= set(sys.path):
            return ours
        return importlib.metadata.EntryPoints(x for x in entry_points(**select) if place(x) not in others)

    importlib.metadata.entry_points = visible


def place(entry_point):
    return entry_point.name, entry_point.dist.locate_file("")


@functools.cache
def is_ours(path):
    return path.is_relative_to(TESTS)


def pytest_ignore_collect(collection_path, config):
    """Leaves modules of which no test runs here unimported, unless a test of them is asked for.

    Where kernels alone run these are the modules without kernels, and without a GPU those whose tests all need one.
    """
    asked_for = any(collection_path.name in argument for argument in config.args)
    if GPU or asked_for or not collection_path.name.startswith("test_") or not is_ours(collection_path):
        return None
    text = collection_path.read_text(encoding="utf-8")
    runs_none = "mark.kernels" not in text if INTERPRETED else KERNELS_ALONE.search(text)
    return True if runs_none else None


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Collects without the garbage collector, which later skips what collection made: all of it stays to the end."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()
        gc.set_threshold(100_000)  # compilers make many objects that stay


def runs_here(item):
    if item.get_closest_marker("thorough") and not item.config.getoption("--thorough"):
        return False
    if not is_ours(item.path):  # the conformance kit, when it runs from this repository
        return True
    device = item.callspec.params.get("device") if hasattr(item, "callspec") else None
    if item.get_closest_marker("gpu"):
        return GPU and device != "cpu"
    if not item.get_closest_marker("kernels"):
        return not INTERPRETED
    return device != "cpu" if GPU else INTERPRETED


def pytest_collection_modifyitems(config, items):
    kept, left_out = [], []
    for item in items:
        (kept if runs_here(item) else left_out).append(item)
    # Slow tests come first. Then a process that ends early can take quick tests from another process.
    items[:] = sorted(kept, key=lambda item: item.get_closest_marker("slow") is None)
    config.hook.pytest_deselected(items=left_out)


def pytest_terminal_summary(terminalreporter, config):
    if GPU or config.getoption("gla_backend"):
        return
    if INTERPRETED:
        terminalreporter.write_line("Triton's kernels alone, interpreted; without TRITON_INTERPRET all other tests run")
    else:
        terminalreporter.write_line(
            "left out without a GPU: Triton's kernels; TRITON_INTERPRET=1 pytest interprets them"
        )


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    return request.param


@pytest.fixture(autouse=True)
def seeded():
    # Not named `seed`: a test with a parameter of that name would replace it.
    # Without a GPU, torch.manual_seed keeps the stack of every call for the day that CUDA starts, which takes long.
    (torch.manual_seed if GPU else torch.default_generator.manual_seed)(0)


@pytest.fixture(scope="session")
def no_folders(tmp_path_factory):
    """An endless supply of paths at which there is nothing; a folder for each test would take longer than the test."""
    root = tmp_path_factory.mktemp("none")
    return (root / str(number) for number in itertools.count())


@pytest.fixture
def fresh_registry(monkeypatch, no_folders):
    """Unsets every GLA_* variable, removes calibrations, and undoes the test's changes after it."""
    for name in [name for name in os.environ if name.startswith("GLA_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("GLA_CACHE_DIR", str(next(no_folders)))
    gla.reload_environment()
    yield
    monkeypatch.undo()
    gla.reload_environment()


@pytest.fixture
def set_environment(monkeypatch):
    """`set_environment(NAME=value)` sets environment variables, or removes them if None, and reads them again."""

    def change(**variables):
        for name, value in variables.items():
            if value is None:
                monkeypatch.delenv(name, raising=False)
            else:
                monkeypatch.setenv(name, value)
        gla.reload_environment()

    return change


@pytest.fixture(scope="session")
def own_backends():
    """The names of gla-core's own backends, in the order in which they are discovered."""
    return ["parallel_scan", "reference", "triton_fused"]


@pytest.fixture
def only_reference(fresh_registry, monkeypatch, own_backends):
    """Leaves the reference as our only backend, so that a test knows all backends that may run."""
    monkeypatch.setenv("GLA_BLOCK_PLUGINS", ",".join(name for name in own_backends if name != "reference"))
    gla.reload_environment()


@pytest.fixture
def logged():
    """The messages of the logger gla_core."""
    messages, logger, handler = [], logging.getLogger("gla_core"), logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    yield messages
    logger.setLevel(logging.NOTSET)
    logger.removeHandler(handler)


@pytest.fixture
def plain_terminal(monkeypatch):
    """A wide terminal without colours."""
    for name in ("FORCE_COLOR", "PY_COLORS", "TERM", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "250")


@pytest.fixture
def script(monkeypatch):
    """A function that imports a script of the folder benchmarks."""
    folder = Path(__file__).parents[1] / "benchmarks"
    monkeypatch.syspath_prepend(folder)  # as when a script runs

    def load(name):
        spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)  # where dataclasses look for it
        spec.loader.exec_module(module)
        return module

    return load


@pytest.fixture
def tf32_allowed():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision(before)


PLANNING = (
    *("chunks.cutting", "gla.forward", "gla.backward", "gla.summary", "gla.general.kernels", "gla.sm90.kernels"),
    *("delta.plan", "delta.sm90"),
)
"""Modules of gla_triton_kernels that plan calls."""


@pytest.fixture
def change_plans(monkeypatch):
    """Returns a function that sets a name in all planning modules that have it, and forgets prepared calls."""
    pytest.importorskip("triton")
    modules = [importlib.import_module(f"gla_triton_kernels.{name}") for name in PLANNING]

    def change(name, value):
        having = [module for module in modules if hasattr(module, name)]
        assert having, name
        for module in having:
            monkeypatch.setattr(module, name, value)
        _run._drop_plans()

    yield change
    _run._drop_plans()


@pytest.fixture
def short_segments(change_plans):
    """Makes parallel_scan cut sequences into segments of at most 128 tokens, also on a GPU."""
    from gla_triton_kernels.chunks.cutting import segment_length

    change_plans("segment_length", lambda *sizes: min(128, segment_length(*sizes)))
