"""Plugins on the path as if installed, and a registry that is fresh in every test."""

import sys
from pathlib import Path

import pytest

import gla_core as gla

PLUGINS = Path(__file__).parents[2] / "plugins"


@pytest.fixture(autouse=True)
def isolated(fresh_registry):
    """Isolates every test here from the environment."""


@pytest.fixture
def plugin_path(tmp_path):
    """A function: `plugin_path(name, source)` returns sys.path's entries for a plugin: its source and entry point."""

    def paths(name, source):
        info = tmp_path / f"{name}-0.1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1.0\n")
        (info / "entry_points.txt").write_text(f"[gla_core.backends]\n{name} = {name}\n")
        return [str(source), str(tmp_path)]

    return paths


@pytest.fixture
def on_path(plugin_path, monkeypatch):
    """A function: `on_path(name, source)` puts a plugin on the path; its modules are removed after the test."""
    names: list[str] = []
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def put(name, source):
        for path in plugin_path(name, source):
            monkeypatch.syspath_prepend(path)
        names.append(name)
        gla.reload_environment()

    yield put
    for module in [m for m in sys.modules if m.partition(".")[0] in names]:
        del sys.modules[module]
