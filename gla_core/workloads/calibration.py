"""The calls that `gla calibrate` measures for each op and type of device, from little more than a launch to large ones.

Sizes are powers of two. The grid that judges selection (benchmarks/selection.py) has none of these calls.
"""

from __future__ import annotations

import dataclasses

import torch

from gla_core.dispatch.backend import CHUNK, OpCall
from gla_core.ops import ABSTRACT_OPS

Sizes = tuple[int, ...]

# B, T, H, K, V, and N if sequences are packed along T
_CHUNK_CUDA: tuple[Sizes, ...] = (
    *((B, 1, H, 128, 128) for B, H in ((1, 32), (8, 16))),
    *((1, T, 16, 128, 128) for T in (256, 1024, 16384)),
    *((1, T, 4, 128, 128) for T in (64, 4096, 65536)),
    *((B, T, 16, 128, 128) for B, T in ((4, 256), (4, 4096), (8, 512), (8, 8192))),
    *((16, T, 32, 128, 128) for T in (64, 2048)),
    (1, 1024, 1, 128, 128),
    (1, 131072, 8, 128, 128),
    *((B, T, 8, 64, 64) for B, T in ((1, 1024), (1, 16384), (32, 1024))),
    *((B, T, 4, 256, 256) for B, T in ((1, 1024), (1, 16384), (8, 2048))),
    (1, 65536, 8, 64, 128),
    (32, 1024, 8, 128, 64),
    *((1, T, 8, 128, 128, N) for T, N in ((1024, 16), (16384, 64), (65536, 4))),
    *((1, T, 2, 128, 128, N) for T, N in ((4096, 2), (65536, 256))),
    (1, 16384, 4, 256, 256, 16),
    (1, 65536, 4, 64, 64, 4),
)
_BACKWARD_CUDA: tuple[Sizes, ...] = (
    *((1, T, 4, 128, 128) for T in (1, 256, 1024, 16384)),
    *((1, T, 8, 128, 128) for T in (8192, 65536)),
    *((B, T, 16, 128, 128) for B, T in ((2, 4096), (8, 64), (8, 1024), (8, 8192))),
    (16, 1024, 32, 128, 128),
    (1, 131072, 1, 128, 128),
    *((B, T, 8, 64, 64) for B, T in ((1, 1024), (8, 2048))),
    *((B, 2048, 4, 256, V) for B, V in ((1, 256), (8, 512))),
    *((1, T, 8, 128, 128, N) for T, N in ((4096, 4), (65536, 64))),
    (1, 2048, 16, 128, 128, 64),
    (1, 16384, 8, 64, 64, 16),
)
_CHUNK_CPU: tuple[Sizes, ...] = (
    (1, 1, 2, 64, 64),
    (1, 16, 4, 64, 64),
    (8, 16, 4, 32, 32),
    (1, 64, 2, 64, 64),
    (1, 64, 8, 128, 128),
    (1, 256, 1, 64, 64),
    (4, 256, 4, 64, 64),
    (1, 1024, 1, 64, 64),
    (1, 1024, 4, 64, 64),
    (1, 1024, 2, 128, 128),
    (1, 512, 2, 128, 256),
    (1, 4096, 1, 64, 64),
    (1, 8192, 1, 32, 32),
    (1, 1, 32, 128, 128),
    (1, 32, 16, 128, 128),
    (4, 32, 8, 128, 64),
    (1, 256, 4, 256, 256),
    (1, 256, 32, 64, 64),
    (1, 2048, 8, 128, 64),
    (2, 2048, 4, 64, 128),
    (8, 512, 8, 64, 64),
    (4, 1024, 8, 128, 128),
    (1, 1024, 4, 64, 64, 8),
    (1, 2048, 2, 64, 64, 64),
    (1, 512, 2, 256, 256, 8),
    (1, 1024, 4, 128, 128, 32),
)
_SUMMARY_CUDA: tuple[Sizes, ...] = (
    *((1, T, H, 128, 128) for T in (16, 4096, 65536) for H in (1, 16)),
    *((8, T, 16, 128, 128) for T in (64, 2048, 8192)),
    *((B, T, 8, 64, 64) for B, T in ((1, 16384), (32, 1024))),
    *((B, T, 4, 256, 256) for B, T in ((1, 1024), (8, 2048))),
    *((1, T, 8, 128, 128, N) for T, N in ((1024, 16), (65536, 4), (65536, 64))),
)
# B, T, H, K, V, N
_POOL_CUDA: tuple[Sizes, ...] = (
    *((1, T, 64, 128, 128, N) for T, N in ((512, 1), (8192, 1), (8192, 16), (1024, 64))),
    *((1, T, 16, 128, 128, N) for T, N in ((64, 1), (1024, 16), (16384, 4))),
    *((1, T, 4, 128, 128, N) for T, N in ((4096, 64), (65536, 4))),
    (1, 16384, 8, 64, 64, 16),
    (1, 2048, 4, 256, 256, 4),
)
_POOL_CPU: tuple[Sizes, ...] = (
    (1, 1, 2, 64, 64, 1),
    (1, 32, 4, 64, 64, 2),
    (1, 64, 8, 128, 128, 4),
    (1, 256, 4, 64, 64, 1),
    (1, 512, 2, 128, 256, 8),
    (1, 1024, 4, 64, 64, 8),
    (1, 2048, 2, 64, 64, 64),
    (1, 2048, 8, 128, 64, 2),
    (1, 4096, 4, 128, 128, 16),
)
# B, H, K, V
_STEP_CUDA: tuple[Sizes, ...] = (
    *((B, 16, 128, 128) for B in (1, 4, 16, 64, 256, 1024)),
    *((B, 4, 128, 128) for B in (1, 64)),
    *((B, 16, 64, 64) for B in (1, 256)),
    *((B, 4, 256, 256) for B in (1, 16, 256)),
)
_STEP_CPU: tuple[Sizes, ...] = (
    (1, 1, 64, 64),
    (1, 4, 64, 64),
    (4, 4, 64, 64),
    (16, 4, 64, 64),
    (4, 8, 128, 128),
    (64, 4, 128, 128),
)
# rows, columns
_SOFTMAX_CUDA: tuple[Sizes, ...] = (
    *((rows, columns) for rows in (1, 16, 128, 1024, 8192) for columns in (256, 2048, 16384, 131072)),
    *((rows, 2**20) for rows in (1, 16, 128, 512)),
    *((rows, 2**24) for rows in (1, 4, 16)),
)
_SOFTMAX_CPU: tuple[Sizes, ...] = ((1, 128), (1, 16384), (1, 2**18), (64, 64), (64, 4096), (1024, 1024), (4096, 32))
# B, Tq, Tk, H, K, V
_ATTENTION_CUDA: tuple[Sizes, ...] = (
    *((B, 1, Tk, 16, 128, 128) for B, Tk in ((1, 64), (1, 1024), (1, 8192), (1, 65536), (1, 131072), (16, 2048))),
    *((B, 1, Tk, 2, 128, 128) for B, Tk in ((1, 16384), (1, 131072), (64, 4096))),
    *((B, T, T, 16, 128, 128) for B, T in ((1, 64), (1, 512), (1, 2048), (1, 8192), (4, 2048), (16, 1024))),
    *((B, T, T, 8, 64, 64) for B, T in ((1, 256), (4, 1024), (1, 4096))),
    *((1, Tq, Tk, 8, 128, 128) for Tq, Tk in ((16, 4096), (16, 65536), (256, 16384))),
    (1, 1, 16384, 8, 256, 256),
    (1, 1024, 1024, 8, 256, 256),
)
_ATTENTION_CPU: tuple[Sizes, ...] = (
    (1, 1, 64, 2, 64, 64),
    (1, 1, 1024, 4, 64, 64),
    (1, 1, 16384, 2, 64, 64),
    (1, 64, 64, 4, 64, 64),
    (1, 256, 256, 4, 64, 64),
    (1, 512, 512, 2, 128, 128),
    (4, 128, 128, 4, 32, 32),
)

