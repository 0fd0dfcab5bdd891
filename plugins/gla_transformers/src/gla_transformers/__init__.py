"""GLA and HGRN2 language models for transformers, computed by gla_core; flash-linear-attention (FLA) has the same.

Importing this package registers `model_type` "gla" and "hgrn2" with AutoConfig, AutoModel and AutoModelForCausalLM. FLA
does so too, and the package that is imported last is used. Call `register()` after both imports to use this one.

It also provides kernels to `gla_core.compat`. `accelerate()` makes transformers' Mamba-2 models run in them.
"""

from __future__ import annotations

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from gla_core.compat.transformers import accelerate, use_gla_core
from gla_core.extension import provide_kernels
from gla_transformers import mamba2
from gla_transformers.cache import GLACache
from gla_transformers.configuration import GLAConfig, HGRN2Config
from gla_transformers.modeling import GLAForCausalLM, GLAModel, HGRN2ForCausalLM, HGRN2Model

__version__ = "0.1.0"
__all__ = [
    "GLACache",
    "GLAConfig",
    "GLAForCausalLM",
    "GLAModel",
    "HGRN2Config",
    "HGRN2ForCausalLM",
    "HGRN2Model",
    "accelerate",
    "register",
    "use_gla_core",
]


def register() -> None:
    """Makes transformers' Auto classes use these classes for their model types, whatever they used before."""
    for config, model, causal in ((GLAConfig, GLAModel, GLAForCausalLM), (HGRN2Config, HGRN2Model, HGRN2ForCausalLM)):
        AutoConfig.register(config.model_type, config, exist_ok=True)
        AutoModel.register(config, model, exist_ok=True)
        AutoModelForCausalLM.register(config, causal, exist_ok=True)


register()
provide_kernels(mamba2)
