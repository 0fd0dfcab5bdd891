"""The discovery of backends: once, at first use, from the entry points of installed packages."""

import importlib
import os
import subprocess
import sys
import threading
import time

import pytest
import torch

import gla_core as gla
from gla_core.dispatch import calibration, registry
from gla_core.dispatch.backend import OP_PARAMETERS, Capabilities

SOFTMAX = "{'online_softmax': softmax}"
MINE = f"[Backend('mine', '1.0', {SOFTMAX})]"


def test_our_own_reference_arrives_by_its_entry_point(info):
    reference = info("reference")
    assert reference.plugin == "reference"
    assert reference.error is None
    assert reference.version == "0.1.0"
    assert set(reference.ops) == set(OP_PARAMETERS)
    assert torch.float64 in reference.capabilities.dtypes


def test_our_own_backends_each_arrive_by_an_entry_point_of_their_name(own_backends):
    assert [(b.name, b.plugin, b.error) for b in gla.backends()] == [(name, name, None) for name in own_backends]


def test_an_installed_plugin_is_found_and_runs(install, plugin_source, x, info):
    module = install("its_entry_point", plugin_source(MINE))
    torch.testing.assert_close(gla.online_softmax(x, backend="mine"), torch.softmax(x, -1))
    assert sys.modules[module].softmax_calls == 1
    mine = gla.BackendInfo(
        "mine", "1.0", ("online_softmax", "online_softmax_bwd"), Capabilities(), "its_entry_point", error=None
    )
    assert info("mine") == mine


def test_one_plugin_may_bring_several_backends(install, plugin_source, info):
    install("several", plugin_source(f"[Backend('one', '1', {SOFTMAX}), Backend('two', '2', {{}})]"))
    assert (info("one").version, info("two").version) == ("1", "2")
    assert info("one").plugin == info("two").plugin == "several"


def test_a_plugin_without_backends_is_no_error(install, plugin_source, own_backends):
    install("empty", plugin_source("[]"))
    assert [b.name for b in gla.backends()] == own_backends


def test_discovery_is_lazy_and_happens_once(install, plugin_source, x):
    module = install("mine", plugin_source(MINE))
    assert module not in sys.modules
    for _ in range(5):
        gla.online_softmax(x)
        gla.online_softmax(x, backend="mine")
        gla.backends()
        gla.explain("online_softmax", x)
    assert sys.modules[module].hook_calls == 1


def test_a_new_plugin_is_seen_after_reload_environment(install, plugin_source, x, info):
    gla.online_softmax(x)
    install("mine", plugin_source(MINE), seen=False)
    assert info("mine") is None
    gla.reload_environment()
    assert info("mine") is not None


def test_threads_that_come_at_once_find_the_same_backends(install, plugin_source, x, at_once):
    install("mine", "import time; time.sleep(0.05)\n" + plugin_source(MINE))
    start, seen = threading.Barrier(8), []

    def call(_):
        start.wait()
        seen.append((gla.online_softmax(x, backend="mine").sum().item(), id(registry.get("mine"))))

    at_once(call, range(8))
    assert seen == [(2.0, id(registry.get("mine")))] * 8


def test_a_plugin_may_use_the_library_while_it_is_imported(install, plugin_source, x):
    install("mine", "import gla_core\nnames = [b.name for b in gla_core.backends()]\n" + plugin_source(MINE))
    assert gla.online_softmax(x, backend="mine").shape == x.shape


ASKS = "import gla_core, time; time.sleep(0.1); names = [b.name for b in gla_core.backends()]\n"


def test_a_plugin_that_asks_for_the_backends_while_its_user_imports_it_is_found_later(
    install, plugin_source, own_backends, info
):
    module = install("mine", ASKS + plugin_source(MINE))
    assert importlib.import_module(module).names == own_backends
    assert info("mine").error is None


def test_a_plugin_imported_by_one_thread_while_another_makes_its_first_call_is_no_deadlock(
    install, plugin_source, x, in_time
):
    module = install("mine", ASKS + plugin_source(MINE))
    thread = threading.Thread(target=importlib.import_module, args=(module,), daemon=True)
    thread.start()
    while module not in sys.modules:
        time.sleep(0.001)
    assert in_time(lambda: gla.online_softmax(x, backend="mine").shape) == x.shape
    thread.join(timeout=10)
    assert not thread.is_alive()


def test_a_hook_may_reload_the_environment(install, plugin_source, x):
    module = install("mine", plugin_source(f"__import__('gla_core').reload_environment() or {MINE}"))
    for _ in range(3):
        assert gla.online_softmax(x, backend="mine").shape == x.shape
    assert sys.modules[module].hook_calls == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("lock", [registry._lock, calibration._lock])
def test_a_child_forked_while_another_thread_holds_a_lock_can_go_on(lock):
    held = threading.Event()

    def hold():
        with lock:
            held.set()
            time.sleep(0.1)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(timeout=10)
    child = os.fork()
    if child == 0:
        os._exit(0 if lock.acquire(timeout=10) else 1)
    thread.join()
    assert os.waitpid(child, 0)[1] == 0


def test_an_interrupted_discovery_starts_again_at_the_next_use(install, tmp_path, x, info):
    module = install("a_slow_one", "raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        gla.backends()
    (tmp_path / f"{module}.py").write_text("raise ImportError('it is imported again')")
    assert gla.online_softmax(x, backend="reference").shape == x.shape
    assert "it is imported again" in info("a_slow_one").error


def test_import_alone_loads_no_plugin_and_reads_no_variable():
    program = """
import sys
import gla_core as gla
assert "gla_reference" not in sys.modules, "a plugin was imported"
assert "triton" not in sys.modules, "triton was imported"
try:
    gla.online_softmax(__import__("torch").ones(2))
except gla.UnknownBackendError as error:
    assert "refrence" in str(error)
else:
    raise AssertionError("GLA_BACKEND was not read")
assert "gla_reference" in sys.modules
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "GLA_BACKEND": "refrence"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
