"""One product for several linear layers of the same input, where their weights lie behind one another in memory.

    weight of q [512, D]      rows 0 to 511 of one matrix          x W^T for all of them, then slices
    weight of k [512, D]      rows 512 to 1023
    ...

Each weight stays a parameter of its own layer, under its own name. Whether the weights still lie so is seen from their
addresses at every call: once they are moved, sharded, quantized or replaced, or a layer is another module or has hooks,
each layer computes for itself. So does training, whose backward needs the gradient of each weight apart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn.modules.module import _has_any_global_hook

from gla_core.ops import autocast
from gla_core.ops.calls import transformed

ALIGNMENT = 16
"""Every weight begins at a multiple of this number of bytes, as matrix products and compiled kernels want it."""


class Merging(nn.Module):
    """A module that puts the weights of some of its linear layers behind one another when they get memory."""

    def merged_layers(self) -> Sequence[Sequence[nn.Module]]:
        """Returns groups of layers that read the same input."""
        raise NotImplementedError

    def merge(self) -> None:
        """Puts the weights of each group behind one another, unless something else decides where they lie.

        The parameters stay the same objects. Call it where they have just got new memory, as `.to` does.
        """
        for layers in self.merged_layers():
            _merge(layers)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        before = [_places(layers) for layers in self.merged_layers()]
        super()._apply(fn, recurse)
        for layers, places in zip(self.merged_layers(), before, strict=True):
            if places.isdisjoint(_places(layers)):  # otherwise another model may share this memory
                _merge(layers)
        return self


def products(layers: Sequence[nn.Module], x: Tensor) -> Sequence[Tensor] | None:
    """Returns the results of all layers for x [..., D] by one product; None if each has to compute for itself."""
    if not _computes_plainly(x):
        return None
    weights = _weights(layers)
    if weights is None or not _adjacent(weights):
        return None
    sizes = [len(weight) for weight in weights]
    first = weights[0]
    y = F.linear(x, first.as_strided((sum(sizes), first.shape[1]), first.stride()))
    return y.split(sizes, dim=-1)


def added(residual: Tensor, layer: nn.Module, x: Tensor) -> Tensor:
    """Returns residual [..., E] + layer(x) for x [..., D].

    Where no gradient is wanted, the product may add to `residual` in place, and return it.
    """
    weights = _weights([layer]) if _computes_plainly(x) else None
    if weights is None or not (residual.dtype == x.dtype == weights[0].dtype) or not residual.is_contiguous():
        return residual + layer(x)
    residual.view(-1, residual.shape[-1]).addmm_(x.reshape(-1, x.shape[-1]), weights[0].t())
    return residual


def _computes_plainly(x: Tensor) -> bool:
    """Returns whether no gradient is wanted, and nothing has to see each layer's call."""
    if torch.is_grad_enabled() or is_compiling() or type(x) is not Tensor:
        return False
    return not (autocast.in_force() or transformed() or _has_any_global_hook())


def _weights(layers: Sequence[nn.Module]) -> list[nn.Parameter] | None:
    """Returns the weights of linear layers without bias; None if any of the layers computes something else."""
    found = []
    for layer in layers:
        if type(layer) is not nn.Linear or layer._forward_hooks or layer._forward_pre_hooks:
            return None
        weight = layer._parameters.get("weight")
        if type(weight) is not nn.Parameter or layer._parameters["bias"] is not None or "forward" in layer.__dict__:
            return None
        found.append(weight)
    return found


def _adjacent(weights: Sequence[Tensor]) -> bool:
    """Returns whether weights [E_i, D] are the rows of one matrix, in this order."""
    first = weights[0]
    if first.device.type == "meta":
        return False
    storage, place = first.untyped_storage().data_ptr(), first.data_ptr()
    for weight in weights:
        if weight.data_ptr() != place or weight.dtype != first.dtype or weight.untyped_storage().data_ptr() != storage:
            return False
        if weight.shape[1] != first.shape[1] or not weight.is_contiguous():
            return False
        place += weight.nbytes
    return True


def _places(layers: Sequence[nn.Module]) -> set[int]:
    return {weight.data_ptr() for weight in _weights(layers) or () if weight.device.type != "meta"}


@torch.no_grad()
def _merge(layers: Sequence[nn.Module]) -> None:
    weights = _weights(layers)
    if weights is None or torch.is_inference_mode_enabled() or _adjacent(weights) or not _movable(weights):
        return
    rows = torch.cat([weight.detach() for weight in weights])
    for weight, part in zip(weights, rows.split([len(weight) for weight in weights]), strict=True):
        weight.data = part


def _movable(weights: Sequence[Tensor]) -> bool:
    """Returns whether each weight is alone in its memory, and all are alike."""
    first = weights[0]
    if first.device.type == "meta" or len({id(weight) for weight in weights}) < len(weights):
        return False
    for weight in weights:
        alike = weight.dtype == first.dtype and weight.device == first.device and weight.shape[1:] == first.shape[1:]
        alone = weight.is_contiguous() and weight.untyped_storage().nbytes() == weight.nbytes
        if not (alike and alone) or weight.nbytes % ALIGNMENT or (weight.is_cpu and weight.is_shared()):
            return False
    return first.is_floating_point()
