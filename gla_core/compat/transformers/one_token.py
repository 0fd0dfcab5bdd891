"""Computes a Mamba-2 layer of transformers, or its block, for one token of each sequence.

    gate, u, dt = x W_in        u = convolution(u)        y = step(u, dt, A_log)        norm(y, gate) W_out

A is -exp(A_log), within the step. transformers' own layer takes three kernels for A alone. A block is
residual + layer(norm(x)). If a plugin provides kernels, the norms are parts of the products or kernels before them,
and the residual is a part of the last product:

    norm(x) W_in                u = convolution(u)        y = step(...) silu(gate)          residual + norm(y) W_out

A class is computed here only if its `forward` uses no name besides those that are known, so a model or a version with
anything else in its layers, such as FalconH1, keeps its own; see falcon_h1.py for prompts.
"""

from __future__ import annotations

import inspect
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from gla_core.compat.mamba_ssm import kernels
from gla_core.compat.mamba_ssm.ops import advance
from gla_core.compat.replace import classes_of, is_replaced
from gla_core.nn.merged import matrix_of
from gla_core.nn.plain import is_plain

_NAMES = """
A_log D activation apply_mask_to_padding_states bias causal_conv1d_fn causal_conv1d_update chunk_size conv1d conv_dim
conv_kernel_size conv_states dt_bias dtype exp expand float get_conv_state get_recurrent_state has_previous_state
head_dim in_proj intermediate_size is_recording_past layer_idx layers mamba2_chunk_scan mamba2_selective_state_update
mamba2_split_conv1d_scan_combined n_groups norm num_heads out_proj record_past recurrent_states reshape shape split
squeeze ssm_state_size time_step_limit to torch training transpose update_conv_state update_recurrent_state
variance_epsilon view weight
"""
NAMES = frozenset(_NAMES.split())
"""The names of attributes and functions in the `forward` of the layers that are known, in transformers 5.16 to 5.24."""
CACHES = ("cache", "cache_params", "past_key_values")
"""The names by which versions of transformers give layers and blocks their cache."""
BLOCK_NAMES = frozenset(
    {"block_type", "dtype", "float32", "mixer", "norm", "residual_in_fp32", "to", "torch", "weight"}
)
"""The names of attributes and functions in the `forward` of the blocks that are known, of Mamba2 and NemotronH."""


def layers(module: ModuleType) -> list[type]:
    """Returns the classes of Mamba-2 layers in a model's module that `forward` computes for one token."""
    return [x for x in classes_of(module) if is_known(x, {"A_log"}, NAMES)]


def blocks(module: ModuleType) -> list[type]:
    """Returns the classes of blocks in a model's module that `forward_of_block` computes for one token."""
    return [x for x in classes_of(module) if is_known(x, {"mixer", "norm"}, BLOCK_NAMES)]


def is_known(owner: type, needed: set[str], known: frozenset[str]) -> bool:
    """Returns whether the `forward` of a class uses all needed names, and none that is not known."""
    code = getattr(inspect.unwrap(vars(owner)["forward"]), "__code__", None) if "forward" in vars(owner) else None
    return code is not None and needed.issubset(code.co_names) and known.issuperset(code.co_names)


def groups_of(norm: Any, width: int) -> int:
    """Returns the number of groups of the channels of a norm; models differ in how they name it."""
    return getattr(norm, "n_groups", None) or width // getattr(norm, "group_size", width)


def gate_is_first(norm: Any) -> bool:
    """Returns whether the gate multiplies the input of a norm, as in most models, and not its output."""
    return not getattr(norm, "norm_before_gate", False)


def forward(
    module: ModuleType,
    layer: Any,
    hidden_states: Tensor,
    cache_params: Any = None,
    attention_mask: Tensor | None = None,
    **options: Any,
) -> Any:
    """Computes a layer's `forward` for hidden_states [B, 1, width]; returns NotImplemented for other calls.

    Args:
        module: the module that defines the `forward`, whose functions it calls. The layer may be of a subclass.
    """
    options |= {"cache_params": cache_params, "attention_mask": attention_mask}
    states = None if is_compiling() else _states_of(layer, hidden_states, options)
    if states is None:
        return NotImplemented
    gate, u, dt = parts_of(layer, layer.in_proj(hidden_states))
    y = _step(module, layer, states, u, dt, None)
    return layer.out_proj(layer.norm(y, gate).to(hidden_states.dtype))


