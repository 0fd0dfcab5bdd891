"""Checks of types, shapes, dtypes, devices and strides, which read no values; two that do serve GLA_CHECK=1.

Every message says which argument, what it was, what was expected.
"""

from __future__ import annotations

import numbers
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
INDICES = (torch.int32, torch.int64)


def tensor(name: str, x: Any, pattern: str, dims: dict[str, Any]) -> None:
    """Check that x is a tensor of the named dimensions, binding those that `dims` does not hold yet.

    Example:
        >>> dims = {}
        >>> tensor("q", torch.ones(2, 64, 4, 16), "B T Hq K", dims)
        >>> tensor("k", torch.ones(2, 63, 4, 16), "B T H K", dims)
        ValueError: k has shape [2, 63, 4, 16]; expected [B, T, H, K] with B=2, T=64, K=16
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} is {type(x).__name__}; expected a tensor [{', '.join(pattern.split())}]")
    names = pattern.split()
    known = {n: dims[n] for n in names if n in dims}
    shape = x.shape
    if len(shape) != len(names) or any(size != known.get(n, size) for n, size in zip(names, shape, strict=True)):
        given = ", ".join(f"{n}={size}" for n, size in known.items())
        raise ValueError(
            f"{name} has shape {list(shape)}; expected [{', '.join(names)}]{f' with {given}' if given else ''}"
        )
    dims.update(zip(names, shape, strict=True))


def queries_keys_values(q: Any, k: Any, v: Any, *patterns: str) -> dict[str, Any]:
    """Check q, k and v of an attention-like op, given the dimensions of each; returns the sizes they bind."""
    dims: dict[str, Any] = {}
    for name, x, pattern in zip("qkv", (q, k, v), patterns, strict=True):
        tensor(name, x, pattern, dims)
    widths(dims, "K", "V", "H", "Hq")
    if dims["Hq"] % dims["H"] != 0:
        raise ValueError(f"q has {dims['Hq']} heads; expected a multiple of k's {dims['H']}")
    dtype("q", q, FLOATS)
    dtype("k", k, [q.dtype], ", as q")
    dtype("v", v, [q.dtype], ", as q")
    return dims


def gate(g: Any, q: Tensor, pattern: str, dims: dict[str, Any]) -> None:
    if g is not None:
        tensor("g", g, pattern, dims)
        dtype("g", g, [q.dtype, torch.float32], ", as q or float32")


def last_dimension_contiguous(**tensors: Tensor | None) -> None:
    for name, x in tensors.items():
        if x is not None and not (x.is_contiguous() or x.stride(-1) == 1):
            strides = tuple(x.stride())
            raise ValueError(
                f"{name} has strides {strides}; its last dimension must be contiguous: call {name}.contiguous()"
            )


def dtype(name: str, x: Tensor, allowed: Iterable[torch.dtype], why: str = "") -> None:
    allowed = tuple(dict.fromkeys(allowed))
    if x.dtype not in allowed:
        expected = " or ".join(str(d).removeprefix("torch.") for d in allowed)
        raise TypeError(f"{name} is {str(x.dtype).removeprefix('torch.')}; expected {expected}{why}")


def same_device(**tensors: Tensor | None) -> None:
    given = {name: x for name, x in tensors.items() if x is not None}
    first, *rest = given
    for name in rest:
        if given[name].device != given[first].device:
            raise ValueError(
                f"{name} is on {given[name].device} and {first} is on {given[first].device}; move them to one device"
            )


def widths(dims: dict[str, Any], *names: str) -> None:
    for name in names:
        if dims[name] < 1:
            raise ValueError(f"{name} is {dims[name]}; expected at least 1")


def cu_seqlens(x: Any, dims: dict[str, Any], of: str = "q") -> None:
    """Check offsets [N+1] of sequences packed into the tensor `of`, binding N."""
    tensor("cu_seqlens", x, "N+1", dims)
    dtype("cu_seqlens", x, INDICES)
    if dims["N+1"] < 1:
        raise ValueError("cu_seqlens is empty; expected N+1 offsets, the first of them 0")
    if dims["B"] != 1:
        raise ValueError(f"cu_seqlens goes with B = 1; {of} has B = {dims['B']}: pack the sequences along T")
    dims["N"] = dims["N+1"] - 1


def number_or_none(name: str, x: Any) -> None:
    if x is not None and (isinstance(x, bool) or not isinstance(x, numbers.Real | torch.SymFloat | torch.SymInt)):
        raise TypeError(f"{name} is {type(x).__name__}; expected a number or None")


def flag(name: str, x: Any) -> None:
    if not isinstance(x, bool):
        raise TypeError(f"{name} is {type(x).__name__}; expected True or False")


def no_nan(**tensors: Tensor | None) -> None:
    """A check of GLA_CHECK=1: reads values."""
    for name, x in tensors.items():
        if x is not None and bool(x.isnan().any()):
            raise ValueError(f"{name} holds NaN in {int(x.isnan().sum())} of {x.numel()} places")


def gate_values(g: Tensor | None) -> None:
    """A check of GLA_CHECK=1: reads values."""
    if g is not None and bool((g > 0).any()):
        raise ValueError(f"g has values up to {float(g.max())}; expected the log of a forget gate, at most 0")


def offset_values(cu_seqlens: Tensor | None, T: int) -> None:
    """A check of GLA_CHECK=1: reads values. Rows of T behind the last offset belong to no sequence."""
    if cu_seqlens is None:
        return
    offsets = cu_seqlens.tolist()
    if offsets[0] != 0 or offsets[-1] > T or offsets != sorted(offsets):
        raise ValueError(f"cu_seqlens is {offsets}; expected offsets that rise from 0 to at most T = {T}")


def with_contiguous_rows(x: Tensor) -> Tensor:
    """x, copied only if its last dimension is not contiguous (gradients come expanded)."""
    return x if x.is_contiguous() or x.stride(-1) == 1 else x.contiguous()


def state_dtype(q: Tensor) -> torch.dtype:
    """States are float32, or float64 with float64 inputs."""
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def plain_number(x: Any) -> Any:
    """A number of any library, such as numpy's, as a float; all else as it is."""
    if type(x) is float or x is None or isinstance(x, bool) or not isinstance(x, numbers.Real):
        return x
    return float(x)


def scale_or_default(q: Any, scale: Any) -> float:
    """The scale as a float, K^-1/2 where none is given."""
    if scale is not None:
        return plain_number(scale)
    try:
        return q.shape[-1] ** -0.5
    except (AttributeError, IndexError, ZeroDivisionError):
        return 1.0  # the checks that follow refuse this q
