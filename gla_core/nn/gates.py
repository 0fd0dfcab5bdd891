"""Holds what the forget gates of a layer are to its ops, and how their parameters begin."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from gla_core.nn.interface import RecurrentLayer


def gate_options(layer: RecurrentLayer) -> dict[str, Any]:
    """Returns the arguments of the ops that say what the layer's g holds."""
    if layer.gate_normalizer is None:
        return {}
    return {"gate": "logsigmoid", "gate_normalizer": layer.gate_normalizer}


@torch.no_grad()
def draw_gates(
    A_log: Tensor, dt_bias: Tensor, rates: tuple[float, float], steps: tuple[float, float], floor: float = 1e-4
) -> None:
    """Draws the parameters of gates -exp(A_log) softplus(dt + dt_bias).

    exp(A_log) is uniform between two rates. softplus(dt_bias) is between two steps, with a uniform logarithm, and at
    least `floor`.
    """
    dt = torch.empty_like(dt_bias, dtype=torch.float32).uniform_(*map(math.log, steps)).exp_().clamp_(min=floor)
    dt_bias.copy_(dt + torch.log(-torch.expm1(-dt)))
    A_log.copy_(torch.empty_like(A_log, dtype=torch.float32).uniform_(*rates).log())
