"""Derives the gradient of an op whose backward is an op too, from the names in their two descriptions.

    kept           every argument and result of the forward that the backward takes by the same name
    d<result>      an argument of the backward: the incoming gradient of a result of the forward
    d<argument>    a result of the backward: the gradient of an argument of the forward

The request of the forward travels to the backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from gla_core.ops.spec import OpSpec, size_of


def gradient(
    forward: OpSpec, backward: OpSpec, run_backward: Callable[..., Any]
) -> tuple[Callable[..., None], Callable[..., tuple]]:
    """Returns the `setup_context` and the `backward` of the forward's torch op, as `torch_op` takes them.

    A result whose gradient the backward does not take is marked as not differentiable. Gradients are not materialized:
    the backward receives None for an optional `d<result>` that is missing, and zeros for a required one.

    Args:
        run_backward: calls the backward's torch op; takes the arguments of the op in order, and the request.
    """
    results = [result.name for result in forward.results]
    without_gradient = [i for i, name in enumerate(results) if f"d{name}" not in backward.parameters]
    optional = [(i, result.when) for i, result in enumerate(forward.results) if result.when is not None]
    given = (*forward.parameters, *results)
    kept = [argument for argument in backward.arguments if argument.name in given]
    tensors = [argument.name for argument in kept if argument.dtype is not None]
    others = [argument.name for argument in kept if argument.dtype is None]
    tensors_at, others_at = ([given.index(name) for name in names] for names in (tensors, others))
    # The arguments of the backward come from the kept tensors, the other kept values, and the incoming gradients.
    sources = [*tensors, *others, *(f"d{name}" for name in results)]
    order = [sources.index(name) for name in backward.parameters]
    required = [i for i, a in enumerate(backward.arguments) if a.type == "Tensor" and a not in kept]
    likes = [result.name.removeprefix("d") for result in backward.results]
    places = [(forward.parameters.index(like), backward.parameters.index(like)) for like in likes]
    parameters, number = forward.parameters, len(forward.parameters)

    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        found = list(output) if isinstance(output, tuple) else [output]
        ctx.mark_non_differentiable(*[found[i] for i in without_gradient if found[i] is not None])
        ctx.set_materialize_grads(False)  # zeros for checkpoints would be as large as the checkpoints
        named = dict(zip(parameters, inputs, strict=False))
        for i, is_asked_for in optional:
            if not is_asked_for(named):
                found[i] = None  # outside eager mode it is an empty tensor
        values = (*inputs[:number], *found)
        ctx.save_for_backward(*[values[i] for i in tensors_at])
        ctx.others = [values[i] for i in others_at]
        ctx.returned = [x is not None for x in found]
        ctx.backend = inputs[-1]

    def run(ctx: Any, *incoming: Tensor | None) -> tuple:
        ds = [d if is_there else None for d, is_there in zip(incoming, ctx.returned, strict=True)]
        found = [*ctx.saved_tensors, *ctx.others, *ds]
        args = [found[i] for i in order]
        for i in required:
            if args[i] is None:
                args[i] = _zeros(backward, args, i)
        gradients: list[Tensor | None] = [None] * (number + 2)  # none for needs_grad and the request
        for (place, like), d in zip(places, run_backward(*args, ctx.backend), strict=True):
            gradients[place] = None if args[like] is None else d
        return tuple(gradients)

    return setup_context, run


def _zeros(op: OpSpec, args: Sequence[Any], i: int) -> Tensor:
    """Returns zeros for argument i of an op, sized by the other arguments."""
    sizes: dict[str, int] = {}
    for argument, x in zip(op.arguments, args, strict=True):
        if argument.shape is not None and x is not None:
            sizes |= zip(argument.dims(x), x.shape, strict=True)
    shape, dtype = op.arguments[i].shape, op.arguments[i].dtype
    assert shape is not None
    assert dtype is not None
    return args[0].new_zeros([size_of(name, sizes) for name in shape.split()], dtype=dtype.allowed(args[0].dtype)[0])
