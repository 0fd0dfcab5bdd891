"""Registers the floating-point operations of the ops with `torch.utils.flop_counter`.

The count follows from the mathematics and does not depend on the backend. As in PyTorch, a multiply-add counts as two
operations, and causal attention counts as if nothing were masked. Elementwise work is not counted. Each op's file holds
its formula.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

_COUNTER = "torch.utils.flop_counter"

_waiting: dict[Any, Callable[..., int]] = {}  # until the counter is imported


def count(op: Any, formula: Callable[..., int]) -> None:
    """Registers the formula of a torch op with PyTorch's counter. The formula takes the shapes of the op's tensors."""
    counter = sys.modules.get(_COUNTER)
    if counter is not None:
        counter.register_flop_formula(op)(formula)
        return
    if not _waiting:
        sys.meta_path.insert(0, _WhenImported())  # pyright: ignore[reportArgumentType]
    _waiting[op] = formula


class _WhenImported:
    """Registers the formulas once PyTorch's counter is imported. It is not imported here, because it imports triton."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != _COUNTER:
            return None
        sys.meta_path.remove(self)  # pyright: ignore[reportArgumentType]
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        load = spec.loader.exec_module

        def load_and_register(module: ModuleType) -> None:
            load(module)
            for op, formula in _waiting.items():
                module.register_flop_formula(op)(formula)

        spec.loader.exec_module = load_and_register
        return spec
