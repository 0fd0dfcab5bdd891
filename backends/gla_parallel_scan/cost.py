"""Predicted seconds of segments that are worked on all at once; gla_triton_shared/cost.py says how a kernel counts.

On a CPU the operations of `in_pytorch` run one after another:

    seconds = call + step * steps + elements / rate        steps: turns of loops and scans; elements: numbers touched
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping

import torch

from gla_core.dispatch.backend import OpCall
from gla_parallel_scan._plan import CHUNK, segment_length
from gla_triton_shared.cost import (
    WORTH_WHOLE_CHUNKS,
    Constants,
    Walk,
    chunk_gla_bytes,
    chunk_gla_host,
    chunk_gla_walk,
    hopper_suits,
    in_all,
    recurrent_gla_step,
    walk_seconds,
)


def predicted_seconds(call: OpCall, c: Constants) -> float | None:
    """Seconds of a call, by the constants `c` of its op and device; None where kernels are interpreted."""
    if call.device.type == "cuda":
        return _BY_TRITON[call.op](call, c)
    return None if os.environ.get("TRITON_INTERPRET") == "1" else _in_pytorch(call, c)


# ---- on a GPU


def _chunk_gla_fwd(call: OpCall, c: Constants) -> float:
    """Three kernels: states of segments from zero, their scan, the outputs. Sequences that fill the device stay whole.

    Constants: those of a walk; build_step, seconds of 64 tokens in the first kernel on Hopper; build, its part of the
    third's time elsewhere; scan_step, seconds of a segment in the second; uneven, the longest of packed sequences over
    their mean.
    """
    N, B, T, H, K, V = (call.dims[name] for name in ("N", "B", "T", "H", "K", "V"))
    packed, size = call.variable_length, chunk_gla_bytes(call)
    on_hopper = hopper_suits(call, c)
    blocks, slots = (-(-V // 128), 1) if on_hopper else (-(-V // 64), 2)
    length = segment_length(N, T, H * blocks, slots * int(c["multiprocessors"]), packed)
    if length >= T:
        walk = chunk_gla_walk(call, on_hopper and B * T >= WORTH_WHOLE_CHUNKS * N, N, c)
        device = walk_seconds(call, walk, N, B * T / max(N, 1), size, c, c["uneven"] if packed else 0)
        return in_all(call, device, chunk_gla_host(1, c))
    # Of a packed sequence the last segment is short, and half as long as the others where sequences are long.
    segments = max(N, T / length + N / 2) if packed else N * math.ceil(T / length)
    mean = T / segments if packed else length
    longest = max(1, min(c["uneven"], length / mean)) if packed else 0
    state = H * K * V * 4  # bytes, of all heads
    walk = chunk_gla_walk(call, on_hopper, segments, c)
    outputs = walk_seconds(call, walk, segments, mean, size + segments * state, c, longest)
    build = Walk(CHUNK, 128, c["build_step"]) if on_hopper else walk._replace(step=c["build"] * walk.step)
    read = B * T * H * ((K + V) * call.dtype.itemsize + (K * call.gate_dtype.itemsize if call.gate_dtype else 0))
    whole = max(0, T / length - N / 2) if packed else segments - N  # segments with another one after them
    built = walk_seconds(call, build, whole, length, read + whole * state, c) if whole else c["launch"]
    scanned = c["launch"] + segments / max(N, 1) * c["scan_step"] + 2 * segments * state / c["bandwidth"]
    return in_all(call, built + scanned + outputs, chunk_gla_host(4 if packed else 3, c))


def _online_softmax(call: OpCall, c: Constants) -> float:
    """Two kernels read, one writes. Constants: launch, bandwidth, host."""
    size = call.dims["rows"] * call.dims["columns"] * call.dtype.itemsize
    return in_all(call, 2 * c["launch"] + 3 * size / c["bandwidth"], c["host"])


def _softmax_attention(call: OpCall, c: Constants) -> float:
    """Arithmetic or keys and values, whichever takes longer, spread over the device; then a merge.

    Constants: launch, bandwidth, host; rate, multiplications a second with halves; float32, times as slow.
    Whether a call is causal is not known: half the keys if it may be.
    """
    B, Tq, Tk, H, Hq, K, V = (call.dims[name] for name in ("B", "Tq", "Tk", "H", "Hq", "K", "V"))
    rows = max(16, Tq * (Hq / max(H, 1)))  # of a matrix product, at least
    keys = Tk / 2 if Tq == Tk > 1 else Tk
    slower = c["float32"] if call.dtype == torch.float32 else 1
    arithmetic = B * H * rows * keys * (K + V) / c["rate"] * slower
    memory = B * H * Tk * (K + V) * call.dtype.itemsize / c["bandwidth"]
    return in_all(call, 2 * c["launch"] + max(arithmetic, memory), c["host"])


_BY_TRITON: Mapping[str, Callable[[OpCall, Constants], float]] = {
    "chunk_gla_fwd": _chunk_gla_fwd,
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
    """In pieces that stay in the cache: segments are halved log2 C times, and joined in 2 log2 n turns."""
    B, T, H, Hq, K, V, N = (call.dims[name] for name in ("B", "T", "H", "Hq", "K", "V", "N"))
    C = min(CHUNK, 1 << max(T - 1, 0).bit_length())
    n = T // C + N if call.variable_length else -(-T // C)
    pieces = math.ceil(B * H * T * max(K, V) / 2**18)
    halvings, turns = math.log2(C), 2 * math.log2(max(n, 1))
    G = Hq / H if H else 0
    per_token = (1 + G) * (K * (4 + halvings) + 2 * V) + 2 * G * C + 6 * K * V / C
    return pieces * (4 + halvings + turns), B * H * n * C * per_token


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
    return steps, B * Hq * Tq * Tk * (2 + (K + V) / 128) + B * Tk * H * (K + V)


_COUNT: Mapping[str, Callable[[OpCall], tuple[float, float]]] = {
    "chunk_gla_fwd": _chunk_gla_in_pytorch,
    "recurrent_gla_step": _recurrent_gla_step_in_pytorch,
    "online_softmax": _online_softmax_in_pytorch,
    "softmax_attention": _softmax_attention_in_pytorch,
}
