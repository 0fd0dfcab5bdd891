"""Configurations of GLA and HGRN2 language models: fields, defaults, JSON as in flash-linear-attention (FLA) 0.6.0."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from transformers import PreTrainedConfig

AttentionSpec = dict[str, Any]
"""The indices `layers` of softmax layers, `num_heads`, `num_kv_heads`, `qkv_bias`, `window_size` and `rope_theta`."""


class SharedConfig(PreTrainedConfig):
    """The fields that configurations of all models have.

    Args:
        hidden_size, use_short_conv, conv_size, elementwise_affine: arguments of each layer, see `gla_core.nn`.
        norm_eps: number added to the mean square in norms.
        hidden_ratio, intermediate_size: width of the MLP; without intermediate_size it is 2/3 of hidden_ratio times
            hidden_size, rounded up to a multiple of 256.
        attn_mode: "chunk", "fused_chunk" or "fused_recurrent"; all modes compute the same.
        hidden_act: activation of the MLP and the output gate; only "swish".
        attn: softmax attention in place of some layers, as one `AttentionSpec` or several; None for no layer.
        max_position_embeddings: stored but not used; no sequence is too long.
        fuse_linear_cross_entropy: whether to compute the loss in slices of the logits; calls with labels then return
            no logits.
        use_l2warp: whether to add the gradient of 0.5e-4 times the mean square of the largest logits to the loss's
            gradient; the value of the loss does not change.
        fuse_norm: selects the name of a norm's weight in GLA as FLA does, see `gla_core.nn.GatedLinearAttention`.
        fuse_swiglu, fuse_cross_entropy: select kernels of FLA; all values compute the same here.
        attnres_block_size: None; FLA's attention residuals are not supported.
        cuda_graphs: whether steps of decoding, and prompts, are captured in CUDA graphs. Saved only if False.
        state_dtype: "bfloat16" for caches whose states take half the memory, and are rounded after every call; None for
            states in float32. Saved only if given.
        use_cache, vocab_size, initializer_range, and all others: as in transformers.

    Raises:
        ValueError: a field asks for a model that is not supported, or has an invalid value. The sizes of the layers are
            checked when the model is made.
    """

    cuda_graphs = True
    state_dtype = None
    use_lower_bound = False
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values", "cache"]

    def __init__(
        self,
        hidden_size: int = 2048,
        hidden_ratio: int | None = 4,
        intermediate_size: int | None = None,
        num_hidden_layers: int = 24,
        attn_mode: str = "chunk",
        use_short_conv: bool = False,
        conv_size: int = 4,
        hidden_act: str = "swish",
        max_position_embeddings: int = 2048,
        elementwise_affine: bool | None = True,
        norm_eps: float = 1e-6,
        attn: AttentionSpec | Sequence[AttentionSpec] | None = None,
        use_cache: bool = True,
        pad_token_id: int | None = None,
        bos_token_id: int | None = 1,
        eos_token_id: int | list[int] | None = 2,
        tie_word_embeddings: bool = False,
        initializer_range: float = 0.02,
        fuse_norm: bool = True,
        fuse_swiglu: bool = True,
        fuse_cross_entropy: bool = True,
        fuse_linear_cross_entropy: bool = False,
        use_l2warp: bool = False,
        vocab_size: int = 32000,
        attnres_block_size: int | None = None,
        cuda_graphs: bool = True,
        state_dtype: str | None = None,
        **kwargs: Any,
    ) -> None:
        if hidden_act != "swish":
            raise ValueError(f"hidden_act is {hidden_act!r}; expected 'swish', the only activation here")
        if attnres_block_size is not None:
            raise ValueError(
                f"attnres_block_size is {attnres_block_size}; expected None: attention residuals are in "
                "flash-linear-attention's model alone"
            )
        if fuse_cross_entropy and fuse_linear_cross_entropy:
            raise ValueError("both fuse_cross_entropy and fuse_linear_cross_entropy are True; set one of them to False")
        self.hidden_size, self.num_hidden_layers, self.vocab_size = hidden_size, num_hidden_layers, vocab_size
        self.hidden_ratio, self.intermediate_size, self.hidden_act = hidden_ratio, intermediate_size, hidden_act
        self.attn_mode, self.use_short_conv, self.conv_size = attn_mode, use_short_conv, conv_size
        self.max_position_embeddings = max_position_embeddings
        self.elementwise_affine, self.norm_eps = elementwise_affine, norm_eps
        self.attn = _complete(attn, num_hidden_layers)
        self.use_cache, self.initializer_range = use_cache, initializer_range
        self.fuse_norm, self.fuse_swiglu = fuse_norm, fuse_swiglu
        self.fuse_cross_entropy, self.fuse_linear_cross_entropy = fuse_cross_entropy, fuse_linear_cross_entropy
        self.use_l2warp, self.attnres_block_size = use_l2warp, attnres_block_size
        if state_dtype not in (None, "bfloat16"):
            raise ValueError(f"state_dtype is {state_dtype!r}; expected 'bfloat16', or None for float32")
        if not cuda_graphs:  # a configuration without fields of its own equals FLA's
            self.cuda_graphs = False
        if state_dtype is not None:
            self.state_dtype = state_dtype
        super().__init__(
            pad_token_id=pad_token_id,
            bos_token_id=bos_token_id,
            eos_token_id=eos_token_id,
            tie_word_embeddings=tie_word_embeddings,
            **kwargs,
        )

    def mlp_width(self) -> int:
        """Returns the width of each MLP."""
        if self.intermediate_size is not None:
            return self.intermediate_size
        width = int(self.hidden_size * (4 if self.hidden_ratio is None else self.hidden_ratio) * 2 / 3)
        return (width + 255) // 256 * 256

    def softmax_attention(self, layer: int) -> AttentionSpec | None:
        """Returns the softmax attention of a layer, None if it is another layer."""
        return next((spec for spec in _listed(self.attn) if layer in spec["layers"]), None)


class GLAConfig(SharedConfig):
    """The configuration of a GLA language model.

    Args:
        hidden_size: width of the residual stream.
        expand_k, expand_v, num_heads, num_kv_heads, feature_map, use_output_gate, clamp_min: arguments of each layer,
            see `gla_core.nn.GatedLinearAttention`.
        use_gk, use_gv: stored for FLA, which reads neither.
        kwargs: fields of `SharedConfig`. The norm of each layer's output uses norm_eps too.

    Raises:
        ValueError: as in `SharedConfig`.

    Example:
        >>> config = GLAConfig(hidden_size=256, num_hidden_layers=4, vocab_size=1000)
        >>> config = GLAConfig(attn={"layers": [5, 11], "num_heads": 16, "window_size": 1024})
    """

    model_type = "gla"

    def __init__(
        self,
        hidden_size: int = 2048,
        expand_k: float = 0.5,
        expand_v: float = 1.0,
        num_heads: int = 4,
        num_kv_heads: int | None = None,
        feature_map: str | None = None,
        use_output_gate: bool = True,
        clamp_min: float | None = None,
        use_gk: bool = True,
        use_gv: bool = False,
        **kwargs: Any,
    ) -> None:
        self.expand_k, self.expand_v = expand_k, expand_v
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.feature_map, self.use_output_gate, self.clamp_min = feature_map, use_output_gate, clamp_min
        self.use_gk, self.use_gv = use_gk, use_gv
        super().__init__(hidden_size, **kwargs)


class HGRN2Config(SharedConfig):
    """The configuration of an HGRN2 language model.

    Args:
        hidden_size: width of the residual stream, and of the keys and of the values of all heads together.
        num_heads: number of heads. It counts only if expand_ratio is None, as in FLA.
        expand_ratio: key width of a head. There are hidden_size // expand_ratio heads.
        use_lower_bound: whether forget gates have lower bounds, which the model learns, from the second layer on.
        kwargs: fields of `SharedConfig`. The norm of each layer's output adds 1e-5 whatever norm_eps is, as in FLA.

    Raises:
        ValueError: neither num_heads nor expand_ratio is given, or it does not divide hidden_size; otherwise as in
            `SharedConfig`.

    Example:
        >>> config = HGRN2Config(hidden_size=256, num_hidden_layers=4, vocab_size=1000)
    """

    model_type = "hgrn2"

    def __init__(
        self,
        hidden_size: int = 2048,
        num_heads: int | None = None,
        expand_ratio: int | None = 128,
        use_lower_bound: bool = True,
        **kwargs: Any,
    ) -> None:
        divisor = num_heads if expand_ratio is None else expand_ratio
        if not divisor or hidden_size % divisor != 0:
            raise ValueError(
                f"num_heads is {num_heads} and expand_ratio is {expand_ratio}; "
                f"expected one of them, a divisor of hidden_size = {hidden_size}"
            )
        self.expand_ratio = hidden_size // divisor if expand_ratio is None else expand_ratio
        self.num_heads = hidden_size // divisor if num_heads is None else num_heads
        self.use_lower_bound = use_lower_bound
        super().__init__(hidden_size, **kwargs)


def _listed(attn: AttentionSpec | Sequence[AttentionSpec] | None) -> Sequence[AttentionSpec]:
    if attn is None:
        return []
    return attn if isinstance(attn, list | tuple) else [attn]  # pyright: ignore[reportReturnType]


def _complete(
    attn: AttentionSpec | Sequence[AttentionSpec] | None, num_hidden_layers: int
) -> AttentionSpec | list[AttentionSpec] | None:
    """Returns the attention with defaults for missing fields. Raises ValueError if it is invalid."""
    completed = [_completed(spec) for spec in _listed(attn)]
    layers = [layer for spec in completed for layer in spec["layers"]]
    if len(set(layers)) < len(layers) or any(layer not in range(num_hidden_layers) for layer in layers):
        raise ValueError(f"layers of attn are {layers}; expected each once, from 0 to {num_hidden_layers - 1}")
    return None if attn is None else completed[0] if isinstance(attn, dict) else completed


def _completed(spec: Any) -> AttentionSpec:
    if not (isinstance(spec, dict) and isinstance(spec.get("layers"), list | tuple) and "num_heads" in spec):
        raise ValueError(f"attn has {spec!r}; expected a dictionary with at least a list 'layers' and 'num_heads'")
    defaults = {"qkv_bias": False, "window_size": None, "rope_theta": 10000.0}
    completed = {**defaults, **spec, "layers": list(spec["layers"])}
    if completed.get("num_kv_heads") is None:
        completed["num_kv_heads"] = spec["num_heads"]
    return completed
