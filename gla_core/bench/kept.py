"""The memory that a forward keeps for its backward, counted on any device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Storages(TorchDispatchMode):
    """The storages that operations have made while the mode was on.

    Attributes:
        largest: number of bytes of the largest one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        old = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        for x in tree_leaves(result):
            if isinstance(x, Tensor) and (storage := x.untyped_storage())._cdata not in old:
                self.made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
                self.largest = max(self.largest, storage.nbytes())
        return result

    def alive(self) -> int:
        """Returns the number of bytes of the storages that still exist."""
        return sum(size for storage, size in self.made.values() if not storage.expired())


def bytes_kept(call: Callable[[], Any]) -> int:
    """Returns the number of bytes that a call has allocated and that exist after it, its results included."""
    with Storages() as storages:
        result = call()
    alive = storages.alive()
    del result
    return alive
