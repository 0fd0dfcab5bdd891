"""Describes what is replaced in the models of a family, and computes the convolutions, which the families share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gla_core.compat.mamba_ssm import kernels
from gla_core.compat.replace import MethodReplacement


class Function(NamedTuple):
    """A function that replaces an original, a test for the calls that it accepts, and a line for the report."""

    function: Callable
    serves: Callable[[dict[str, Any]], bool]
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


def is_not_packed(arguments: dict[str, Any]) -> bool:
    """Returns whether a call has no packed sequences."""
    return arguments.get("cu_seqlens") is None and arguments.get("seq_idx") is None


def is_step_without_gradients(arguments: dict[str, Any]) -> bool:
    if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in arguments.values()):
        return False
    return is_not_packed(arguments)


def _convolve(
    hidden_states: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **_: Any,
) -> Any:
    """Computes transformers' `causal_conv1d_update` by a kernel; `conv_state` is overwritten."""
    if kernels.provided is None:
        return NotImplemented
    return result_or_original(kernels.provided.convolve_token(hidden_states, conv_state, weight, bias, activation))


def _convolve_sequences(
    hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **_: Any
) -> Any:
    """Computes transformers' `causal_conv1d_fn` by a kernel."""
    if kernels.provided is None:
        return NotImplemented
    return result_or_original(kernels.provided.convolve_sequences(hidden_states, weight, bias, activation))


BY_KERNEL = "computed on a GPU by a kernel of gla_transformers, if it is imported"
CONVOLUTIONS: Mapping[str, Function] = {
    "causal_conv1d_fn": Function(_convolve_sequences, is_not_packed, BY_KERNEL),
    "causal_conv1d_update": Function(_convolve, is_step_without_gradients, BY_KERNEL),
}
"""Replacements of the functions of convolutions."""
