"""Random arguments of the calls of published models: one layer's call over sequences, and its step.

Keys, values and queries are standard normal in the dtype of the model, and betas are between 0 and 1. Gates, Mamba-2's
parameters and states are float32 (float64 with float64 inputs), as layers make them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gla_core.dispatch.tensors import wide
from gla_core.workloads.inputs import normal, random_gate
from gla_core.workloads.models import FUNCTIONS, SCAN, SEQUENCES, Model

OPTIONS: Mapping[str, Mapping[str, Any]] = {
    SCAN: {"chunk_size": 256, "dt_softplus": True},
    "chunk_linear_attn": {"scale": 1.0, "normalize": True},
    **{name: {"use_qk_l2norm_in_kernel": True} for name, function in FUNCTIONS.items() if function.is_delta_rule},
}
"""The other arguments with which layers call a function."""
CONSTANTS = ("g_gamma",)
"""The inputs of floating-point numbers that are no parameters, and have no gradient."""


def shapes(model: Model) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of a call's inputs by name, and that of its output, out."""
    q = next(iter(FUNCTIONS[model.function].inputs))
    named = {**FUNCTIONS[model.function].inputs, "out": "B T Hv V" if q == "x" or model.dims["G"] == 1 else "B T Hq V"}
    return {name: _shape(shape, model) for name, shape in named.items()}


def state_shapes(model: Model) -> list[tuple[int, ...]]:
    """Returns the shapes of the states that a step reads and writes."""
    return [_shape(shape, model) for shape in FUNCTIONS[model.function].states]


def arguments(model: Model, device: torch.device, dtype: torch.dtype, seed: int = 0) -> dict[str, Tensor]:
    """Returns the inputs of a call by name; `OPTIONS` are its other arguments."""
    generator = torch.Generator(device).manual_seed(seed)
    made = {
        name: _random(name, _shape(shape, model), dtype, generator)
        for name, shape in FUNCTIONS[model.function].inputs.items()
    }
    if model.function == "chunk_linear_attn":  # of a feature map, none is below 0
        made.update({name: made[name].abs() for name in ("q", "k")})
    if model.function == "chunk_gsa":
        made["s"] = (1 - made["g"].exp()).to(dtype)
    return made


def step_arguments(
    model: Model, device: torch.device, dtype: torch.dtype, seed: int = 0, sequences: int = SEQUENCES
) -> dict[str, Any]:
    """Returns all arguments of a step by name, as layers pass them: one token of each sequence, and states."""
    token = model.resized(B=sequences, T=1)
    made: dict[str, Any] = dict(arguments(token, device, dtype, seed))
    generator = torch.Generator(device).manual_seed(seed + 1)
    states = [normal(shape, wide(dtype), generator) for shape in state_shapes(token)]
    if model.function == SCAN:
        return {"state": states[0], **_expanded(made, token), "dt_softplus": True}
    if model.function == "chunk_linear_attn":
        states[1] = states[1].abs()
    if model.function == "chunk_gla":
        made["gk"] = made.pop("g")
    state = states[0] if len(states) == 1 else tuple(states)
    return {**made, **OPTIONS.get(model.function, {}), "initial_state": state, "output_final_state": True}


def _expanded(made: Mapping[str, Tensor], model: Model) -> dict[str, Tensor]:
    """Returns the inputs of a step of Mamba-2, expanded over channels and states as its layer expands them."""
    H, K, V = (model.dims[name] for name in ("Hv", "K", "V"))
    return {
        **{name: made[name][:, 0] for name in ("x", "B", "C")},
        "dt": made["dt"][:, 0, :, None].expand(-1, -1, V),
        "A": made["A"][:, None, None].expand(H, V, K),
        "D": made["D"][:, None].expand(H, V),
        "dt_bias": made["dt_bias"][:, None].expand(H, V),
    }


def _shape(shape: str, model: Model) -> tuple[int, ...]:
    """Returns a shape such as "B T Hv V" in numbers."""
    return tuple(1 if dim == "1" else model.dims[dim] for dim in shape.split())


def _random(name: str, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Returns an input of this name: gates are mild, A is in [-16, -1], and dt after softplus mostly 1e-3 to 0.1."""
    if name in ("g", "w"):
        gate = random_gate(shape, "mild", wide(dtype), generator)
        assert gate is not None
        return gate
    if name == "beta":
        return normal(shape, dtype, generator).sigmoid()
    if name == "g_gamma":  # as in Lightning attention
        heads = torch.arange(1, shape[0] + 1, dtype=wide(dtype), device=generator.device)
        return -(2 ** (-8 * heads / shape[0]))
    if name == "A":
        return -torch.rand(shape, dtype=wide(dtype), device=generator.device, generator=generator) * 15 - 1
    if name == "dt_bias":
        return normal(shape, wide(dtype), generator) - 4
    return normal(shape, wide(dtype) if name in ("D", "u") else dtype, generator)
