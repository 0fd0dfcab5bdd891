"""Triton kernels that make one pass over their inputs and keep the state on chip. README.md tells how they came about.

Each op stands in the file of its name. The files import triton, so each is imported when its op is first called.
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
from gla_triton_fused.cost import predicted_seconds

MAX_WIDTH = 512
"""The widest head, K or V, whose state the kernels can keep on chip."""


@hookimpl
def gla_register_backends() -> list[Backend]:
    # Triton's interpreter runs the kernels anywhere, but multiplies bfloat16 matrices wrongly.
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    dtypes = {torch.float32, torch.float16} | (set() if interpreted else {torch.bfloat16})
    return [
        Backend(
            name="triton_fused",
            version="0.1.0",
            ops={
                "chunk_gla_fwd": _chunk_gla_fwd,
                "recurrent_gla_step": _recurrent_gla_step,
                "online_softmax": _online_softmax,
                "softmax_attention": _softmax_attention,
            },
            capabilities=Capabilities(
                devices=None if interpreted else frozenset({"cuda"}),
                dtypes=frozenset(dtypes),
                min_compute_capability=(8, 0),
                key_widths=range(1, MAX_WIDTH + 1),
                value_widths=range(1, MAX_WIDTH + 1),
                cuda_graphs=not interpreted,
            ),
            supports=_supports,
            cost=CostModel(predicted_seconds, shipped_constants("gla_triton_fused")),
        )
    ]


def _supports(call: OpCall) -> Reason | None:
    if importlib.util.find_spec("triton") is None:
        return "needs the package triton; install gla-core[triton]"
    return None


@functools.cache
def _module(op: str) -> Any:
    """The module with the kernels of an op, imported at its first use."""
    return importlib.import_module(f"gla_triton_fused.{op}")


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
    return *_module("chunk_gla").chunk_gla_fwd(q, k, v, g, scale, initial_state, output_final_state, cu_seqlens), None


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
    return _module("recurrent_gla_step").recurrent_gla_step(q, k, v, g, state, scale, state_indices, inplace)


def _online_softmax(x: Tensor, dim: int) -> Tensor:
    return _module("online_softmax").online_softmax(x, dim)


def _softmax_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    return _module("softmax_attention").softmax_attention(q, k, v, scale, causal)
