"""Predicts the seconds of the PyTorch form on a CPU, whose operations run one after another:

    seconds = call + step * steps + elements / rate

steps is the number of steps of loops and scans, and elements is the number of elements that are read or written. The
constants are call, the seconds to start a call; step, the seconds to start a step; and rate, in elements per second.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch

from gla_core.dispatch.backend import Constants, OpCall
from gla_core.dispatch.tensors import ceil_div
from gla_parallel_scan.pytorch import online_softmax
from gla_parallel_scan.pytorch.blocks import block
from gla_parallel_scan.pytorch.chunk_gla import BLOCK, SEGMENT
from gla_parallel_scan.pytorch.softmax_attention import QUERIES, SPLIT


def predicted_seconds(call: OpCall, c: Constants) -> float:
    """Returns the predicted seconds of a call from the constants `c` of its op on a CPU."""
    steps, elements = _COUNT[call.op](call)
    return c["call"] + c["step"] * steps + elements * (2 if call.dtype == torch.float64 else 1) / c["rate"]


def _chunk_gla(call: OpCall) -> tuple[float, float]:
    """Counts halving segments log2 C times, and scanning them in 2 log2 n steps, in blocks that stay in the cache.

    There is one state per segment, and one more per sequence: the state that enters it.
    """
    B, T, H, Hq, K, V, N = (call.dims[name] for name in ("B", "T", "Hv", "Hq", "K", "V", "N"))
    C = min(SEGMENT, 1 << max(T - 1, 0).bit_length())
    n = T // C + N if call.variable_length else ceil_div(T, C)
    rows, heads = block(B, H, T * max(K, V), BLOCK)
    blocks = math.ceil(B / rows) * math.ceil(H / heads)
    halvings, scanning = math.log2(C), 2 * math.log2(max(n, 1))
    G = max(Hq / H, 1) if H else 0
    # Ten multiplications of a matrix product count as one element.
    per_token = (1 + G) * (K * (4 + halvings) + 2 * V + K * V / 10) + 2 * G * C
    if T % C:
        per_token += (2 + G) * K + V  # zeros for the tokens that the last segment lacks
    elements = H * (B * n * C * per_token + 2 * (B * n + N) * K * V)
    packed = 1.4 if call.variable_length else 1  # also gathered and scattered
    return blocks * (4 + halvings + scanning), elements * packed


def _recurrent_gla_step(call: OpCall) -> tuple[float, float]:
    B, H, K, V, P = (call.dims[name] for name in ("B", "Hv", "K", "V", "P"))
    return (1, B * H * K * V * 2 + P * H * K * V) if call.indexed else (0, B * H * K * V)


def _online_softmax(call: OpCall) -> tuple[float, float]:
    rows, columns = call.dims["rows"], call.dims["columns"]
    return math.ceil(rows / max(1, online_softmax.BLOCK // max(columns, 1))), rows * columns


def _softmax_attention(call: OpCall) -> tuple[float, float]:
    """Counts one step per block of queries and split of the keys."""
    B, Tq, Tk, H, Hq, K, V = (call.dims[name] for name in ("B", "Tq", "Tk", "H", "Hq", "K", "V"))
    steps = B * math.ceil(Tq / QUERIES) * math.ceil(Tk / SPLIT)
    return steps, B * Hq * Tq * Tk * (2 + (K + V) / 128) + B * Tk * H * (K + V) / 4


_COUNT: Mapping[str, Callable[[OpCall], tuple[float, float]]] = {
    "chunk_gla_fwd": _chunk_gla,
    "recurrent_gla_step": _recurrent_gla_step,
    "online_softmax": _online_softmax,
    "softmax_attention": _softmax_attention,
}
