"""Discovery, quarantine, and registration at run time."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import threading
import time
import warnings

import pytest
import torch

import gla_core as gla
from gla_core.dispatch import calibration, registry
from gla_core.dispatch.backend import OP_PARAMETERS, Backend, Capabilities

SOFTMAX = "{'online_softmax': softmax}"
MINE = f"[Backend('mine', '1.0', {SOFTMAX})]"


def info(name):
    found = [b for b in gla.backends() if b.name == name]
    assert len(found) <= 1
    return found[0] if found else None


def softmax(x, dim):
    return torch.softmax(x, dim)


# discovery


def test_our_own_reference_arrives_by_its_entry_point():
    reference = info("reference")
    assert reference.plugin == "reference"
    assert reference.error is None
    assert reference.version == "0.1.0"
    assert set(reference.ops) == set(OP_PARAMETERS)
    assert torch.float64 in reference.capabilities.dtypes


def test_our_own_backends_each_arrive_by_an_entry_point_of_their_name(own_backends):
    assert [(b.name, b.plugin, b.error) for b in gla.backends()] == [(name, name, None) for name in own_backends]


def test_an_installed_plugin_is_found_and_runs(install, plugin_source, x):
    module = install("its_entry_point", plugin_source(MINE))
    gla.reload_environment()
    torch.testing.assert_close(gla.online_softmax(x, backend="mine"), torch.softmax(x, -1))
    assert sys.modules[module].softmax_calls == 1
    assert info("mine") == gla.BackendInfo(
        "mine", "1.0", ("online_softmax",), Capabilities(), "its_entry_point", error=None
    )


def test_one_plugin_may_bring_several_backends(install, plugin_source):
    install("several", plugin_source(f"[Backend('one', '1', {SOFTMAX}), Backend('two', '2', {{}})]"))
    gla.reload_environment()
    assert (info("one").version, info("two").version) == ("1", "2")
    assert info("one").plugin == info("two").plugin == "several"


def test_a_plugin_without_backends_is_no_error(install, plugin_source, own_backends):
    install("empty", plugin_source("[]"))
    gla.reload_environment()
    assert [b.name for b in gla.backends()] == own_backends


def test_discovery_is_lazy_and_happens_once(install, plugin_source, x):
    module = install("mine", plugin_source(MINE))
    gla.reload_environment()
    assert module not in sys.modules
    for _ in range(5):
        gla.online_softmax(x)
        gla.online_softmax(x, backend="mine")
        gla.backends()
        gla.explain("online_softmax", x)
    assert sys.modules[module].hook_calls == 1


def test_a_new_plugin_is_seen_after_reload_environment(install, plugin_source, x):
    gla.online_softmax(x)
    install("mine", plugin_source(MINE))
    assert info("mine") is None
    gla.reload_environment()
    assert info("mine") is not None


def test_threads_that_come_at_once_find_the_same_backends(install, plugin_source, x):
    install("mine", "import time; time.sleep(0.05)\n" + plugin_source(MINE))
    gla.reload_environment()
    start, seen = threading.Barrier(8), []

    def call():
        start.wait()
        seen.append((gla.online_softmax(x, backend="mine").sum().item(), id(registry.get("mine"))))

    threads = [threading.Thread(target=call) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [(2.0, id(registry.get("mine")))] * 8


def test_a_plugin_may_use_the_library_while_it_is_imported(install, plugin_source, x):
    install("mine", "import gla_core\nnames = [b.name for b in gla_core.backends()]\n" + plugin_source(MINE))
    gla.reload_environment()
    assert gla.online_softmax(x, backend="mine").shape == x.shape


ASKS = "import gla_core, time; time.sleep(0.1); names = [b.name for b in gla_core.backends()]\n"


def test_a_plugin_that_asks_for_the_backends_while_its_user_imports_it_is_found_later(
    install, plugin_source, own_backends
):
    module = install("mine", ASKS + plugin_source(MINE))
    gla.reload_environment()
    assert importlib.import_module(module).names == own_backends
    assert info("mine").error is None


def test_a_plugin_imported_by_one_thread_while_another_makes_its_first_call_is_no_deadlock(
    install, plugin_source, x, in_time
):
    module = install("mine", ASKS + plugin_source(MINE))
    gla.reload_environment()
    thread = threading.Thread(target=importlib.import_module, args=(module,), daemon=True)
    thread.start()
    while module not in sys.modules:
        time.sleep(0.001)
    assert in_time(lambda: gla.online_softmax(x, backend="mine").shape) == x.shape
    thread.join(timeout=10)
    assert not thread.is_alive()


def test_a_hook_may_reload_the_environment(install, plugin_source, x):
    module = install("mine", plugin_source(f"__import__('gla_core').reload_environment() or {MINE}"))
    gla.reload_environment()
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


def test_an_interrupted_discovery_starts_again_at_the_next_use(install, tmp_path, x):
    module = install("a_slow_one", "raise KeyboardInterrupt")
    gla.reload_environment()
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


# quarantine

BROKEN = {
    "import error": ("import a_package_that_nobody_has", "No module named 'a_package_that_nobody_has'"),
    "syntax error": ("def", "SyntaxError"),
    "fault at import": ("1 / 0", "ZeroDivisionError"),
    "no hook": ("x = 1", "implements no hook; decorate gla_register_backends with hookimpl"),
    "hook not decorated": ("def gla_register_backends(): return []", "implements no hook"),
    "hook misspelled": (
        "from gla_core.dispatch.backend import hookimpl\n@hookimpl\ndef gla_register_backend(): return []",
        "gla_register_backend",
    ),
    "hook with a parameter": (
        "from gla_core.dispatch.backend import hookimpl\n@hookimpl\ndef gla_register_backends(device): return []",
        "device",
    ),
    "hook that raises": ("raise_in_hook()", "NameError: name 'raise_in_hook' is not defined"),
    "sys.exit at import": ("import sys\nsys.exit(3)", "SystemExit: 3"),
    "sys.exit in the hook": ("__import__('sys').exit('no licence')", "SystemExit: no licence"),
    "returns a tuple": (f"(Backend('mine', '1', {SOFTMAX}),)", "returned tuple; expected a list of Backend"),
    "returns a backend": (f"Backend('mine', '1', {SOFTMAX})", "returned Backend; expected a list of Backend"),
    "returns None": ("None", "returned NoneType; expected a list of Backend"),
    "returns other values": ("['mine']", "expected a gla_core.dispatch.backend.Backend; got str"),
    "wrong signature": (
        "[Backend('mine', '1', {'online_softmax': lambda x, axis: x})]",
        "online_softmax takes (x, axis); the contract is (x, dim)",
    ),
    "unknown op": ("[Backend('mine', '1', {'online_sofmax': softmax})]", "did you mean 'online_softmax'?"),
    "name of ours": (f"[Backend('reference', '9', {SOFTMAX})]", "'reference' is already in use"),
    "name auto": (f"[Backend('auto', '1', {SOFTMAX})]", "identifier other than 'auto'"),
    "one name twice": (
        f"[Backend('mine', '1', {SOFTMAX}), Backend('mine', '2', {SOFTMAX})]",
        "'mine' is already in use",
    ),
    "second backend bad": (
        f"[Backend('good', '1', {SOFTMAX}), Backend('bad', '1', {{'online_softmax': lambda x: x}})]",
        "backend 'bad': online_softmax takes (x)",
    ),
    "capabilities of another type": (f"[Backend('mine', '1', {SOFTMAX}, {{'cpu'}})]", "capabilities is set"),
    "ops of another type": ("[Backend('mine', '1', [softmax])]", "Error"),
    "backend without ops": ("[Backend('mine', '1')]", "missing 1 required positional argument: 'ops'"),
}
IN_HOOK = {"hook that raises", "sys.exit in the hook", "returns None"}


@pytest.fixture(params=BROKEN)
def broken(request, install, plugin_source):
    """A broken plugin called `broken`, and what its traceback must say."""
    text, message = BROKEN[request.param]
    in_hook = request.param in IN_HOOK or text.startswith(("[", "(", "Backend"))
    install("broken", plugin_source(text) if in_hook else text)
    gla.reload_environment()
    return message


def test_a_broken_plugin_is_shown_with_its_traceback(broken):
    found = info("broken")
    assert (found.version, found.ops, found.capabilities, found.plugin) == (None, (), None, "broken")
    assert found.error.startswith("Traceback (most recent call last)")
    assert broken in found.error


def test_a_broken_plugin_leaves_everything_else_working(broken, install, plugin_source, own_backends, x):
    install("zz_fine", plugin_source(f"[Backend('fine', '1', {SOFTMAX})]"))
    gla.reload_environment()
    torch.testing.assert_close(gla.online_softmax(x), torch.softmax(x, -1))
    assert [b.name for b in gla.backends()] == [*own_backends, "fine", "broken"]
    assert info("reference").version == "0.1.0"
    assert gla.explain("online_softmax", x, backend="reference").winner == "reference"


def test_a_broken_plugin_asked_for_by_name_is_an_error_that_gives_the_cause(broken, x):
    with pytest.raises(gla.UnknownBackendError, match=r"backend 'broken' failed to load: .*gla doctor"):
        gla.online_softmax(x, backend="broken")
    with pytest.raises(gla.UnknownBackendError, match="failed to load"):
        gla.use_backend("broken")


def test_the_cause_is_the_last_line_of_the_traceback(install, x):
    install("broken", BROKEN["import error"][0])
    gla.reload_environment()
    with pytest.raises(gla.UnknownBackendError) as error:
        gla.online_softmax(x, backend="broken")
    assert "ModuleNotFoundError: No module named 'a_package_that_nobody_has'" in str(error.value)


def test_of_two_backends_one_bad_neither_is_registered(install, plugin_source, own_backends, x):
    install("broken", plugin_source(BROKEN["second backend bad"][0]))
    gla.reload_environment()
    assert [b.name for b in gla.backends()] == [*own_backends, "broken"]
    with pytest.raises(gla.UnknownBackendError):
        gla.online_softmax(x, backend="good")


def test_several_broken_plugins_are_each_in_quarantine(install, own_backends):
    for kind, (text, _) in list(BROKEN.items())[:4]:
        install("broken_" + kind.replace(" ", "_"), text)
    gla.reload_environment()
    assert [b.name for b in gla.backends() if b.error is None] == own_backends
    assert sum(b.error is not None for b in gla.backends()) == 4


def test_two_broken_plugins_of_one_entry_point_name_are_both_shown(install):
    install("mine", "raise ValueError('the first')", distribution="first")
    install("mine", "raise ValueError('the second')", distribution="second")
    gla.reload_environment()
    errors = "".join(b.error for b in gla.backends() if b.error is not None)
    assert "the first" in errors
    assert "the second" in errors


def test_ours_wins_its_name_whatever_the_order_on_the_path(install, plugin_source, x):
    install("a_first_one", plugin_source(f"[Backend('reference', '9', {SOFTMAX})]"))
    gla.reload_environment()
    assert info("reference").plugin == "reference"
    assert "already in use" in info("a_first_one").error


def test_a_plugin_that_reuses_a_registered_name_is_in_quarantine(install, plugin_source, spy, x):
    mine = spy("mine")
    install("its_entry_point", plugin_source(MINE))
    gla.reload_environment()
    gla.online_softmax(x, backend="mine")
    assert mine.calls == ["online_softmax"]
    assert "'mine' is already in use" in info("its_entry_point").error


def test_a_repaired_plugin_is_out_of_quarantine_after_reload_environment(install, plugin_source, tmp_path, x):
    module = install("mine", "import a_package_that_nobody_has")
    gla.reload_environment()
    assert info("mine").error is not None
    (tmp_path / f"{module}.py").write_text(plugin_source(MINE))
    gla.reload_environment()
    assert info("mine").error is None
    assert gla.online_softmax(x, backend="mine").shape == x.shape


# GLA_BLOCK_PLUGINS


def test_a_blocked_plugin_is_not_imported(install, plugin_source, monkeypatch, own_backends, x):
    one, two, three = (install(name, plugin_source(MINE.replace("mine", name))) for name in ("one", "two", "three"))
    monkeypatch.setenv("GLA_BLOCK_PLUGINS", " one, three,")
    gla.reload_environment()
    gla.online_softmax(x)
    assert [b.name for b in gla.backends()] == [*own_backends, "two"]
    assert [name in sys.modules for name in (one, two, three)] == [False, True, False]


def test_a_blocked_broken_plugin_is_not_in_quarantine(install, monkeypatch, own_backends):
    install("broken", "1 / 0")
    monkeypatch.setenv("GLA_BLOCK_PLUGINS", "broken")
    gla.reload_environment()
    assert [b.name for b in gla.backends()] == own_backends


def test_our_own_can_be_blocked_too(monkeypatch, own_backends, x):
    monkeypatch.setenv("GLA_BLOCK_PLUGINS", ",".join(own_backends))
    gla.reload_environment()
    assert gla.backends() == []
    with pytest.raises(gla.NoBackendError, match="no backend is installed"):
        gla.online_softmax(x)
    assert gla.explain("online_softmax", x).winner is None


def test_a_blocked_backend_asked_for_by_name_is_an_error_that_names_the_variable(monkeypatch, x):
    monkeypatch.setenv("GLA_BLOCK_PLUGINS", "reference,triton_fused")
    gla.reload_environment()
    with pytest.raises(gla.UnknownBackendError, match=r"backend 'reference' is blocked by GLA_BLOCK_PLUGINS"):
        gla.online_softmax(x, backend="reference")
    with pytest.raises(gla.UnknownBackendError) as error:
        gla.use_backend("zzzzzz")
    assert str(error.value) == (
        "use_backend: unknown backend 'zzzzzz' "
        "(installed: parallel_scan; plugins blocked by GLA_BLOCK_PLUGINS: reference, triton_fused)"
    )


def test_blocking_what_is_not_installed_warns_once_with_the_nearest_spelling(monkeypatch, x):
    monkeypatch.setenv("GLA_BLOCK_PLUGINS", "refrence")
    gla.reload_environment()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        gla.online_softmax(x)
        gla.online_softmax(x)
    assert [str(w.message) for w in caught] == [
        "GLA_BLOCK_PLUGINS names no installed plugin 'refrence'; did you mean 'reference'?"
    ]


def test_that_warning_made_an_error_does_not_lose_the_backends(monkeypatch, x):
    monkeypatch.setenv("GLA_BLOCK_PLUGINS", "refrence")
    gla.reload_environment()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="refrence"):
            gla.online_softmax(x)
    monkeypatch.delenv("GLA_BLOCK_PLUGINS")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert gla.online_softmax(x).shape == x.shape


# register


def test_register_and_unregister(own_backends, x):
    handle = gla.register(Backend("mine", "1.0", {"online_softmax": softmax}))
    assert info("mine") == gla.BackendInfo("mine", "1.0", ("online_softmax",), Capabilities(), "register()")
    torch.testing.assert_close(gla.online_softmax(x, backend="mine"), torch.softmax(x, -1))
    handle.unregister()
    assert info("mine") is None
    with pytest.raises(gla.UnknownBackendError) as error:
        gla.online_softmax(x, backend="mine")
    assert f"unknown backend 'mine' (installed: {', '.join(own_backends)})" in str(error.value)


def test_unregistering_twice_does_nothing(own_backends):
    handle = gla.register(Backend("mine", "1.0", {"online_softmax": softmax}))
    handle.unregister()
    handle.unregister()
    assert [b.name for b in gla.backends()] == own_backends


def test_a_handle_takes_back_only_its_own_registration():
    first = gla.register(Backend("mine", "1.0", {"online_softmax": softmax}))
    first.unregister()
    with gla.register(Backend("mine", "2.0", {"online_softmax": softmax})):
        first.unregister()
        assert info("mine").version == "2.0"


def test_a_used_handle_does_not_take_back_a_later_registration_of_the_same_backend():
    backend = Backend("mine", "1.0", {"online_softmax": softmax})
    first = gla.register(backend)
    first.unregister()
    with gla.register(backend):
        first.unregister()
        assert info("mine") is not None


def test_the_handle_is_a_context_manager_that_gives_the_backend():
    backend = Backend("mine", "1.0", {"online_softmax": softmax})
    with gla.register(backend) as registered:
        assert registered is backend
        assert info("mine") is not None
    assert info("mine") is None
    with pytest.raises(KeyError), gla.register(backend):
        raise KeyError
    assert info("mine") is None


def test_registrations_stay_over_reload_environment(spy, x):
    mine = spy("mine")
    gla.reload_environment()
    gla.online_softmax(x, backend="mine")
    assert mine.calls == ["online_softmax"]


def test_what_backends_returns_is_a_copy():
    gla.backends().clear()
    assert info("reference") is not None


# plans: a call's backend is chosen once per signature, and again when the set of backends changes


def test_a_plan_is_dropped_when_a_better_backend_is_registered(spy, x):
    first = spy("first", cost=lambda call: 2.0)
    gla.online_softmax(x)
    second = spy("second", cost=lambda call: 1.0)
    gla.online_softmax(x)
    second.handle.unregister()
    gla.online_softmax(x)
    assert (len(first.calls), len(second.calls)) == (2, 1)


def test_a_plan_is_dropped_when_its_backend_is_unregistered(spy, x):
    gone = spy("gone")
    gla.online_softmax(x, backend="gone")
    gone.handle.unregister()
    with pytest.raises(gla.UnknownBackendError):
        gla.online_softmax(x, backend="gone")
    again = spy("gone")
    gla.online_softmax(x, backend="gone")
    assert (len(gone.calls), len(again.calls)) == (1, 1)


def test_a_plan_made_while_the_backends_change_is_not_kept(spy, x):
    def supports(call):
        gone.handle.unregister()  # as another thread might, between the choice and its being remembered

    gone = spy("gone", supports=supports, cost=lambda call: 1.0)
    gla.online_softmax(x)
    calls = len(gone.calls)
    gla.online_softmax(x)
    assert len(gone.calls) == calls
