"""vLLM's own models with delta rules: checkpoints of random weights, and transformers' models with the same weights."""

import importlib
import json
import sys
from types import ModuleType, SimpleNamespace

import torch
import transformers
import vllm.models
from requests_of_tests import VOCABULARY
from safetensors.torch import load_file, save_file
from vllm.model_executor.layers.mamba.gdn import olmo_gdn_linear_attn
from vllm.model_executor.models import bailing_moe_v3
from vllm.model_executor.models.qwen3_next import Qwen3NextForCausalLM
from vllm.models.kimi_k3.nvidia import model as kimi_model

from gla_vllm.delta_rules import OlmoLayer, QwenLayer

# vLLM imports the models of GLM-5.3 with torchvision alone; their layer needs none.
sys.modules["vllm.models.glm5next"] = package = ModuleType("vllm.models.glm5next")
package.__path__ = [f"{path}/glm5next" for path in vllm.models.__path__]
from vllm.models.glm5next.common.kda import Glm5NextLinearAttention

from gla_vllm.glm import GlmLayer
from gla_vllm.kda import KimiLayer, LingLayer
from gla_vllm.kimi_k3 import KimiK3Layer
from gla_vllm.layers import LAYERS, replace

COMMON = {"vocab_size": VOCABULARY, "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
COMMON |= {"max_position_embeddings": 256, "initializer_range": 0.3, "intermediate_size": 64, "pad_token_id": 0}
COMMON |= {"bos_token_id": None, "eos_token_id": None}
HYBRID = {"layer_types": ["linear_attention", "full_attention", "linear_attention"], "num_hidden_layers": 3}
HYBRID |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "head_dim": 32}
HYBRID |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "mlp_only_layers": [0, 1]}
EXPERTS |= {"shared_expert_intermediate_size": 32}
KIMI = {"layer_types": ["linear_attention"] * 2, "mlp_layer_types": ["dense"] * 2, "num_hidden_layers": 2}
KIMI |= {"linear_num_heads": 2, "linear_head_dim": 16, "rms_norm_eps": 1e-5}
OLMO = {**HYBRID, "linear_value_head_dim": 32}
MODELS = {
    "Qwen3Next": (QwenLayer, HYBRID | EXPERTS),
    "Qwen3Next flat": (QwenLayer, HYBRID | EXPERTS),
    "OlmoHybrid": (OlmoLayer, OLMO),
    "KimiLinear": (KimiLayer, KIMI),
    "KimiLinear K3": (KimiK3Layer, KIMI),
    "KimiLinear Ling": (LingLayer, KIMI),
    "KimiLinear GLM": (GlmLayer, KIMI),
}
"""For each model the class of its replaced layers, and its sizes; a second word is the layout of the checkpoint."""
# What transformers calls otherwise than the checkpoints that vLLM reads
KIMI_CONFIG = {"linear_attn_config": {"kda_layers": [1, 2], "full_attn_layers": [], "head_dim": 16, "num_heads": 2}}
KIMI_CONFIG["linear_attn_config"] |= {"short_conv_kernel_size": 4}
KIMI_CONFIG |= {"architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear", "model_max_length": 256}
LING_CONFIG = {"architectures": ["BailingMoeV3ForCausalLM"], "model_type": "bailing_hybrid", "layer_group_size": 4}
LING_CONFIG |= {"head_dim": 16, "short_conv_kernel_size": 4, "no_kda_lora": True, "kda_safe_gate": False}
LING_CONFIG |= {"max_position_embeddings": 256, "hidden_act": "silu", "use_bias": False}
LING_CONFIG |= {"num_experts": 1, "first_k_dense_replace": 2}  # no layer has experts


class LingConfig(transformers.PreTrainedConfig):
    """The configuration; vLLM takes its fields from config.json."""

    model_type = "bailing_hybrid"


def save(name, folder, monkeypatch, **sizes):
    """Saves a model of MODELS in a folder, and returns transformers' model."""
    torch.manual_seed(0)
    kind, *layout = name.split()
    config = getattr(transformers, f"{kind}Config")(**COMMON | MODELS[name][1] | sizes)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    model.generation_config.use_cache = False  # transformers' cache wants a layer of softmax attention
    _by_pytorch(importlib.import_module(type(model).__module__), monkeypatch)
    model.save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    if layout == ["flat"]:
        _lay_flat(weights, monkeypatch)
    elif kind == "OlmoHybrid":
        monkeypatch.setattr(olmo_gdn_linear_attn, "set_triton_allocator", lambda device: None)  # for GPUs
        weights = _named_as_olmo(weights, config)
    elif kind == "KimiLinear":
        weights = _named_as_kimi(weights)
        described = dict(KIMI_CONFIG)
        if layout:
            _multiply_out(weights, {"K3": ("g",), "Ling": ("f", "g"), "GLM": ()}[layout[0]])
        if layout == ["GLM"]:
            weights = _named_as_glm(weights)
            replace("Glm5NextLinearAttention", LAYERS["kda"]["Glm5NextLinearAttention"])
            monkeypatch.setattr(kimi_model, "KimiLinearGatedDeltaNetAttention", _glm_layer)
        elif layout == ["K3"]:
            replace("KimiK3DeltaAttention", LAYERS["kda"]["KimiK3DeltaAttention"])
            described["linear_attn_config"] = KIMI_CONFIG["linear_attn_config"] | {"use_full_rank_gate": True}
        elif layout:
            weights = {key.replace("embed_tokens", "word_embeddings"): weight for key, weight in weights.items()}
            described = LING_CONFIG
            transformers.AutoConfig.register("bailing_hybrid", LingConfig, exist_ok=True)
            # Its layers of softmax attention are of a kind that vLLM does not compute on a CPU.
            monkeypatch.setattr(bailing_moe_v3, "_is_kda_layer", lambda *sizes: True)
        kept = {key: COMMON[key] for key in ("vocab_size", "hidden_size", "num_attention_heads", "intermediate_size")}
        kept |= {"num_hidden_layers": 2, "num_experts": None, "rms_norm_eps": 1e-5}
        (folder / "config.json").write_text(json.dumps(kept | described))
    save_file(weights, folder / "model.safetensors")
    return model


