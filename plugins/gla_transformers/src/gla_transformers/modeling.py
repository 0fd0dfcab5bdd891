"""Language models: blocks of GLA or HGRN2 and a gated MLP, each on a normed residual stream.

    x = x + attn(norm(x))        y = W_head norm(x)
    x = x + mlp(norm(x))         mlp(x) = (silu(x W_gate) * x W_up) W_down

The models differ in their configurations, which say what `attn` is. In HGRN2, all layers but the first one have lower
bounds of their forget gates, which are made of one parameter [layers, hidden_size] by a softmax and sums over layers.

Parameters have the names and shapes of flash-linear-attention 0.6.0. Sources: Yang et al., "Gated Linear Attention
Transformers with Hardware-Efficient Training" (arXiv 2312.06635); Qin et al., "HGRN2: Gated Linear RNNs with State
Expansion" (arXiv 2404.07904).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from transformers import GenerationMixin, PreTrainedModel
from transformers import initialization as init
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils import can_return_tuple, logging

from gla_core.dispatch.tensors import wide
from gla_core.extension import Merging, RMSNormGated, ShortConvolution, added, is_plain, not_kept, products
from gla_core.nn import HGRN2, GatedLinearAttention
from gla_transformers import few_rows, generation, packing
from gla_transformers.cache import NAME, GLACache, read
from gla_transformers.causal_convolution import convolve_sequences
from gla_transformers.configuration import GLAConfig, HGRN2Config, SharedConfig
from gla_transformers.gated import forgetting, gated, normed
from gla_transformers.graphs import Graphs
from gla_transformers.loss import IGNORED, l2warp, loss_in_parts, next_token_loss
from gla_transformers.softmax_attention import SoftmaxAttention

logger = logging.get_logger(__name__)


class GatedMLP(Merging):
    """A gated MLP, (silu(x W_gate) * x W_up) W_down: [..., hidden_size] to [..., hidden_size]."""

    def __init__(self, hidden_size: int, width: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, width, bias=False)
        self.up_proj = nn.Linear(hidden_size, width, bias=False)
        self.down_proj = nn.Linear(width, hidden_size, bias=False)
        self.merge()

    def merged_layers(self) -> Sequence[Sequence[nn.Module]]:
        """Returns the two projections of x."""
        return [[self.gate_proj, self.up_proj]]

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Maps x to y; see `gla_core.extension.added` for a residual [..., hidden_size]."""
        made = products([self.gate_proj, self.up_proj], x)
        if made is None:
            with not_kept(x):
                made = self.gate_proj(x), self.up_proj(x)
        x = gated(*made)
        with not_kept(x):
            return self.down_proj(x) if residual is None else added(residual, self.down_proj, x)


class Block(GradientCheckpointingLayer):
    """One layer of the model: [B, T, hidden_size] to [B, T, hidden_size]."""

    def __init__(self, config: SharedConfig, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.attn_norm = RMSNormGated(config.hidden_size, config.norm_eps)
        self.attn: Any = _attention(config, layer_idx)  # users wrap it
        self.is_softmax = config.softmax_attention(layer_idx) is not None
        self.mlp_norm = RMSNormGated(config.hidden_size, config.norm_eps)
        self.mlp = GatedMLP(config.hidden_size, config.mlp_width())

    def forward(
        self,
        x: Tensor,
        lower_bound: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: GLACache | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        inplace: bool = False,
    ) -> Tensor:
        """Runs the layer. With `inplace` it may write into x, which nobody else may see then.

        Args:
            lower_bound: [hidden_size], as in `gla_core.nn.HGRN2`; None for layers of other classes.

        The other arguments are as in `GLAModel.forward`.
        """
        memory: Any = None if past_key_values is None else past_key_values.layers[self.layer_idx]
        attends, feeds = self._halves_that_add()
        if attends and feeds and memory is not None and cu_seqlens is None:
            parts = (self.attn_norm, self.attn, self.mlp_norm, self.mlp)
            y = few_rows.step(*parts, x, memory, attention_mask, lower_bound)
            if y is not None:
                return y
        y = self.attn_norm(x)
        if self.is_softmax:
            x = x + self.attn(y, memory, attention_mask, cu_seqlens)
        else:
            residual = (x if inplace else x.clone()) if attends else None
            y = read(self.attn, y, memory, attention_mask, cu_seqlens, max_seqlen, residual, lower_bound)
            x = y if attends else x + y
        y = self.mlp_norm(x)
        return self.mlp(y, x) if feeds else x + self.mlp(y)

    def _halves_that_add(self) -> tuple[bool, bool]:
        """Returns whether the last product of each half may add to x in place, as no module but it sees the sum."""
        if torch.is_grad_enabled() or is_compiling():
            return False, False
        attends = is_plain(self.attn_norm, RMSNormGated) and is_plain(self.attn, GatedLinearAttention, HGRN2)
        return attends, is_plain(self.mlp_norm, RMSNormGated) and is_plain(self.mlp, GatedMLP)


class GLAPreTrainedModel(PreTrainedModel):
    """The attributes that transformers expects of all models."""

    config_class = GLAConfig
    config: SharedConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules: ClassVar[list[str]] = ["Block"]
    _is_stateful = True  # tokens cannot be taken back
    _can_compile_fullgraph = True
    _skip_keys_device_placement: ClassVar[list[str]] = ["past_key_values", "cache"]
    _input_embed_layer = "embeddings"

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """Reads a folder as transformers does, and puts weights that are read together behind one another."""
        loaded = super().from_pretrained(*args, **kwargs)
        for module in (loaded[0] if isinstance(loaded, tuple) else loaded).modules():
            if isinstance(module, Merging):
                module.merge()
        return loaded

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, ShortConvolution):
            init.normal_(module.weight, std=self.config.initializer_range)
            if module.bias is not None:
                init.zeros_(module.bias)
        if isinstance(module, GLAModel) and module.lower_bounds is not None:
            init.zeros_(module.lower_bounds)


