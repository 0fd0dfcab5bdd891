"""The configuration of HGRN2 models: fields, defaults and JSON as in flash-linear-attention (FLA) 0.6.0."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from gla_transformers import GLAConfig


class HGRN2Config(PreTrainedConfig):
    """The configuration of an HGRN2 language model.

    Args:
        num_heads, expand_ratio: heads of a layer, and key width of a head. One follows from the other, because the keys
            of all heads together have hidden_size channels; expand_ratio is used if both are given.
        use_lower_bound: whether forget gates have lower bounds, which are parameters.
        kwargs: fields that FLA's layers and kernels read; they change no number here.

    The other arguments are as in `gla_transformers.GLAConfig`.

    Raises:
        ValueError: neither num_heads nor expand_ratio is given, or they do not divide hidden_size.
    """

    model_type = "hgrn2"

    def __init__(
        self,
        hidden_size: int = 2048,
        num_hidden_layers: int = 24,
        num_heads: int | None = None,
        expand_ratio: int | None = 128,
        use_short_conv: bool = False,
        use_lower_bound: bool = True,
        hidden_ratio: int | None = 4,
        intermediate_size: int | None = None,
        hidden_act: str = "swish",
        max_position_embeddings: int = 2048,
        elementwise_affine: bool | None = True,
        norm_eps: float = 1e-6,
        attn: Any = None,
        attnres_block_size: int | None = None,
        bos_token_id: int | None = 1,
        eos_token_id: int | list[int] | None = 2,
        tie_word_embeddings: bool = False,
        vocab_size: int = 32000,
        **kwargs: Any,
    ) -> None:
        divisor = num_heads if expand_ratio is None else expand_ratio
        if divisor is None or hidden_size % divisor != 0:
            raise ValueError(
                f"num_heads is {num_heads} and expand_ratio is {expand_ratio}; "
                f"expected one of them, a divisor of hidden_size = {hidden_size}"
            )
        self.expand_ratio = hidden_size // divisor if expand_ratio is None else expand_ratio
        self.num_heads = hidden_size // self.expand_ratio
        self.hidden_size, self.num_hidden_layers, self.vocab_size = hidden_size, num_hidden_layers, vocab_size
        self.use_short_conv, self.use_lower_bound = use_short_conv, use_lower_bound
        self.hidden_ratio, self.intermediate_size, self.hidden_act = hidden_ratio, intermediate_size, hidden_act
        self.max_position_embeddings = max_position_embeddings
        self.elementwise_affine, self.norm_eps = elementwise_affine, norm_eps
        self.attn, self.attnres_block_size = attn, attnres_block_size
        super().__init__(
            bos_token_id=bos_token_id, eos_token_id=eos_token_id, tie_word_embeddings=tie_word_embeddings, **kwargs
        )


def mlp_width(config: GLAConfig | HGRN2Config) -> int:
    """Returns the width of each MLP."""
    return GLAConfig.mlp_width(config)  # pyright: ignore[reportArgumentType]


def check_served(config: GLAConfig | HGRN2Config) -> None:
    """Raises ValueError if vLLM cannot serve the model with this plug-in."""
    refused = {"attn": None, "use_short_conv": False, "attnres_block_size": None}
    for name, served in refused.items():
        if getattr(config, name) not in (served, []):
            raise ValueError(
                f"{name} is {getattr(config, name)!r} in the model's config.json; gla_vllm serves models with {served} "
                "only: run this model with gla_transformers"
            )
    if config.hidden_act not in ("swish", "silu"):
        raise ValueError(f"hidden_act is {config.hidden_act!r} in the model's config.json; expected 'swish'")
