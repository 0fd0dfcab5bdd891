"""One product for several linear layers of the same input, where their weights lie behind one another in memory.

    weight of q [512, D]      rows 0 to 511 of one matrix          x W^T for all of them, then slices
    weight of k [512, D]      rows 512 to 1023
    ...

Each weight stays a parameter of its own layer, under its own name, and with a storage of its own: tools that save
models take tensors in one storage for copies of each other. The storages are windows of one allocation, which lives as
long as any of them. Whether the weights still lie so is seen from their addresses at every call: once they are moved,
sharded, quantized or replaced, or a layer is not plain (see plain.py), each layer computes for itself. So does
training, whose backward needs the gradient of each weight apart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.multiprocessing.reductions import StorageWeakRef

from gla_core.nn.plain import is_plain
from gla_core.ops import autocast
from gla_core.ops.calls import tracing, transformed

_ALLOCATIONS: WeakKeyDictionary[nn.Module, StorageWeakRef] = WeakKeyDictionary()
"""The allocation of each group, under its first layer. This does not keep it alive, nor is it a part of the module,
which may be copied and pickled."""
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
            if all(old != new for old, new in zip(places, _places(layers), strict=False)):
                _merge(layers)  # a weight that stayed where it was may share its memory with another model
        return self


def products(layers: Sequence[nn.Module], x: Tensor) -> Sequence[Tensor] | None:
    """Returns the results of all layers for x [..., D] by one product; None if each has to compute for itself."""
    matrix = matrix_of(layers, x)
    return None if matrix is None else split(F.linear(x, matrix), layers)


def split(y: Tensor, layers: Sequence[nn.Module]) -> Sequence[Tensor]:
    """Cuts the product y [..., sum of E_i] of several layers into their results [..., E_i]."""
    return y.split([len(layer.weight) for layer in layers], dim=-1)  # pyright: ignore[reportArgumentType]


def matrix_of(layers: Sequence[nn.Module], x: Tensor, biased: bool = False) -> Tensor | None:
    """Returns the matrix [sum of E_i, D] whose product with x [..., D] gives the results of all layers, in order.

    None if each layer has to compute for itself. With `biased`, layers may have a bias, which the caller adds.
    """
    weights = _weights(layers, biased) if _computes_plainly(x) else None
    if weights is None or len(weights) > 1:
        return None if weights is None else _matrix(layers[0], weights)
    return weights[0].detach() if weights[0].is_contiguous() else None


def added(residual: Tensor, layer: nn.Module, x: Tensor) -> Tensor:
    """Returns residual [..., E] + layer(x) for x [..., D].

    Where no gradient is wanted, the product may add to `residual` in place, and return it: the caller has made it.
    """
    weights = _weights([layer]) if _computes_plainly(x) else None
    if weights is None or not (residual.dtype == x.dtype == weights[0].dtype) or not residual.is_contiguous():
        return residual + layer(x)
    residual.view(-1, residual.shape[-1]).addmm_(x.reshape(-1, x.shape[-1]), weights[0].t())
    return residual


def _computes_plainly(x: Tensor) -> bool:
    """Returns whether no gradient is wanted, and nothing of PyTorch has to see each product."""
    if torch.is_grad_enabled() or is_compiling() or tracing() or type(x) is not Tensor:
        return False
    return not (autocast.in_force() or transformed())


def _weights(layers: Sequence[nn.Module], biased: bool = False) -> list[nn.Parameter] | None:
    """Returns the weights of plain linear layers; None if any is not plain, or has a bias and is not `biased`."""
    weights = []
    for layer in layers:
        if not is_plain(layer, nn.Linear):
            return None
        weight, bias = layer._parameters.get("weight"), layer._parameters.get("bias")
        if weight is None or not (bias is None or biased):
            return None
        weights.append(weight)
    return weights


def _matrix(first: nn.Module, weights: Sequence[Tensor]) -> Tensor | None:
    """Returns the matrix [sum of E_i, D] of weights [E_i, D]; None if they do not lie behind one another."""
    known = _ALLOCATIONS.get(first)
    storage = None if known is None else torch.UntypedStorage._new_with_weak_ptr(known.cdata)
    if storage is None:
        return None
    D, dtype, begin = weights[0].shape[-1], weights[0].dtype, storage.data_ptr()
    place = begin
    for weight in weights:  # what lies at these addresses is in the allocation, as it lives
        if weight.data_ptr() != place or weight.dtype != dtype or weight.shape[-1] != D or not weight.is_contiguous():
            return None
        place += weight.nbytes
    if place - begin > storage.nbytes() or storage.device != weights[0].device:
        return None
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, 0, (sum(map(len, weights)), D), (D, 1))


def _places(layers: Sequence[nn.Module]) -> list[int]:
    return [weight.data_ptr() for weight in _weights(layers) or ()]


@torch.no_grad()
def _merge(layers: Sequence[nn.Module]) -> None:
    weights = _weights(layers)
    if weights is None or not _movable(weights) or _matrix(layers[0], weights) is not None:
        return
    rows = torch.cat([weight.detach() for weight in weights])
    _ALLOCATIONS[layers[0]] = StorageWeakRef(rows.untyped_storage())
    for weight, part in zip(weights, rows.split([len(weight) for weight in weights]), strict=True):
        weight.data = torch.from_dlpack(part)  # in a storage of its own, which keeps that of `rows`


def _movable(weights: Sequence[Tensor]) -> bool:
    """Returns whether each weight is alone in its memory, and all are alike."""
    first = weights[0]
    if first.device.type not in ("cpu", "cuda") or torch.is_inference_mode_enabled():
        return False
    if not first.is_floating_point() or len({id(weight) for weight in weights}) < len(weights):
        return False
    for weight in weights:
        alike = weight.dtype == first.dtype and weight.device == first.device and weight.shape[1:] == first.shape[1:]
        alone = weight.is_contiguous() and weight.untyped_storage().nbytes() == weight.nbytes > 0
        if not (alike and alone) or weight.nbytes % ALIGNMENT or (weight.is_cpu and weight.is_shared()):
            return False
    return True
