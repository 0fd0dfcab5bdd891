"""Floating-point operations of the ops, for `torch.utils.flop_counter`: those of the mathematics, by any backend.

A multiply-add counts two, as PyTorch counts, and causal attention counts as if nothing were masked, as PyTorch's does.
Gated linear attention counts its recurrence: a token adds k^T v to a state of each key/value head and multiplies the
state by q for each query head. Backwards, dq takes one product of a query head with the state, and the gradient of the
state one; dk, dv and the states once more take one of a key/value head each. Elementwise work counts nothing.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch

_COUNTER = "torch.utils.flop_counter"

Shape = Sequence[int]


def _chunk_gla_fwd(q: Shape, k: Shape, v: Shape, *_: Any, **__: Any) -> int:
    B, T, Hq, K = q
    return 2 * B * T * (Hq + k[2]) * K * v[3]


def _chunk_gla_bwd(q: Shape, k: Shape, v: Shape, *_: Any, **__: Any) -> int:
    B, T, Hq, K = q
    return 2 * B * T * (2 * Hq + 3 * k[2]) * K * v[3]


def _recurrent_gla_step(q: Shape, k: Shape, v: Shape, *_: Any, **__: Any) -> int:
    B, Hq, K = q
    return 2 * B * (Hq + k[1]) * K * v[2]


def _softmax_attention(q: Shape, k: Shape, v: Shape, *_: Any, **__: Any) -> int:
    B, Tq, Hq, K = q
    return 2 * B * Hq * Tq * k[1] * (K + v[3])


def _softmax_attention_bwd(q: Shape, k: Shape, v: Shape, *_: Any, **__: Any) -> int:
    B, Tq, Hq, K = q
    return 2 * B * Hq * Tq * k[1] * (3 * K + 2 * v[3])


def _register(counter: ModuleType) -> None:
    ops = torch.ops.gla
    formulas = {
        ops.chunk_gla_fwd: _chunk_gla_fwd,
        ops.chunk_gla_bwd: _chunk_gla_bwd,
        ops.recurrent_gla_step: _recurrent_gla_step,
        ops.recurrent_gla_step_: _recurrent_gla_step,
        ops.softmax_attention: _softmax_attention,
        ops.softmax_attention_bwd: _softmax_attention_bwd,
    }
    for op, formula in formulas.items():
        counter.register_flop_formula(op)(formula)


class _WhenImported:
    """Registers the formulas as soon as somebody imports PyTorch's counter, which itself imports triton."""

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
            _register(module)

        spec.loader.exec_module = load_and_register
        return spec


def register_with_counter() -> None:
    """Register the formulas with PyTorch's counter, now or as soon as it is imported."""
    if _COUNTER in sys.modules:
        _register(sys.modules[_COUNTER])
    else:
        sys.meta_path.insert(0, _WhenImported())  # pyright: ignore[reportArgumentType]
