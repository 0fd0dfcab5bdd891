"""Shared fixtures: other libraries' functions as tests can run them, and numbers of calls."""

import importlib

import pytest

from gla_core.compat.mamba_ssm import ops
from gla_core.compat.transformers import delta
from gla_core.compat.transformers.delta import GATED_DELTA_RULE, KIMI_DELTA_ATTENTION

RULES = {name for family in (GATED_DELTA_RULE, KIMI_DELTA_ATTENTION) for name in family.functions if "delta" in name}
"""The names of transformers' functions that compute delta rules."""


@pytest.fixture(scope="module")
def untuned():
    """Makes Triton's autotuners run the first configuration that fits, and try no other.

    flash-linear-attention lists dozens of them; compiling and timing all takes minutes and changes only the speed.
    """
    autotuner = pytest.importorskip("triton.runtime.autotuner")

    def run(self, *args, **kwargs):
        self.nargs, refusal = dict(zip(self.arg_names, args, strict=False)), None
        for config in self.prune_configs(kwargs):
            try:
                return self.fn.run(*args, **kwargs, **config.all_kwargs())
            except autotuner.OutOfResources as error:
                refusal = error
        raise refusal

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(autotuner.Autotuner, "run", run)
        yield


@pytest.fixture
def delta_rules_in_pytorch(monkeypatch):
    """Has transformers compute delta rules in PyTorch, even if it has bound the kernels of flash-linear-attention."""
    for family in (GATED_DELTA_RULE, KIMI_DELTA_ATTENTION):
        for model in family.models:
            try:
                module = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
            except ModuleNotFoundError:  # a model of another version
                continue
            for name in set(family.functions) & RULES:
                monkeypatch.setattr(module, name, getattr(module, name).__wrapped__)


@pytest.fixture
def calls(monkeypatch):
    """The numbers of calls of our ops by models of transformers."""
    counts = {"scan": 0, "step": 0}
    for module, counter, names in (
        (ops, "scan", ("chunk_ssd", "chunk_gla")),
        (ops, "step", ("recurrent_ssd_step",)),
        (delta, "scan", ("chunk_delta",)),
        (delta, "step", ("recurrent_delta_step",)),
    ):
        for name in names:
            monkeypatch.setattr(module, name, counted(counts, counter, getattr(module, name)))
    return counts


def counted(counts, name, function):
    """Returns a function that counts its calls."""

    def call(*args, **kwargs):
        counts[name] += 1
        return function(*args, **kwargs)

    return call
