"""The settings of the C library for memory that is freed on a CPU."""

import ctypes
from types import SimpleNamespace

import pytest
import torch

import gla_core as gla
from gla_core.ops import _memory


@pytest.fixture
def told(fresh_registry, monkeypatch):
    """Sets GLA_KEEP_MEMORY=1 as in a new process, and returns a list of the arguments of later calls of mallopt."""
    calls = []
    library = SimpleNamespace(mallopt=lambda *setting: calls.append(setting))
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    monkeypatch.setenv("GLA_KEEP_MEMORY", "1")
    _memory.keep_freed.cache_clear()
    gla.reload_environment()
    yield calls
    _memory.keep_freed.cache_clear()


def test_it_keeps_freed_memory_from_the_first_op_on(told):
    assert told == []
    for _ in range(2):
        gla.online_softmax(torch.randn(3, 4))
        gla.online_softmax(torch.randn(5, 4))
    assert told == [(-3, 2**25), (-1, 2**26)]


@pytest.mark.parametrize("setting", [None, "0"])
def test_unless_the_user_does_not_ask_for_it(told, monkeypatch, setting):
    monkeypatch.delenv("GLA_KEEP_MEMORY")
    if setting is not None:
        monkeypatch.setenv("GLA_KEEP_MEMORY", setting)
    gla.reload_environment()
    gla.online_softmax(torch.randn(3, 4))
    assert told == []


@pytest.mark.parametrize("error", [AttributeError, OSError, TypeError])
def test_other_c_libraries_are_left_alone(told, monkeypatch, error):
    def library(name):
        raise error("there is none")

    monkeypatch.setattr(ctypes, "CDLL", library)
    assert gla.online_softmax(torch.zeros(2)).tolist() == [0.5, 0.5]
