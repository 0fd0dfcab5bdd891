"""Predicts the seconds of a kernel that goes through segments or whole sequences; ../cost.py has the formula of a call.

    seconds = launch + max(step * waves of blocks * time of a block on an H200, bytes / bandwidth)

Constants of a device, in seconds unless their line says otherwise:

    launch       between the starts of two kernels
    bandwidth    bytes per second
    step         time of a block, as a multiple of its time on an H200

The times of blocks are in the values of kernels: seconds on an H200.

B batch   T tokens   N sequences   H key heads   Hq query heads   Hv value heads   Ho heads of o, the more of Hq and Hv
K, V key and value width
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, TypeVar

from gla_core.dispatch.backend import Constants, OpCall
from gla_core.dispatch.tensors import ceil_div, checkpoint_dtype
from gla_triton_kernels import MAX_WIDTH

AnyPlan = TypeVar("AnyPlan")
Prices = list[float]
"""The device seconds of each kernel of a plan."""
PriceFunction = Callable[[OpCall, AnyPlan, Constants], Prices]
"""A function that takes a call, its plan, and the constants of a device."""

SCAN_STEP = 8e-8
"""Seconds of scan.py for each segment of a sequence, on an H200."""
RAGGED = 5e-6
"""Seconds of a block for the incomplete chunk of a packed sequence, on an H200."""


class BlockTime(NamedTuple):
    """The work and the time of a block of a kernel, on an H200.

    Attributes:
        tokens: tokens of a step.
        columns: columns of v of a block.
        start: seconds before the first step.
        step: seconds of a step.
        shared: number of blocks that share a multiprocessor without slowing each other down.
        keys: keys of a block; `MAX_WIDTH` stands for all keys of a head.
        even: whether all multiprocessors get the same share of the work.
    """

    tokens: int
    columns: int
    start: float
    step: float
    shared: float = 1
    keys: int = MAX_WIDTH
    even: bool = False


class Heads(NamedTuple):
    """The number of heads of tensors of width K, and the number of heads of tensors of width V."""

    keys: int
    values: int


class Cut(NamedTuple):
    """The segments of a call: their number, their mean length, and the length of the longest segment, in tokens."""

    number: float
    mean: float
    longest: float


def whole(call: OpCall) -> Cut:
    """Returns the sequences of a call as segments."""
    T, N = call.dims["T"], max(call.dims["N"], 1)
    return Cut(N, T / N, longest(call)) if call.variable_length else Cut(N, T, T)


def cut(call: OpCall, length: int, uncut: int) -> Cut:
    """Returns the segments of `length` tokens of a call; packed sequences of up to `uncut` tokens stay whole."""
    T, N = max(call.dims["T"], 1), call.dims["N"]
    if not call.variable_length:
        return Cut(N * ceil_div(T, length), length, length)
    if longest(call) <= uncut:
        return whole(call)
    # The last segment of a packed sequence is shorter than the others: about half as long if sequences are long.
    number = max(N, T / length + N / 2)
    return Cut(number, T / number, min(length, longest(call)))


def longest(call: OpCall) -> float:
    """Returns the tokens of the longest packed sequence; if no bound is known, 1.5 times the mean."""
    T, N = call.dims["T"], max(call.dims["N"], 1)
    return min(T, 1.5 * T / N) if call.longest is None else max(min(T, call.longest), T / N)


def kernel_seconds(call: OpCall, block: BlockTime, segments: Cut, size: float, c: Constants) -> float:
    """Returns the device seconds of a kernel that goes through segments and moves `size` bytes."""
    Hv, K, V = (call.dims[name] for name in ("Hv", "K", "V"))
    blocks = segments.number * Hv * ceil_div(K, block.keys) * ceil_div(V, block.columns)
    if call.variable_length:  # the longest blocks start first, so all multiprocessors are busy until short blocks run
        mean, most = (
            block.start + RAGGED + tokens / block.tokens * block.step for tokens in (segments.mean, segments.longest)
        )
        seconds = max(most, (blocks / c["multiprocessors"] + 0.5) * mean / block.shared)
    else:
        waves = blocks / c["multiprocessors"]
        waves = max(1.0, (waves if block.even else math.ceil(waves)) / block.shared)
        seconds = waves * (block.start + math.ceil(segments.mean / block.tokens) * block.step)
    return c["launch"] + max(seconds * c["step"], size / c["bandwidth"])


def states_seconds(
    call: OpCall, length: int, uncut: int, heads: Heads, block: BlockTime, moved: int, ends: bool, c: Constants
) -> list[float]:
    """Returns the device seconds of the launch that computes the states of segments, and of the launch that scans them.

    Args:
        length, uncut: see `cut`.
        heads: numbers of heads of the keys and of the values that are read.
        moved: bytes that are read and written for each element of a state, in total.
        ends: whether final states are needed. If so, all sequences are scanned; otherwise only cut sequences.
    """
    B, T, Hv, K, V, N = (call.dims[name] for name in ("B", "T", "Hv", "K", "V", "N"))
    pieces = cut(call, length, uncut)
    built = pieces if ends else Cut(pieces.number - N, length, length)  # without `ends`, only followed segments
    scanned = built.number if call.variable_length else pieces.number
    read = token_bytes(call, heads) * min(1, built.number * built.mean / max(B * T, 1))
    build = kernel_seconds(call, block, built, read, c) if built.number else c["launch"]
    in_a_row = longest(call) / length if call.variable_length else pieces.number / max(N, 1)
    scan = c["launch"] + in_a_row * SCAN_STEP * c["step"] + moved * scanned * Hv * K * V / c["bandwidth"]
    return [build, scan]


def moved_bytes(call: OpCall) -> float:
    """Returns the bytes of q, k, v, g, o or do, of initial and final states, and of returned checkpoints."""
    H, Hq, Hv, K, V, N = (call.dims[name] for name in ("H", "Hq", "Hv", "K", "V", "N"))
    states = 2 * N * Hv * K * V * 4 if call.state_dtype else 0
    checkpoints = checkpoint_bytes(call, call.scalars["checkpoint_every"]) if call.checkpoints else 0
    return token_bytes(call, Heads(Hq + H, max(Hq, Hv) + Hv)) + states + checkpoints


def token_bytes(call: OpCall, heads: Heads) -> int:
    """Returns the bytes of gates, and of tensors of width K and V with these numbers of heads."""
    B, T, K, V = (call.dims[name] for name in ("B", "T", "K", "V"))
    return B * T * (heads.keys * K + heads.values * V) * call.dtype.itemsize + gate_elements(call) * gate_itemsize(call)


def checkpoint_bytes(call: OpCall, every: int) -> float:
    """Returns the bytes of checkpoints every `every` tokens."""
    B, T, Hv, K, V = (call.dims[name] for name in ("B", "T", "Hv", "K", "V"))
    return B * T / every * Hv * K * V * checkpoint_dtype(call.dtype).itemsize


def queries_of_state(call: OpCall) -> float:
    """Returns the number of query heads that read a state: the query heads of a group, or 1."""
    return max(call.dims["Hq"] / max(call.dims["Hv"], 1), 1.0)


def gate_elements(call: OpCall) -> int:
    """Returns the number of elements of g, by the form of gates; 0 without gates."""
    B, T, Hv, K = (call.dims[name] for name in ("B", "T", "Hv", "K"))
    if call.gate_dtype is None:
        return 0
    return {"constant": Hv, "head": B * T * Hv}.get(call.gate_form or "key", B * T * Hv * K)


def gate_itemsize(call: OpCall) -> int:
    """Returns the bytes of a gate; 0 without gates."""
    return call.gate_dtype.itemsize if call.gate_dtype else 0
