"""Computes a Falcon-H1 layer without a norm for sequences, with the output gate in the scan.

    gate, u, dt = m x W_in        u = convolution(u)        y = scan(u, dt, D, gate)        y W_out

Here transformers multiplies by silu(gate) after the scan, and reads and writes the output of the scan three times more.
A class is computed here only if its `forward` uses the names that are known and no other, as in one_token.py. Calls
that record gradients are left to it: their scan would be computed apart from the gate, too.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from gla_core.compat.replace import classes_of
from gla_core.compat.transformers.one_token import NAMES, is_known, parts_of
from gla_core.nn.plain import is_plain

MIXER_NAMES = NAMES | {"float32", "functional", "mamba_rms_norm", "mup_vector", "nn", "silu", "ssm_in_multiplier"}
"""The names of attributes and functions in the `forward` of the layer."""


def layers(module: ModuleType) -> list[type]:
    """Returns the classes of layers in a model's module that `forward` computes for sequences."""
    needed = {"A_log", "get_recurrent_state", "mamba_rms_norm", "mup_vector"}  # older caches have no such method
    return [x for x in classes_of(module) if is_known(x, needed, MIXER_NAMES)]


def forward(
    module: ModuleType,
    layer: Any,
    hidden_states: Tensor,
    cache_params: Any = None,
    attention_mask: Tensor | None = None,
    **options: Any,
) -> Any:
    """Computes a layer's `forward` for sequences [B, T, width] without gradients; NotImplemented for other calls.

    Args:
        module: the module that defines the `forward`, whose functions it calls.
    """
    T, conv, i = hidden_states.shape[1], layer.conv1d, layer.layer_idx
    packed = any(options.get(name) is not None for name in ("seq_idx", "cu_seqlens"))
    if layer.mamba_rms_norm or T == 1 or packed or torch.is_grad_enabled() or is_compiling():
        return NotImplemented
    if not is_plain(conv, nn.Conv1d):
        return NotImplemented
    x = module.apply_mask_to_padding_states(hidden_states, attention_mask) * layer.ssm_in_multiplier
    gate, u, dt = parts_of(layer, layer.in_proj(x) * layer.mup_vector)
    u, state = u.mT, None
    if cache_params is not None:
        state = cache_params.get_recurrent_state(i, state_idx=0)
        u = cache_params.update_conv_state(u, i, conv_kernel_size=layer.conv_kernel_size)
    u = module.causal_conv1d_fn(u, conv.weight.squeeze(1), conv.bias, activation=layer.activation)[:, :, -T:]
    u = module.apply_mask_to_padding_states(u.mT, attention_mask)
    width = layer.n_groups * layer.ssm_state_size
    x, k, q = u.split([layer.intermediate_size, width, width], dim=-1)
    x = x.unflatten(-1, (layer.num_heads, layer.head_dim))
    y = module.mamba2_chunk_scan(
        x,
        dt,
        -layer.A_log.float().exp(),
        *(y.unflatten(-1, (layer.n_groups, layer.ssm_state_size)) for y in (k, q)),
        chunk_size=layer.chunk_size,
        D=layer.D,
        z=gate.view(x.shape),
        return_final_states=cache_params is not None,
        dt_bias=layer.dt_bias,
        dt_softplus=True,
        initial_states=state,
        dt_limit=layer.time_step_limit,
    )
    if cache_params is not None:
        y, state = y
        cache_params.update_recurrent_state(state, i)
    return layer.out_proj(y.flatten(-2).to(hidden_states.dtype))
