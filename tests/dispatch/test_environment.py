"""The environment variables: the time when they are read, and errors in their values."""

from pathlib import Path

import pytest
import torch

import gla_core as gla
from gla_core.dispatch.environment import VARIABLES, Environment, environment


@pytest.fixture(autouse=True)
def no_cache_dir(isolated, set_environment):
    """Makes the folder of calibrations the default one."""
    set_environment(GLA_CACHE_DIR=None, XDG_CACHE_HOME=None)


DEFAULTS = Environment(
    backend="",
    batch_invariant="",
    blocked_plugins=frozenset(),
    check_values=False,
    cache_dir=Path.home() / ".cache" / "gla_core",
    checkpoints=True,
    graphs=True,
    keep_memory=False,
)


def test_the_defaults():
    assert environment() == DEFAULTS


def test_all_of_them_are_read(set_environment):
    set_environment(
        GLA_BACKEND=" reference ",
        GLA_BATCH_INVARIANT=" 128 ",
        GLA_BLOCK_PLUGINS="a, b,,a",
        GLA_CHECK="1",
        GLA_CACHE_DIR="/x/y",
        GLA_CHECKPOINTS="0",
        GLA_GRAPHS="0",
        GLA_KEEP_MEMORY="1",
    )
    assert environment() == Environment(
        backend="reference",
        batch_invariant="128",
        blocked_plugins=frozenset({"a", "b"}),
        check_values=True,
        cache_dir=Path("/x/y"),
        checkpoints=False,
        graphs=False,
        keep_memory=True,
    )


def test_a_change_is_seen_only_after_reload_environment(monkeypatch, spy, x, set_environment):
    a, b = spy("a"), spy("b")
    set_environment(GLA_BACKEND="a")
    gla.online_softmax(x)
    monkeypatch.setenv("GLA_BACKEND", "b")
    gla.online_softmax(x)
    assert (len(a.calls), len(b.calls)) == (2, 0)
    gla.reload_environment()
    gla.online_softmax(x)
    assert (len(a.calls), len(b.calls)) == (2, 1)
    set_environment(GLA_BACKEND=None)
    assert gla.explain("online_softmax", x).source == "default"


def test_it_is_read_at_the_first_use_not_at_reload(monkeypatch, spy, x):
    a = spy("a")
    gla.reload_environment()
    monkeypatch.setenv("GLA_BACKEND", "a")
    gla.online_softmax(x)
    assert a.calls == ["online_softmax"]


@pytest.mark.parametrize("value", ["", "  "])
def test_an_empty_variable_is_one_that_is_not_set(set_environment, value, x):
    set_environment(**dict.fromkeys(VARIABLES, value))
    assert environment() == DEFAULTS
    assert gla.explain("online_softmax", x).source == "default"


@pytest.mark.parametrize(
    ("variables", "folder"),
    [
        ({"XDG_CACHE_HOME": "/x"}, Path("/x/gla_core")),
        ({"XDG_CACHE_HOME": "/x", "GLA_CACHE_DIR": "/y"}, Path("/y")),
        ({"XDG_CACHE_HOME": " ", "GLA_CACHE_DIR": " "}, DEFAULTS.cache_dir),
        ({"GLA_CACHE_DIR": "~/z"}, Path.home() / "z"),
    ],
)
def test_where_calibrated_constants_are_kept(set_environment, variables, folder):
    set_environment(**variables)
    assert environment().cache_dir == folder


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("GLA_BACKENDS", "; did you mean 'GLA_BACKEND'?"),
        ("GLA_BLOCK_PLUGIN", "; did you mean 'GLA_BLOCK_PLUGINS'?"),
        ("GLA_CHEK", "; did you mean 'GLA_CHECK'?"),
        ("GLA_XYZZY_QUUX_PLUGH", ""),
    ],
)
def test_an_unknown_variable_warns_once_with_the_nearest_spelling(set_environment, name, hint, x, warnings_of):
    set_environment(**{name: "1"})
    calls = warnings_of(lambda: [gla.online_softmax(x), gla.online_softmax(x), gla.backends()])
    assert calls == [f"unknown environment variable {name}{hint}"]


def test_every_unknown_variable_has_its_warning(set_environment, warnings_of):
    set_environment(GLA_BACKENDS="a", GLA_CHEK="1")
    assert [text.split()[3].rstrip(";") for text in warnings_of(environment)] == ["GLA_BACKENDS", "GLA_CHEK"]


def test_known_and_foreign_variables_do_not_warn(set_environment, warnings_of):
    known = {"GLA_BACKEND": "reference", "GLA_BLOCK_PLUGINS": "x", "GLA_CHECK": "0", "GLA_CACHE_DIR": "/x"}
    set_environment(**known, GLACIER="1", XGLA_A="1")
    assert warnings_of(environment) == []


def test_unknown_variables_warn_again_after_reload_environment(set_environment, warnings_of):
    set_environment(GLA_BACKENDS="a")
    assert len(warnings_of(environment)) == 1
    gla.reload_environment()
    assert len(warnings_of(environment)) == 1


@pytest.mark.parametrize(
    ("value", "expected"),
    [("1", True), ("true", True), ("YES", True), (" on ", True), ("0", False), ("False", False), ("no", False)],
)
def test_gla_check_is_true_or_false(set_environment, value, expected):
    set_environment(GLA_CHECK=value)
    assert environment().check_values is expected


@pytest.mark.parametrize("value", ["2", "maybe"])
def test_a_gla_check_that_is_neither_is_an_error_until_it_is_put_right(set_environment, value, own_backends, x):
    set_environment(GLA_CHECK=value)
    for use in (lambda: gla.online_softmax(x), gla.backends):
        with pytest.raises(ValueError, match=f"GLA_CHECK is '{value}'; expected 0 or 1"):
            use()
    set_environment(GLA_CHECK="1")
    assert [b.name for b in gla.backends()] == own_backends


def test_gla_check_put_right_without_reload_leaves_the_backends_whole(monkeypatch, own_backends, set_environment):
    set_environment(GLA_CHECK="maybe")
    with pytest.raises(ValueError, match="GLA_CHECK"):
        gla.backends()
    monkeypatch.setenv("GLA_CHECK", "1")
    assert [b.name for b in gla.backends()] == own_backends


def test_gla_check_reads_values_and_its_absence_does_not(set_environment, spy):
    a = spy("a")
    with_nan = torch.tensor([1.0, float("nan")])
    assert gla.online_softmax(with_nan, backend="a").isnan().all()
    set_environment(GLA_CHECK="1")
    with pytest.raises(ValueError, match="x holds NaN in 1 of 2 places"):
        gla.online_softmax(with_nan, backend="a")
    assert a.calls == ["online_softmax"]  # the check comes before the launch
