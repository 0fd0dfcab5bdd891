"""Predicted seconds of the kernels that more than one backend launches.

Blocks queue for the multiprocessors and so run in waves, a block takes its steps one after another, and no kernel is
faster than memory:

    seconds = launch + max(waves * (start + steps * step), bytes / bandwidth)

While the device works the host prepares the next call, and in a CUDA graph there is nothing for it to prepare:

    seconds of a call = max(device, host)

Constants, in seconds where nothing else is said; the last ones, of a step or a sequence, are those of chunk_gla:

    host, host_launch          of the host for a call, and for chunk_gla more for each launch
    launch                     between the starts of two kernels
    bandwidth                  bytes a second
    start, hopper_start        before a block's first step, in chunk_gla.py and in Hopper's kernels
    hopper_step, hopper_tile   64 tokens in chunk_gla_hopper.py: of each step, and more for every 64 columns of keys
                               and of values
    tile_step, query_step      64 tokens in chunk_gla.py with bfloat16 products and K = 128; in proportion to K. More
                               for every further query of a group
    wide_step                  16 tokens in chunk_gla.py with bfloat16 products and K = 256
    wide_packed_step           the same where sequences are packed, and loaded without TMA
    tf32_step                  16 tokens in chunk_gla.py with TF32 products and K = 128
    token_step                 one token in chunk_gla.py without matrix units and K = 128
    gate_rate                  elements of k a second in the first kernel of chunk_gla_hopper_wide.py
    state_step                 64 tokens in its second
    shared                     blocks with tile_step that share a multiprocessor at no cost to each other
    ragged                     a packed sequence's incomplete chunk
    uneven                     tokens of the longest of packed sequences over their mean
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch

from gla_core.dispatch.backend import OpCall
from gla_triton_kernels.runtime.architecture import Gpu, architecture_of

Constants = Mapping[str, float]

HOPPER = 9.0
"""The compute capability that specialised kernels are written for."""
WORTH_WHOLE_CHUNKS = 96
"""As in chunk_gla_whole.py."""
CHUNK = 64


class Walk(NamedTuple):
    """How a kernel walks: tokens a step, columns of v a block, seconds before the first step and of each, blocks that
    share a multiprocessor.
    """

    tokens: int
    columns: int
    start: float
    step: float
    shared: float = 1


def gpu_of_constants(c: Constants) -> Gpu:
    """The GPU whose facts stand among the constants of a cost model, as plans ask for it."""
    major, minor = divmod(round(10 * c["compute_capability"]), 10)
    return Gpu(architecture_of(major, minor), int(c["multiprocessors"]))


def in_all(call: OpCall, device: float, host: float) -> float:
    """Seconds of a call that takes the device and the host so long."""
    return device if call.capturing else max(device, host)


def walk_seconds(
    call: OpCall, walk: Walk, sequences: float, length: float, size: float, c: Constants, longest: float = 1
) -> float:
    """Device seconds of a kernel that walks sequences, or segments, of chunk_gla.

    Args:
        length: tokens of each, on average. size: bytes that are moved. longest: times the average that the longest
            of packed ones has.
    """
    blocks = sequences * call.dims["H"] * math.ceil(call.dims["V"] / walk.columns)
    if call.variable_length:  # unequal blocks, in no order: all multiprocessors are busy until the last blocks run
        block = walk.start + c["ragged"] + length / walk.tokens * walk.step
        turns = max(longest, (blocks / c["multiprocessors"] + longest / 2) / walk.shared)
    else:
        block = walk.start + math.ceil(length / walk.tokens) * walk.step
        turns = max(1.0, math.ceil(blocks / c["multiprocessors"]) / walk.shared)
    return c["launch"] + max(turns * block, size / c["bandwidth"])


def whole_seconds(call: OpCall, c: Constants) -> float:
    """Seconds of a call whose sequences are walked whole; on Hopper, wide heads take two kernels.

    More than a chunk of tokens, but fewer than chunk_gla_whole.py asks for, take chunk_gla.py about as long as Hopper's
    kernel and count as that.
    """
    B, T, H, K, V, N = (call.dims[name] for name in ("B", "T", "H", "K", "V", "N"))
    mean, size = B * T / max(N, 1), chunk_gla_bytes(call)
    gated = call.gate_dtype is not None and not call.variable_length
    if gated and T >= WORTH_WHOLE_CHUNKS and hopper_suits(call, c, keys=range(129, 257)):
        gates = c["launch"] + B * T * H * K / c["gate_rate"]
        walk = Walk(CHUNK, 128 if V > 64 else 64, c["hopper_start"], c["state_step"])
        return in_all(call, gates + walk_seconds(call, walk, N, T, size, c), chunk_gla_host(2, c))
    walk = chunk_gla_walk(call, mean > CHUNK and hopper_suits(call, c), N, mean, c)
    return in_all(call, walk_seconds(call, walk, N, mean, size, c, c["uneven"]), chunk_gla_host(1, c))


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


def chunk_gla_walk(call: OpCall, hopper: bool, sequences: float, length: float, c: Constants) -> Walk:
    """How chunk_gla_hopper.py, or else chunk_gla.py, walks so many sequences; chunk_gla.py is more exact in itself."""
    H, Hq, K, V = (call.dims[name] for name in ("H", "Hq", "K", "V"))
    width = max(16, 1 << (K - 1).bit_length()) / 128
    if hopper:
        tiles = math.ceil(K / 64) + min(2, math.ceil(V / 64))
        return Walk(64, 128 if V > 64 else 64, c["hopper_start"], c["hopper_step"] + c["hopper_tile"] * tiles)
    if call.dtype == torch.float32 and call.float32_matmul_precision == "highest":
        return Walk(1, 32, c["start"], c["token_step"] * width, 2)
    if call.dtype != torch.bfloat16 or K <= 32 or (length <= 16 and K <= 128):
        return Walk(16, 32, c["start"], c["tf32_step"] * width, 2)
    if K > 128:
        step = c["wide_packed_step" if call.variable_length else "wide_step"]
        return Walk(16, 128, c["start"], step * width / 2)
    programs = sequences * H * math.ceil(V / 64)
    columns = 32 if programs <= 66 else 128 if programs >= 512 and width == 1 and V > 64 else 64
    step = c["tile_step"] + c["query_step"] * (Hq / max(H, 1) - 1)
    return Walk(64, columns, c["start"], step * width, c["shared"])
