"""Predicts the seconds of calls over sequences. ../cost.py explains the formula, and ../chunks/price.py the constants.

A chunk takes a block of each kernel that computes chunks in parallel. A pass takes the chunks of a segment one after
another. The times of blocks are estimates from the instructions of the kernels; they were not measured.

B batch   T tokens   N sequences   H heads of q and k   Hv value heads   K, V key and value width
"""

from __future__ import annotations

from gla_core.dispatch.backend import CHUNK, Constants, OpCall
from gla_core.dispatch.tensors import ceil_div
from gla_triton_kernels.chunks.price import gate_elements, gate_itemsize, longest
from gla_triton_kernels.cost import gpu_of_constants, in_all
from gla_triton_kernels.delta import sm90
from gla_triton_kernels.delta.plan import plan_pass

CHUNK_OF_KEY_GATES, CHUNK_OF_HEAD_GATES, STEP, GRADIENTS = 6e-6, 3e-6, 2.5e-6, 16e-6
"""Seconds of a chunk of a head with K = V = 128 on a multiprocessor of an H200: of pairs.py with a gate for each key
and without, of a pass with 128 values, and of gradients.py."""
WHOLE_BY_KEY, WHOLE_BY_HEAD = 3.2e-6, 2e-6
"""Seconds of a chunk of sm90/forward.py with a gate for each key, and without."""


def forward_seconds(call: OpCall, c: Constants, cut: bool) -> float:
    """Returns the seconds of a forward."""
    gpu = gpu_of_constants(c)
    if sm90.refusal(call, gpu) is None and plan_pass(call, gpu, cut).length is None:
        return in_all(call, _whole(call, c), c["host"] + c["host_launch"])
    return in_all(call, _chunks(call, c) + _pass(call, c, cut), c["host"] + 2 * c["host_launch"])


def backward_seconds(call: OpCall, c: Constants, cut: bool) -> float:
    """Returns the seconds of a backward; without checkpoints, it makes a pass forwards as well."""
    passes = 1 if call.scalars.get("checkpoint_every") == CHUNK else 2
    gradients = 2 * c["launch"] + c["step"] * GRADIENTS * _share_of_chunks(call, c)
    device = _chunks(call, c) + passes * _pass(call, c, cut) + gradients
    return in_all(call, device, c["host"] + (3 + passes) * c["host_launch"])


def _whole(call: OpCall, c: Constants) -> float:
    """Returns the device seconds of sm90/forward.py."""
    B, T, N, H, Hv, K, V = (call.dims[name] for name in ("B", "T", "N", "H", "Hv", "K", "V"))
    groups = sm90.parameters(call, gpu_of_constants(c)).groups
    blocks = N * Hv * ceil_div(V, groups * sm90.COLUMNS)
    chunks = (longest(call) if call.variable_length else T) / CHUNK
    step = WHOLE_BY_KEY if sm90.has_key_gates(call) else WHOLE_BY_HEAD
    moved = 2 * B * T * (H * K + Hv * V) * call.dtype.itemsize + gate_elements(call) * gate_itemsize(call)
    waves = ceil_div(blocks, int(c["multiprocessors"]))
    return c["launch"] + max(c["step"] * waves * chunks * step, moved / c["bandwidth"])


def _share_of_chunks(call: OpCall, c: Constants) -> float:
    """Returns the chunks of all heads that a multiprocessor computes, in units of 128 keys."""
    B, T, Hv, K = (call.dims[name] for name in ("B", "T", "Hv", "K"))
    return B * ceil_div(T, CHUNK) * Hv * K / 128 / c["multiprocessors"]


def _chunks(call: OpCall, c: Constants) -> float:
    """Returns the device seconds of pairs.py."""
    B, T, H, Hv, K = (call.dims[name] for name in ("B", "T", "H", "Hv", "K"))
    by_key = call.gate_form in (None, "key") and call.gate_dtype is not None
    heads = 2 * H + (3 * Hv if by_key else 2 * H)  # of q and k, which are read, and of the operands, which are written
    moved = B * T * (heads * K * call.dtype.itemsize + 4 * Hv * CHUNK) + gate_elements(call) * gate_itemsize(call)
    seconds = (CHUNK_OF_KEY_GATES if by_key else CHUNK_OF_HEAD_GATES) * _share_of_chunks(call, c)
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
    scan = segments * 2 * K * K * 16 / 1e12  # products with 16 values by a block
    return 4 * c["launch"] + max(1.0, waves * segments) * planned.length / CHUNK * step * widths + scan