def save_one_layer(name, folder, monkeypatch):
    """Saves a model of MODELS with one layer, which has a delta rule and no experts."""
    kinds = ["linear_attention", "full_attention"]  # transformers wants one of each
    sizes = {} if name == "KimiLinear" else {"layer_types": kinds, "num_hidden_layers": 2}
    save(name, folder, monkeypatch, **sizes)
    weights = load_file(folder / "model.safetensors")
    save_file({key: x for key, x in weights.items() if ".layers.1." not in key}, folder / "model.safetensors")
    monkeypatch.setattr(Qwen3NextForCausalLM, "set_moe_parameters", lambda model: None)


def _by_pytorch(module, monkeypatch):
    """Makes a module of transformers compute its delta rules by PyTorch, though flash-linear-attention is installed."""
    for name, function in vars(module).items():
        if "delta" in name and hasattr(function, "__wrapped__"):
            monkeypatch.setattr(module, name, function.__wrapped__)


def _lay_flat(weights, monkeypatch):
    """Lays the projections of Qwen3-Next out as in Qwen3.5, which vLLM imports with torchvision alone."""
    for name, weight in weights.items():
        widths = [16, 16, 32, 32] if "qkvz" in name else [2, 2] if "in_proj_ba" in name else []
        if widths:  # of q, k, v and z, or b and a, of a key head
            parts = weight.unflatten(0, (2, -1)).split(widths, dim=1)
            weights[name] = torch.cat([part.flatten(0, 1) for part in parts])
    made = QwenLayer.__init__

    def make(self, *args, **kwargs):
        made(self, *args, **kwargs | {"gqa_interleaved_layout": False})

    monkeypatch.setattr(QwenLayer, "__init__", make)


def _named_as_olmo(weights, config):
    """Returns weights with the names that vLLM reads. transformers saves filters of q, k and v as three equal parts."""
    names = {"attention_layer_norm": "input_layernorm", "feedforward_layer_norm": "post_attention_layernorm"}
    for theirs, ours in names.items():
        weights = {name.replace(f".{theirs}.", f".{ours}."): weight for name, weight in weights.items()}
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    for name in [name for name in weights if "q_conv1d" in name]:
        parts = [name.replace("q_conv1d", f"{part}_conv1d") for part in "qkv"]
        joined = torch.cat([weights[part] for part in parts])
        weights |= zip(parts, joined.split([keys, keys, len(joined) - 2 * keys]), strict=True)
    return {name: weight.contiguous() for name, weight in weights.items()}


def _named_as_kimi(weights):
    """Returns weights with the names that vLLM reads; transformers saves dense layers under names of experts."""
    return {name.replace("block_sparse_moe", "mlp"): weight for name, weight in weights.items()}


def _named_as_glm(weights):
    """Returns weights of a Kimi-Linear model with the layers of GLM-5.3, whose projections are merged."""
    parts = ("q_proj", "k_proj", "v_proj", "b_proj", "f_a_proj", "g_a_proj")
    for name in [name for name in weights if "q_proj" in name]:
        merged = torch.cat([weights.pop(name.replace("q_proj", part)) for part in parts])
        weights[name.replace("q_proj", "in_proj_qkvbfg_a")] = merged
    return weights


def _glm_layer(config, vllm_config, prefix):
    """Makes a layer of GLM-5.3 for a Kimi-Linear model; without a bound its gates are of the same form."""
    names = {"linear_head_dim": "head_dim", "linear_num_heads": "num_heads"}
    sizes = {name: config.linear_attn_config[theirs] for name, theirs in names.items()}
    options = {"linear_conv_kernel_dim": 4, "linear_lower_bound": None, "hidden_act": "silu"}
    described = SimpleNamespace(hidden_size=config.hidden_size, rms_norm_eps=1e-5, **sizes, **options)
    return Glm5NextLinearAttention(described, vllm_config, prefix)


def _multiply_out(weights, gates):
    """Makes each of these gates one projection out of two of low rank."""
    for name in [name for name in weights if any(f".{gate}_a_proj" in name for gate in gates)]:
        first, second = weights.pop(name), weights.pop(name.replace("_a_proj", "_b_proj"))
        weights[name.replace("_a_proj", "_proj")] = second @ first
