"""Classes by which Hugging Face's package `kernels` has functions of transformers computed here: `use_kernels`.

If `kernels` is installed, the functions that transformers' layers call are modules, and `kernels` replaces the
`forward` of each by that of a class in a folder that it loads: here the folder `kernel`. A class has the signature of
transformers' function, because `kernels` compares the two. A call that is not computed here goes to that function.

Importing this module imports a model of each family. It makes no class if `kernels` is missing, or has a version that
does not suit transformers.
"""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path
from typing import Any

import torch

from gla_core.compat.replace import Replacement, parameters
from gla_core.compat.transformers.accelerate import FAMILIES, module_of
from gla_core.compat.transformers.family import Function

FOLDER = Path(__file__).parent / "kernel"
"""The folder that `kernels` loads."""


def kernel_config(model: Any) -> Any:
    """Returns transformers' `KernelConfig` by which the functions of a model are computed here, on a GPU.

    It holds for the mode of the model, training or not; set it again after `train` or `eval`. All models with the same
    module share their functions.

    Raises:
        ImportError: transformers is not installed.

    Example:
        >>> model.set_use_kernels(True, kernel_config(model))
    """
    config = importlib.import_module("transformers").KernelConfig(use_local_kernel=True)
    config.store_registered_layer_names(model)
    names = set(config.registered_layer_names.values()) & LAYERS.keys()
    config.kernel_mapping = {name: f"{FOLDER}:{name}" for name in sorted(names)}
    return config


def _layer(new: Function, original: type[torch.nn.Module]) -> type[torch.nn.Module]:
    """Returns the class whose `forward` computes a function, or leaves a call to the original's."""
    names = parameters(new.function)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        reason = new.left_out({**dict(zip(names, args, strict=False)), **kwargs})
        result = new.function(*args, **kwargs) if reason is None else NotImplemented
        return type(self).forward(self, *args, **kwargs) if result is NotImplemented else result

    vars(forward)["__signature__"] = inspect.signature(original.forward)
    return type(original.__name__, (torch.nn.Module,), {"forward": forward, "can_torch_compile": True})


def _layers() -> dict[str, type[torch.nn.Module]]:
    """Returns the classes by the names that transformers gives to the functions."""
    layers = {}
    for family in FAMILIES:
        module = next((module for module in map(module_of, family.models) if module is not None), None)
        for name, new in family.functions.items() if module is not None else ():
            current = getattr(module, name)
            original = current.original if isinstance(current, Replacement) else current
            if isinstance(original, torch.nn.Module):
                layers[getattr(type(original), "kernel_layer_name")] = _layer(new, type(original))  # noqa: B009
    return layers


LAYERS = _layers()
"""The classes, by the name of the kernel. They are attributes of this module too, where `kernels` looks for them."""
globals().update(LAYERS)
