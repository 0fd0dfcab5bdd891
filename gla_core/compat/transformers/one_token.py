"""Computes a Mamba-2 layer of transformers for one token of each sequence, with A = -exp(A_log) within the step.

    gate, u, dt = x W_in        u = convolution(u)        y = step(u, dt, A_log)        norm(y, gate) W_out

transformers' own layer takes three kernels for A alone. A layer is computed here only if its `forward` uses no name
besides `NAMES`, so a model or a version with anything else in its layers, such as FalconH1, keeps its own.
"""

from __future__ import annotations

import inspect
import sys
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from gla_core.compat.mamba_ssm.ops import advance
from gla_core.compat.replace import classes_of

_NAMES = """
A_log D activation apply_mask_to_padding_states bias causal_conv1d_fn causal_conv1d_update chunk_size conv1d conv_dim
conv_kernel_size conv_states dt_bias dtype exp expand float get_conv_state get_recurrent_state has_previous_state
head_dim in_proj intermediate_size is_recording_past layer_idx layers mamba2_chunk_scan mamba2_selective_state_update
mamba2_split_conv1d_scan_combined n_groups norm num_heads out_proj record_past recurrent_states reshape shape split
squeeze ssm_state_size time_step_limit to torch training transpose update_conv_state update_recurrent_state
variance_epsilon view weight
"""
NAMES = frozenset(_NAMES.split())
"""The names of attributes and functions in the `forward` of the layers that are known, in transformers 5.16 to 5.23."""


def layers(module: ModuleType) -> list[type]:
    """Returns the classes of Mamba-2 layers in a model's module that `forward` computes for one token."""
    return [x for x in classes_of(module) if "forward" in vars(x) and _is_known(vars(x)["forward"])]


def _is_known(forward: Any) -> bool:
    code = getattr(inspect.unwrap(forward), "__code__", None)
    return code is not None and "A_log" in code.co_names and NAMES.issuperset(code.co_names)


def forward(
    layer: Any, hidden_states: Tensor, cache_params: Any = None, attention_mask: Tensor | None = None, **kwargs: Any
) -> Any:
    """Computes a layer's `forward` for hidden_states [B, 1, width]; NotImplemented for other calls."""
    if cache_params is None or hidden_states.shape[1] != 1 or attention_mask is not None or is_compiling():
        return NotImplemented
    cache = cache_params.layers[layer.layer_idx]
    if torch.is_grad_enabled() or cache.record_past or not cache.has_previous_state[0]:
        return NotImplemented
    packed = kwargs.get("seq_idx") is not None or kwargs.get("cu_seqlens") is not None
    if packed or cache.recurrent_states[0] is None or getattr(layer.conv1d, "_hf_hook", None) is not None:
        return NotImplemented
    B, H, G, N = hidden_states.shape[0], layer.num_heads, layer.n_groups, layer.ssm_state_size
    gate, u, dt = layer.in_proj(hidden_states).split([layer.intermediate_size, layer.conv_dim, H], dim=-1)
    update = sys.modules[type(layer).__module__].causal_conv1d_update  # the one that is in force
    weight, bias = layer.conv1d.weight.squeeze(1), layer.conv1d.bias
    u = update(u.mT, cache.conv_states[0], weight, bias, activation=layer.activation)[..., 0]
    x, k, q = u.split([layer.intermediate_size, G * N, G * N], dim=-1)
    x, k, q = x.view(B, H, layer.head_dim), k.view(B, G, N), q.view(B, G, N)
    y = advance(
        cache.recurrent_states[0],
        x,
        dt[:, 0, :, None].expand_as(x),
        layer.A_log[:, None, None].expand(-1, layer.head_dim, N),
        k,
        q,
        layer.D[:, None].expand(-1, layer.head_dim),
        None,
        layer.dt_bias[:, None].expand(-1, layer.head_dim),
        dt_softplus=True,
        A_is_log=True,
    )
    return layer.out_proj(layer.norm(y.view(B, 1, -1), gate).to(hidden_states.dtype))
