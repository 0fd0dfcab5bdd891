"""Shared fixtures. Tests marked `gpu` run where there is a CUDA device and are deselected elsewhere."""

from __future__ import annotations

import os

import pytest
import torch

import gla_core as gla


def pytest_collection_modifyitems(config, items):
    if torch.cuda.is_available():
        return
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    items[:] = [item for item in items if not item.get_closest_marker("gpu")]
    config.hook.pytest_deselected(items=gpu)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    return request.param


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture
def fresh_registry(monkeypatch):
    """No GLA_* variable is set, and whatever the test changes is forgotten after it."""
    for name in [name for name in os.environ if name.startswith("GLA_")]:
        monkeypatch.delenv(name)
    gla.reload_environment()
    yield
    monkeypatch.undo()
    gla.reload_environment()


@pytest.fixture
def plain_terminal(monkeypatch):
    """A wide terminal without colours."""
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "250")
