"""Small models of random weights, ours and flash-linear-attention's (FLA), on a CPU."""

import pytest
import torch

import gla_transformers
from gla_core.compat.fla import accelerate

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_heads": 2, "vocab_size": 61, "intermediate_size": 48}
SMALL |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0, "initializer_range": 0.3}
OWN = {"gla": {}, "hgrn2": {"expand_ratio": 16}}


def made(models, model_type="gla", **options):
    """Returns a model of a module that has models of both types, with lower bounds that differ, if there are any."""
    config = getattr(models, f"{model_type.upper()}Config")(**SMALL | OWN[model_type] | options)
    model = getattr(models, f"{model_type.upper()}ForCausalLM")(config).eval()
    for bounds in [x for name, x in model.named_parameters() if name.endswith("lower_bounds")]:
        torch.nn.init.normal_(bounds)
    return model


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def ours():
    """A function: `ours(**options)` returns a model in evaluation mode, of the `model_type` "gla" or "hgrn2"."""
    return lambda **options: made(gla_transformers, **options)


@pytest.fixture
def theirs():
    """A function: `theirs(**options)` returns FLA's model, which computes on a CPU as long as the test runs."""
    models = pytest.importorskip("fla.models", reason="needs flash-linear-attention 0.6.0: make test-fla")
    with accelerate(cpu=True):
        yield lambda **options: made(models, **options)


@pytest.fixture
def pair(theirs, ours):
    """A function: `pair(**options)` returns FLA's model, and ours with its weights."""

    def make(**options):
        a, b = theirs(**options), ours(**options)
        b.load_state_dict(a.state_dict())
        return a, b

    return make


@pytest.fixture
def tokens():
    return torch.randint(1, 61, (2, 80))