# B, T, H, K, V, P
_STEPS_CUDA: tuple[Sizes, ...] = (
    *((B, 4, 64, 128, 128, 4 * B) for B in (1, 4, 16, 64, 128)),
    *((B, 2, 16, 128, 128, 2 * B) for B in (1, 64, 512)),
    *((B, 8, 8, 64, 64, 8 * B) for B in (1, 64)),
)
_STEPS_CPU: tuple[Sizes, ...] = (
    (1, 1, 2, 64, 64, 1),
    (4, 2, 2, 64, 64, 8),
    (2, 4, 8, 128, 128, 8),
    (16, 4, 4, 64, 64, 64),
    (8, 8, 4, 128, 128, 64),
)
# B, T, H, K, V, L
_REPLAY_CUDA: tuple[Sizes, ...] = (
    *((B, 4, 64, 128, 128, 8) for B in (1, 4, 16, 64, 128)),
    *((B, 2, 16, 128, 128, 4) for B in (1, 64, 512)),
    *((B, 8, 8, 64, 64, 16) for B in (1, 64)),
)
_REPLAY_CPU: tuple[Sizes, ...] = (
    (1, 1, 2, 64, 64, 2),
    (4, 2, 2, 64, 64, 4),
    (2, 4, 8, 128, 128, 8),
    (16, 4, 4, 64, 64, 8),
    (8, 8, 4, 128, 128, 16),
)
_SIZES = {
    "chunk_gla_fwd": {"cuda": _CHUNK_CUDA, "cpu": _CHUNK_CPU},
    "chunk_gla_bwd": {"cuda": _BACKWARD_CUDA, "cpu": _CHUNK_CPU},
    "chunk_gla_pool": {"cuda": _POOL_CUDA, "cpu": _POOL_CPU},
    "chunk_gla_summary": {"cuda": _SUMMARY_CUDA, "cpu": _CHUNK_CPU},
    "recurrent_gla_step": {"cuda": _STEP_CUDA, "cpu": _STEP_CPU},
    "recurrent_gla_layer_step": {"cuda": _STEP_CUDA, "cpu": _STEP_CPU},
    "recurrent_gla_steps": {"cuda": _STEPS_CUDA, "cpu": _STEPS_CPU},
    "recurrent_gla_replay": {"cuda": _REPLAY_CUDA, "cpu": _REPLAY_CPU},
    "online_softmax": {"cuda": _SOFTMAX_CUDA, "cpu": _SOFTMAX_CPU},
    "softmax_attention": {"cuda": _ATTENTION_CUDA, "cpu": _ATTENTION_CPU},
}
_NAMES = {
    "chunk_gla_fwd": ("B", "T", "H", "K", "V", "N"),
    "chunk_gla_bwd": ("B", "T", "H", "K", "V", "N"),
    "chunk_gla_pool": ("B", "T", "H", "K", "V", "N"),
    "chunk_gla_summary": ("B", "T", "H", "K", "V", "N"),
    "recurrent_gla_step": ("B", "H", "K", "V"),
    "recurrent_gla_layer_step": ("B", "H", "K", "V"),
    "recurrent_gla_steps": ("B", "T", "H", "K", "V", "P"),
    "recurrent_gla_replay": ("B", "T", "H", "K", "V", "L"),
    "online_softmax": ("rows", "columns"),
    "softmax_attention": ("B", "Tq", "Tk", "H", "K", "V"),
}
# Calls for other kernels of the same op, on a CUDA device: sizes, dtype, query heads per key/value head
_OTHERS: dict[str, tuple[tuple[Sizes, torch.dtype, int], ...]] = {
    "chunk_gla_fwd": (
        ((1, 4096, 4, 128, 128), torch.float16, 1),
        ((1, 4096, 4, 128, 128), torch.float32, 1),
        ((8, 2048, 8, 128, 128), torch.bfloat16, 4),
    ),
    "chunk_gla_bwd": (
        ((1, 4096, 4, 128, 128), torch.float16, 1),
        ((1, 4096, 4, 128, 128), torch.float32, 1),
        ((8, 2048, 8, 64, 64), torch.bfloat16, 4),
    ),
    "softmax_attention": (
        ((1, 512, 512, 8, 128, 128), torch.float32, 1),
        ((1, 1, 16384, 8, 128, 128), torch.float32, 1),
    ),
}
_MOST_CAPTURED = 2**16  # in the unit of `_rows`; above it, a graph takes as long as the eager call


