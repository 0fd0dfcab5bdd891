"""Functions of which autograd keeps the arguments alone: the backward computes them again.

Between large products of a model, an activation times a gate is quick to compute and large to keep.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from gla_core.ops.calls import transformed


def recomputed(function: Callable[..., Tensor], *tensors: Tensor | None) -> Tensor:
    """`function(*tensors)`, of which nothing but the tensors is kept for its gradients.

    Args:
        function: of these tensors and nothing else that needs a gradient; autocast has to make no difference to it.

    In a compiled graph, where the compiler decides what is kept, and under torch.func it is a plain call.
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
        tensors, create_graph = ctx.saved_tensors, torch.is_grad_enabled()  # which checkpointing lets be read once
        with torch.enable_grad():
            y = ctx.function(*tensors)
        needed = [x for x, needs in zip(tensors, ctx.needs_input_grad[1:], strict=True) if needs]
        found = iter(torch.autograd.grad(y, needed, gradients, create_graph=create_graph))
        return None, *(next(found) if needs else None for needs in ctx.needs_input_grad[1:])