def forward_of_block(module: ModuleType, block: Any, hidden_states: Tensor, *args: Any, **options: Any) -> Any:
    """Computes a block's `forward` for hidden_states [B, 1, width] by the kernels of a plugin.

    Returns NotImplemented for other calls, before it computes anything. `module` is as in `forward`.
    """
    provided, layer = kernels.provided, block.mixer
    if is_compiling() or provided is None or args or not _is_plain(layer):
        return NotImplemented
    states = _states_of(layer, hidden_states, options)
    norm, gated_norm = block.norm, layer.norm
    if states is None or not (_is_plain(norm) and _is_plain(gated_norm) and gate_is_first(gated_norm)):
        return NotImplemented
    w_in, w_out = (matrix_of([linear], hidden_states) for linear in (layer.in_proj, layer.out_proj))
    if w_in is None or w_out is None:
        return NotImplemented
    projected = provided.product(hidden_states, w_in, norm.weight, norm.variance_epsilon, 1, None)
    if projected is None:
        return NotImplemented
    gate, u, dt = parts_of(layer, projected)
    residual = hidden_states.float() if getattr(block, "residual_in_fp32", False) else hidden_states
    if projected.dtype == torch.float16:  # y silu(gate) may be too large for it; the norm computes it in float32
        y, weight = gated_norm(_step(module, layer, states, u, dt, None), gate), None
    else:
        y, weight = _step(module, layer, states, u, dt, gate), gated_norm.weight
    groups = groups_of(gated_norm, y.shape[-1])
    out = provided.product(y, w_out, weight, gated_norm.variance_epsilon, groups, residual)
    if out is not None:
        return out
    normed = y if weight is None else gated_norm(y)
    return residual + layer.out_proj(normed.to(projected.dtype))


def _is_plain(module: Any) -> bool:
    """Returns whether a call of a module is only its class's `forward`, which is one of those that are replaced."""
    return is_replaced(type(module)) and is_plain(module, type(module))


def _states_of(layer: Any, hidden_states: Tensor, options: dict[str, Any]) -> Any:
    """Returns the states of a layer before a call for one token of each sequence; None for other calls."""
    caches = next((options[name] for name in CACHES if options.get(name) is not None), None)
    if caches is None or hidden_states.shape[1] != 1:
        return None
    if any(options.get(name) is not None for name in ("attention_mask", "seq_idx", "cu_seqlens")):
        return None
    states = caches.layers[layer.layer_idx]
    if torch.is_grad_enabled() or states.record_past or not states.has_previous_state[0]:
        return None
    if states.recurrent_states[0] is None or not is_plain(layer.conv1d, nn.Conv1d):
        return None
    return states


def parts_of(layer: Any, projected: Tensor) -> Any:
    """Cuts the product with W_in into the gate, u and dt, each [B, T, ...]."""
    return projected.split([layer.intermediate_size, layer.conv_dim, layer.num_heads], dim=-1)


def _step(module: Any, layer: Any, states: Any, u: Tensor, dt: Tensor, gate: Tensor | None) -> Tensor:
    """Returns y [B, 1, width], times silu(gate) if there is a gate [B, 1, width]; adds the token to the states."""
    B, H, G, N = len(u), layer.num_heads, layer.n_groups, layer.ssm_state_size
    weight, bias = layer.conv1d.weight.squeeze(1), layer.conv1d.bias
    u = module.causal_conv1d_update(u.mT, states.conv_states[0], weight, bias, activation=layer.activation)[..., 0]
    x, k, q = u.split([layer.intermediate_size, G * N, G * N], dim=-1)
    x, k, q = x.view(B, H, layer.head_dim), k.view(B, G, N), q.view(B, G, N)
    y = advance(
        states.recurrent_states[0],
        x,
        dt[:, 0, :, None].expand_as(x),
        layer.A_log[:, None, None].expand(-1, layer.head_dim, N),
        k,
        q,
        layer.D[:, None].expand(-1, layer.head_dim),
        None if gate is None else gate.view(x.shape),
        layer.dt_bias[:, None].expand(-1, layer.head_dim),
        dt_softplus=True,
        A_is_log=True,
    )
    return y.view(B, 1, -1)
