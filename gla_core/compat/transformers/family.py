"""Describes what is replaced in the models of a family, and replaces what families share: convolutions and the loop of
`generate`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gla_core.compat.mamba_ssm import kernels
from gla_core.compat.replace import LeftOut, MethodReplacement, classes_of, method_replacement


class Function(NamedTuple):
    """A function that replaces an original, why a call is left to the original, and a line for the report."""

    function: Callable
    left_out: LeftOut
    how: str


class Family(NamedTuple):
    """Models whose layers call functions of the same names, which each model's module defines.

    Attributes:
        models: the names of the models' folders in `transformers.models`, and the first versions of transformers that
            have the models with these functions.
        functions: the replacements of these functions, by name.
        methods: returns the replacements of methods in a model's module; by default none.
    """

    models: Mapping[str, str]
    functions: Mapping[str, Function]
    methods: Callable[[ModuleType], list[MethodReplacement]] = lambda module: []


def result_or_original(result: Any) -> Any:
    """Returns the result of a kernel; NotImplemented, by which the original is called, if there is none."""
    return NotImplemented if result is None else result


def packed(arguments: Mapping[str, Any]) -> str | None:
    """Returns why a call is left to the original, if it has packed sequences."""
    is_packed = arguments.get("cu_seqlens") is not None or arguments.get("seq_idx") is not None
    return "packed sequences" if is_packed else None


def packed_or_differentiable(arguments: Mapping[str, Any]) -> str | None:
    """Returns why a decoding step is left to the original, if it has packed sequences or records gradients."""
    if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in arguments.values()):
        return "gradients are recorded"
    return packed(arguments)


def loops(module: ModuleType) -> list[MethodReplacement]:
    """Returns the replacements of the loop of `generate` in a model's module."""
    generating = [x for x in classes_of(module) if x.__name__.endswith("ForCausalLM")]
    return [method_replacement(x, _sample, LOOP, "_sample") for x in generating]


def _sample(model: Any, input_ids: Tensor, *args: Any, **options: Any) -> Any:
    """Computes the loop of `generate` for greedy search and sampling by a plugin."""
    if kernels.provided is None or args:
        return NotImplemented
    return result_or_original(kernels.provided.sample(model, input_ids, **options))


def _without_kernels(left_out: LeftOut) -> LeftOut:
    return lambda arguments: "gla_transformers is not imported" if kernels.provided is None else left_out(arguments)


def _convolve(
    hidden_states: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **_: Any,
) -> Any:
    """Computes transformers' `causal_conv1d_update` by a kernel; `conv_state` is overwritten."""
    assert kernels.provided is not None
    return result_or_original(kernels.provided.convolve_token(hidden_states, conv_state, weight, bias, activation))


def _convolve_sequences(
    hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **_: Any
) -> Any:
    """Computes transformers' `causal_conv1d_fn` by a kernel."""
    assert kernels.provided is not None
    return result_or_original(kernels.provided.convolve_sequences(hidden_states, weight, bias, activation))


LOOP = "computed on a GPU in CUDA graphs by gla_transformers, if it is imported"
BY_KERNEL = "computed on a GPU by a kernel of gla_transformers, if it is imported"
CONVOLUTIONS: Mapping[str, Function] = {
    "causal_conv1d_fn": Function(_convolve_sequences, _without_kernels(packed), BY_KERNEL),
    "causal_conv1d_update": Function(_convolve, _without_kernels(packed_or_differentiable), BY_KERNEL),
}
"""Replacements of the functions of convolutions."""
