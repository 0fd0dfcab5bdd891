"""Makes transformers' Mamba-2 models compute here, with one line before or after they are created.

Each model's module defines the functions that its Mamba-2 layers call, and a layer looks them up in its module whenever
it is called. So replacing them in these modules changes all layers, and undoing it changes all of them back.

In training, a layer first calls `mamba2_split_conv1d_scan_combined`, which may compute the whole layer in a kernel of
mamba_ssm. Its replacement returns None. This is the result by which transformers itself says that there is no such
kernel, and the layer calls its convolution, the scan, the norm and the projection one after another.

Convolutions and norms run in the kernels of `gla_core.compat.mamba_ssm.kernels`, if a plugin provides them, and
otherwise in transformers. Norms are classes, whose `forward` is replaced. So is that of layers and blocks for
decoding steps, and that of Falcon-H1's layers for prompts; see one_token.py and falcon_h1.py.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gla_core.compat.mamba_ssm import kernels, mamba_chunk_scan_combined
from gla_core.compat.mamba_ssm.ops import advance
from gla_core.compat.replace import (
    COMPUTED,
    LOCK,
    Acceleration,
    MethodReplacement,
    Replacement,
    classes_of,
    method_replacement,
    replacement,
)
from gla_core.compat.transformers import falcon_h1, one_token
from gla_core.dispatch.errors import check_known

MODELS = ("bamba", "falcon_h1", "granitemoehybrid", "mamba2", "nemotron_h", "zamba2")
"""Models whose functions are replaced, by the names of their folders in `transformers.models`."""


def accelerate(*models: str) -> Acceleration:
    """Replaces the functions by which transformers' Mamba-2 layers compute, in models created before and after.

    The models' modules are imported. Calls that are not computed here go to the original functions: decoding steps that
    record gradients or have `seq_idx`, calls with `cu_seqlens` but without `seq_idx`, and a negative `time_step_limit`.

    If `gla_transformers` is imported, its kernels compute convolutions, norms and the decoding step on a GPU, and the
    products and the residual of a decoding step of a few sequences.

    Args:
        models: names among `MODELS`; by default all that the installed transformers has. Functions that are replaced
            already stay replaced.

    Returns:
        The replacements that were made. Print it to see them, and call `undo` to remove them; as a context manager it
        removes them at its end.

    Raises:
        ImportError: transformers cannot be imported, or does not have a model, or has it without these functions.
        ValueError: a name is not among `MODELS`.

    Example:
        >>> print(accelerate())
        >>> with accelerate("mamba2"):
        ...     model.generate(tokens)
    """
    for name in models:
        check_known("model", name, MODELS)
    modules = _modules(models)
    with LOCK:
        wanted: list[Replacement | MethodReplacement] = [
            replacement(module, name, new.function, new.serves, within=module.__name__, how=new.how)
            for name, new in FUNCTIONS.items()
            for module in modules
        ]
        for module in modules:
            norms = [x for x in classes_of(module) if x.__name__.endswith(("RMSNorm", "RMSNormGated"))]
            wanted += [method_replacement(norm, _norm, BY_KERNEL) for norm in norms]
            layer_forward = functools.partial(one_token.forward, module)
            gated_forward = functools.partial(falcon_h1.forward, module)
            block_forward = functools.partial(one_token.forward_of_block, module)
            wanted += [method_replacement(x, layer_forward, ONE_TOKEN) for x in one_token.layers(module)]
            wanted += [method_replacement(x, gated_forward, GATED) for x in falcon_h1.layers(module)]
            wanted += [method_replacement(x, block_forward, BLOCK) for x in one_token.blocks(module)]
        return Acceleration("transformers", wanted, NOTE if kernels.provided else NO_KERNELS)


use_gla_core = accelerate
"""`accelerate`, under a name that does not hide Hugging Face's package `accelerate`."""


def _modules(models: tuple[str, ...]) -> list[ModuleType]:
    """Returns the modules of the models, or of all models that exist."""
    try:
        transformers = importlib.import_module("transformers")
    except ImportError as error:
        raise ImportError("accelerate() cannot import transformers; install it: pip install transformers") from error
    modules = {name: _module(name) for name in dict.fromkeys(models or MODELS)}
    missing = [name for name, module in modules.items() if module is None]
    if missing if models else len(missing) == len(modules):
        version = getattr(transformers, "__version__", "of an unknown version")
        raise ImportError(
            f"transformers {version} has no {' or '.join(FUNCTIONS)} for {', '.join(missing)}; install transformers "
            "5.16 or newer"
        )
    return [module for module in modules.values() if module is not None]


