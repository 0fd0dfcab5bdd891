"""Sequences in segments, all at once: states are built side by side, spilled, scanned, and outputs made from them.

Each op stands in the file of its name: Triton kernels there, the same algorithm for a CPU under `pytorch`. Either is
imported when its op is first called.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from typing import Any

import torch
from torch import Tensor

from gla_core.dispatch.backend import Backend, Capabilities, CostModel, OpCall, Reason, hookimpl, shipped_constants
from gla_parallel_scan.cost import predicted_seconds

MAX_WIDTH = 512
"""The widest head, K or V, whose state the kernels can keep on chip."""


@hookimpl
def gla_register_backends() -> list[Backend]:
    # Triton's interpreter multiplies bfloat16 matrices wrongly.
    narrow = {torch.float32, torch.float16}
    return [
        Backend(
            name="parallel_scan",
            version="0.1.0",
            ops={
                "chunk_gla_fwd": _chunk_gla_fwd,
                "recurrent_gla_step": _recurrent_gla_step,
                "online_softmax": _online_softmax,
                "softmax_attention": _softmax_attention,
            },
            capabilities=Capabilities(
                devices=frozenset({"cpu", "cuda"}),
                dtypes=frozenset(narrow if _interpreted() else {*narrow, torch.bfloat16, torch.float64}),
                min_compute_capability=(8, 0),
                cuda_graphs=not _interpreted(),
            ),
            supports=_supports,
            cost=CostModel(predicted_seconds, shipped_constants("gla_parallel_scan")),
        )
    ]


def _interpreted() -> bool:
    """Whether Triton's kernels run anywhere, slowly, for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def _module(x: Tensor, op: str) -> Any:
    """The module that computes an op where x is."""
    if not (x.is_cuda or _interpreted()):
        return _imported(f"gla_parallel_scan.pytorch.{op}")
    return _imported(f"gla_parallel_scan.{op}")


@functools.cache
def _imported(module: str) -> Any:
    return importlib.import_module(module)


def _supports(call: OpCall) -> Reason | None:
    if call.device.type == "cpu" and not _interpreted():
        return None
    if importlib.util.find_spec("triton") is None:
        return "needs the package triton; install gla-core[triton]"
    if call.dtype == torch.float64:
        return "computes float64 on a CPU only"
    for name in ("K", "V"):
        if call.dims.get(name, 0) > MAX_WIDTH:
            return f"computes {name} up to {MAX_WIDTH} on a GPU; {name} is {call.dims[name]}"
    return None


def _chunk_gla_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    scale: float,
    initial_state: Tensor | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
    checkpoint_every: int | None,
) -> tuple[Tensor, Tensor | None, None]:
    return *_module(q, "chunk_gla").chunk_gla_fwd(
        q, k, v, g, scale, initial_state, output_final_state, cu_seqlens
    ), None


def _recurrent_gla_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    state: Tensor,
    scale: float,
    state_indices: Tensor | None,
    inplace: bool,
) -> tuple[Tensor, Tensor]:
    return _module(q, "recurrent_gla_step").recurrent_gla_step(q, k, v, g, state, scale, state_indices, inplace)


def _online_softmax(x: Tensor, dim: int) -> Tensor:
    return _module(x, "online_softmax").online_softmax(x, dim)


def _softmax_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    return _module(q, "softmax_attention").softmax_attention(q, k, v, scale, causal)
