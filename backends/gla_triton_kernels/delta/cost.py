"""Predicts the seconds of calls over sequences. ../cost.py explains the formula, and ../chunks/price.py the constants.

A chunk takes a block of each kernel that computes chunks in parallel. A pass takes the chunks of a segment one after
another. The times of blocks were measured on an H200 at K = V = 128.

B batch   T tokens   N sequences   H heads of q and k   Hv value heads   K, V key and value width
"""

from __future__ import annotations

from typing import NamedTuple

from gla_core.dispatch.backend import CHUNK, Constants, OpCall
from gla_core.dispatch.tensors import ceil_div
from gla_triton_kernels.chunks.cutting import most_segments, uncut_length
from gla_triton_kernels.chunks.price import gate_elements, gate_itemsize, longest
from gla_triton_kernels.cost import gpu_of_constants, in_all
from gla_triton_kernels.delta import backward, sm90
from gla_triton_kernels.delta.forward import plan_forward
from gla_triton_kernels.delta.plan import has_key_gates, plan_pass


class Seconds(NamedTuple):
    """Seconds of a chunk of a value head on a multiprocessor of an H200, with K = V = 128.

    Attributes:
        pairs: of general/pairs.py.
        gradients: of general/gradients.py: what does not grow with K or V, and the rest.
        whole: of a block of sm90/forward.py with one state warpgroup, and with two.
        pairs_sm90, gradients_sm90: of the kernels of the backward for SM90.
        scan_sm90: of a block of sm90/backward.py beside few others, or without results for each chunk; and of one
            beside blocks on all multiprocessors, whose results memory limits.
    """

    pairs: float
    gradients: tuple[float, float]
    whole: tuple[float, float]
    pairs_sm90: float
    scan_sm90: tuple[float, float]
    gradients_sm90: float


BY_KEY = Seconds(50e-6, (0.0, 140e-6), (3.6e-6, 5.5e-6), 7e-6, (3.05e-6, 4.75e-6), 18e-6)
BY_HEAD = Seconds(25e-6, (16e-6, 8.4e-6), (2.1e-6, 3.55e-6), 4.6e-6, (3.2e-6, 4.2e-6), 15.7e-6)
WIDE_SCAN = 4e-6
"""Seconds of a chunk of a block of sm90/backward.py with two parts of the keys."""
STEP = 6.3e-6
"""Seconds of a chunk of a pass of the general kernels with 128 values."""
SCAN = 4.1e-6
"""Seconds of a segment of a scan with 128 keys."""


def forward_seconds(call: OpCall, c: Constants, cut: bool) -> float:
    """Returns the seconds of a forward."""
    plan, kernel = plan_forward(call, gpu_of_constants(c), cut)
    if kernel is not None:
        launches = 1 if plan.length is None else 3
        return in_all(call, _by_sm90(call, c, plan.length), c["host"] + launches * c["host_launch"])
    return in_all(call, _chunks(call, c) + _pass(call, c, cut), c["host"] + 2 * c["host_launch"])


def backward_seconds(call: OpCall, c: Constants, cut: bool) -> float:
    """Returns the seconds of a backward; without checkpoints, there is a pass forwards as well."""
    passes = 1 if call.scalars.get("checkpoint_every") == CHUNK else 2
    planned, states = backward.plan(call, gpu_of_constants(c), cut), 0.0
    length = planned.states.length
    if passes == 2:
        states = _pass(call, c, cut) if planned.forward is None else _by_sm90(call, c, length)
    before = _passes_sm90(call, c, length) if planned.has_passes_by_sm90 else _chunks(call, c) + _pass(call, c, cut)
    gradients = _gradients_sm90(call, c) if planned.refusal is None else _gradients(call, c)
    launches = 3 + passes * (1 if length is None or not planned.has_passes_by_sm90 else 3)
    return in_all(call, states + before + gradients, c["host"] + launches * c["host_launch"])


def _by_sm90(call: OpCall, c: Constants, length: int | None) -> float:
    """Returns the device seconds of sm90/forward.py, with the launches before it if sequences are cut.

    Args:
        length: tokens of a segment; None if sequences stay whole.
    """
    B, T, H, Hv, K, V = (call.dims[name] for name in ("B", "T", "H", "Hv", "K", "V"))
    kernel = sm90.parameters(call, gpu_of_constants(c), length)
    step = c["step"] * _seconds(call).whole[kernel.groups - 1] * (1 + kernel.BK / sm90.TILE) / 2
    moved = 2 * B * T * (H * K + Hv * V) * call.dtype.itemsize + gate_elements(call) * gate_itemsize(call)

    def seconds(columns: int) -> float:
        return max(_chunks_in_turn(call, c, length, columns) * step, moved / c["bandwidth"])

    outputs, transitions = ceil_div(V, kernel.columns), ceil_div(K, kernel.columns)
    return c["launch"] + seconds(outputs) + _before(call, c, length, seconds(outputs + transitions))


