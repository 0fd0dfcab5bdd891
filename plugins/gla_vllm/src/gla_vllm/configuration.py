"""The models that vLLM can serve with this plug-in."""

from __future__ import annotations

from typing import Any

from gla_transformers import GLAConfig, HGRN2Config


def mlp_width(config: Any) -> int:
    """Returns the width of each MLP; the configuration may be of flash-linear-attention's class."""
    return GLAConfig.mlp_width(config)


def check_served(config: GLAConfig | HGRN2Config) -> None:
    """Raises ValueError if vLLM cannot serve the model with this plug-in."""
    refused = {"attn": None, "use_short_conv": False}
    for name, served in refused.items():
        if getattr(config, name) not in (served, []):
            raise ValueError(
                f"{name} is {getattr(config, name)!r} in the model's config.json; gla_vllm serves models with {served} "
                "only: run this model with gla_transformers"
            )
