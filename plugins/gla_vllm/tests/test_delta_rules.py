"""vLLM's models with delta rules with their layers replaced, against transformers' models."""

import pytest
import torch
import transformers
from requests_of_tests import VOCABULARY, expected, greedy, outputs, prompt, tokens
from vllm.model_executor.layers.mamba.gdn import olmo_gdn_linear_attn

from gla_vllm.delta_rules import KimiLayer, OlmoLayer, QwenLayer

COMMON = {"vocab_size": VOCABULARY, "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
COMMON |= {"max_position_embeddings": 256, "initializer_range": 0.3, "intermediate_size": 48, "head_dim": 32}
COMMON |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16}
LAYERS = {"num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"]}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
EXPERTS |= {"shared_expert_intermediate_size": 32}
MODELS = {
    "Qwen3Next": (QwenLayer, LAYERS | LINEAR | EXPERTS | {"mlp_only_layers": [0, 1]}),
    "OlmoHybrid": (OlmoLayer, LAYERS | LINEAR | {"linear_num_key_heads": 4, "linear_allow_neg_eigval": True}),
}


@pytest.fixture
def model(request, tmp_path):
    """A folder with a model, the model, and the class of its replaced layers."""
    layer, options = MODELS[request.param]
    torch.manual_seed(0)
    config = getattr(transformers, f"{request.param}Config")(**COMMON | options)
    made = getattr(transformers, f"{request.param}ForCausalLM")(config).eval()
    made.save_pretrained(tmp_path)
    return str(tmp_path), made, layer


@pytest.mark.parametrize("model", MODELS, indirect=True)
def test_tokens(model, engine, monkeypatch):
    """Prompts are cut, and a second time their states are read from the prefix cache."""
    # vLLM's layer of OLMo-Hybrid models asks Triton for memory, which is not installed for a CPU.
    monkeypatch.setattr(olmo_gdn_linear_attn, "set_triton_allocator", lambda device: None)
    folder, made, layer = model
    llm = engine(folder, max_num_batched_tokens=96, enable_prefix_caching=True, block_size=64, max_model_len=256)
    layers = [type(x) for x in llm.llm_engine.vllm_config.compilation_config.static_forward_context.values()]
    assert layers.count(layer) == 2
    prompts = [prompt(length) for length in (1, 2, 64, 65, 100, 150)]
    assert tokens(llm, prompts, greedy(20)) == expected(made, prompts, 20)
    (again,) = outputs(llm, [prompts[-1]], greedy(20))
    assert again.num_cached_tokens == 128
    assert [list(again.outputs[0].token_ids)] == expected(made, prompts[-1:], 20)
