"""Floating-point operations of the ops, for `torch.utils.flop_counter`: those of the mathematics, by any backend.

A multiply-add counts two, as PyTorch counts, and causal attention counts as if nothing were masked, as PyTorch's does.
Elementwise work counts nothing. The formulas stand with the ops.
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
    """Tell PyTorch's counter the formula of a torch op, which takes the shapes of its tensors."""
    counter = sys.modules.get(_COUNTER)
    if counter is not None:
        counter.register_flop_formula(op)(formula)
        return
    if not _waiting:
        sys.meta_path.insert(0, _WhenImported())  # pyright: ignore[reportArgumentType]
    _waiting[op] = formula


class _WhenImported:
    """Hands the formulas over as soon as somebody imports PyTorch's counter, which itself imports triton."""

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
