"""What `gla demo` runs: a byte-level language model of gated linear attention, trained on Python's own source files.

`model.py` is the example of how to build a model from `gla_core.nn.GatedLinearAttention`.
"""
