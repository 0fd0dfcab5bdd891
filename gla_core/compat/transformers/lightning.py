"""Computes the lightning attention of transformers' MiniMax: gated linear attention with a constant gate for each head.

    q, k, v = act(x W_qkv)        S_t = exp(-slope) S_{t-1} + k_t^T v_t        o_t = q_t S_t

transformers computes blocks of tokens one after another. A class is computed here only if its `forward` uses the names
that are known and no other, as in one_token.py.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

from torch import Tensor

from gla_core.compat.fla.ops import recurrent
from gla_core.compat.replace import COMPUTED, MethodReplacement, classes_of, method_replacement
from gla_core.compat.transformers.family import Family
from gla_core.compat.transformers.one_token import is_known

_NAMES = """
F act_fn append apply_mask_to_padding_states block_size cat device diagonal_decay dtype exp get_linear_cache head_dim
key_decay layer_idx matmul min norm num_attention_heads out_proj output_gate qkv_proj query_decay range reshape
set_linear_cache shape sigmoid slope_rate split to torch transpose zeros
"""
NAMES = frozenset(_NAMES.split())
"""The names of attributes and functions in the `forward` of the layer that are known, in transformers 5.16 to 5.23."""


def _methods(module: ModuleType) -> list[MethodReplacement]:
    """Returns the replacements of the `forward` of layers in a model's module."""
    layers = [x for x in classes_of(module) if is_known(x, {"slope_rate", "get_linear_cache"}, NAMES)]
    return [method_replacement(x, functools.partial(_forward, module), COMPUTED) for x in layers]


def _forward(
    module: ModuleType,
    layer: Any,
    hidden_states: Tensor,
    position_embeddings: Any,
    attention_mask: Tensor | None,
    past_key_values: Any = None,
    **_: Any,
) -> tuple[Tensor, Tensor | None]:
    """Computes a layer's `forward` for hidden_states [B, T, width]; returns its result and the state [B, H, K, V].

    Args:
        module: the module that defines the `forward`, whose functions it calls.
    """
    i, cache = layer.layer_idx, past_key_values
    qkv = module.apply_mask_to_padding_states(layer.act_fn(layer.qkv_proj(hidden_states)), attention_mask)
    q, k, v = qkv.unflatten(-1, (layer.num_attention_heads, -1)).split(layer.head_dim, -1)
    state = None if cache is None else cache.get_linear_cache(i)
    o, state = recurrent(q, k, v, -layer.slope_rate.flatten().float(), 1.0, state, True)
    if cache is not None:
        cache.set_linear_cache(i, state)
    return layer.out_proj(layer.output_gate(hidden_states).sigmoid() * layer.norm(o.flatten(2))), state


LIGHTNING_ATTENTION = Family(models={"minimax": "5.16"}, functions={}, methods=_methods)
"""The models with lightning attention."""
