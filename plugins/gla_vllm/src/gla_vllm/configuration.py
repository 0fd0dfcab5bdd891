"""The models that vLLM can serve with this plug-in."""

from __future__ import annotations

from typing import Any

from gla_transformers import GLAConfig, HGRN2Config


def mlp_width(config: Any) -> int:
    """Returns the width of each MLP; the configuration may be of flash-linear-attention's class."""
    return GLAConfig.mlp_width(config)


def check_served(config: GLAConfig | HGRN2Config) -> None:
    """Raises ValueError if vLLM cannot serve the model with this plug-in."""
    if config.attn not in (None, []):
        raise ValueError(
            f"attn is {config.attn!r} in the model's config.json; gla_vllm serves models with None only: run this model "
            "with gla_transformers"
        )
