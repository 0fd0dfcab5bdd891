"""Models that are registered, layers that are replaced, and settings that are refused."""

import importlib.metadata
import os
from types import SimpleNamespace

import pytest
import vllm
from transformers import AutoConfig
from vllm.compilation.breakable_cudagraph import is_breakable_cudagraph_enabled
from vllm.model_executor.models.registry import _VLLM_MODELS

import gla_vllm
from gla_transformers import GLAConfig, HGRN2Config
from gla_vllm import layers
from gla_vllm.attention import sizes_of_gla, sizes_of_hgrn2
from gla_vllm.configuration import check_served
from gla_vllm.layers import wanted


def test_the_entry_point():
    points = importlib.metadata.entry_points(group="vllm.general_plugins")
    assert points["gla_vllm"].load() is gla_vllm.register


def test_models_are_registered_and_a_second_time_changes_nothing():
    for _ in range(2):
        gla_vllm.register()
        assert set(gla_vllm.MODELS.values()) <= set(vllm.ModelRegistry.get_supported_archs())
        assert type(AutoConfig.for_model("hgrn2")) is HGRN2Config
        assert type(AutoConfig.for_model("gla")) is GLAConfig


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", []),
        (" ", []),
        ("lightning", ["lightning"]),
        ("mamba2, lightning", ["mamba2", "lightning"]),
        ("all", ["gated_delta_net", "kda", "lightning", "mamba2"]),
    ],
)
def test_names_of_layers(text, names):
    assert wanted(text) == names


@pytest.mark.parametrize(("model", "module"), [entry for models in layers.MODELS.values() for entry in models.items()])
def test_models_with_rings_are_where_vllm_has_them(model, module):
    theirs, name = _VLLM_MODELS[model]
    assert (theirs if theirs.startswith("vllm.") else f"vllm.model_executor.models.{theirs}", name) == (module, model)


def test_an_unknown_layer_is_an_error():
    with pytest.raises(ValueError, match=r"'lightening'; did you mean 'lightning'\?; expected names .* or all"):
        wanted("mamba2,lightening")


@pytest.mark.parametrize(("text", "names"), [("", "none"), ("lightning, mamba2", "lightning, mamba2")])
def test_the_log_says_what_is_replaced_and_that_vllm_is_another(monkeypatch, text, names):
    said = []

    def log(message, *values):
        said.append(message % values)

    monkeypatch.setattr(layers, "logger", SimpleNamespace(info_once=log, warning_once=log))
    monkeypatch.setenv("GLA_VLLM_LAYERS", text)
    layers.replace_layers()
    (line,) = said
    assert line.endswith(f"of vLLM's own layers {names} (GLA_VLLM_LAYERS)")
    monkeypatch.setattr(vllm, "__version__", "0.33.1")
    layers.replace_layers()
    assert said[1:] == [line, "gla_vllm was written for vLLM 0.32; this is 0.33.1"]


def test_layers_are_imported_for_graphs_that_break_too(monkeypatch):
    """The model says whether they do, after plug-ins are loaded; vLLM's decorator must have worked by then."""
    monkeypatch.delenv("VLLM_USE_BREAKABLE_CUDAGRAPH", raising=False)
    with layers.imported_early():
        assert is_breakable_cudagraph_enabled()
    assert "VLLM_USE_BREAKABLE_CUDAGRAPH" not in os.environ
    monkeypatch.setenv("VLLM_USE_BREAKABLE_CUDAGRAPH", "0")
    with layers.imported_early():
        assert not is_breakable_cudagraph_enabled()
    assert os.environ["VLLM_USE_BREAKABLE_CUDAGRAPH"] == "0"


def test_softmax_attention_is_refused():
    with pytest.raises(ValueError, match=r"attn is .*; gla_vllm serves models with None only"):
        check_served(GLAConfig(attn={"layers": [0], "num_heads": 2}))


def test_sizes_of_a_rank():
    config = GLAConfig(hidden_size=64, num_heads=8, num_kv_heads=4, expand_k=0.5, expand_v=2.0)
    assert sizes_of_gla(config, 1) == (8, 4, 4, 4, 16, 4)
    assert sizes_of_gla(config, 2) == (4, 2, 2, 4, 16, 4)
    with pytest.raises(ValueError, match="num_kv_heads is 4; expected a multiple of the 8 ranks"):
        sizes_of_gla(config, 8)
    assert sizes_of_hgrn2(HGRN2Config(hidden_size=64, expand_ratio=16), 2) == (2, 2, 2, 16, 16, 16)
    with pytest.raises(ValueError, match="num_heads is 4; expected a multiple of the 3 ranks"):
        sizes_of_hgrn2(HGRN2Config(hidden_size=64, expand_ratio=16), 3)
