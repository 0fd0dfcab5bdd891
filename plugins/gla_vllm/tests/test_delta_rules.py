"""vLLM's models with delta rules with their layers replaced, against transformers' models."""

import importlib
import json

import pytest
import torch
import transformers
from requests_of_tests import DRAFTS, VOCABULARY, expected, greedy, outputs, prompt, tokens
from safetensors.torch import load_file, save_file

from gla_vllm.delta_rules import KimiLayer, QwenLayer

COMMON = {"vocab_size": VOCABULARY, "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
COMMON |= {"max_position_embeddings": 256, "initializer_range": 0.3, "intermediate_size": 48}
COMMON |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
HYBRID = {"layer_types": ["linear_attention", "full_attention", "linear_attention"], "num_hidden_layers": 3}
HYBRID |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "head_dim": 32}
HYBRID |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "mlp_only_layers": [0, 1]}
EXPERTS |= {"shared_expert_intermediate_size": 32}
KIMI = {"layer_types": ["linear_attention"] * 2, "mlp_layer_types": ["dense"] * 2, "num_hidden_layers": 2}
KIMI |= {"linear_num_heads": 2, "linear_head_dim": 16, "rms_norm_eps": 1e-5}
MODELS = {
    "Qwen3Next": (QwenLayer, HYBRID | EXPERTS),
    "Qwen3Next flat": (QwenLayer, HYBRID | EXPERTS),
    "KimiLinear": (KimiLayer, KIMI),
}
# What transformers calls otherwise than the checkpoints that vLLM reads
KIMI_CONFIG = {"linear_attn_config": {"kda_layers": [1, 2], "full_attn_layers": [], "head_dim": 16, "num_heads": 2}}
KIMI_CONFIG["linear_attn_config"] |= {"short_conv_kernel_size": 4}
KIMI_CONFIG |= {"model_max_length": 256, "num_experts": None, "rms_norm_eps": 1e-5}


def by_pytorch(module, monkeypatch):
    """Makes a module of transformers compute its delta rules by PyTorch, though flash-linear-attention is installed."""
    for name, function in vars(module).items():
        if "delta" in name and hasattr(function, "__wrapped__"):
            monkeypatch.setattr(module, name, function.__wrapped__)


def lay_flat(file, monkeypatch):
    """Lays the projections of Qwen3-Next out as in Qwen3.5, which vLLM imports with torchvision alone."""
    weights = load_file(file)
    for name, weight in weights.items():
        widths = [16, 16, 32, 32] if "qkvz" in name else [2, 2] if "in_proj_ba" in name else []
        if widths:  # of q, k, v and z, or b and a, of a key head
            parts = weight.unflatten(0, (2, -1)).split(widths, dim=1)
            weights[name] = torch.cat([part.flatten(0, 1) for part in parts])
    save_file(weights, file)
    made = QwenLayer.__init__

    def make(self, *args, **kwargs):
        made(self, *args, **kwargs | {"gqa_interleaved_layout": False})

    monkeypatch.setattr(QwenLayer, "__init__", make)


@pytest.fixture
def model(request, tmp_path, monkeypatch):
    """A folder with a model, the model, and the class of its replaced layers."""
    (layer, options), (name, *flat) = MODELS[request.param], request.param.split()
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**COMMON | options)
    made = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    made.generation_config.use_cache = False  # transformers' cache wants a layer of softmax attention
    by_pytorch(importlib.import_module(type(made).__module__), monkeypatch)
    made.save_pretrained(tmp_path)
    if flat:
        lay_flat(tmp_path / "model.safetensors", monkeypatch)
    if layer is KimiLayer:
        kept = {key: COMMON[key] for key in ("vocab_size", "hidden_size", "num_attention_heads", "intermediate_size")}
        described = {"architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear", "num_hidden_layers": 2}
        (tmp_path / "config.json").write_text(json.dumps(described | kept | KIMI_CONFIG))
        weights = load_file(tmp_path / "model.safetensors")  # transformers saves dense layers under names of experts
        weights = {name.replace("block_sparse_moe", "mlp"): weight for name, weight in weights.items()}
        save_file(weights, tmp_path / "model.safetensors")
    return str(tmp_path), made, layer


@pytest.mark.parametrize("model", MODELS, indirect=True)
def test_tokens(model, engine, monkeypatch):
    """Prompts are cut, and a second time their states are read from the prefix cache."""
    monkeypatch.setenv("VLLM_KIMI_K3_GEMM_AR", "0")  # kernels for GPUs
    folder, made, layer = model
    llm = engine(folder, max_num_batched_tokens=96, enable_prefix_caching=True, block_size=64, max_model_len=256)
    layers = [type(x) for x in llm.llm_engine.vllm_config.compilation_config.static_forward_context.values()]
    assert layers.count(layer) == 2
    prompts = [prompt(length) for length in (1, 2, 64, 65, 100, 150)]
    assert tokens(llm, prompts, greedy(20)) == expected(made, prompts, 20)
    (again,) = outputs(llm, [prompts[-1]], greedy(20))
    assert again.num_cached_tokens == 128
    assert [list(again.outputs[0].token_ids)] == expected(made, prompts[-1:], 20)


@pytest.mark.parametrize("model", ["Qwen3Next"], indirect=True)
def test_drafts(model, engine):
    folder, made, _ = model
    prompts = [prompt(length) for length in (1, 5, 65, 100)]
    llm = engine(folder, speculative_config=DRAFTS, enable_prefix_caching=False, max_num_batched_tokens=96)
    assert tokens(llm, prompts, greedy(20)) == expected(made, prompts, 20)