def _before(call: OpCall, c: Constants, length: int | None, summaries: float) -> float:
    """Returns the device seconds of the launches before a pass over segments; 0 if sequences stay whole.

    Args:
        length: tokens of a segment; None if sequences stay whole.
        summaries: seconds of the summaries of all segments.
    """
    if length is None:
        return 0.0
    is_cut = not call.variable_length or _tokens(call) > uncut_length(length)
    return 2 * c["launch"] + (summaries + _scan(_tokens(call) / length, call.dims["K"]) if is_cut else 0.0)


def _chunks_in_turn(call: OpCall, c: Constants, length: int | None, columns: int) -> float:
    """Returns the number of chunks that a multiprocessor computes one after the other.

    Args:
        length: tokens of a segment; None if sequences stay whole.
        columns: the blocks of warps of a segment and head.
    """
    T, N, blocks = call.dims["T"], call.dims["N"], call.dims["Hv"] * columns
    if length is None:
        return ceil_div(N * blocks, int(c["multiprocessors"])) * _tokens(call) / CHUNK
    if call.variable_length:  # many segments are shorter
        return max(min(length, _tokens(call)), T * blocks / c["multiprocessors"]) / CHUNK
    segments = most_segments(N, T, length, False)
    return ceil_div(segments * blocks, int(c["multiprocessors"])) * length / CHUNK


def _tokens(call: OpCall) -> float:
    """Returns the tokens of the longest sequence."""
    return longest(call) if call.variable_length else call.dims["T"]


def _scan(segments: float, K: int) -> float:
    """Returns the device seconds of a scan over the segments of a sequence."""
    return segments * SCAN * K / 128


def _passes_sm90(call: OpCall, c: Constants, length: int | None) -> float:
    """Returns the device seconds of backward_pairs.py and backward.py for SM90; `length` as in `_by_sm90`."""
    step, share, parts = _seconds(call), _share_of_chunks(call, c), ceil_div(call.dims["K"], sm90.TILE)
    blocks = ceil_div(call.dims["V"], sm90.TILE // parts)  # of values
    least, most = step.scan_sm90 if parts == 1 else (WIDE_SCAN, 0.0)
    passes, summaries = (_chunks_in_turn(call, c, length, n) * least for n in (blocks, blocks + 1))
    seconds = step.pairs_sm90 * share + max(passes, most * share * blocks)
    return 2 * c["launch"] + c["step"] * seconds + _before(call, c, length, c["step"] * summaries)


def _gradients_sm90(call: OpCall, c: Constants) -> float:
    """Returns the device seconds of sm90/gradients.py."""
    return 2 * c["launch"] + c["step"] * _seconds(call).gradients_sm90 * _share_of_chunks(call, c)


def _gradients(call: OpCall, c: Constants) -> float:
    """Returns the device seconds of general/gradients.py.

    With a gate for each key, halves of pairs take most of them, which do not grow with V.
    """
    K, V = call.dims["K"], call.dims["V"]
    fixed, growing = _seconds(call).gradients
    seconds = fixed * 128 / K + growing * (1.0 if has_key_gates(call) else V / 128)
    return 2 * c["launch"] + c["step"] * seconds * _share_of_chunks(call, c)


def _seconds(call: OpCall) -> Seconds:
    return BY_KEY if has_key_gates(call) else BY_HEAD


def _share_of_chunks(call: OpCall, c: Constants) -> float:
    """Returns the chunks of all heads that a multiprocessor computes, in units of 128 keys."""
    B, T, Hv, K = (call.dims[name] for name in ("B", "T", "Hv", "K"))
    return B * ceil_div(T, CHUNK) * Hv * K / 128 / c["multiprocessors"]


def _chunks(call: OpCall, c: Constants) -> float:
    """Returns the device seconds of pairs.py."""
    B, T, H, Hv, K = (call.dims[name] for name in ("B", "T", "H", "Hv", "K"))
    written = 3 * Hv if has_key_gates(call) else 2 * H  # heads of the operands
    heads = 2 * H + written  # of q and k, which are read, and of the operands
    moved = B * T * (heads * K * call.dtype.itemsize + 4 * Hv * CHUNK) + gate_elements(call) * gate_itemsize(call)
    seconds = _seconds(call).pairs * _share_of_chunks(call, c)
    return c["launch"] + max(c["step"] * seconds, moved / c["bandwidth"])


def _pass(call: OpCall, c: Constants, cut: bool) -> float:
    """Returns the device seconds of a pass over sequences, with the launches before it if they are cut."""
    T, N, Hv, K, V = (call.dims[name] for name in ("T", "N", "Hv", "K", "V"))
    planned = plan_pass(call, gpu_of_constants(c), cut)
    tokens = longest(call) if call.variable_length else T
    step = c["step"] * STEP * max(K, 64) / 128
    waves = N * Hv * V / 128 / c["multiprocessors"]
    if planned.length is None:
        return c["launch"] + max(1.0, waves) * tokens / CHUNK * step
    segments = tokens / planned.length
    widths = (2 * V + K) / V  # outputs, states and transitions
    passes = max(1.0, waves * segments) * planned.length / CHUNK * step * widths
    return 4 * c["launch"] + passes + _scan(segments, K)
