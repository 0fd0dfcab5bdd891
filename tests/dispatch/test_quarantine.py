"""Broken plugins are put in quarantine, and blocked plugins are not imported; everything else works."""

import sys
import warnings

import pytest
import torch

import gla_core as gla

SOFTMAX = "{'online_softmax': softmax}"
MINE = f"[Backend('mine', '1.0', {SOFTMAX})]"

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
        "online_softmax takes 'axis' (the op has the arguments x, dim)",
    ),
    "unknown op": ("[Backend('mine', '1', {'online_sofmax': softmax})]", "did you mean 'online_softmax'?"),
    "name of ours": (f"[Backend('reference', '9', {SOFTMAX})]", "'reference' is already in use"),
    "name auto": (f"[Backend('auto', '1', {SOFTMAX})]", "identifier other than 'auto'"),
    "one name twice": (
        f"[Backend('mine', '1', {SOFTMAX}), Backend('mine', '2', {SOFTMAX})]",
        "'mine' is already in use",
    ),
    "second backend bad": (
        f"[Backend('good', '1', {SOFTMAX}), Backend('bad', '1', {{'online_softmax': lambda dim: dim}})]",
        "backend 'bad': online_softmax does not take x",
    ),
    "capabilities of another type": (f"[Backend('mine', '1', {SOFTMAX}, {{'cpu'}})]", "capabilities is set"),
    "ops of another type": ("[Backend('mine', '1', [softmax])]", "Error"),
    "backend without ops": ("[Backend('mine', '1')]", "missing 1 required positional argument: 'ops'"),
}
IN_HOOK = {"hook that raises", "sys.exit in the hook", "returns None"}


@pytest.fixture(params=BROKEN)
def broken(request, install, plugin_source):
    """Installs a broken plugin named `broken`, and returns text that its traceback must contain."""
    text, message = BROKEN[request.param]
    in_hook = request.param in IN_HOOK or text.startswith(("[", "(", "Backend"))
    install("broken", plugin_source(text) if in_hook else text)
    return message


def test_a_broken_plugin_is_shown_with_its_traceback(broken, info):
    backend = info("broken")
    assert (backend.version, backend.ops, backend.capabilities, backend.plugin) == (None, (), None, "broken")
    assert backend.error.startswith("Traceback (most recent call last)")
    assert broken in backend.error


def test_a_broken_plugin_leaves_everything_else_working(broken, install, plugin_source, own_backends, x, info):
    install("zz_fine", plugin_source(f"[Backend('fine', '1', {SOFTMAX})]"))
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
    with pytest.raises(gla.UnknownBackendError) as error:
        gla.online_softmax(x, backend="broken")
    assert "ModuleNotFoundError: No module named 'a_package_that_nobody_has'" in str(error.value)


def test_of_two_backends_one_bad_neither_is_registered(install, plugin_source, own_backends, x):
    install("broken", plugin_source(BROKEN["second backend bad"][0]))
    assert [b.name for b in gla.backends()] == [*own_backends, "broken"]
    with pytest.raises(gla.UnknownBackendError):
        gla.online_softmax(x, backend="good")


def test_several_broken_plugins_are_each_in_quarantine(install, own_backends):
    for kind, (text, _) in list(BROKEN.items())[:4]:
        install("broken_" + kind.replace(" ", "_"), text)
    assert [b.name for b in gla.backends() if b.error is None] == own_backends
    assert sum(b.error is not None for b in gla.backends()) == 4


def test_two_broken_plugins_of_one_entry_point_name_are_both_shown(install):
    install("mine", "raise ValueError('the first')", distribution="first")
    install("mine", "raise ValueError('the second')", distribution="second")
    errors = "".join(b.error for b in gla.backends() if b.error is not None)
    assert "the first" in errors
    assert "the second" in errors


def test_ours_wins_its_name_whatever_the_order_on_the_path(install, plugin_source, x, info):
    install("a_first_one", plugin_source(f"[Backend('reference', '9', {SOFTMAX})]"))
    assert info("reference").plugin == "reference"
    assert "already in use" in info("a_first_one").error


def test_a_plugin_that_reuses_a_registered_name_is_in_quarantine(install, plugin_source, spy, x, info):
    mine = spy("mine")
    install("its_entry_point", plugin_source(MINE))
    gla.online_softmax(x, backend="mine")
    assert mine.calls == ["online_softmax"]
    assert "'mine' is already in use" in info("its_entry_point").error


def test_a_repaired_plugin_is_out_of_quarantine_after_reload_environment(install, plugin_source, tmp_path, x, info):
    module = install("mine", "import a_package_that_nobody_has")
    assert info("mine").error is not None
    (tmp_path / f"{module}.py").write_text(plugin_source(MINE))
    gla.reload_environment()
    assert info("mine").error is None
    assert gla.online_softmax(x, backend="mine").shape == x.shape


# GLA_BLOCK_PLUGINS


def test_a_blocked_plugin_is_not_imported(install, plugin_source, set_environment, own_backends, x):
    one, two, three = (install(name, plugin_source(MINE.replace("mine", name))) for name in ("one", "two", "three"))
    set_environment(GLA_BLOCK_PLUGINS=" one, three,")
    gla.online_softmax(x)
    assert [b.name for b in gla.backends()] == [*own_backends, "two"]
    assert [name in sys.modules for name in (one, two, three)] == [False, True, False]


def test_a_blocked_broken_plugin_is_not_in_quarantine(install, set_environment, own_backends):
    install("broken", "1 / 0")
    set_environment(GLA_BLOCK_PLUGINS="broken")
    assert [b.name for b in gla.backends()] == own_backends


def test_our_own_can_be_blocked_too(set_environment, own_backends, x):
    set_environment(GLA_BLOCK_PLUGINS=",".join(own_backends))
    assert gla.backends() == []
    with pytest.raises(gla.NoBackendError, match="no backend is installed"):
        gla.online_softmax(x)
    assert gla.explain("online_softmax", x).winner is None


def test_a_blocked_backend_asked_for_by_name_is_an_error_that_names_the_variable(set_environment, x):
    set_environment(GLA_BLOCK_PLUGINS="reference,triton_fused")
    with pytest.raises(gla.UnknownBackendError, match=r"backend 'reference' is blocked by GLA_BLOCK_PLUGINS"):
        gla.online_softmax(x, backend="reference")
    with pytest.raises(gla.UnknownBackendError) as error:
        gla.use_backend("zzzzzz")
    assert str(error.value) == (
        "use_backend: unknown backend 'zzzzzz' "
        "(installed: parallel_scan; plugins blocked by GLA_BLOCK_PLUGINS: reference, triton_fused)"
    )


def test_blocking_what_is_not_installed_warns_once_with_the_nearest_spelling(set_environment, x, warnings_of):
    set_environment(GLA_BLOCK_PLUGINS="refrence")
    assert warnings_of(lambda: [gla.online_softmax(x) for _ in range(2)]) == [
        "GLA_BLOCK_PLUGINS names no installed plugin 'refrence'; did you mean 'reference'?"
    ]


def test_that_warning_made_an_error_does_not_lose_the_backends(monkeypatch, x, set_environment):
    set_environment(GLA_BLOCK_PLUGINS="refrence")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="refrence"):
            gla.online_softmax(x)
    monkeypatch.delenv("GLA_BLOCK_PLUGINS")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert gla.online_softmax(x).shape == x.shape
