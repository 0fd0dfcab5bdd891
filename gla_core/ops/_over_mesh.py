"""Runs ops on DTensors: each rank computes its own sequences, heads or rows of a softmax, without communication.

Along each dimension of the mesh, all arguments are sharded like the first argument that is sharded there; arguments
with other placements are redistributed. Tensors sharded along tokens are refused, because a state passes from token to
token, and a query reads the keys of other tokens. A tensor sharded along the dimension that a softmax sums is refused
too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from gla_core.ops.spec import PER_SEQUENCE, OpSpec

SPREAD = {"B": "B", "N": "B", "P": "B", "H": "H", "Hq": "H", "Hv": "H", "Ho": "H"}
"""Maps the names of the dimensions that may be spread over ranks to sequences (B) or heads (H)."""

TOKENS = {
    "T": "sequences that are spread over ranks are for gla_core.distributed.chunk_gla",
    "Tq": "redistribute() brings it there",
    "Tk": "redistribute() brings it there",
}
"""Maps the names of the dimensions that may not be spread to advice for the error message."""

Along = Sequence[str | None]
"""The kind that each dimension of a mesh spreads: sequences (B), heads (H) or nothing (None)."""


def taking_dtensors(spec: OpSpec, call: Callable[..., Any], in_place: bool) -> Callable[..., Any]:
    """Returns a function that calls an op with DTensors too.

    Args:
        call: calls the op with plain tensors.
        in_place: whether the op writes into an argument. Arguments are then not redistributed, and the op returns only
            the first result.
    """
    results = spec.results[:1] if in_place else spec.results

    def call_any(*args: Any) -> Any:
        if type(args[0]) is Tensor or not is_dtensor(args[0]):
            return call(*args)
        from torch.distributed.tensor.experimental import local_map

        arguments = dict(zip(spec.parameters, args, strict=False))
        shapes = {a.name: a.dims(x) for a in spec.arguments if isinstance(x := arguments.get(a.name), Tensor)}
        along, outputs = _along(spec, shapes, arguments), []
        inputs = [_placements(shapes[name], along) if is_dtensor(x) else None for name, x in arguments.items()]
        for result in results:
            absent = arguments[result.like] is None if result.like else result.when and not result.when(arguments)
            shape = shapes.get(result.like, []) if result.like else result.shape.split()
            outputs.append(None if absent else _placements(shape, along, sums=result.name == f"d{result.like}"))
        gradients = [
            _placements(shapes[name], along, sums=True) if is_dtensor(x) else None for name, x in arguments.items()
        ]
        rest = [None] * (len(args) - len(inputs))
        where: dict[str, Any] = {"device_mesh": args[0].device_mesh, "redistribute_inputs": not in_place}
        where["in_grad_placements"] = (*gradients, *rest)
        return local_map(call, tuple(outputs), (*inputs, *rest), **where)(*args)

    return call_any


def taking_dtensors_of_rows(call: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that calls an op of x along dim with a DTensor too; `call` takes only a plain tensor.

    The DTensor may be sharded along any dimension except dim.
    """

    def call_any(x: Any, dim: Any, *rest: Any) -> Any:
        if type(x) is Tensor or not is_dtensor(x):
            return call(x, dim, *rest)
        from torch.distributed.tensor import Replicate
        from torch.distributed.tensor.experimental import local_map

        if any(placement.is_shard(dim) for placement in x.placements):
            raise ValueError(
                f"x is sharded along dim = {dim}, which sums to one; expected along other dimensions: "
                "redistribute() brings it there"
            )
        where = tuple(placement if placement.is_shard() else Replicate() for placement in x.placements)
        _check_even("x", [f"shape[{i}]" for i in range(x.ndim)], x, where)
        inputs = (where, *[None] * (1 + len(rest)))
        on_each_rank: Any = local_map(call, (where,), inputs, device_mesh=x.device_mesh, redistribute_inputs=True)
        return on_each_rank(x, dim, *rest)

    return call_any


def is_dtensor(x: Any) -> bool:
    """Returns whether x is a DTensor."""
    return isinstance(x, Tensor) and hasattr(x, "device_mesh")


def _placements(shape: Sequence[str], along: Along, sums: bool = False) -> tuple[Any, ...]:
    """Returns the placements on a mesh of a tensor whose dimensions have these names.

    Args:
        sums: whether the tensor is the gradient of an argument. If it lacks a dimension that is spread, as the gradient
            of a constant gate lacks the batch, each rank has its own share of the sum.
    """
    from torch.distributed.tensor import Partial, Replicate, Shard

    kinds, whole = [SPREAD.get(name) for name in shape], Replicate()
    missing = Partial() if sums else whole
    return tuple(whole if k is None else Shard(kinds.index(k)) if k in kinds else missing for k in along)


def _along(spec: OpSpec, shapes: Mapping[str, Sequence[str]], arguments: Mapping[str, Any]) -> Along:
    """Returns the kind that each dimension of the mesh spreads in a call.

    Raises:
        ValueError, TypeError: a tensor is sharded along tokens, a size is not a multiple of the ranks that spread it,
            or not all tensors are DTensors.
    """
    first = arguments[spec.parameters[0]]
    along: list[str | None] = [None] * first.device_mesh.ndim
    packed = False
    for argument in spec.arguments:
        name = argument.name
        x: Any = arguments.get(name)
        if argument.role in PER_SEQUENCE:
            packed |= x is not None
        elif is_dtensor(x):
            for dim, placement in enumerate(x.placements):
                where: str = shapes[name][int(placement.dim)] if placement.is_shard() else ""
                if where in TOKENS:
                    raise ValueError(
                        f"{name} is sharded along its tokens; expected along the batch or heads: {TOKENS[where]}"
                    )
                along[dim] = along[dim] or SPREAD.get(where)
        elif isinstance(x, Tensor):
            raise TypeError(f"{name} is a plain tensor and {spec.parameters[0]} a DTensor; expected both alike")
    # Offsets of packed sequences and indices into a pool count rows of the whole tensor.
    along = [None if packed and kind == "B" else kind for kind in along]
    for name, x in arguments.items():
        if is_dtensor(x):
            _check_even(name, shapes[name], x, _placements(shapes[name], along))
    return along


def _check_even(argument: str, names: Sequence[str], x: Any, placements: Sequence[Any]) -> None:
    """Raises ValueError unless all ranks get equal parts of x, whose dimensions have these names."""
    for dim, (name, size) in enumerate(zip(names, x.shape, strict=False)):
        ranks = math.prod(n for p, n in zip(placements, x.device_mesh.shape, strict=True) if p.is_shard(dim))
        if size % ranks:
            raise ValueError(f"{argument} has {name} = {size}; expected a multiple of the {ranks} ranks that spread it")
