"""The code of `gla demo`: a byte-level GLA language model, trained on Python's own source files.

`model.py` is the example of how to build a model from `gla_core.nn.GatedLinearAttention`.
"""
