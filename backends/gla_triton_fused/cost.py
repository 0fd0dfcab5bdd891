"""Predicted seconds of the fused kernels; gla_triton_kernels/cost.py says how the time of a kernel is counted."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch

from gla_core.dispatch.backend import OpCall
from gla_triton_kernels.chunk_gla import cost as chunk_gla
from gla_triton_kernels.cost import (
    Constants,
    attention_bytes,
    attention_products,
    in_all,
    recurrent_gla_step,
)

MOST_ON_CHIP = 2**14
"""As in online_softmax.py."""
MOST_IN_CACHE = 2**17
"""Bytes of a row that is still in the L2 cache when it is read again, like those of all blocks at work on an H200."""


def predicted_seconds(call: OpCall, c: Constants) -> float | None:
    """Seconds of a call, by the constants `c` of its op and device; None where kernels are interpreted."""
    return _SECONDS[call.op](call, c) if call.device.type == "cuda" else None


def _online_softmax(call: OpCall, c: Constants) -> float:
    """A block reads its row once if it fits on chip or in the cache, twice if not, and writes it.

    Many rows are as fast as memory. Constants: launch, bandwidth, host; block_bandwidth, bytes a second of one block.
    """
    rows, columns = call.dims["rows"], call.dims["columns"]
    row = columns * call.dtype.itemsize
    row *= 2 if columns <= MOST_ON_CHIP or row <= MOST_IN_CACHE else 3
    return in_all(call, c["launch"] + max(row / c["block_bandwidth"], rows * row / c["bandwidth"]), c["host"])


def _softmax_attention(call: OpCall, c: Constants) -> float:
    """The last block of 128 queries meets all keys, 64 a step; many blocks are as fast as arithmetic, or as memory.

    Constants: launch, host, bandwidth; step, seconds; rate, multiplications a second; start, seconds of the device's
    multiprocessors between two blocks; float32, times as slow.
    """
    B, Tq, Tk, H, Hq = (call.dims[name] for name in ("B", "Tq", "Tk", "H", "Hq"))
    slower = c["float32"] if call.dtype == torch.float32 else 1
    blocks = B * H * math.ceil(Tq * (Hq / max(H, 1)) / 128)
    all_keys = math.ceil(Tk / 64) * c["step"] * slower
    arithmetic = blocks / c["multiprocessors"] * c["start"] + attention_products(call) / c["rate"] * slower
    memory = attention_bytes(call) / c["bandwidth"]
    return in_all(call, c["launch"] + max(all_keys, arithmetic, memory), c["host"])


_SECONDS: Mapping[str, Callable[[OpCall, Constants], float]] = {
    "chunk_gla_fwd": chunk_gla.one_pass,
    "recurrent_gla_step": recurrent_gla_step,
    "online_softmax": _online_softmax,
    "softmax_attention": _softmax_attention,
}
