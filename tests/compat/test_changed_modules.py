"""Models of which one module is hooked, patched, wrapped, parametrized, offloaded or sharded: `make test-fla`.

Our models and flash-linear-attention's, accelerated, are compared with themselves without a cache and with gradients,
where nothing goes past a module. transformers' models are compared with themselves without `accelerate()`, which call
their modules as they like.
"""

from __future__ import annotations

import contextlib
import copy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.changes import CHANGES, Runs, applies, check, gradients, parts_of, places

pytest.importorskip("transformers", reason="needs transformers: make test-fla")
gla_transformers = pytest.importorskip("gla_transformers", reason="needs gla_transformers: make test-fla")

from gla_core.compat import fla, transformers  # noqa: E402 -- after the checks above
from tests.compat.test_with_transformers import blocks_of, cache_of, model_of  # noqa: E402

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 61, "intermediate_size": 48, "initializer_range": 0.3}
SIZES |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0, "use_short_conv": True}
OWN = {"GLA": {"num_heads": 2}, "HGRN2": {"expand_ratio": 16}}
FAMILIES = ("Mamba2", "Bamba", "FalconH1", "GraniteMoeHybrid", "NemotronH", "Zamba2")
TOKENS = torch.randint(3, 61, (2, 7), generator=torch.Generator().manual_seed(0))
STEPS = NEW = 2
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


def whole(model):
    return model(TOKENS, use_cache=False).logits


def stepped(model):
    out = model(TOKENS[:, :-STEPS], use_cache=True)
    logits = [out.logits]
    for word in TOKENS[:, -STEPS:].split(1, 1):
        out = model(word, use_cache=True, **cache_of(out))
        logits.append(out.logits)
    return torch.cat(logits, 1)


def loss(model):
    model.train()
    found = model(TOKENS, labels=TOKENS).loss
    model.eval()
    return found


def generated(model, use_cache):
    options = {"max_new_tokens": NEW, "do_sample": False, "use_cache": use_cache}
    return model.generate(TOKENS, **options)[:, TOKENS.shape[1] :]


RUNS = Runs(whole, stepped, 1 + STEPS, loss, generated)


def made(models, kind):
    torch.manual_seed(0)
    return getattr(models, f"{kind}ForCausalLM")(getattr(models, f"{kind}Config")(**SIZES | OWN[kind])).eval()


def sample(model, name):
    """Returns the paths at which a change is tried: those outside of the layers, and those of the first layer."""
    paths = [path for path in places(model) if applies(model, path, name) and path not in ("model", "backbone")]
    return [path for path in paths if ".layers." not in path or ".layers.0" in path]


def thorough(*values, unless):
    return pytest.param(*values, marks=() if unless else pytest.mark.thorough)


@pytest.mark.parametrize("name", [thorough(name, unless=name != "compiled") for name in CHANGES])
@pytest.mark.parametrize("kind", OWN)
def test_our_models(kind, name):
    model = made(gla_transformers, kind)
    for path in sample(model, name):
        check(model, path, name, RUNS, CLOSE)


@pytest.mark.parametrize("name", [thorough(name, unless=name in ("hook", "patched", "adapter")) for name in CHANGES])
@pytest.mark.parametrize("kind", OWN)
def test_models_of_fla(kind, name):
    models = pytest.importorskip("fla.models", reason="needs flash-linear-attention 0.6.0: make test-fla")
    with fla.accelerate(cpu=True):
        model = made(models, kind)
        for path in sample(model, name):
            check(model, path, name, RUNS, CLOSE)


def results(model, path, change, factor):
    """Returns what all runs of a copy with a change compute, and the calls of the changed module in each run."""
    model, calls, found, counts = copy.deepcopy(model), [], [], []
    with change.make(*parts_of(model, path), calls, factor):
        for run in (whole, stepped, lambda model: generated(model, True)):
            calls.clear()
            with torch.no_grad():
                found.append(run(model))
            counts.append(len(calls))
        if change.trains:
            calls.clear()
            found += [x for x in gradients(model, list(model.parameters()), RUNS) if x is not None]
            counts.append(len(calls))
    return found, counts


SOME = ("hook", "backward_hook", "global_hook", "patched", "subclass", "adapter", "parametrized", "offloaded", "freed")


def paths_of(model, name, all_paths):
    """Returns the paths of a layer with A_log and what is in and around it; with `all_paths` those of the whole model."""
    layer = next(path for path, module in model.named_modules() if hasattr(module, "A_log"))
    block = layer.rpartition(".")[0]
    paths = [path for path in places(model) if applies(model, path, name) and path not in ("model", "backbone")]
    return paths if all_paths else [path for path in paths if path == block or path.startswith(block)]


@pytest.mark.parametrize("all_paths", [False, pytest.param(True, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("name", [thorough(name, unless=name in SOME) for name in CHANGES])
@pytest.mark.parametrize("family", FAMILIES)
def test_models_of_transformers(family, name, all_paths):
    model, change, tried = model_of(family), CHANGES[name], 0
    for path in paths_of(model, name, all_paths):
        for factor in {1.0, 1.5 if change.steers else 1.0}:
            try:
                expected, calls = results(model, path, change, factor)
            except (RuntimeError, AttributeError, TypeError, NotImplementedError):  # transformers itself cannot do it
                continue
            with transformers.accelerate():
                found, calls_here = results(model, path, change, factor)
            assert calls_here == calls, path
            for a, b in zip(found, expected, strict=True):
                torch.testing.assert_close(a, b, **CLOSE)
            tried += 1
    assert tried
