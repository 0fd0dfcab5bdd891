"""Computes recurrent_gla_layer_step by recurrent_gla_step in place, an RMS norm of each head, and the output gate.

B batch   Ho heads of o   V value width
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch

from gla_core.dispatch.backend import Backend, Op, step_of_layer_step
from gla_core.dispatch.composed.compose import Kind, compose
from gla_core.dispatch.tensors import wide

OUTPUT_ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = MappingProxyType(
    {"silu": torch.nn.functional.silu, "sigmoid": torch.sigmoid}
)
"""The activations of the output gate of recurrent_gla_layer_step, by name."""


def through_layer_step(step: Kind) -> Kind:
    """Returns an implementation of recurrent_gla_layer_step that computes by one of recurrent_gla_step.

    It runs `step` in place, and PyTorch's operations for the norm and the output gate.

    Example:
        >>> ops = {"recurrent_gla_step": step}
        >>> ops["recurrent_gla_layer_step"] = through_layer_step(step)
        >>> Backend("mine", "1.0", ops)
    """
    return compose("recurrent_gla_layer_step", step, lambda call: [step_of_layer_step(call)], _through_layer_step)


def implementation(backend: Backend, op: str) -> Op:
    """Returns the implementation of an op that a backend serves: its own, or `through_layer_step` of a step."""
    part = backend.part_of(op)
    return backend.ops[op] if part is None else through_layer_step(backend.ops[part])


def _through_layer_step(step: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that computes recurrent_gla_layer_step by one with the arguments of recurrent_gla_step."""

    def recurrent_gla_layer_step(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor | None,
        state: torch.Tensor,
        output_gate: torch.Tensor | None,
        norm_weight: torch.Tensor | None,
        scale: float,
        norm_eps: float,
        activation: str,
        state_indices: torch.Tensor | None,
        gate_normalizer: int | None,
    ) -> torch.Tensor:
        token = {"q": q, "k": k, "v": v, "g": g, "scale": scale, "gate_normalizer": gate_normalizer}
        o, _ = step(**token, state=state, state_indices=state_indices, inplace=True)
        y = _normed(o, output_gate, norm_weight, norm_eps, activation)
        if state_indices is None:
            return y
        is_used = (state_indices >= 0) & (state_indices < len(state))  # elsewhere the output gate may be NaN
        return torch.where(is_used[:, None, None], y, 0)

    return recurrent_gla_layer_step


def _normed(
    o: torch.Tensor,
    output_gate: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    eps: float,
    activation: str,
) -> torch.Tensor:
    """Returns the RMS norm of each head of o [B, Ho, V] times the activation of its gate, in the dtype of o."""
    dtype = wide(o.dtype)
    weight = None if norm_weight is None else norm_weight.to(dtype)
    y = torch.nn.functional.rms_norm(o.to(dtype), o.shape[-1:], weight, eps)
    y = y if output_gate is None else y * OUTPUT_ACTIVATIONS[activation](output_gate.to(dtype))
    return y.to(o.dtype).contiguous()
