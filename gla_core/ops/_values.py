"""Checks the values of a call under GLA_CHECK=1, which makes the host wait for the device.

A check reads what the op reads, and nothing else: a pool of states is new memory where no request has written, and rows
that belong to no sequence hold anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from gla_core.ops import _overlap, checks
from gla_core.ops.spec import OpSpec, Role


def check(spec: OpSpec, args: tuple) -> None:
    """Raises ValueError for values for which an op is not defined, such as NaN or a gate above 0 where it reads.

    It also checks again that no memory is written which another argument has; see _overlap.py.
    """
    if spec.reads is None:
        return
    arguments = dict(zip(spec.parameters, args, strict=True))
    _overlap.check(spec.as_public(arguments), spec.written_by(arguments))
    read = rows_read(spec, arguments)
    for name, x in spec.as_public(read).items():
        if bool(x.isnan().any()):
            raise ValueError(f"{name} holds NaN in {int(x.isnan().sum())} of {x.numel()} places")
    gate = spec.has(Role.GATE)
    if gate is not None and all(arguments.get(name) is None for name in ("gate_normalizer", "gate_activation")):
        checks.gate_values(read.get(gate.name))


def rows_read(spec: OpSpec, arguments: Mapping[str, Any]) -> dict[str, Tensor]:
    """Returns what an op reads of its tensors of floats: rows, slots of a pool, or whole tensors; see `OpSpec.reads`.

    Args:
        arguments: the arguments by name.

    Raises:
        ValueError: the op is not defined for offsets, slots or indices of the call.
    """
    places = {} if spec.reads is None else spec.reads(arguments)
    read = {}
    for argument in spec.arguments:
        x = arguments[argument.name]
        if isinstance(x, Tensor) and x.is_floating_point() and argument.name not in spec.places:
            dims = " ".join(argument.dims(x)) + " "
            read[argument.name] = x[next((at for first, at in places.items() if dims.startswith(f"{first} ")), ...)]
    return read
