"""vLLM's models with delta rules with their layers replaced, against transformers' models."""

import pytest
from delta_models import MODELS, save
from requests_of_tests import DRAFTS, expected, greedy, outputs, prompt, states_of_drafts, tokens
from vllm import ModelRegistry
from vllm.model_executor.models.qwen3_next import Qwen3NextForCausalLM
from vllm.plugins import load_general_plugins


@pytest.fixture
def model(request, tmp_path, monkeypatch):
    """A folder with a model, the model, and the class of its replaced layers."""
    monkeypatch.setenv("VLLM_KIMI_K3_GEMM_AR", "0")  # kernels for GPUs
    return str(tmp_path), save(request.param, tmp_path, monkeypatch), MODELS[request.param][0]


@pytest.mark.parametrize("model", MODELS, indirect=True)
def test_tokens(model, engine):
    """Prompts are cut, and a second time their states are read from the prefix cache."""
    folder, made, layer = model
    llm = engine(folder, max_num_batched_tokens=96, enable_prefix_caching=True, block_size=64, max_model_len=256)
    layers = [type(x) for x in llm.llm_engine.vllm_config.compilation_config.static_forward_context.values()]
    assert layers.count(layer) == 2
    prompts = [prompt(length) for length in (1, 2, 64, 65, 100, 150)]
    assert tokens(llm, prompts, greedy(20)) == expected(made, prompts, 20)
    (again,) = outputs(llm, [prompts[-1]], greedy(20))
    assert again.num_cached_tokens == 128
    assert [list(again.outputs[0].token_ids)] == expected(made, prompts[-1:], 20)


@pytest.mark.parametrize("model", ["Qwen3Next", "KimiLinear K3"], indirect=True)
def test_drafts(model, engine, accepted):
    """A sequence has one state. vLLM's models with softmax attention pad its blocks to a state and its rings."""
    folder, made, _ = model
    prompts = [prompt(length) for length in (1, 5, 65, 100)]
    llm = engine(folder, speculative_config=DRAFTS, enable_prefix_caching=False, max_num_batched_tokens=96)
    assert tokens(llm, prompts, greedy(20)) == expected(made, prompts, 20)
    assert max(accepted) > 1
    assert states_of_drafts(llm) == [0, 0]


@pytest.mark.parametrize("model", ["Qwen3Next"], indirect=True)
def test_drafts_in_a_model_without_room_for_rings(model, engine, monkeypatch):
    """It is vLLM's own class, as those that contain a language model may be. A sequence has a state for each draft."""
    load_general_plugins()
    name = Qwen3NextForCausalLM.__name__
    monkeypatch.setitem(ModelRegistry.models, name, ModelRegistry.models[name])  # restores what follows
    ModelRegistry.register_model(name, Qwen3NextForCausalLM)
    folder, made, _ = model
    llm = engine(folder, speculative_config=DRAFTS, enable_prefix_caching=False, max_num_batched_tokens=96)
    prompts = [prompt(length) for length in (1, 65)]
    assert tokens(llm, prompts, greedy(20)) == expected(made, prompts, 20)
    assert states_of_drafts(llm) == [3, 3]
