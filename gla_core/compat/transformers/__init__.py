"""Makes Mamba-2 models of Hugging Face transformers compute here.

Importing this package does not import transformers; `accelerate` does.
"""

from gla_core.compat.transformers.accelerate import accelerate

__all__ = ["accelerate"]
