"""Computes what a scan and a step of Mamba-2 do around gated linear attention: time steps, rates, skip, output gate."""

from __future__ import annotations

import torch
from torch import Tensor

from gla_core.dispatch import tensors
from gla_core.dispatch.tensors import silu, wide
from gla_core.ops._invariant import needs_equal_bits


def time_steps(dt: Tensor, bias: Tensor | None, softplus: bool, dtype: torch.dtype) -> Tensor:
    """Returns the time steps, before they are clamped."""
    dt = dt.to(dtype) if bias is None else dt.to(dtype) + bias.to(dtype)
    return tensors.softplus(dt, needs_equal_bits()) if softplus else dt


def rates(A: Tensor, is_log: bool, dtype: torch.dtype) -> Tensor:
    """Returns A; -exp(A) if `is_log`."""
    A = A.to(dtype)
    return -A.exp() if is_log else A


def output(o: Tensor, v: Tensor, D: Tensor | None, z: Tensor | None) -> Tensor:
    """Returns (o + D v) silu(z) with the dtype of v [.., Hv, V]."""
    out = o.to(wide(v.dtype))
    if D is not None:
        out = out + v * for_channels(D, out.dtype)
    if z is not None:
        out = out * silu(z.to(out.dtype), needs_equal_bits())
    return out.to(v.dtype)


def for_channels(D: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns D [Hv] or [Hv, V] in a dtype, as a factor of v [.., Hv, V]."""
    return (D[:, None] if D.ndim == 1 else D).to(dtype)
