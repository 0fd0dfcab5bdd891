"""GLA, HGRN2, GatedDeltaNet and KDA models in vLLM, and layers of vLLM's own models, computed by gla_core.

vLLM finds this package by its entry point, and calls `register` in each of its processes.
"""

from __future__ import annotations

__version__ = "0.1.0"
__all__ = ["register"]

MODELS = {
    "gla": "GLAForCausalLM",
    "hgrn2": "HGRN2ForCausalLM",
    "gated_deltanet": "GatedDeltaNetForCausalLM",
    "kda": "KDAForCausalLM",
}


def register() -> None:
    """Registers the models, and replaces the layers of vLLM that GLA_VLLM_LAYERS names. A second call changes nothing.

    Raises:
        ValueError: GLA_VLLM_LAYERS names an unknown layer.
    """
    from transformers import AutoConfig
    from vllm import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP, MambaModelConfig
    from vllm.transformers_utils.model_arch_config_convertor import (
        MODEL_ARCH_CONFIG_CONVERTORS,
        MambaModelArchConfigConvertor,
    )

    import gla_transformers
    from gla_vllm.configuration import GatedDeltaNetConfig, KDAConfig
    from gla_vllm.layers import replace_layers

    gla_transformers.register()
    for config in (GatedDeltaNetConfig, KDAConfig):
        AutoConfig.register(config.model_type, config, exist_ok=True)
    for kind, model in MODELS.items():
        MODEL_ARCH_CONFIG_CONVERTORS[kind] = MambaModelArchConfigConvertor  # no keys and values of softmax attention
        MODELS_CONFIG_MAP[model] = MambaModelConfig  # without it the states have no size of blocks
        if model not in ModelRegistry.get_supported_archs():
            ModelRegistry.register_model(model, f"gla_vllm.model:{model}")
    replace_layers()
