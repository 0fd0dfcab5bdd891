"""Functions for code outside this package that calls abstract ops, or public ones from a function of its own."""

from gla_core.ops._run import backward_of, needs_gradient, request_text, run, transformed
from gla_core.ops._torch_op import refuse_tangents

__all__ = ["backward_of", "needs_gradient", "refuse_tangents", "request_text", "run", "transformed"]
