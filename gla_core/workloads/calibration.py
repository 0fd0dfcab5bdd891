"""The calls that `gla calibrate` measures for each op and type of device, from little more than a launch to large ones.

Their sizes, powers of two, are in calibration.toml. The grid that judges selection (benchmarks/selection.py) has none
of these calls.
"""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from gla_core.dispatch.backend import CHUNK, OpCall
from gla_core.ops import ABSTRACT_OPS

_TABLE: dict[str, dict[str, Any]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
_MOST_CAPTURED = 2**16  # in the unit of `_rows`; above it, a graph takes as long as the eager call


def shapes(op: str, device: torch.device) -> list[OpCall]:
    """Returns the calls that are measured for an op.

    On a CUDA device most of them are bfloat16, and small ones are in CUDA graphs too; elsewhere all are float32.
    """
    if device.type != "cuda":
        return [_call(op, device, sizes) for sizes in _sizes(op, "cpu")]
    calls = [_call(op, device, sizes, "bfloat16") for sizes in _sizes(op, "cuda")]
    captured = [dataclasses.replace(call, capturing=True) for call in calls if _rows(call) <= _MOST_CAPTURED]
    return [*calls, *(_call(op, device, **other) for other in _TABLE[op].get("others", ())), *captured]


def _sizes(op: str, kind: str) -> Sequence[Sequence[int]]:
    """Returns the sizes for a type of device. In place of sizes, the table may name an op that has the same."""
    sizes = _TABLE[op][kind]
    return _TABLE[sizes][kind] if isinstance(sizes, str) else sizes


def _call(op: str, device: torch.device, sizes: Sequence[int], dtype: str = "float32", groups: int = 1) -> OpCall:
    """Returns a call with these sizes, with `groups` query heads per key/value head.

    Attention is causal unless there is one query, a decoding step works in place, and sequences are packed if there is
    an N. A backward on a CUDA device receives checkpoints, as in a training step.
    """
    named = dict(zip(_TABLE[op]["names"], sizes, strict=False))
    usual: dict[str, object] = {"causal": named.get("Tq", 0) > 1, "inplace": True}
    if "checkpoints" in ABSTRACT_OPS[op].parameters and device.type == "cuda":
        usual["checkpoint_every"] = CHUNK
    return ABSTRACT_OPS[op].call(
        {**named, "Hq": named.get("H", 0) * groups},
        device,
        getattr(torch, dtype),
        variable_length="N" in named,
        scalars={name: usual[name] for name in ABSTRACT_OPS[op].parameters if name in usual},
    )


def _rows(call: OpCall) -> int:
    """Returns a measure of the work of a call: tokens times heads, or for a softmax its elements divided by 128."""
    dims = call.dims
    if "rows" in dims:
        return dims["rows"] * dims["columns"] // 128
    return dims["B"] * dims["H"] * dims.get("T", dims.get("Tk", 1))
