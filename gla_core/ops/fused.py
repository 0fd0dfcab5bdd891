"""Computes chains of elementwise operations and sums by compiled code on a GPU."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gla_core.ops._invariant import is_invariant
from gla_core.ops.calls import tracing, transformed

_compiled = functools.cache(torch.compile)
_has_triton = functools.cache(lambda: importlib.util.find_spec("triton") is not None)


def fused(function: Callable[..., Any], x: Tensor, *others: Any, backend: str | None = None) -> Any:
    """Returns function(x, *others), computed by compiled code if x is on a GPU.

    Eager PyTorch would write each product to memory in float32, which takes longer than a scan. The first call takes
    seconds, as does the first with another combination of dtypes and optional arguments. Compilers, tracers and
    transforms of torch.func see the operations of `function`. Under `batch_invariant` nothing is compiled, because code
    that is compiled for one shape may round otherwise than code for another one.

    Args:
        backend: the request of the public function that calls this, if it has one.
    """
    is_seen = torch.compiler.is_compiling() or transformed() or tracing()
    if x.is_cuda and not is_seen and _has_triton() and not is_invariant(backend):
        function = _compiled(function)
    return function(x, *others)
