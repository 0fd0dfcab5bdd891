"""Small models of random weights: ours, flash-linear-attention's (FLA) and transformers'."""

import pytest
import torch
import transformers

import gla_transformers
from gla_core.compat.fla import accelerate

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_heads": 2, "vocab_size": 61, "intermediate_size": 48}
SMALL |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0, "initializer_range": 0.3}
OWN = {"gla": {}, "hgrn2": {"expand_ratio": 16}}

SIZES = {"vocab_size": 61, "hidden_size": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
ATTENTION = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48, "num_hidden_layers": 2}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 2, "mamba_d_state": 16, "mamba_chunk_size": 16}
DELTA = {"head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8}
HYBRIDS = {
    "Mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 2, "state_size": 16, "chunk_size": 16}
    | {"num_hidden_layers": 1},
    "Bamba": ATTENTION | MAMBA | {"attn_layer_indices": [1]},
    "FalconH1": ATTENTION | MAMBA | {"mamba_d_ssm": 64},  # Mamba-2 and attention in each layer
    "Qwen3_5": ATTENTION | DELTA | {"linear_value_head_dim": 12, "layer_types": ["linear_attention", "full_attention"]},
}
"""Small models: all recurrent, with layers of attention, and with both in a layer."""


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


@pytest.fixture(scope="session")
def hybrid_of():
    """A function from a name in `HYBRIDS` and options to a model of transformers in evaluation mode."""

    def make(name, **options):
        torch.manual_seed(0)
        config = getattr(transformers, f"{name}TextConfig", None) or getattr(transformers, f"{name}Config")
        model = getattr(transformers, f"{name}ForCausalLM")(config(**SIZES | HYBRIDS[name] | options)).eval()
        for weight in model.parameters():
            torch.nn.init.normal_(weight, std=0.3)  # so that positions and padding have an effect
        return model

    return make


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
