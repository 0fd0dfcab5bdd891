"""Plugins on the path as if installed, and a registry that every test finds as a fresh process would."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import gla_core as gla

PLUGINS = Path(__file__).parents[2] / "plugins"


@pytest.fixture(autouse=True)
def isolated(fresh_registry: None) -> None:
    """Every test here."""


@pytest.fixture
def plugin_path(tmp_path: Path) -> Callable[[str, Path], list[str]]:
    """`plugin_path(name, source)` is what sys.path needs for a plugin: its source, and its entry point as installed."""

    def paths(name: str, source: Path) -> list[str]:
        info = tmp_path / f"{name}-0.1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1.0\n")
        (info / "entry_points.txt").write_text(f"[gla_core.backends]\n{name} = {name}\n")
        return [str(source), str(tmp_path)]

    return paths


@pytest.fixture
def on_path(plugin_path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, Path], None]]:
    """`on_path(name, source)` puts a plugin there; its modules are forgotten after the test."""
    names: list[str] = []
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def put(name: str, source: Path) -> None:
        for path in plugin_path(name, source):
            monkeypatch.syspath_prepend(path)
        names.append(name)
        gla.reload_environment()

    yield put
    for module in [m for m in sys.modules if m.partition(".")[0] in names]:
        del sys.modules[module]
