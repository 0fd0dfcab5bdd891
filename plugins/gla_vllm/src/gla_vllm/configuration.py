"""The models that vLLM can serve with this plug-in, and the configurations that no other package here has."""

from __future__ import annotations

from typing import Any

from gla_transformers.configuration import GLAConfig, SharedConfig


class GatedDeltaNetConfig(SharedConfig):
    """The configuration of flash-linear-attention's gated delta networks.

    Args:
        head_dim, num_heads, num_v_heads, expand_v, use_gate, use_short_conv, allow_neg_eigval, output_gate_activation:
            arguments of each layer, see `gla_core.nn.GatedDeltaNet`.
        kwargs: as in `gla_transformers.GLAConfig`.
    """

    model_type = "gated_deltanet"

    def __init__(
        self,
        expand_v: float = 2.0,
        use_gate: bool = True,
        use_short_conv: bool = True,
        allow_neg_eigval: bool = False,
        head_dim: int = 256,
        num_heads: int = 6,
        num_v_heads: int | None = None,
        num_hidden_layers: int = 21,
        output_gate_activation: str = "swish",
        **kwargs: Any,
    ) -> None:
        self.expand_v, self.use_gate, self.allow_neg_eigval = expand_v, use_gate, allow_neg_eigval
        self.head_dim, self.num_heads, self.num_v_heads = head_dim, num_heads, num_v_heads
        self.output_gate_activation = output_gate_activation
        super().__init__(use_short_conv=use_short_conv, num_hidden_layers=num_hidden_layers, **kwargs)


class KDAConfig(SharedConfig):
    """The configuration of flash-linear-attention's models with Kimi delta attention.

    Args:
        head_dim, num_heads, num_v_heads, expand_v, use_short_conv, allow_neg_eigval, safe_gate, lower_bound: arguments
            of each layer, see `gla_core.nn.KimiDeltaAttention`.
        kwargs: as in `gla_transformers.GLAConfig`.
    """

    model_type = "kda"

    def __init__(
        self,
        expand_v: float = 1.0,
        use_short_conv: bool = True,
        allow_neg_eigval: bool = False,
        safe_gate: bool = False,
        lower_bound: float | None = None,
        head_dim: int = 128,
        num_heads: int = 16,
        num_v_heads: int | None = None,
        **kwargs: Any,
    ) -> None:
        self.expand_v, self.allow_neg_eigval = expand_v, allow_neg_eigval
        self.safe_gate, self.lower_bound = safe_gate, lower_bound
        self.head_dim, self.num_heads, self.num_v_heads = head_dim, num_heads, num_v_heads
        super().__init__(use_short_conv=use_short_conv, **kwargs)


def mlp_width(config: Any) -> int:
    """Returns the width of each MLP; the configuration may be of flash-linear-attention's class."""
    return GLAConfig.mlp_width(config)


def check_served(config: Any) -> None:
    """Raises ValueError if vLLM cannot serve the model with this plug-in; the class may be flash-linear-attention's."""
    for name in ("attn", "attnres_block_size"):
        if getattr(config, name) not in (None, []):
            raise ValueError(
                f"{name} is {getattr(config, name)!r} in the model's config.json; gla_vllm serves models with None "
                "only: run this model with transformers"
            )
