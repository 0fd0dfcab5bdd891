"""Models of which one module is hooked, patched, wrapped, parametrized, offloaded or sharded: `make test-fla`.

Our models and flash-linear-attention's, accelerated, are compared with themselves without a cache and with gradients,
where nothing goes past a module. transformers' models are compared with themselves without `accelerate()`, which call
their modules as they like.
"""

import copy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.changes import CHANGES, Runs, applies, check, gradients, parts_of, places

pytest.importorskip("transformers", reason="needs transformers: make test-fla")
gla_transformers = pytest.importorskip("gla_transformers", reason="needs gla_transformers: make test-fla")

from gla_core.compat import fla, transformers
from tests.compat.test_with_transformers import cache_of, model_of

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
    actual = model(TOKENS, labels=TOKENS).loss
    model.eval()
    return actual


def generated(model, use_cache):
    options = {"max_new_tokens": NEW, "do_sample": False, "use_cache": use_cache}
    return model.generate(TOKENS, **options)[:, TOKENS.shape[1] :]


RUNS = Runs(whole, stepped, 1 + STEPS, loss, generated)


def made(models, kind):
    torch.manual_seed(0)
    return getattr(models, f"{kind}ForCausalLM")(getattr(models, f"{kind}Config")(**SIZES | OWN[kind])).eval()


SIBLINGS = ("k_proj", "v_proj", "f_proj", "i_proj", "up_proj", "k_conv1d", "v_conv1d", "f_conv1d", "i_conv1d")
"""Names of modules that are used like another one that has none of these names."""


def sample(model, name):
    """Returns the paths at which a change is tried: those outside of the layers, and those of the first layer."""
    paths = [path for path in places(model) if applies(model, path, name) and path != "model"]
    return [path for path in paths if ".layers.1" not in path and not path.endswith(SIBLINGS)]


def thorough(*values, unless):
    return pytest.param(*values, marks=() if unless else pytest.mark.thorough)


QUICK = {"GLA": [name for name in CHANGES if name != "compiled"], "HGRN2": ["hook", "patched", "adapter", "freed"]}
OURS = [thorough(kind, name, unless=name in QUICK[kind]) for kind in OWN for name in CHANGES]
READ = ("adapter", "offloaded", "freed")
"""Changes under which flash-linear-attention's own code fails, as it reads weights of modules that it does not call."""
THEIRS = [
    thorough(kind, name, unless=name in ("hook", "patched")) for kind in OWN for name in CHANGES if name not in READ
]


@pytest.mark.parametrize(("kind", "name"), OURS)
def test_our_models(kind, name):
    model = made(gla_transformers, kind)
    for path in sample(model, name):
        check(model, path, name, RUNS, CLOSE)


@pytest.mark.parametrize(("kind", "name"), THEIRS)
def test_models_of_fla(kind, name):
    models = pytest.importorskip("fla.models", reason="needs flash-linear-attention 0.6.0: make test-fla")
    with fla.accelerate(cpu=True):
        model = made(models, kind)
        for path in sample(model, name):
            check(model, path, name, RUNS, CLOSE)


def results(model, path, change):
    """Returns what all runs of a copy with a change compute, and the calls of the changed module in each run."""
    model, calls, actual, counts = copy.deepcopy(model), [], [], []
    with change.make(*parts_of(model, path), calls, 1.5 if change.steers else 1.0):
        for run in (whole, stepped, lambda model: generated(model, True)):
            calls.clear()
            with torch.no_grad():
                actual.append(run(model))
            counts.append(len(calls))
        if change.trains:
            calls.clear()
            actual += [x for x in gradients(model, list(model.parameters()), RUNS) if x is not None]
            counts.append(len(calls))
    return actual, counts


def paths_of(model, name, whole_model):
    """Returns the paths of a Mamba-2 layer and of its parts, or of all modules of the model."""
    paths = [path for path in places(model) if applies(model, path, name) and path not in ("model", "backbone")]
    layer = next(path for path, module in model.named_modules() if hasattr(module, "A_log"))
    return paths if whole_model else [path for path in paths if path.startswith(layer)]


SOME = ("hook", "patched", "subclass", "adapter", "parametrized")
THOROUGH = pytest.param(True, marks=pytest.mark.thorough)


@pytest.mark.parametrize("whole_model", [False, THOROUGH])
@pytest.mark.parametrize("name", [thorough(name, unless=name in SOME) for name in CHANGES])
@pytest.mark.parametrize("family", FAMILIES)
def test_models_of_transformers(family, name, whole_model):
    model, change, tried = model_of(family), CHANGES[name], 0
    for path in paths_of(model, name, whole_model):
        try:
            expected, calls = results(model, path, change)
        except (RuntimeError, AttributeError, TypeError, NotImplementedError):  # transformers itself cannot do it
            continue
        if name in ("offloaded", "freed") and not any(calls):  # transformers reads weights without memory
            continue
        with transformers.accelerate():
            actual, calls_here = results(model, path, change)
        assert calls_here == calls, path
        torch.testing.assert_close(actual, expected, **CLOSE)
        tried += 1
    assert tried


def test_units_of_fsdp2(tmp_path):
    command = [sys.executable, Path(__file__).with_name("fsdp_units_of_models.py"), tmp_path]
    ran = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=250)
    assert ran.returncode == 0, ran.stdout + ran.stderr
