"""Makes transformers' models with Mamba-2, a delta rule or lightning attention compute here, with one line before or
after they are created.

Each model's module defines the functions that its layers call, and a layer looks them up in its module whenever it is
called. So replacing them in these modules changes all layers, and undoing it changes all of them back. mamba2.py,
delta.py and lightning.py list the functions of each family of models.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import ModuleType

from gla_core.compat.mamba_ssm import kernels
from gla_core.compat.replace import LOCK, Acceleration, MethodReplacement, Replacement, replacement
from gla_core.compat.transformers.delta import GATED_DELTA_RULE, KIMI_DELTA_ATTENTION
from gla_core.compat.transformers.family import Family, loops
from gla_core.compat.transformers.lightning import LIGHTNING_ATTENTION
from gla_core.compat.transformers.mamba2 import MAMBA2
from gla_core.dispatch.errors import check_known

FAMILIES = (MAMBA2, LIGHTNING_ATTENTION, GATED_DELTA_RULE, KIMI_DELTA_ATTENTION)
MODELS: Mapping[str, Family] = {model: family for family in FAMILIES for model in family.models}
"""Families of the models whose functions are replaced, by the names of the models' folders in `transformers.models`."""


def accelerate(*models: str) -> Acceleration:
    """Replaces the functions by which transformers' layers with Mamba-2, a delta rule or lightning attention compute.

    Models created before and after run by the replacements.

    The models' modules are imported. Calls that are not computed here go to the original functions: for Mamba-2,
    decoding steps that record gradients or have `seq_idx`, calls with `cu_seqlens` but without `seq_idx`, and a
    negative `time_step_limit`; for a delta rule, packed sequences without `cu_seqlens`.

    If `gla_transformers` is imported, its kernels compute convolutions, norms and the decoding step on a GPU, and the
    products and the residual of a decoding step of a few sequences. `generate` takes its loop.

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
        wanted: list[Replacement | MethodReplacement] = []
        for family in FAMILIES:
            present = [modules[name] for name in family.models if name in modules]
            wanted += [
                replacement(module, name, new.function, new.left_out, within=module.__name__, how=new.how)
                for name, new in family.functions.items()
                for module in present
            ]
            wanted += [method for module in present for method in (*family.methods(module), *loops(module))]
        return Acceleration("transformers", wanted, NOTE if kernels.provided else NO_KERNELS)


use_gla_core = accelerate
"""`accelerate`, under a name that does not hide Hugging Face's package `accelerate`."""


def _modules(models: tuple[str, ...]) -> dict[str, ModuleType]:
    """Returns the modules of the models, or of all models that exist, by the models' names."""
    try:
        transformers = importlib.import_module("transformers")
    except ImportError as error:
        raise ImportError("accelerate() cannot import transformers; install it: pip install transformers") from error
    modules = {name: module_of(name) for name in dict.fromkeys(models or MODELS)}
    missing = [name for name, module in modules.items() if module is None]
    if missing if models else len(missing) == len(modules):
        version = getattr(transformers, "__version__", "of an unknown version")
        functions = dict.fromkeys(function for name in missing for function in MODELS[name].functions) or ["module"]
        since = (max if models else min)(MODELS[name].models[name] for name in missing)
        raise ImportError(
            f"transformers {version} has no {' or '.join(functions)} for {', '.join(missing)}; install transformers "
            f"{since} or newer"
        )
    return {name: module for name, module in modules.items() if module is not None}


def module_of(model: str) -> ModuleType | None:
    """Returns the module of a model; None if it does not exist or does not have the functions."""
    path = f"transformers.models.{model}.modeling_{model}"
    try:
        module = importlib.import_module(path)
    except ModuleNotFoundError as error:
        if error.name is None or not path.startswith(error.name):  # it exists, and needs a package that is missing
            raise
        return None
    return module if all(hasattr(module, name) for name in MODELS[model].functions) else None


NOTE = "convolutions of packed sequences are left to transformers"
NO_KERNELS = "convolutions and norms are left to transformers; on a GPU, import gla_transformers, which has kernels"
