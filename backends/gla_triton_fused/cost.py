"""Predicted seconds of the fused kernels; gla_triton_shared/cost.py says how the time of a kernel is counted."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch

from gla_core.dispatch.backend import OpCall
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
    waves,
)

MOST_ON_CHIP = 2**14
"""As in online_softmax.py."""


def predicted_seconds(call: OpCall, c: Constants) -> float | None:
    """Seconds of a call, by the constants `c` of its op and device; None where kernels are interpreted."""
    return _SECONDS[call.op](call, c) if call.device.type == "cuda" else None


def _chunk_gla_fwd(call: OpCall, c: Constants) -> float:
    """Whole sequences in one walk; on Hopper, wide heads in two kernels, the gates' and the state's.

    Constants: those of a walk; uneven, the longest of packed sequences over their mean; gate_rate, elements of k a
    second in the wide heads' first kernel; state_step, seconds of 64 tokens in the second.
    """
    N, H, K, V = (call.dims[name] for name in ("N", "H", "K", "V"))
    tokens = call.dims["B"] * call.dims["T"]
    length, size = tokens / max(N, 1), chunk_gla_bytes(call)
    whole_chunks = tokens >= WORTH_WHOLE_CHUNKS * N
    gated = call.gate_dtype is not None and not call.variable_length
    if whole_chunks and gated and hopper_suits(call, c, keys=range(129, 257)):
        walk = Walk(64, 128 if V > 64 else 64, c["state_step"])
        gates = c["launch"] + tokens * H * K / c["gate_rate"]
        return in_all(call, gates + walk_seconds(call, walk, N, length, size, c), chunk_gla_host(2, c))
    walk = chunk_gla_walk(call, whole_chunks and hopper_suits(call, c), N, c)
    longest = c["uneven"] if call.variable_length else 0
    return in_all(call, walk_seconds(call, walk, N, length, size, c, longest), chunk_gla_host(1, c))


def _online_softmax(call: OpCall, c: Constants) -> float:
    """A block reads its row once if it fits on chip, twice if not, and writes it; many rows are as fast as memory.

    Constants: launch, bandwidth, host; block_bandwidth, bytes a second of one block.
    """
    rows, columns = call.dims["rows"], call.dims["columns"]
    row = columns * call.dtype.itemsize * (2 if columns <= MOST_ON_CHIP else 3)
    return in_all(call, c["launch"] + max(row / c["block_bandwidth"], rows * row / c["bandwidth"]), c["host"])


def _softmax_attention(call: OpCall, c: Constants) -> float:
    """A block of 128 queries meets 64 keys a step. Whether a call is causal is not known: half the keys if it may be.

    Constants: launch, start, host; step, seconds with halves and K + V = 256; float32, times as slow.
    """
    B, Tq, Tk, H, Hq, K, V = (call.dims[name] for name in ("B", "Tq", "Tk", "H", "Hq", "K", "V"))
    blocks = B * H * math.ceil(Tq * (Hq / max(H, 1)) / 128)
    keys = Tk / 2 if Tq == Tk > 1 else Tk
    step = c["step"] * (K + V) / 256 * (c["float32"] if call.dtype == torch.float32 else 1)
    device = waves(blocks, c["multiprocessors"]) * (c["start"] + math.ceil(keys / 64) * step)
    return in_all(call, c["launch"] + device, c["host"])


_SECONDS: Mapping[str, Callable[[OpCall, Constants], float]] = {
    "chunk_gla_fwd": _chunk_gla_fwd,
    "recurrent_gla_step": recurrent_gla_step,
    "online_softmax": _online_softmax,
    "softmax_attention": _softmax_attention,
}