def _module(model: str) -> ModuleType | None:
    """Returns the module of a model; None if it does not exist or does not have the functions."""
    path = f"transformers.models.{model}.modeling_{model}"
    try:
        module = importlib.import_module(path)
    except ModuleNotFoundError as error:
        if error.name is None or not path.startswith(error.name):  # it exists, and needs a package that is missing
            raise
        return None
    return module if all(hasattr(module, name) for name in FUNCTIONS) else None


def _norm(layer: Any, hidden_states: Tensor, gate: Tensor | None = None) -> Any:
    """Computes the norm of one of transformers' layers by a kernel."""
    if kernels.provided is None:
        return NotImplemented
    groups, gate_first = one_token.groups_of(layer, hidden_states.shape[-1]), one_token.gate_is_first(layer)
    return _found(kernels.provided.norm(hidden_states, layer.weight, gate, layer.variance_epsilon, groups, gate_first))


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
    return _found(kernels.provided.convolve_token(hidden_states, conv_state, weight, bias, activation))


def _convolve_sequences(
    hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **_: Any
) -> Any:
    """Computes transformers' `causal_conv1d_fn` by a kernel."""
    if kernels.provided is None:
        return NotImplemented
    return _found(kernels.provided.convolve_sequences(hidden_states, weight, bias, activation))


def _found(result: Tensor | None) -> Any:
    """Returns the result of a kernel; NotImplemented, by which the original is called, if there is none."""
    return NotImplemented if result is None else result


def _chunk_scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    z: Tensor | None = None,
    seq_idx: Tensor | None = None,
    **_: Any,
) -> Any:
    """Computes transformers' `mamba2_chunk_scan`. Like it, it ignores arguments meant for other functions."""
    tensors = (hidden_states, dt, A, B, C, chunk_size, D, z, dt_bias, initial_states, seq_idx)
    options = (None, dt_softplus, dt_limit, return_final_states)
    return mamba_chunk_scan_combined(*tensors, *options)


def _step(
    state: Tensor,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    z: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """Computes transformers' `mamba2_selective_state_update`; `state` is overwritten."""
    return advance(state, hidden_states, dt, A, B, C, D, z, dt_bias, dt_softplus)


def _no_kernel(*_: Any, **__: Any) -> None:
    """Returns None, for which a layer computes by its other functions."""


def _is_computed_here(arguments: dict[str, Any]) -> bool:
    offsets_alone = arguments.get("cu_seqlens") is not None and arguments.get("seq_idx") is None
    return not offsets_alone and arguments.get("dt_limit", (0.0,))[0] >= 0


def _is_not_packed(arguments: dict[str, Any]) -> bool:
    return arguments.get("cu_seqlens") is None and arguments.get("seq_idx") is None


def _is_step_without_gradients(arguments: dict[str, Any]) -> bool:
    if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in arguments.values()):
        return False
    return _is_not_packed(arguments)


class _Replacement(NamedTuple):
    """A function that replaces an original, a test for the calls that it accepts, and a line for the report."""

    function: Callable
    serves: Callable[[dict[str, Any]], bool]
    how: str


ONE_TOKEN = "computed by gla_core for one token"
GATED = "computed by gla_core for prompts, with the output gate in the scan"
BLOCK = "computed for one token on a GPU by kernels of gla_transformers, if it is imported"
BY_KERNEL = "computed on a GPU by a kernel of gla_transformers, if it is imported"
NOTE = "convolutions of packed sequences are left to transformers"
NO_KERNELS = "convolutions and norms are left to transformers; on a GPU, import gla_transformers, which has kernels"
FUNCTIONS: Mapping[str, _Replacement] = {
    "mamba2_chunk_scan": _Replacement(_chunk_scan, _is_computed_here, COMPUTED),
    "mamba2_selective_state_update": _Replacement(_step, _is_step_without_gradients, COMPUTED),
    "mamba2_split_conv1d_scan_combined": _Replacement(_no_kernel, _is_computed_here, "left out for mamba2_chunk_scan"),
    "causal_conv1d_fn": _Replacement(_convolve_sequences, _is_not_packed, BY_KERNEL),
    "causal_conv1d_update": _Replacement(_convolve, _is_step_without_gradients, BY_KERNEL),
}
"""Replacements of the functions that each model's module defines."""
