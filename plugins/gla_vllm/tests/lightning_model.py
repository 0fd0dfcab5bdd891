"""A model of vLLM's Ling 2.5 class with lightning layers only, and its tokens, computed token by token."""

import json
import math

import torch
import torch.nn.functional as F
from requests_of_tests import VOCABULARY
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig

from gla_transformers.softmax_attention import rotated

LAYERS, HEADS, WIDTH, HIDDEN, MLP, GROUPS, EPS, THETA = 3, 4, 16, 64, 64, 2, 1e-5, 10000.0


class LingConfig(PreTrainedConfig):
    """The configuration; vLLM takes its fields from config.json."""

    model_type = "bailing_hybrid"


def save(folder):
    """Saves the model, and returns its weights."""
    torch.manual_seed(0)
    AutoConfig.register("bailing_hybrid", LingConfig, exist_ok=True)
    config = {
        "architectures": ["BailingMoeV2_5ForCausalLM"],
        "model_type": "bailing_hybrid",
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "layer_group_size": LAYERS + 1,  # one layer of softmax attention ends each group
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "head_dim": WIDTH,
        "intermediate_size": MLP,
        "num_experts": 1,
        "group_norm_size": GROUPS,
        "rms_norm_eps": EPS,
        "rope_theta": THETA,
        "max_position_embeddings": 512,
        "use_qk_norm": True,
        "use_bias": False,
        "use_qkv_bias": False,
        "hidden_act": "silu",
    }
    (folder / "config.json").write_text(json.dumps(config))
    shapes = {"word_embeddings": (VOCABULARY, HIDDEN), "norm": (HIDDEN,)}
    for i in range(LAYERS):
        layer_shapes = {
            "input_layernorm": (HIDDEN,),
            "post_attention_layernorm": (HIDDEN,),
            "attention.query_key_value": (3 * HEADS * WIDTH, HIDDEN),
            "attention.query_layernorm": (WIDTH,),
            "attention.key_layernorm": (WIDTH,),
            "attention.g_proj": (HEADS * WIDTH, HIDDEN),
            "attention.g_norm": (HEADS * WIDTH,),
            "attention.dense": (HIDDEN, HEADS * WIDTH),
            "mlp.gate_proj": (MLP, HIDDEN),
            "mlp.up_proj": (MLP, HIDDEN),
            "mlp.down_proj": (HIDDEN, MLP),
        }
        shapes |= {f"layers.{i}.{name}": shape for name, shape in layer_shapes.items()}
    weights = {f"model.{name}.weight": _random(shape) for name, shape in shapes.items()}
    weights["lm_head.weight"] = _random((VOCABULARY, HIDDEN))
    save_file(weights, str(folder / "model.safetensors"))
    return weights


def _random(shape) -> Tensor:
    return 1 + 0.2 * torch.randn(shape) if len(shape) == 1 else torch.randn(shape) * 0.2


class Reader:
    """Reads tokens one after the other, in float64."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        self.weights = {name.removesuffix(".weight"): x.double() for name, x in weights.items()}
        self.states = torch.zeros(LAYERS, HEADS, WIDTH, WIDTH, dtype=torch.float64)
        self.position = 0

    def read(self, token: int) -> int:
        """Returns the likeliest token after this one."""
        w = self.weights
        x = w["model.word_embeddings"][token]
        for i in range(LAYERS):
            x = x + self._attention(i, _norm(x, w[f"model.layers.{i}.input_layernorm"]))
            y = _norm(x, w[f"model.layers.{i}.post_attention_layernorm"])
            gate, up, down = (w[f"model.layers.{i}.mlp.{name}_proj"] for name in ("gate", "up", "down"))
            x = x + down @ (F.silu(gate @ y) * (up @ y))
        self.position += 1
        return int((w["lm_head"] @ _norm(x, w["model.norm"])).argmax())

    def _attention(self, i: int, x: Tensor) -> Tensor:
        w = {name: self.weights[f"model.layers.{i}.attention.{name}"] for name in ("g_norm", "g_proj", "dense")}
        q, k, v = (self.weights[f"model.layers.{i}.attention.query_key_value"] @ x).view(3, HEADS, WIDTH)
        q, k = (
            self._rotated(_norm(y, self.weights[f"model.layers.{i}.attention.{name}_layernorm"]))
            for name, y in (("query", q), ("key", k))
        )
        decay = torch.tensor([math.exp(-slope) for slope in slopes(i)], dtype=torch.float64)
        self.states[i] = decay[:, None, None] * self.states[i] + k[:, :, None] * v[:, None]
        o = torch.einsum("hk,hkv->hv", q * WIDTH**-0.5, self.states[i])
        o = F.rms_norm(o.view(GROUPS, -1), (HEADS * WIDTH // GROUPS,), eps=EPS).flatten() * w["g_norm"]
        return w["dense"] @ (o * torch.sigmoid(w["g_proj"] @ x))

    def _rotated(self, x: Tensor) -> Tensor:
        return rotated(x[None, :, None], torch.tensor([[self.position]]), THETA)[0, :, 0]


def slopes(layer: int) -> list[float]:
    """Returns the slope of each head: ALiBi's, smaller in later layers."""
    return [2 ** (-8 * (head + 1) / HEADS) * (1 - layer / (LAYERS - 1) + 1e-5) for head in range(HEADS)]


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, EPS)


def tokens_of(weights, prompt, new):
    """Returns the greedy tokens that follow a prompt."""
    reader, tokens = Reader(weights), []
    for token in prompt[:-1]:
        reader.read(token)
    token = prompt[-1]
    for _ in range(new):
        token = reader.read(token)
        tokens.append(token)
    return tokens
