"""The GLA language model for transformers, computed by gla_core; interchangeable with flash-linear-attention's (FLA).

Importing this package registers `model_type` "gla" with AutoConfig, AutoModel and AutoModelForCausalLM. FLA does so
too, and the package that is imported last is used. Call `register()` after both imports to use this one.
"""

from __future__ import annotations

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from gla_transformers.cache import GLACache
from gla_transformers.configuration import GLAConfig
from gla_transformers.modeling import GLAForCausalLM, GLAModel

__version__ = "0.1.0"
__all__ = ["GLACache", "GLAConfig", "GLAForCausalLM", "GLAModel", "register"]


def register() -> None:
    """Makes transformers' Auto classes use these classes for `model_type` "gla", whatever they used before."""
    AutoConfig.register(GLAConfig.model_type, GLAConfig, exist_ok=True)
    AutoModel.register(GLAConfig, GLAModel, exist_ok=True)
    AutoModelForCausalLM.register(GLAConfig, GLAForCausalLM, exist_ok=True)


register()
