import importlib.metadata

import pytest
from typer.testing import CliRunner

import gla_core as gla
from gla_tools.command import app

ENTRY_POINTS = "gla_core.backends"


@pytest.fixture(autouse=True)
def isolated(fresh_registry, plain_terminal):
    """Isolates every test here from the environment, without calibration."""


@pytest.fixture
def run():
    """A function that runs `gla` with its arguments."""
    return lambda *arguments: CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def broken_plugin(monkeypatch):
    """The name of an installed plugin that cannot be imported."""
    broken = importlib.metadata.EntryPoint("broken", "module_that_does_not_exist", ENTRY_POINTS)
    real = importlib.metadata.entry_points

    def entry_points(**select):
        return [*real(**select), broken] if select.get("group") == ENTRY_POINTS else list(real(**select))

    monkeypatch.setattr(importlib.metadata, "entry_points", entry_points)
    gla.reload_environment()
    return broken.name
