"""Makes models of Hugging Face transformers with Mamba-2, a delta rule or lightning attention compute here.

Importing this package does not import transformers; `accelerate` does. `use_gla_core` is the same function.
"""

from gla_core.compat.transformers.accelerate import MODELS, accelerate, use_gla_core

__all__ = ["MODELS", "accelerate", "use_gla_core"]