def shapes(op: str, device: torch.device) -> list[OpCall]:
    """Returns the calls that are measured for an op.

    On a CUDA device most of them are bfloat16, and small ones are in CUDA graphs too; elsewhere all are float32.
    """
    if device.type != "cuda":
        return [_call(op, device, sizes, torch.float32) for sizes in _SIZES[op]["cpu"]]
    calls = [_call(op, device, sizes, torch.bfloat16) for sizes in _SIZES[op]["cuda"]]
    captured = [dataclasses.replace(call, capturing=True) for call in calls if _rows(call) <= _MOST_CAPTURED]
    return [*calls, *(_call(op, device, *other) for other in _OTHERS.get(op, ())), *captured]


def _call(op: str, device: torch.device, sizes: Sizes, dtype: torch.dtype, groups: int = 1) -> OpCall:
    """Returns a call with these sizes.

    Attention is causal unless there is one query, a decoding step works in place, and sequences are packed if there is
    an N. A backward on a CUDA device receives checkpoints, as in a training step.
    """
    named = dict(zip(_NAMES[op], sizes, strict=False))
    usual: dict[str, object] = {"causal": named.get("Tq", 0) > 1, "inplace": True}
    if op == "chunk_gla_bwd" and device.type == "cuda":
        usual["checkpoint_every"] = CHUNK
    return ABSTRACT_OPS[op].call(
        {**named, "Hq": named.get("H", 0) * groups},
        device,
        dtype,
        variable_length="N" in named,
        scalars={name: usual[name] for name in ABSTRACT_OPS[op].parameters if name in usual},
    )


def _rows(call: OpCall) -> int:
    """Returns a measure of the work of a call: tokens times heads, or for a softmax its elements divided by 128."""
    dims = call.dims
    if "rows" in dims:
        return dims["rows"] * dims["columns"] // 128
    return dims["B"] * dims["H"] * dims.get("T", dims.get("Tk", 1))
