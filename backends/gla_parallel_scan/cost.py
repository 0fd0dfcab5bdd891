"""Predicted seconds of segments that are worked on all at once; gla_triton_kernels/cost.py says how a kernel counts.

On a CPU the operations of `in_pytorch` run one after another:

    seconds = call + step * steps + elements / rate        steps: turns of loops and scans; elements: numbers touched
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping

import torch

from gla_core.dispatch.backend import OpCall
from gla_parallel_scan.pytorch.pieces import piece
from gla_triton_kernels.chunk_gla import cost as chunk_gla
from gla_triton_kernels.cost import (
    Constants,
    attention_bytes,
    attention_keys,
    attention_products,
    in_all,
    recurrent_gla_step,
)

PIECE, SEGMENT = 2**18, 64
"""As in pytorch/chunk_gla.py."""
UNALIGNED = 3
"""Times as long; measured on an H200 with 50257 columns."""


def predicted_seconds(call: OpCall, c: Constants) -> float | None:
    """Seconds of a call, by the constants `c` of its op and device; None where kernels are interpreted."""
    if call.device.type == "cuda":
        return _BY_TRITON[call.op](call, c)
    return None if os.environ.get("TRITON_INTERPRET") == "1" else _in_pytorch(call, c)


# ---- on a GPU


def _online_softmax(call: OpCall, c: Constants) -> float:
    """Two kernels read, one writes; rows that are not aligned are moved column by column, which takes `UNALIGNED`.

    Constants: launch, bandwidth, host.
    """
    columns = call.dims["columns"]
    size = call.dims["rows"] * columns * call.dtype.itemsize
    slower = 1 if columns % 16 == 0 else UNALIGNED
    return in_all(call, 2 * c["launch"] + 3 * size / c["bandwidth"] * slower, c["host"])


def _softmax_attention(call: OpCall, c: Constants) -> float:
    """Arithmetic or keys and values, whichever takes longer, spread over the device; outputs of pieces are merged.

    Constants: launch, bandwidth, host; rate, multiplications a second with halves; float32, times as slow; merge,
    outputs a second.
    """
    B, Tq, Tk, H, Hq, V = (call.dims[name] for name in ("B", "Tq", "Tk", "H", "Hq", "V"))
    blocks = B * H * math.ceil(Tq * (Hq / max(H, 1)) / 128)
    piece = 64 * max(4, math.ceil(attention_keys(call) * blocks / (4 * c["multiprocessors"]) / 64))  # keys
    slower = c["float32"] if call.dtype == torch.float32 else 1
    work = max(attention_products(call) / c["rate"] * slower, attention_bytes(call) / c["bandwidth"])
    merging = c["launch"] + B * Tq * Hq * V / c["merge"] if Tk > piece else 0
    return in_all(call, c["launch"] + work + merging, c["host"])


_BY_TRITON: Mapping[str, Callable[[OpCall, Constants], float]] = {
    "chunk_gla_fwd": chunk_gla.segments,
    "recurrent_gla_step": recurrent_gla_step,
    "online_softmax": _online_softmax,
    "softmax_attention": _softmax_attention,
}


# ---- on a CPU


def _in_pytorch(call: OpCall, c: Constants) -> float:
    """Constants: call and step, seconds of the operations that start a call and a step; rate, elements a second."""
    steps, elements = _COUNT[call.op](call)
    return c["call"] + c["step"] * steps + elements * (2 if call.dtype == torch.float64 else 1) / c["rate"]


def _chunk_gla_in_pytorch(call: OpCall) -> tuple[float, float]:
    """In pieces that stay in the cache: segments are halved log2 C times, and joined in 2 log2 n turns.

    A state is held for each segment, and for each sequence the one that enters it.
    """
    B, T, H, Hq, K, V, N = (call.dims[name] for name in ("B", "T", "H", "Hq", "K", "V", "N"))
    C = min(SEGMENT, 1 << max(T - 1, 0).bit_length())
    n = T // C + N if call.variable_length else -(-T // C)
    rows, heads = piece(B, H, T * max(K, V), PIECE)
    pieces = math.ceil(B / rows) * math.ceil(H / heads)
    halvings, turns = math.log2(C), 2 * math.log2(max(n, 1))
    G = Hq / H if H else 0
    # Of a matrix product, ten multiplications count as one element.
    per_token = (1 + G) * (K * (4 + halvings) + 2 * V + K * V / 10) + 2 * G * C
    if T % C:
        per_token += (2 + G) * K + V  # zeros for what is missing at the end
    elements = H * (B * n * C * per_token + 2 * (B * n + N) * K * V)
    packed = 1.4 if call.variable_length else 1  # gathered and scattered as well
    return pieces * (4 + halvings + turns), elements * packed


def _recurrent_gla_step_in_pytorch(call: OpCall) -> tuple[float, float]:
    B, H, K, V, P = (call.dims[name] for name in ("B", "H", "K", "V", "P"))
    return (1, B * H * K * V * 2 + P * H * K * V) if call.indexed else (0, B * H * K * V)


def _online_softmax_in_pytorch(call: OpCall) -> tuple[float, float]:
    rows, columns = call.dims["rows"], call.dims["columns"]
    return math.ceil(rows / max(1, 2**17 // max(columns, 1))), rows * columns


def _softmax_attention_in_pytorch(call: OpCall) -> tuple[float, float]:
    """Up to 256 queries meet up to 1024 keys a step."""
    B, Tq, Tk, H, Hq, K, V = (call.dims[name] for name in ("B", "Tq", "Tk", "H", "Hq", "K", "V"))
    steps = B * math.ceil(Tq / 256) * math.ceil(Tk / 1024)
    return steps, B * Hq * Tq * Tk * (2 + (K + V) / 128) + B * Tk * H * (K + V) / 4


_COUNT: Mapping[str, Callable[[OpCall], tuple[float, float]]] = {
    "chunk_gla_fwd": _chunk_gla_in_pytorch,
    "recurrent_gla_step": _recurrent_gla_step_in_pytorch,
    "online_softmax": _online_softmax_in_pytorch,
    "softmax_attention": _softmax_attention_in_pytorch,
}
