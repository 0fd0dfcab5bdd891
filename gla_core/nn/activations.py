"""Activations by the names that models' configurations use, as in flash-linear-attention."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import torch.nn.functional as F
from torch import Tensor

from gla_core.dispatch.errors import check_known

Activation = Callable[[Tensor], Tensor]
ACTIVATIONS: Mapping[str, Activation] = {
    "relu": F.relu,
    "sigmoid": F.sigmoid,
    "logsigmoid": F.logsigmoid,
    "silu": F.silu,
    "swish": F.silu,
    "sqrelu": lambda x: F.relu(x).square(),
    "gelu": functools.partial(F.gelu, approximate="tanh"),
}


def activation(argument: str, name: str | Activation) -> Activation:
    """Returns the activation with this name; a function is returned as it is.

    Args:
        argument: name of the caller's argument, for the error message.
        name: one of `ACTIVATIONS`, or a function.

    Raises:
        ValueError: no activation has this name.
    """
    if not isinstance(name, str):
        return name
    check_known(argument, name, ACTIVATIONS)
    return ACTIVATIONS[name]
