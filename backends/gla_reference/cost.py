"""Predicts the seconds of the reference: the host issues small operations one by one, and each moves memory.

    host = call + step * steps        steps: iterations of the op's loop over chunks, tiles of columns or blocks of keys
    work = elements / rate            elements: number of elements that the operations touch, in proportion
    seconds = host + work + pages     on a CPU
    seconds = max(host, work + kernels * host)        on a GPU

pages is (temporary bytes beyond `KEPT`) / page_rate. These bytes do not fit into the cache, and the C library may
return them to the system, which then maps them again page by page. kernels is the time between the starts of two small
kernels on the device, as a fraction of the time of the host. In a CUDA graph, only this fraction and the work remain.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

from gla_core.dispatch.backend import OpCall
from gla_core.dispatch.tensors import ceil_div

CHUNK, TILE, KEY_BLOCK = 64, 1024, 256
"""The sizes CHUNK of chunk_gla.py, TILE of online_softmax.py and KEY_BLOCK of softmax_attention.py."""
KEPT = 2**25
"""The number of temporary bytes up to which they add no time: caches hold them, and glibc keeps them when freed."""
HALVING = 8
"""The number of iterations of the loop over chunks that issue as many operations as one halving of the chunks."""


class Count(NamedTuple):
    """The counts of a call: steps, elements, and elements that are held at once."""

    steps: float
    elements: float
    held: float = 0


def predicted_seconds(call: OpCall, c: Mapping[str, float]) -> float:
    """Returns the predicted seconds of a call from the constants `c` of its op and device."""
    steps, elements, held = _COUNT[call.op](call)
    size = 8 if call.dtype == torch.float64 else 4
    host = c["call"] + c["step"] * steps
    work = elements * (size / 4) / c["rate"]
    if call.device.type == "cpu":
        beyond = held * size - KEPT
        return host + work + (beyond / c["page_rate"] if beyond > 0 else 0)
    device = work + c["kernels"] * host
    return device if call.capturing else max(host, device)


def _chunk_gla(call: OpCall) -> Count:
    """Counts, per token, log2 C halvings of K columns, C scores, and a share of the state of its chunk.

    Ten multiplications of a matrix product count as one element.
    """
    B, T, H, Hq, K, V, N = (call.dims[name] for name in ("B", "T", "Hv", "Hq", "K", "V", "N"))
    C = min(CHUNK, 1 << max(T - 1, 0).bit_length())
    chunks = T // C + N if call.variable_length else ceil_div(T, C)
    G = max(Hq / H, 1) if H else 0
    halvings = math.log2(C)
    per_token = (1 + G) * (K * (4 + halvings) + 2 * V + K * V / 10) + 2 * G * C + 2 * K * V / C
    if T % C:
        per_token += 2 * ((2 + G) * K + V)  # one more copy, which is padded with zeros
    held = (2 + G) * K + (1 + G) * V + G * C + 3 * K * V / C
    packed = call.variable_length  # also gathered and scattered; three operations per chunk carry the state
    steps = HALVING * halvings + chunks * (3 if packed else 1)
    return Count(steps, B * H * chunks * C * per_token * (1.5 if packed else 1), B * H * chunks * C * held)


def _chunk_gla_summary(call: OpCall) -> Count:
    """Counts, per token, the halvings and the product of a forward, without scores and outputs."""
    B, T, H, Hq, K, V, N = (call.dims[name] for name in ("B", "T", "Hv", "Hq", "K", "V", "N"))
    C = min(CHUNK, 1 << max(T - 1, 0).bit_length())
    chunks = T // C + N if call.variable_length else ceil_div(T, C)
    G, halvings = max(Hq / H, 1) if H else 0, math.log2(C)
    per_token = K * (4 + halvings) + G * (3 * K + 2 * V + K * V / 10) + 2 * K * V / C
    held = (2 + 2 * G) * K + G * V + 3 * K * V / C
    packed = call.variable_length
    steps = HALVING * halvings + chunks * (3 if packed else 1)
    return Count(steps, B * H * chunks * C * per_token * (1.5 if packed else 1), B * H * chunks * C * held)


def _chunk_delta(call: OpCall) -> Count:
    """Counts, per token, the halvings of k and of the rows of q and k, the pairs, and its share of a transition."""
    B, T, H, K, V, N = (call.dims[name] for name in ("B", "T", "Hv", "K", "V", "N"))
    C = min(CHUNK, 1 << max(T - 1, 0).bit_length())
    chunks = T // C + N if call.variable_length else ceil_div(T, C)
    halvings = math.log2(C)
    products = K * (K + 3 * V) + K * K * V / C + 2 * C * (K + V) + 2 * C * K
    per_token = 3 * K * (4 + halvings) + 4 * V + 4 * C + products / 10 + 2 * K * (K + V) / C
    held = 5 * K + 3 * V + 3 * C + (2 * K * K + 3 * K * V) / C
    packed = call.variable_length  # also gathered and scattered; three operations per chunk carry the state
    steps = HALVING * halvings + chunks * (3 if packed else 1)
    return Count(steps, B * H * chunks * C * per_token * (1.5 if packed else 1), B * H * chunks * C * held)


def _recurrent_gla_step(call: OpCall) -> Count:
    """Counts reading, decaying, multiplying and writing states; a pool's states are also gathered and scattered."""
    B, H, K, V, P = (call.dims[name] for name in ("B", "Hv", "K", "V", "P"))
    return Count(1, B * H * K * V * 2 + P * H * K * V) if call.indexed else Count(0, B * H * K * V)


def _online_softmax(call: OpCall) -> Count:
    return Count(math.ceil(call.dims["columns"] / TILE), call.dims["rows"] * call.dims["columns"])


def _softmax_attention(call: OpCall) -> Count:
    """Counts K multiplications, a few passes and V multiplications per score."""
    B, Tq, Tk, Hq, K, V = (call.dims[name] for name in ("B", "Tq", "Tk", "Hq", "K", "V"))
    elements = B * Hq * Tq * Tk * (2 + (K + V) / 128) + B * Tk * call.dims["H"] * (K + V)
    return Count(math.ceil(Tk / KEY_BLOCK), elements)


_COUNT: Mapping[str, Callable[[OpCall], Count]] = {
    "chunk_gla_fwd": _chunk_gla,
    "chunk_gla_bwd": _chunk_gla,
    "chunk_gla_summary": _chunk_gla_summary,
    "recurrent_gla_step": _recurrent_gla_step,
    "chunk_delta_fwd": _chunk_delta,
    "chunk_delta_bwd": _chunk_delta,
    "recurrent_delta_step": _recurrent_gla_step,
    "online_softmax": _online_softmax,
    "softmax_attention": _softmax_attention,
}
