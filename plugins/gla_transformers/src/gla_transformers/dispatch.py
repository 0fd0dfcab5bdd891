"""Decides whether Triton kernels of this package compute a call; otherwise PyTorch computes it."""

from __future__ import annotations

import functools
import importlib
from types import ModuleType

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from gla_core.extension import autocast_off, bypasses_torch

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""The dtypes of the tensors that kernels take."""


def module_of(name: str, device: torch.device) -> ModuleType | None:
    """Returns a module of kernels; None if they do not run on a device, or there is no Triton."""
    return _imported(name) if device.type == "cuda" and device.index == torch.cuda.current_device() else None


@functools.cache
def _imported(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(f"gla_transformers.{name}")
    except ImportError:
        return None


def is_eager(x: Tensor) -> bool:
    """Returns whether kernels take x and nothing of PyTorch has to see the call: no compiler, mode or transform."""
    if is_compiling() or x.dtype not in DTYPES:
        return False
    with autocast_off(x.device.type):  # it changes nothing here
        return bypasses_torch(x)


def is_taken(y: Tensor, x: Tensor) -> bool:
    """Returns whether kernels take y, which may be a parameter, together with x."""
    return type(y) in (Tensor, nn.Parameter) and y.dtype in DTYPES and y.device == x.device
