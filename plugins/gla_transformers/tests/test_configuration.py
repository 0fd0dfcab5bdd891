"""Configurations that are refused, and the package that serves both types in transformers' Auto classes."""

import subprocess
import sys

import pytest
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from gla_transformers import GLAConfig, HGRN2Config, register


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; expected 'swish'"),
        ({"attnres_block_size": 4}, "attnres_block_size is 4; expected None"),
        ({"fuse_linear_cross_entropy": True}, "set one of them to False"),
        ({"attn": {"layers": [1]}}, "'layers' and 'num_heads'"),
        ({"attn": 3}, "attn has 3; expected a dictionary"),
        ({"attn": {"layers": 1, "num_heads": 2}}, "a list 'layers'"),
        ({"attn": {"layers": [24], "num_heads": 2}}, r"layers of attn are \[24\]; expected each once, from 0 to 23"),
        ({"attn": [{"layers": [1], "num_heads": 2}] * 2}, r"layers of attn are \[1, 1\]"),
    ],
)
def test_refusals(options, said):
    for config in (GLAConfig, HGRN2Config):
        with pytest.raises(ValueError, match=said):
            config(**options)


def test_heads_of_hgrn2(ours):
    assert HGRN2Config(expand_ratio=None, num_heads=4).expand_ratio == 512
    assert HGRN2Config(expand_ratio=64).num_heads == 32
    assert ours(model_type="hgrn2", num_heads=1).model.layers[0].attn.num_heads == 2, "as in FLA"
    for heads, ratio in [(None, None), (None, 48), (3, None)]:
        with pytest.raises(ValueError, match="expected one of them, a divisor of hidden_size = 64"):
            HGRN2Config(hidden_size=64, num_heads=heads, expand_ratio=ratio)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"attn_mode": "chunks"}, "unknown mode 'chunks'; did you mean 'chunk'"),
        ({"num_heads": 5}, "expected a multiple of num_heads = 5"),
        ({"clamp_min": 1.0}, "clamp_min is 1.0"),
        ({"attn": {"layers": [0], "num_heads": 3}}, "attn has num_heads 3"),
    ],
)
def test_refusals_of_models(ours, options, said):
    with pytest.raises(ValueError, match=said):
        ours(**options)


def test_refusals_of_calls(ours, tokens):
    model = ours()
    with pytest.raises(ValueError, match="either input_ids or inputs_embeds"):
        model(tokens, inputs_embeds=model.get_input_embeddings()(tokens))
    with pytest.raises(ValueError, match="either input_ids or inputs_embeds"):
        model()
    with pytest.raises(ValueError, match="no attention weights"):
        model(tokens, output_attentions=True)


@pytest.mark.parametrize("kind", ["gla", "hgrn2"])
def test_auto_classes(tmp_path, ours, kind):
    register()
    register()
    model = ours(model_type=kind, initializer_range=0.1)
    assert type(AutoConfig.for_model(kind)) is type(model.config)
    assert type(AutoModel.from_config(model.config)) is type(model.model)
    model.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").is_file()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is type(model)
    expected = model.state_dict()
    assert all((x == expected[name]).all() for name, x in loaded.state_dict().items())
    base = AutoModel.from_pretrained(tmp_path)
    assert all((x == expected[f"model.{name}"]).all() for name, x in base.state_dict().items())


@pytest.mark.parametrize("order", ["fla.models, gla_transformers", "gla_transformers, fla.models"])
def test_the_last_one_imported_answers(order):
    pytest.importorskip("fla.models", reason="needs flash-linear-attention 0.6.0: make test-fla")
    code = f"""
import {order}
from transformers import AutoConfig, AutoModelForCausalLM

def who():
    sizes = dict(hidden_size=32, num_hidden_layers=1, num_heads=2, vocab_size=9)
    configs = AutoConfig.for_model("gla", **sizes), AutoConfig.for_model("hgrn2", expand_ratio=16, **sizes)
    made = (*configs, *map(AutoModelForCausalLM.from_config, configs))
    return {{type(x).__module__.split(".")[0] for x in made}}

last = who()
gla_transformers.register()
print(*last, *who())
"""
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.split() == [order.split(", ")[1].split(".")[0], "gla_transformers"]


def test_new_weights_have_the_width_asked_for(ours):
    model = ours(use_short_conv=True, initializer_range=0.3, hidden_size=64)
    weights = dict(model.named_parameters())
    for name in ("lm_head", "model.embeddings", "model.layers.0.attn.q_proj", "model.layers.1.attn.q_conv1d"):
        assert weights[f"{name}.weight"].detach().std() == pytest.approx(0.3, rel=0.3), name
    assert (weights["model.layers.0.attn_norm.weight"] == 1).all()
    assert (weights["model.layers.0.attn.gk_proj.1.bias"] == 0).all()


def test_lower_bounds_that_a_folder_lacks_are_zeros(ours, tmp_path):
    model = ours(model_type="hgrn2", use_lower_bound=False)
    model.save_pretrained(tmp_path)
    assert (type(model).from_pretrained(tmp_path, use_lower_bound=True).model.lower_bounds == 0).all()
