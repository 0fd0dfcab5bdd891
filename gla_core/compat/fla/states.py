"""Converts states of flash-linear-attention's layers to states here, and back.

    here                                    an entry of flash-linear-attention's cache
    recurrent   [N, H, K, V]                recurrent_state   [N, Hq, V, K], a key/value head once per query head
    conv        [N, W - 1, D] three times   conv_state        [N, D, W] three times; the oldest input is never read

Source: `GatedLinearAttention`, `HGRN2Attention`, `KimiDeltaAttention`, `GatedDeltaNet` and `ShortConvolution` of
flash-linear-attention 0.6.0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gla_core.dispatch.tensors import wide
from gla_core.nn.recurrence import GLAState
from gla_core.ops import checks


def state_from_fla(entry: Mapping[str, Any], groups: int = 1) -> GLAState:
    """Returns the state of a layer here, from the entry of flash-linear-attention's cache for the same layer.

    Entries of `MultiScaleRetention` and `DeltaNet` do not fit: their recurrent states are [N, Hq, K, V], and those of
    the former have no number of tokens for each sequence, which `Retention` needs as `position`. The function cannot
    recognize such an entry. Make a `GLAState` from it in place of the call, as docs/from-fla.md shows.

    Args:
        entry: "recurrent_state" [N, Hq, V, K], and "conv_state", three tensors [N, D, W], or None without convolutions.
        groups: number of query heads per key/value head: num_heads / num_kv_heads.

    Returns:
        A `GLAState` of new, contiguous tensors; the recurrent state is float32 (float64 with float64 inputs).

    Raises:
        ValueError, TypeError: `entry` has another form, or its number of heads is not a multiple of `groups`.

    Example:
        >>> state = state_from_fla(past_key_values[0])
        >>> y, state = layer.step(x, state)
    """
    recurrent = entry.get("recurrent_state")
    if recurrent is None:
        raise ValueError("the entry has no 'recurrent_state'; expected what the cache holds of a layer that has run")
    sizes: dict[str, Any] = {}
    checks.tensor("recurrent_state", recurrent, "N Hq V K", sizes)
    if groups < 1 or sizes["Hq"] % groups != 0:
        raise ValueError(f"recurrent_state has {sizes['Hq']} heads; expected a multiple of groups = {groups}")
    recurrent = recurrent[:, ::groups].mT.to(wide(recurrent.dtype), copy=True)
    conv = entry.get("conv_state")
    if conv is None:
        return GLAState(recurrent.contiguous())
    q, k, v = (x[..., 1:].mT.clone(memory_format=torch.contiguous_format) for x in conv)
    return GLAState(recurrent.contiguous(), (q, k, v))


def state_to_fla(state: GLAState, groups: int = 1) -> dict[str, Any]:
    """Returns the entry of flash-linear-attention's cache for a layer, from the state of the same layer here.

    Args:
        state: the state that `forward` or `step` returned. States of `Retention` and `DeltaNet` do not fit, see
            `state_from_fla`.
        groups: as in `state_from_fla`.

    Returns:
        "recurrent_state" and "conv_state", new and contiguous, as arguments of flash-linear-attention's `Cache.update`.

    Example:
        >>> entry = state_to_fla(state)
        >>> past_key_values.update(layer_idx=0, offset=100, **entry)
    """
    recurrent = state.recurrent.repeat_interleave(groups, 1).mT.contiguous()
    conv: tuple[Tensor, ...] | None = None
    if state.conv is not None:
        conv = tuple(F.pad(x.mT, (1, 0)) for x in state.conv)
    return {"recurrent_state": recurrent, "conv_state": conv}
