"""Kernels of the delta rule for Hopper (SM90), with specialised warps. Planning imports no Triton.

    forward.py    outputs, states and checkpoints in one pass, and the summaries of segments
    common.py     device functions: decays of blocks, their pairs, and the solve

    backward_calls.py     the calls that the backward computes
    backward_pairs.py     what a chunk needs beside the gradient of the state, for all chunks in parallel
    backward.py           gradients of states, and of v, in one pass backwards
    gradients.py          the other gradients, for all chunks in parallel
    backward_blocks.py    pairs within blocks whose gates are too strong for the other two
    common_backward.py    layouts, descriptors and device functions of these

B batch   T tokens   H heads of q and k   Hv value heads   K, V key and value width
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from gla_core.dispatch.backend import CHUNK, Layout, OpCall, Reason, contiguous_layout
from gla_core.dispatch.tensors import ceil_div
from gla_triton_kernels.delta.plan import FEW, has_key_gates, tokens_of_segment
from gla_triton_runtime.architecture import Gpu
from gla_triton_runtime.tma import addressable

COLUMNS = 64
"""The values of a state warpgroup."""
MOST_STAGES = 4
RESERVED = 2**10
"""The bytes of shared memory for barriers and small tiles, for each preparing warpgroup."""
LEAST, MOST_KEYS, MOST_VALUES = FEW + 1, 256, 512
"""The fewest keys and values of a head, the most keys, and the most values."""
TILE = 128
"""The most keys of a tile, and of a head with a gate for each key."""
LEAST_SEGMENTS = 6
"""The fewest segments of a sequence that is cut: summaries take twice as long as outputs."""


class Parameters(NamedTuple):
    """Launch parameters of the forward.

    Attributes:
        BK: keys of a tile.
        groups: state warpgroups of a block of warps, 1 or 2. The bits of the results do not depend on it.
        stages: number of pipeline stages: chunks that are in shared memory at once.
        stages_of_states: the same for launches that compute states and no outputs.
        parts: tiles of keys of a head. If there are two, so are the groups, and each has one of them.
        BT: tokens of a block, whose results the next block waits for: 16 or 32.
    """

    BK: int
    groups: int
    stages: int = 2
    stages_of_states: int = 2
    parts: int = 1
    BT: int = 16

    @property
    def columns(self) -> int:
        """Returns the values of a block of warps."""
        return self.groups // self.parts * COLUMNS

    @property
    def turns(self) -> int:
        """Returns the number of warpgroups that prepare chunks in turns."""
        return 2 if self.groups == 1 and self.BT == 32 else 1


def refusal_of_kind(call: OpCall, gpu: Gpu) -> Reason | None:
    """Returns the reason why no kernel for SM90 computes calls of this dtype on this GPU, or None."""
    if not gpu.facts.has_wgmma:
        return f"needs Hopper (compute capability 9.0); the GPU is of the kind {gpu.facts.known_as}"
    if call.dtype != torch.bfloat16:
        return f"computes bfloat16; q is {str(call.dtype).removeprefix('torch.')}"
    return None


def refusal(call: OpCall, gpu: Gpu) -> Reason | None:
    """Returns the reason why the forward for SM90 cannot compute a call, or None."""
    if (reason := refusal_of_kind(call, gpu)) is not None:
        return reason
    K, V = call.dims["K"], call.dims["V"]
    most = TILE if has_key_gates(call) else MOST_KEYS
    if not (LEAST <= K <= most and LEAST <= V <= MOST_VALUES):
        return f"computes K from {LEAST} to {most} and V from {LEAST} to {MOST_VALUES}; K is {K} and V is {V}"
    if (every := call.scalars.get("checkpoint_every")) is not None and every % CHUNK:
        return f"computes checkpoints every multiple of {CHUNK} tokens; checkpoint_every is {every}"
    if (name := _not_addressable(call)) is not None:
        return f"needs tensors that TMA can address: addresses and strides are multiples of 16 bytes; {name} is not one"
    return None


def copied(call: OpCall) -> frozenset[str]:
    """Returns the names of tensors that are copied so that TMA can address them, under batch invariance.

    The results of a sequence would otherwise depend on the addresses of tensors.
    """
    if call.batch_invariant is None:
        return frozenset()
    return frozenset(name for name, layout in moved_by_tma(call).items() if not addressable(layout))


def cut_length(call: OpCall, gpu: Gpu, cut: bool) -> int | None:
    """Returns the tokens of a segment; None if sequences stay whole.

    Args:
        cut: whether to cut sequences into segments if they do not fill the device.
    """
    if not cut:
        return None
    columns = COLUMNS if call.dims["V"] <= COLUMNS else 2 * COLUMNS
    return tokens_of_segment(call, gpu, columns, LEAST_SEGMENTS)


def parameters(call: OpCall, gpu: Gpu, length: int | None = None) -> Parameters:
    """Returns the launch parameters of the forward.

    A block of warps takes 64 values if twice as many blocks can run at once, because the state warpgroups of a
    multiprocessor wait for each other.

    Args:
        length: tokens of a segment; None if sequences stay whole.
    """
    K, V, heads = call.dims["K"], call.dims["V"], call.dims["N"] * call.dims["Hv"]
    if length is not None:
        heads *= ceil_div(call.dims["T"], length)
    BT = tokens_of_block(has_key_gates(call))
    if K > TILE:
        kernel = Parameters(TILE, groups=2, parts=2, BT=BT)
    else:
        single = V <= COLUMNS or heads * ceil_div(V, COLUMNS) <= gpu.multiprocessors
        kernel = Parameters(64 if K <= 64 else TILE, 1 if single else 2, BT=BT)
    stages, stages_of_states = (_stages(call, gpu, kernel, has_outputs) for has_outputs in (True, False))
    return kernel._replace(stages=stages, stages_of_states=stages_of_states)


def tokens_of_block(by_key: bool) -> int:
    """Returns the tokens of a block. It does not depend on the batch, because the bits of the results depend on it."""
    return 16 if by_key else 32


def _stages(call: OpCall, gpu: Gpu, kernel: Parameters, has_outputs: bool) -> int:
    """Returns the pipeline stages that fit into shared memory, at most `MOST_STAGES`.

    A stage is taken from the start of its load until the state warps have read it, and they take less than half of this
    time. So with two stages they wait.
    """
    BK, groups, parts, BT, by_key = kernel.BK, kernel.groups, kernel.parts, kernel.BT, has_key_gates(call)
    keys, values = parts * CHUNK * BK * 2, CHUNK * COLUMNS * 2  # bytes
    matrices = CHUNK * 4 * (32 if BT == 16 else 56)  # A and L
    tiles = (3 if by_key else 1) + has_outputs  # of keys
    stage = tiles * keys + groups // parts * values + matrices + 4 * (4 * BK if by_key else 2 * CHUNK)
    results = groups * values * (BK // CHUNK if call.scalars.get("checkpoint_every") or parts == 2 else 1)
    return min(MOST_STAGES, (gpu.facts.shared_memory - RESERVED * kernel.turns - results) // stage)


def _not_addressable(call: OpCall) -> str | None:
    """Returns the name of a tensor that TMA cannot address; None if TMA can address all of them, or copies of them."""
    moved = moved_by_tma(call)
    if call.batch_invariant is not None:
        moved = {name: contiguous_layout(layout.shape, layout.dtype) for name, layout in moved.items()}
    return next((name for name, layout in moved.items() if not addressable(layout)), None)


def moved_by_tma(call: OpCall) -> dict[str, Layout]:
    """Returns the layouts of the tensors that TMA moves. One that is not known counts as contiguous.

    TMA moves gates only if each key has its own.
    """
    B, T, H, Hv, K, V = (call.dims[name] for name in ("B", "T", "H", "Hv", "K", "V"))
    shapes = {"q": (B, T, H, K), "k": (B, T, H, K), "v": (B, T, Hv, V)}
    layouts = {name: call.layouts.get(name) or contiguous_layout(shape, call.dtype) for name, shape in shapes.items()}
    if call.gate_dtype is not None and has_key_gates(call):
        layouts["g"] = call.layouts.get("g") or contiguous_layout((B, T, Hv, K), call.gate_dtype)
    return layouts
