"""Activations by the names that configurations of models give them, as flash-linear-attention has them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import torch.nn.functional as F
from torch import Tensor

from gla_core.dispatch.errors import nearest

Activation = Callable[[Tensor], Tensor]


def _squared_relu(x: Tensor) -> Tensor:
    return F.relu(x).square()


ACTIVATIONS: Mapping[str, Activation] = {
    "relu": F.relu,
    "sigmoid": F.sigmoid,
    "logsigmoid": F.logsigmoid,
    "silu": F.silu,
    "swish": F.silu,
    "sqrelu": _squared_relu,
    "gelu": functools.partial(F.gelu, approximate="tanh"),
}


def activation(argument: str, name: str | Activation) -> Activation:
    """The activation of this name; a function stands for itself.

    Args:
        argument: what it was given as, for the message.

    Raises:
        ValueError: there is no activation of this name.
    """
    if not isinstance(name, str):
        return name
    if name not in ACTIVATIONS:
        raise ValueError(
            f"unknown {argument} {name!r}{nearest(name, ACTIVATIONS)} (there are {', '.join(ACTIVATIONS)})"
        )
    return ACTIVATIONS[name]
