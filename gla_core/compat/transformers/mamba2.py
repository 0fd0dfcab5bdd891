"""Computes the functions that transformers' Mamba-2 layers call.

In training, a layer first calls `mamba2_split_conv1d_scan_combined`, which may compute the whole layer in a kernel of
mamba_ssm. Its replacement returns None. This is the result by which transformers itself says that there is no such
kernel, and the layer calls its convolution, the scan, the norm and the projection one after another.

Convolutions and norms run in the kernels of `gla_core.compat.mamba_ssm.kernels`, if a plugin provides them, and
otherwise in transformers. Norms are classes, whose `forward` is replaced. So is that of layers and blocks for
decoding steps, and that of Falcon-H1's layers for prompts; see one_token.py and falcon_h1.py.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from torch import Tensor

from gla_core.compat.mamba_ssm import kernels, mamba_chunk_scan_combined
from gla_core.compat.mamba_ssm.ops import advance
from gla_core.compat.replace import COMPUTED, MethodReplacement, classes_of, method_replacement
from gla_core.compat.transformers import falcon_h1, one_token
from gla_core.compat.transformers.family import (
    BY_KERNEL,
    CONVOLUTIONS,
    Family,
    Function,
    packed_or_differentiable,
    result_or_original,
)


def _methods(module: ModuleType) -> list[MethodReplacement]:
    """Returns the replacements of the `forward` of norms, layers and blocks in a model's module."""
    norms = [x for x in classes_of(module) if x.__name__.endswith(("RMSNorm", "RMSNormGated"))]
    layer_forward = functools.partial(one_token.forward, module)
    gated_forward = functools.partial(falcon_h1.forward, module)
    block_forward = functools.partial(one_token.forward_of_block, module)
    return [
        *(method_replacement(x, _norm, BY_KERNEL) for x in norms),
        *(method_replacement(x, layer_forward, ONE_TOKEN) for x in one_token.layers(module)),
        *(method_replacement(x, gated_forward, GATED) for x in falcon_h1.layers(module)),
        *(method_replacement(x, block_forward, BLOCK) for x in one_token.blocks(module)),
    ]


def _norm(layer: Any, hidden_states: Tensor, gate: Tensor | None = None) -> Any:
    """Computes the norm of one of transformers' layers by a kernel."""
    if kernels.provided is None:
        return NotImplemented
    groups, gate_first = one_token.groups_of(layer, hidden_states.shape[-1]), one_token.gate_is_first(layer)
    weight, eps = layer.weight, layer.variance_epsilon
    return result_or_original(kernels.provided.norm(hidden_states, weight, gate, eps, groups, gate_first))


def _chunk_scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    z: Tensor | None = None,
    seq_idx: Tensor | None = None,
    **_: Any,
) -> Any:
    """Computes transformers' `mamba2_chunk_scan`. Like it, it ignores arguments meant for other functions."""
    tensors = (hidden_states, dt, A, B, C, chunk_size, D, z, dt_bias, initial_states, seq_idx)
    options = (None, dt_softplus, dt_limit, return_final_states)
    return mamba_chunk_scan_combined(*tensors, *options)


def _step(
    state: Tensor,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    z: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """Computes transformers' `mamba2_selective_state_update`; `state` is overwritten."""
    return advance(state, hidden_states, dt, A, B, C, D, z, dt_bias, dt_softplus)


def _no_kernel(*_: Any, **__: Any) -> None:
    """Returns None, for which a layer computes by its other functions."""


def _left_out(arguments: Mapping[str, Any]) -> str | None:
    if arguments.get("cu_seqlens") is not None and arguments.get("seq_idx") is None:
        return "cu_seqlens without seq_idx"
    return "a negative time_step_limit" if arguments.get("dt_limit", (0.0,))[0] < 0 else None


ONE_TOKEN = "computed by gla_core for one token"
GATED = "computed by gla_core for prompts, with the output gate in the scan"
BLOCK = "computed for one token on a GPU by kernels of gla_transformers, if it is imported"
MAMBA2 = Family(
    models=dict.fromkeys(("bamba", "falcon_h1", "granitemoehybrid", "mamba2", "nemotron_h", "zamba2"), "5.16"),
    functions={
        "mamba2_chunk_scan": Function(_chunk_scan, _left_out, COMPUTED),
        "mamba2_selective_state_update": Function(_step, packed_or_differentiable, COMPUTED),
        "mamba2_split_conv1d_scan_combined": Function(_no_kernel, _left_out, "left out for mamba2_chunk_scan"),
        **CONVOLUTIONS,
    },
    methods=_methods,
)
"""The models with Mamba-2 layers."""