class GLAModel(GLAPreTrainedModel):
    """The model without its head: tokens [B, T] to hidden states [B, T, hidden_size].

    Args:
        config: sizes and options.

    Raises:
        ValueError: sizes do not fit together, see `GatedLinearAttention` and `SoftmaxAttention`.
    """

    lower_bounds: nn.Parameter | None

    def __init__(self, config: SharedConfig) -> None:
        super().__init__(config)
        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList(Block(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = RMSNormGated(config.hidden_size, config.norm_eps)
        bounds = nn.Parameter(torch.zeros(config.num_hidden_layers, config.hidden_size))
        self.register_parameter("lower_bounds", bounds if config.use_lower_bound else None)
        self.gradient_checkpointing = False
        self.graphs = Graphs(Block, GatedMLP)
        for module in self.modules():
            if isinstance(module, RMSNormGated):
                module.kernel = normed
            elif isinstance(module, HGRN2):
                module.kernel = forgetting
            elif isinstance(module, ShortConvolution):
                module.kernel = convolve_sequences
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        past_key_values: GLACache | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        cache: GLACache | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Reads tokens, from the beginning or after the tokens of a cache.

        Args:
            input_ids: [B, T] int.
            inputs_embeds: [B, T, hidden_size], in place of input_ids.
            attention_mask: [B, T], or with more columns in front for the tokens of the cache. 0 marks padding, which
                may be anywhere. Numbers 1, 2, ... keep the sequences of a row apart.
            past_key_values: the cache of earlier calls; this call updates it.
            use_cache: whether to return a cache, a new one if none is given. The default is the configuration's value,
                but False in training. Packed sequences in a model with layers of softmax attention have no cache,
                because a cache cannot keep their keys apart. In training with gradient checkpointing there is no cache
                either.
            output_attentions: False; there are no attention weights.
            output_hidden_states: whether to return the input of every layer, and the normed output of the last one.
            cu_seqlens: [N+1] int32 or int64, B = 1: sequence i is columns cu_seqlens[i] to cu_seqlens[i+1].
            max_seqlen: number of tokens of the longest packed sequence, if known.
            cache: another name of past_key_values, as in transformers from 5.24 on.
            kwargs: return_dict=False to return a tuple; arguments by which collators describe packed sequences:
                position_ids or seq_idx, [B, T] or [1, T], or cu_seq_lens_q and max_length_q. Sequences may be packed in
                several rows; a new cache then has a row for each sequence.

        Returns:
            last_hidden_state [B, T, hidden_size], past_key_values and hidden_states; None if not asked for.

        Raises:
            ValueError: both or neither of input_ids and inputs_embeds are given; output_attentions is set; a cache is
                given under both names, or in training with gradient checkpointing; a cache or use_cache is given with
                packed sequences in a model with layers of softmax attention; a cache is given with sequences that
                position_ids, seq_idx or attention_mask describe, or one of these has a wrong shape.
            TypeError: the cache is of another class. Other errors are as in `GatedLinearAttention.forward`.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("expected either input_ids or inputs_embeds")
        if self.config.output_attentions if output_attentions is None else output_attentions:
            raise ValueError("output_attentions is True; gated linear attention has no attention weights: leave it out")
        if cache is not None:
            if past_key_values is not None:
                raise ValueError("both cache and past_key_values are given; they are one argument")
            past_key_values = cache
        packed = None
        if cu_seqlens is None:
            inputs: Any = input_ids if inputs_embeds is None else inputs_embeds
            packed, mask = packing.packed(kwargs, attention_mask, inputs, with_cache=past_key_values is not None)
            if self.config.attn is None or packed is not None:  # keys of softmax attention are kept with the mask
                attention_mask = mask
        if packed is not None:
            cu_seqlens, max_seqlen = packed.cu_seqlens, packed.max_seqlen
            input_ids, inputs_embeds = (x if x is None else packed.row(x) for x in (input_ids, inputs_embeds))
        cache = self._cache(past_key_values, use_cache, packed=cu_seqlens is not None)
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        seen: list[Tensor] | None = [] if output_hidden_states else None
        x = None
        graphs = self.config.cuda_graphs and not (self.training or is_compiling()) and self.config.attn is None
        if graphs and input_ids is not None and cache is not None and cu_seqlens is None and seen is None:
            x = self.graphs.read(self, self._read_words, input_ids, attention_mask, cache)
        if x is None:
            x = self._read(input_ids, inputs_embeds, attention_mask, cache, cu_seqlens, max_seqlen, seen)
        if cache is not None:
            cache.advance(x.shape[1], x.device)
        states = [x] if seen is None else [*seen, x]
        if packed is not None:
            states = [packed.batch(y) for y in states]
        return BaseModelOutputWithPast(
            last_hidden_state=states[-1],  # pyright: ignore[reportArgumentType]
            **{NAME: cache},
            hidden_states=None if seen is None else tuple(states),  # pyright: ignore[reportArgumentType]
        )

    def _read(
        self,
        words: Tensor | None,
        embedded: Tensor | None,
        attention_mask: Tensor | None,
        cache: GLACache | None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        seen: list[Tensor] | None = None,
    ) -> Tensor:
        """Sends words [B, T], or embedded ones, through the model, and adds the inputs of layers to `seen`."""
        eager = not (torch.is_grad_enabled() or is_compiling())
        made_here = eager and embedded is None and is_plain(self.embeddings, nn.Embedding)  # x, which nobody else sees
        x: Tensor = self.embeddings(words) if embedded is None else embedded
        for layer, bound in zip(self.layers, self._lower_bounds(), strict=True):
            if seen is not None:
                seen.append(x)
            plain = eager and is_plain(layer, Block)
            x = layer(
                x,
                bound,  # not by name, as checkpointing then finds that it needs a gradient
                attention_mask=attention_mask,
                past_key_values=cache,
                cu_seqlens=cu_seqlens,
                max_seqlen=max_seqlen,
                inplace=made_here and plain and seen is None,
            )
            made_here = plain
        return self.norm(x)

    def _lower_bounds(self) -> Sequence[Tensor | None]:
        """Returns the lower bound of each layer's forget gates; None for 0."""
        if self.lower_bounds is None:
            return [None] * len(self.layers)
        parts = self.lower_bounds.softmax(0, dtype=wide(self.lower_bounds.dtype))
        return [None, *(parts.cumsum(0) - parts[0])[1:]]

    def _read_words(self, words: Tensor, attention_mask: Tensor | None, cache: GLACache) -> Tensor:
        return self._read(words, None, attention_mask, cache)

    def train(self, mode: bool = True) -> Any:
        """Sets the mode of training, in which there are no graphs of decoding."""
        if mode:
            self.graphs.drop()
        return super().train(mode)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        self.graphs.drop()
        return super()._apply(*args, **kwargs)

    def _cache(self, cache: Any, wanted: bool | None, packed: bool) -> GLACache | None:
        if cache is not None and not isinstance(cache, GLACache):
            raise TypeError(f"past_key_values is {type(cache).__name__}; expected a gla_transformers.GLACache")
        if self.training and self.gradient_checkpointing:  # otherwise the backward would write the cache a second time
            if cache is not None:
                raise ValueError(
                    "past_key_values is given in training with gradient checkpointing; call model.eval() or "
                    "model.gradient_checkpointing_disable() first, or leave the cache out"
                )
            return None
        if wanted is None:
            keeps_nothing = packed and self.config.attn is not None
            wanted = self.config.use_cache and not self.training and not keeps_nothing
        return GLACache(self.config) if cache is None and wanted else cache


class HGRN2Model(GLAModel):
    """The HGRN2 model without its head. Its arguments, calls and errors are as in `GLAModel`."""

    config_class = HGRN2Config


class GLAForCausalLM(GLAPreTrainedModel, GenerationMixin):
    """The language model: tokens [B, T] to logits [B, T, vocab_size], or to the loss of labels; with `generate`.

    Args:
        config: sizes and options.

    Raises:
        The errors of `GLAModel`.

    Example:
        >>> model = GLAForCausalLM.from_pretrained("a/folder", dtype=torch.bfloat16)
        >>> tokens = model.generate(prompt, max_new_tokens=100)
    """

    _tied_weights_keys: ClassVar[dict[str, str]] = {"lm_head.weight": "model.embeddings.weight"}
    without_head: ClassVar[type[GLAModel]] = GLAModel

    def __init__(self, config: SharedConfig) -> None:
        super().__init__(config)
        self.model = self.without_head(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        past_key_values: GLACache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        cache: GLACache | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Reads tokens as `GLAModel.forward` does, and predicts the token after each one.

        Args:
            labels: [B, T] int, the tokens themselves, because this call shifts them; -100 for tokens without a loss.
            logits_to_keep: the number of last tokens that get logits, 0 for all; or the columns of the tokens that get
                logits.
            cache: another name of past_key_values.
            kwargs: arguments of `GLAModel.forward` and of transformers' loss: num_items_in_batch is the number of
                labels to divide by; shift_labels [B, T] are labels that are shifted already.

        Returns:
            loss (a scalar, float32), logits [B, T, vocab_size], past_key_values and hidden_states; None if not asked
            for. With a loss and the configuration's fuse_linear_cross_entropy, logits are None.

        Raises:
            The errors of `GLAModel.forward`.
        """
        out = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
            past_key_values=past_key_values,
            cache=cache,
            use_cache=use_cache,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
            return_dict=True,
            **kwargs,
        )
        x = out.last_hidden_state
        if not isinstance(logits_to_keep, int):
            x = x[:, logits_to_keep]
        elif logits_to_keep != 0:  # a slice of all columns would be a view, which is kept; see `not_kept`
            x = x[:, -logits_to_keep:]
        loss, logits = self._loss_and_logits(x, labels, kwargs)
        return CausalLMOutputWithPast(
            loss=loss,  # pyright: ignore[reportArgumentType]
            logits=logits,  # pyright: ignore[reportArgumentType]
            **{NAME: out.get(NAME)},
            hidden_states=out.hidden_states,
        )

    def _loss_and_logits(
        self, x: Tensor, labels: Tensor | None, options: dict[str, Any]
    ) -> tuple[Tensor | None, Tensor | None]:
        shifted = options.get("shift_labels")
        targets = labels if shifted is None else shifted
        if targets is None:
            with not_kept(x):
                return None, self.lm_head(x)
        number, warp = options.get("num_items_in_batch"), self.config.use_l2warp
        if self.config.fuse_linear_cross_entropy:
            ignored = options.get("ignore_index", IGNORED)
            return loss_in_parts(self.lm_head, x, targets, shifted is not None, number, warp, ignored), None
        with not_kept(x):
            logits = self.lm_head(x)
        function = next_token_loss if self.loss_function is ForCausalLMLoss else self.loss_function
        loss = function(logits, labels, self.config.vocab_size, **options)
        if warp:
            loss = loss + l2warp(logits, targets.numel()) / (1 if number is None else number)
        return loss, logits

    # ---- for `generate`

    def _sample(
        self,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        synced_gpus: bool = False,
        streamer: Any = None,
        **inputs: Any,
    ) -> Any:
        """Generates by `generation.sample`; by transformers' method what is not computed there.

        transformers calls this method for greedy search and for sampling.
        """
        asked = (input_ids, logits_processor, stopping_criteria, generation_config, synced_gpus)
        cache, rules = inputs.get(NAME), None
        if type(self) in (GLAForCausalLM, HGRN2ForCausalLM) and isinstance(cache, GLACache) and not cache.compileable:
            rules = generation.rules(self, *asked, inputs)
        if rules is None:
            return super()._sample(*asked, streamer, **inputs)  # pyright: ignore[reportAttributeAccessIssue]
        advance = functools.partial(self._advance, rules, cache)
        return generation.sample(self, rules, input_ids, generation_config, streamer, inputs, cache, advance)

    def _advance(self, rules: generation.Rules, cache: GLACache, state: generation.State, n: int) -> Tensor:
        """Computes `generation.steps`, in a graph if possible."""
        model, head = self.model, self.lm_head

        def call(inputs: Sequence[Tensor], cache: GLACache) -> Tensor:
            def read(words: Tensor) -> Tensor:
                return head(model._read_words(words, None, cache))[:, -1]

            return generation.steps(rules, generation.State(*inputs), n, read)

        def read(words: Tensor) -> Tensor:
            return self(words, **{NAME: cache}, use_cache=True, logits_to_keep=1).logits[:, -1]

        records = None
        plain = is_plain(self, type(self)) and is_plain(model, GLAModel, HGRN2Model) and is_plain(head, nn.Linear)
        if plain and self.config.cuda_graphs and not self.training and self.config.attn is None:
            weights = [None if x is None else (x.data_ptr(), x.dtype, x.shape) for x in (head.weight, head.bias)]
            records = model.graphs.repeat(model, call, state, n, (rules.key(), *weights), cache)
        if records is None:
            return generation.steps(rules, state, n, read)
        cache.advance(n, records.device)
        return records

    def prepare_inputs_for_generation(
        self, input_ids: Tensor, inputs_embeds: Tensor | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """Returns the arguments of one call of `forward`, as transformers prepares them."""
        inputs = super().prepare_inputs_for_generation(input_ids, inputs_embeds=inputs_embeds, **kwargs)
        if inputs.get(NAME) is not None and not kwargs.get("is_first_iteration"):
            inputs.pop("attention_mask", None)  # new tokens are not padding, and the cache knows earlier padding
        mask = inputs.get("attention_mask")
        if (
            mask is not None and mask.ndim == 2 and bool((mask == 1).all())
        ):  # the prompt is longer than the wait for this
            inputs.pop("attention_mask")
        return inputs

    @staticmethod
    def create_masks_for_generate(*, attention_mask: Tensor | None = None, **_: Any) -> Tensor | None:
        """Returns the mask [B, T] unchanged; transformers would make a 4-dimensional mask for compiled attention."""
        return attention_mask

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        cache = model_kwargs.get(NAME)
        if cache is None and self.training and self.model.gradient_checkpointing:
            logger.warning_once(
                "generate keeps no cache in training with gradient checkpointing, and reads all tokens again for each "
                "new one; call model.eval() or model.gradient_checkpointing_disable() first, which makes it quick"
            )
            generation_config.use_cache = False
        if cache is None and generation_config.use_cache is not False:
            wanted = generation_config.cache_implementation
            if wanted not in (None, "dynamic", "static"):
                raise ValueError(f"cache_implementation is {wanted!r}; expected 'dynamic' or 'static', or nothing")
            model_kwargs[NAME] = GLACache(self.config, compileable=wanted == "static")
        else:
            super()._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)
            if isinstance(cache, GLACache):  # versions of transformers before 5.16 do not mark it
                cache._is_user_defined = True  # pyright: ignore[reportAttributeAccessIssue]


class HGRN2ForCausalLM(GLAForCausalLM):
    """The HGRN2 language model. Its arguments, calls and errors are as in `GLAForCausalLM`."""

    config_class = HGRN2Config
    without_head = HGRN2Model


def _attention(config: Any, layer_idx: int) -> GatedLinearAttention | HGRN2 | SoftmaxAttention:
    spec = config.softmax_attention(layer_idx)
    if spec is not None:
        names = ("num_heads", "num_kv_heads", "qkv_bias", "window_size", "rope_theta")
        return SoftmaxAttention(config.hidden_size, **{name: spec[name] for name in names})
    shared = {name: getattr(config, name) for name in ("hidden_size", "use_short_conv", "conv_size")}
    shared |= {"elementwise_affine": bool(config.elementwise_affine), "mode": config.attn_mode, "layer_idx": layer_idx}
    if isinstance(config, HGRN2Config):
        return HGRN2(expand_ratio=config.expand_ratio, **shared)
    sizes = ("expand_k", "expand_v", "num_heads", "num_kv_heads")
    names = (*sizes, "feature_map", "use_output_gate", "norm_eps", "clamp_min", "fuse_norm")
    return GatedLinearAttention(gate_fn=config.hidden_act, **{name: getattr(config, name) for name in names}, **shared)
