"""Functions whose backward computes them again, so that autograd keeps only their arguments.

It suits an activation times a gate: quick to compute, and large to keep.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from gla_core.ops.calls import transformed


def recomputed(function: Callable[..., Tensor], *tensors: Tensor | None) -> Tensor:
    """Returns `function(*tensors)`; autograd keeps only the tensors for the backward.

    In a compiled graph and under torch.func it is a plain call. In a graph, the compiler decides what to keep.

    Args:
        function: a function that depends on no other tensor that needs a gradient. Autocast must not change its result.
        tensors: the arguments of `function`.
    """
    if is_compiling() or transformed() or not torch.is_grad_enabled():
        return function(*tensors)
    found = _Recomputed.apply(function, *tensors)
    assert isinstance(found, Tensor)
    return found


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: Callable[..., Tensor], *tensors: Tensor | None) -> Tensor:
        ctx.function = function
        ctx.save_for_backward(*tensors)
        return function(*tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        tensors, create_graph = ctx.saved_tensors, torch.is_grad_enabled()  # checkpointing allows one read
        with torch.enable_grad():
            # With views in their place, no gradient passes through one tensor to another on which it depends.
            views: list[Any] = [None if x is None else x.view_as(x) for x in tensors]
            y = ctx.function(*views)
        needed = [x for x, needs in zip(views, ctx.needs_input_grad[1:], strict=True) if needs]
        found = iter(torch.autograd.grad(y, needed, gradients, create_graph=create_graph))
        return None, *(next(found) if needs else None for needs in ctx.needs_input_grad[1:])
