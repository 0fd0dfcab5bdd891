"""Predicted seconds of the kernels that more than one backend launches.

Blocks queue for the multiprocessors and so run in waves, a block takes its steps one after another, and no kernel is
faster than memory:

    seconds = launch + max(waves * (start + steps * step), bytes / bandwidth)

While the device works the host prepares the next call, and in a CUDA graph there is nothing for it to prepare:

    seconds of a call = max(device, host)

Constants: launch, seconds between the starts of two kernels; start, seconds before a block's first step; bandwidth,
bytes a second; host, seconds of the host for a call, for chunk_gla with host_launch more for each launch; and seconds
of a step, which for chunk_gla are

    hopper_step, hopper_key    64 tokens in chunk_gla_hopper.py: of each step, and more for every 64 columns of keys
    tile_step                  64 tokens in chunk_gla.py with bfloat16 products and K = 128; in proportion to K
    wide_step                  16 tokens in chunk_gla.py with bfloat16 products and K = 256
    tf32_step                  16 tokens in chunk_gla.py with TF32 products and K = 128
    token_step                 one token in chunk_gla.py without matrix units and K = 128
    shared                     blocks of chunk_gla.py that share a multiprocessor at no cost to each other
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch

from gla_core.dispatch.backend import OpCall

Constants = Mapping[str, float]

HOPPER = 9.0
"""The compute capability that specialised kernels are written for."""
WORTH_WHOLE_CHUNKS = 256
"""Tokens of an average sequence from which on whole ones are walked by Hopper's kernel."""


class Walk(NamedTuple):
    """How a kernel walks: tokens a step, columns of v a block, seconds a step, blocks that share a multiprocessor."""

    tokens: int
    columns: int
    step: float
    shared: float = 1


def in_all(call: OpCall, device: float, host: float) -> float:
    """Seconds of a call that takes the device and the host so long."""
    return device if call.capturing else max(device, host)


def waves(blocks: float, multiprocessors: float, longest: float = 0) -> float:
    """Waves of equal blocks; of unequal ones, `longest` times their mean at most, how many mean blocks come in turn."""
    if not longest:
        return math.ceil(blocks / multiprocessors)
    return max(longest, blocks / multiprocessors + longest / 2)


def walk_seconds(
    call: OpCall, walk: Walk, sequences: float, length: float, size: float, c: Constants, longest: float = 0
) -> float:
    """Device seconds of a kernel that walks sequences, or segments, of chunk_gla.

    Args:
        length: tokens of each. size: bytes that are moved. longest: see `waves`.
    """
    blocks = sequences * call.dims["H"] * math.ceil(call.dims["V"] / walk.columns)
    turns = max(1.0, waves(blocks, c["multiprocessors"], longest) / walk.shared)
    steps = math.ceil(length / walk.tokens)
    return c["launch"] + max(turns * (c["start"] + steps * walk.step), size / c["bandwidth"])


def chunk_gla_host(launches: int, c: Constants) -> float:
    """Host seconds of a call with so many launches."""
    return c["host"] + c["host_launch"] * launches


def chunk_gla_bytes(call: OpCall) -> int:
    """Bytes of q, k, v, g, o and of the states that enter and leave."""
    B, T, H, Hq, K, V, N = (call.dims[name] for name in ("B", "T", "H", "Hq", "K", "V", "N"))
    gates = H * K * call.gate_dtype.itemsize if call.gate_dtype else 0
    states = 2 * N * H * K * V * 4 if call.state_dtype else 0
    return B * T * ((Hq + H) * (K + V) * call.dtype.itemsize + gates) + states


def hopper_suits(call: OpCall, c: Constants, keys: range = range(1, 129)) -> bool:
    """Whether Hopper's kernel for heads of so many keys computes the call, strides aside."""
    dims = call.dims
    fits = dims["K"] in keys and dims["K"] % 8 == dims["V"] % 8 == 0 and dims["Hq"] == dims["H"]
    return fits and call.dtype == torch.bfloat16 and c["compute_capability"] == HOPPER


def chunk_gla_walk(call: OpCall, hopper: bool, sequences: float, c: Constants) -> Walk:
    """How chunk_gla_hopper.py, or else chunk_gla.py, walks so many sequences; chunk_gla.py is more exact in itself."""
    K, V, H = (call.dims[name] for name in ("K", "V", "H"))
    width = max(16, 1 << (K - 1).bit_length()) / 128
    if hopper:
        return Walk(64, 128 if V > 64 else 64, c["hopper_step"] + c["hopper_key"] * math.ceil(K / 64))
    if call.dtype == torch.float32 and call.float32_matmul_precision == "highest":
        return Walk(1, 32, c["token_step"] * width, c["shared"])
    if call.dtype != torch.bfloat16 or K <= 32:
        return Walk(16, 32, c["tf32_step"] * width, c["shared"])
    if K > 128:
        return Walk(16, 128, c["wide_step"] * width / 2)
    few = sequences * H * math.ceil(V / 64) <= 66
    return Walk(64, 32 if few else 64, c["tile_step"] * width, c["shared"])


def recurrent_gla_step(call: OpCall, c: Constants) -> float:
    """Seconds of recurrent_gla_step.py: every state is read once and written once."""
    B, H, K, V = (call.dims[name] for name in ("B", "H", "K", "V"))
    states = B * H * K * V * (call.state_dtype.itemsize if call.state_dtype else 4)
    return in_all(call, c["launch"] + 2 * states / c["bandwidth"], c["host"])
