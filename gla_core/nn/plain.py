"""Says of a module whether code may compute what the module computes without calling it.

A product of several layers at once, an op with a norm in it, a sum in place, a captured graph, a step in place of a
forward: each goes past a module's `__call__`, or reads a module's weights outside of its own forward and backward. The
result is the same only if nothing but the forward of a known class would have run, and if the weights are in memory at
all times. Every such short cut asks `is_plain`, and calls the module where it says no.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.nn.modules.module import _has_any_global_hook

_FORWARDS: dict[type[nn.Module], Any] = {
    cls: cls.forward for cls in (nn.Conv1d, nn.Embedding, nn.Linear, nn.Sequential)
}
"""The forward of PyTorch's own classes, which some tools replace for all modules."""


def is_plain(module: nn.Module, *classes: type[nn.Module]) -> bool:
    """Returns whether a call of a module is nothing but the forward of one of these classes, on weights in memory.

    It is not if the module is a wrapper or of a subclass (parametrizations and `fully_shard` make one), has a hook or a
    compiled call, has a forward or step of its own, or if there is a global hook. Nor is it if one of its parameters,
    those of its children aside, is not an ordinary one in memory; see `is_in_memory`.
    """
    state = module.__dict__
    if type(module) not in classes or "forward" in state or "step" in state or "_compiled_call_impl" in state:
        return False
    if state["_forward_hooks"] or state["_forward_pre_hooks"] or state["_backward_hooks"]:
        return False
    if state["_backward_pre_hooks"] or _has_any_global_hook():
        return False
    if is_dynamo_compiling():  # the compiler sees all weights
        return True
    for weight in state["_parameters"].values():
        if weight is not None and not (type(weight) is nn.Parameter and is_in_memory(weight)):
            return False
    return _FORWARDS.get(type(module), type(module).forward) is type(module).forward


def is_in_memory(x: Tensor) -> bool:
    """Returns whether x has memory that it can be read from.

    Offloading leaves a weight on the device "meta" outside of its module's forward, and sharding frees its memory.
    """
    return not x.is_meta and (x.untyped_storage().nbytes() > 0 or not x.numel())
