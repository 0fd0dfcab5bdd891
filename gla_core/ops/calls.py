"""Exports functions for other packages that run abstract ops, or wrap public ones in functions of their own."""

# ruff: noqa: F401 - the imports are what it exports
from gla_core.ops._over_mesh import is_dtensor
from gla_core.ops._run import backward_of, bypasses_torch, needs_gradient, request_text, run, tracing, transformed
from gla_core.ops._torch_op import exportable, refuse_tangents
