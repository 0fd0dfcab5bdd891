"""Predicts the seconds of the PyTorch form on a CPU, whose operations run one after another:

    seconds = call + step * steps + elements / rate

steps is the number of steps of loops, and elements is the number of elements that are read or written. The
constants are call, the seconds to start a call; step, the seconds to start a step; and rate, in elements per second.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from gla_core.dispatch.backend import Constants, OpCall
from gla_parallel_scan.pytorch import online_softmax
from gla_parallel_scan.pytorch.softmax_attention import QUERIES, SPLIT


def seconds(count: Callable[[OpCall], tuple[float, float]], call: OpCall, c: Constants) -> float:
    """Returns the predicted seconds of a call from the constants `c` of its op on a CPU.

    Args:
        count: returns the numbers of steps and of elements of a call.
    """
    steps, elements = count(call)
    return c["call"] + c["step"] * steps + elements * (2 if call.dtype == torch.float64 else 1) / c["rate"]


def count_step(call: OpCall) -> tuple[float, float]:
    """Counts one step if the states are in a pool, and reads and writes of states."""
    B, H, K, V, P = (call.dims[name] for name in ("B", "Hv", "K", "V", "P"))
    return (1, B * H * K * V * 2 + P * H * K * V) if call.indexed else (0, B * H * K * V)


def count_softmax(call: OpCall) -> tuple[float, float]:
    """Counts one step per block of rows."""
    rows, columns = call.dims["rows"], call.dims["columns"]
    return math.ceil(rows / max(1, online_softmax.BLOCK // max(columns, 1))), rows * columns


def count_attention(call: OpCall) -> tuple[float, float]:
    """Counts one step per block of queries and split of the keys."""
    B, Tq, Tk, H, Hq, K, V = (call.dims[name] for name in ("B", "Tq", "Tk", "H", "Hq", "K", "V"))
    steps = B * math.ceil(Tq / QUERIES) * math.ceil(Tk / SPLIT)
    return steps, B * Hq * Tq * Tk * (2 + (K + V) / 128) + B * Tk * H * (K + V) / 4
