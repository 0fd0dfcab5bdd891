"""The language models in vLLM: names and shapes of weights as in flash-linear-attention 0.6.0."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from vllm.compilation.decorators import support_torch_compile
from vllm.config import VllmConfig
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateCopyFuncCalculator
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.models.interfaces import HasInnerState, IsAttentionFree, IsHybrid, SupportsMambaPrefixCaching
from vllm.model_executor.models.llama import LlamaMLP
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper, maybe_prefix

from gla_vllm.attention import GLAAttention, HGRN2Attention, sizes_of_gla, sizes_of_hgrn2
from gla_vllm.configuration import check_served, mlp_width
from gla_vllm.delta import GatedDeltaNetAttention, KimiDeltaAttention, sizes_of_delta_rule
from gla_vllm.recurrence import state_dtypes, state_shapes

Layer = Callable[[Any, VllmConfig, str], nn.Module]


def _merged(*convolved: str, **others: tuple[str, int]) -> dict[str, tuple[str, int]]:
    """Returns the mapping of the names of weights to the merged weights and their places in it.

    Args:
        convolved: what the first projections make, each through a convolution if the model has them.
        others: the names of other projections.
    """
    names = {"gate_proj": ("gate_up_proj", 0), "up_proj": ("gate_up_proj", 1), **others}
    for place, name in enumerate(convolved):
        names |= {f"{name}_proj": ("in_proj", place), f"{name}_conv1d": ("conv1d", place)}
    return {f".{name}.": (f".{merged}.", place) for name, (merged, place) in names.items()}


GLA_WEIGHTS = WeightsMapper(
    orig_to_new_substr={".g_norm_swish_gate.": ".g_norm."},
    orig_to_new_stacked=_merged("q", "k", "v", g_proj=("in_proj", 3)),
)
GATED_DELTA_NET_WEIGHTS = WeightsMapper(
    orig_to_new_stacked=_merged("q", "k", "v", a_proj=("in_proj", 3), b_proj=("in_proj", 4), g_proj=("in_proj", 5))
)
KDA_WEIGHTS = WeightsMapper(orig_to_new_stacked=_merged("q", "k", "v", b_proj=("in_proj", 3)))
HGRN2_WEIGHTS = WeightsMapper(orig_to_new_stacked=_merged("q", "f", "i"))


class Block(nn.Module):
    """One layer of a model: [T, hidden_size] to [T, hidden_size].

    The residual stream is passed beside the output of the block before, because vLLM's norms add the two.
    """

    def __init__(self, config: Any, vllm_config: VllmConfig, prefix: str, layer: Layer) -> None:
        super().__init__()
        self.attn_norm = RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.attn = layer(config, vllm_config, f"{prefix}.attn")
        self.mlp_norm = RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.mlp = LlamaMLP(
            config.hidden_size, mlp_width(config), "silu", quant_config=vllm_config.quant_config, prefix=f"{prefix}.mlp"
        )

    def forward(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        x, stream = (self.attn_norm(x), x) if residual is None else self.attn_norm(x, residual)
        x, stream = self.mlp_norm(self.attn(x), stream)
        return self.mlp(x), stream


@support_torch_compile(dynamic_arg_dims={"input_ids": 0, "positions": 0, "inputs_embeds": 0})
class Decoder(nn.Module):
    """A model without its head: tokens [T] to hidden states [T, hidden_size]."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str, layer: Layer) -> None:
        super().__init__()
        config: Any = vllm_config.model_config.hf_config
        self.embeddings = VocabParallelEmbedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            Block(config, vllm_config, f"{prefix}.layers.{i}", layer) for i in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, eps=config.norm_eps)

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: None = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        x = self.embeddings(input_ids) if inputs_embeds is None else inputs_embeds
        residual = None
        for layer in self.layers:
            x, residual = layer(x, residual)
        return self.norm(x, residual)[0]


class LanguageModel(nn.Module, HasInnerState, IsAttentionFree, IsHybrid, SupportsMambaPrefixCaching):
    """A language model: what all models here share."""

    layer: ClassVar[Any]
    weights: ClassVar[WeightsMapper]
    sizes: ClassVar[Any]

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config: Any = vllm_config.model_config.hf_config
        check_served(config)
        self.config = config
        self.model = Decoder(vllm_config=vllm_config, prefix=maybe_prefix(prefix, "model"), layer=type(self).layer)
        self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size, prefix=maybe_prefix(prefix, "lm_head"))
        if config.tie_word_embeddings:
            self.lm_head = self.lm_head.tie_weights(self.model.embeddings)
        self.logits_processor = LogitsProcessor(config.vocab_size)

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config: VllmConfig) -> tuple[torch.dtype, ...]:
        return state_dtypes(vllm_config)

    @classmethod
    def get_mamba_state_shape_from_config(cls, vllm_config: VllmConfig) -> tuple[tuple[int, ...], ...]:
        ranks = vllm_config.parallel_config.tensor_parallel_size
        return state_shapes(vllm_config, cls.sizes(vllm_config.model_config.hf_config, ranks))

    def get_mamba_state_copy_funcs(self, mamba_types: set[Any]) -> dict[Any, tuple[Any, ...]]:
        """Returns for each type of states the functions that find them; the first is that of convolutions, if any."""
        functions: tuple[Any, ...] = MambaStateCopyFuncCalculator.gated_delta_net_state_copy_func()
        return dict.fromkeys(mamba_types, functions if self.config.use_short_conv else functions[1:])

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        return self.model.embeddings(input_ids)

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: None = None,
        inputs_embeds: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        return self.model(input_ids, positions, intermediate_tensors, inputs_embeds)

    def compute_logits(self, hidden_states: Tensor) -> Tensor | None:
        return self.logits_processor(self.lm_head, hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        return AutoWeightsLoader(self).load_weights(weights, mapper=self.weights)


class GLAForCausalLM(LanguageModel):
    """The GLA language model."""

    layer, weights, sizes = GLAAttention, GLA_WEIGHTS, staticmethod(sizes_of_gla)


class GatedDeltaNetForCausalLM(LanguageModel):
    """The language model of gated delta networks."""

    layer, weights, sizes = GatedDeltaNetAttention, GATED_DELTA_NET_WEIGHTS, staticmethod(sizes_of_delta_rule)


class KDAForCausalLM(LanguageModel):
    """The language model with Kimi delta attention."""

    layer, weights, sizes = KimiDeltaAttention, KDA_WEIGHTS, staticmethod(sizes_of_delta_rule)


class HGRN2ForCausalLM(LanguageModel):
    """The HGRN2 language model."""

    layer, weights, sizes = HGRN2Attention, HGRN2_WEIGHTS, staticmethod(sizes_of_hgrn2)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        return super().load_weights(_bounds_of_layers(weights))


def _bounds_of_layers(weights: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
    """Replaces `lower_bounds` [layers, width] by the lower bound of each layer; that of the first layer is 0."""
    for name, weight in weights:
        if not name.endswith("lower_bounds"):
            yield name, weight
            continue
        parts = weight.softmax(0, dtype=torch.float32)
        for i, bound in enumerate(parts.cumsum(0) - parts[0]):
            yield f"{name.removesuffix('lower_bounds')}layers.{i}.attn.lower_bound", bound
