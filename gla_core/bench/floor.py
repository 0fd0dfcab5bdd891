"""The memory floor: the least bytes an op can move, and what the device takes to move them.

    forward    every input read once, every output written once
    backward   every input read again, the gradient of every output read, the gradient of every input written

A forward with its backward is the sum of both. For chunk_gla in bfloat16 with float32 gates and K = V = 128, per token
and head: q k v g in and o out are 1536 bytes; q k v g do in and dq dk dv dg out are 2816 more, 4352 together.
Whatever an implementation keeps between the two is its own affair and not in the floor. Offsets and indices are
not counted. softmax_attention is bound by arithmetic and not by this floor, except with few queries.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

Bytes = tuple[int, int]
"""Bytes of the inputs and of the outputs."""


def floor_bytes(op: str, sizes: Mapping[str, Any], backward: bool = False) -> int:
    """The least bytes that a call moves.

    Args:
        op: a public op, as in `gla_core.workloads.named.OPS`.
        sizes: sizes, dtypes and what else shapes the arguments, as in `Workload.sizes`; what is left out has the
            default of the function that makes the inputs. A chunk_gla with an initial state also returns the final one.
        backward: count the forward and its backward. recurrent_gla_step has none.

    Raises:
        ValueError: an op that does not exist, or backward of one that has none.

    Example:
        >>> floor_bytes("online_softmax", {"shape": (8, 1024), "dtype": torch.bfloat16})
        32768
    """
    if op not in _COUNT:
        raise ValueError(f"op is {op!r}; expected one of {', '.join(_COUNT)}")
    if backward and op == "recurrent_gla_step":
        raise ValueError("recurrent_gla_step has no backward; leave out backward=True")
    inputs, outputs = _COUNT[op](sizes)
    # backward: inputs again, gradients of the outputs, and gradients that are as large as the inputs
    return inputs + outputs + (backward and 2 * inputs + outputs)


def floor_seconds(op: str, sizes: Mapping[str, Any], bandwidth: float, backward: bool = False) -> float:
    """Seconds to move `floor_bytes` at `bandwidth` bytes per second, read and written together."""
    return floor_bytes(op, sizes, backward) / bandwidth


def _chunk_gla(sizes: Mapping[str, Any]) -> Bytes:
    lengths = sizes.get("lengths")
    B, T = (sizes.get("B", 2), sizes.get("T", 100)) if lengths is None else (1, sum(lengths))
    N = B if lengths is None else len(lengths)
    inputs, outputs = _tokens(B * T, sizes)
    state = N * _state(sizes) if sizes.get("initial_state", False) else 0
    return inputs + state, outputs + state


def _recurrent_gla_step(sizes: Mapping[str, Any]) -> Bytes:
    B, rows = sizes.get("B", 2), sizes.get("rows")
    served = B if rows is None else sum(row >= 0 for row in rows)
    inputs, outputs = _tokens(served, sizes)
    return inputs + served * _state(sizes), outputs + served * _state(sizes)


def _online_softmax(sizes: Mapping[str, Any]) -> Bytes:
    x = math.prod(sizes["shape"]) * _itemsize(sizes)
    return x, x


def _softmax_attention(sizes: Mapping[str, Any]) -> Bytes:
    B, Tq, Tk, H, K, V = (sizes[name] for name in ("B", "Tq", "Tk", "H", "K", "V"))
    queries, keys, size = B * Tq * H * sizes.get("G", 1), B * Tk * H, _itemsize(sizes)
    return (queries * K + keys * (K + V)) * size, queries * (V * size + _wide(sizes).itemsize)  # o and lse


_COUNT: Mapping[str, Callable[[Mapping[str, Any]], Bytes]] = {
    "chunk_gla": _chunk_gla,
    "recurrent_gla_step": _recurrent_gla_step,
    "online_softmax": _online_softmax,
    "softmax_attention": _softmax_attention,
}


def _tokens(tokens: int, sizes: Mapping[str, Any]) -> Bytes:
    """Of so many tokens: q k v g in, o out."""
    H, K, V = (sizes.get(name, default) for name, default in (("H", 2), ("K", 16), ("V", 16)))
    Hq, size = H * sizes.get("G", 1), _itemsize(sizes)
    gate = 0 if sizes.get("gates") == "none" else (sizes.get("gate_dtype") or _dtype(sizes)).itemsize
    return tokens * (Hq * K * size + H * (K + V) * size + H * K * gate), tokens * Hq * V * size


def _state(sizes: Mapping[str, Any]) -> int:
    """The state of one sequence."""
    return sizes.get("H", 2) * sizes.get("K", 16) * sizes.get("V", 16) * _wide(sizes).itemsize


def _dtype(sizes: Mapping[str, Any]) -> torch.dtype:
    return sizes.get("dtype", torch.float32)


def _itemsize(sizes: Mapping[str, Any]) -> int:
    return _dtype(sizes).itemsize


def _wide(sizes: Mapping[str, Any]) -> torch.dtype:
    return torch.float64 if _dtype(sizes) == torch.float64 else torch.float32
