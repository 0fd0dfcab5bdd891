"""Predicted seconds of the backend parallel_scan: the prices of its ops' plans, and those of its CPU form."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from gla_core.dispatch.backend import Constants, OpCall
from gla_parallel_scan.pytorch import cost as in_pytorch
from gla_triton_kernels.chunk_gla.segment_length import CHUNK, blocks_of, segment_length
from gla_triton_kernels.cost import (
    Walk,
    chunk_gla_bytes,
    chunk_gla_host,
    chunk_gla_walk,
    hopper_suits,
    in_all,
    walk_seconds,
    whole_seconds,
)
from gla_triton_kernels.online_softmax import cost as online_softmax
from gla_triton_kernels.recurrent_gla_step import cost as recurrent_gla_step
from gla_triton_kernels.runtime.architecture import interpreted
from gla_triton_kernels.softmax_attention import cost as softmax_attention


def _chunk_gla_fwd(call: OpCall, c: Constants) -> float:
    """Three kernels: states of segments from zero, their scan, the outputs. Sequences that fill the device stay whole.

    Constants: those of a walk; build_step, seconds of 64 tokens in the first kernel on Hopper; build, a step of it as a
    part of one of the third elsewhere, and build_start before the first; scan_step, seconds of a segment in the second.
    """
    B, T, H, Hq, K, V, N = (call.dims[name] for name in ("B", "T", "H", "Hq", "K", "V", "N"))
    packed, on_hopper = call.variable_length, hopper_suits(call, c)
    blocks, at_once = blocks_of(H, Hq, K, V, on_hopper)
    length = segment_length(N, T, blocks, at_once * int(c["multiprocessors"]), packed)
    if length >= T:
        return whole_seconds(call, c)
    # Of a packed sequence the last segment is short, and half as long as the others where sequences are long.
    segments = max(N, T / length + N / 2) if packed else N * math.ceil(T / length)
    mean = T / segments if packed else length
    longest = max(1, min(c["uneven"], length / mean))
    walk = chunk_gla_walk(call, on_hopper, segments, mean, c)
    outputs = walk_seconds(call, walk, segments, mean, chunk_gla_bytes(call), c, longest)
    if on_hopper:
        walk = Walk(CHUNK, 128, c["hopper_start"], c["build_step"])
    else:
        walk = walk._replace(start=c["build_start"], step=c["build"] * walk.step)
    built = max(0, T / length - N / 2) if packed else segments - N  # segments with another one after them
    read = B * T * H * ((K + V) * call.dtype.itemsize + (K * call.gate_dtype.itemsize if call.gate_dtype else 0))
    build = walk_seconds(call, walk, built, length, read, c) if built else c["launch"]
    states = 4 * segments * H * K * V * 4  # bytes: each is written, scanned and read
    scan = c["launch"] + segments / max(N, 1) * c["scan_step"] + states / c["bandwidth"]
    return in_all(call, build + scan + outputs, chunk_gla_host(4 if packed else 3, c))


_SECONDS: Mapping[str, Callable[[OpCall, Constants], float]] = {
    "chunk_gla_fwd": _chunk_gla_fwd,
    "recurrent_gla_step": recurrent_gla_step.seconds,
    "online_softmax": online_softmax.splits,
    "softmax_attention": softmax_attention.splits,
}


def predicted_seconds(call: OpCall, c: Constants) -> float | None:
    """Seconds of a call, by the constants `c` of its op and device; None where kernels are interpreted."""
    if call.device.type == "cuda":
        return _SECONDS[call.op](call, c)
    return None if interpreted() else in_pytorch.predicted_seconds(call, c)
