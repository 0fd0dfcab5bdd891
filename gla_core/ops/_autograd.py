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

from gla_core.ops.spec import OpSpec


def gradient(
    forward: OpSpec, backward: OpSpec, run_backward: Callable[..., Any]
) -> tuple[Callable[..., None], Callable[..., tuple]]:
    """Returns the `setup_context` and the `backward` of the forward's torch op, as `torch_op` takes them.

    A result that the backward takes no gradient of is marked as not differentiable. Gradients are not materialized: the
    backward receives None for an optional `d<result>` that is missing, and zeros for a required one.

    Args:
        run_backward: calls the backward's torch op: takes its arguments in order, and the request.
    """
    results = [result.name for result in forward.results]
    given = (*forward.parameters, *results)
    takes_gradient = [f"d{name}" in backward.parameters for name in results]
    kept = [name for name in backward.parameters if name in given]
    tensors = [a.name for a in backward.arguments if a.name in kept and a.dtype is not None]
    tensors_at = [given.index(name) for name in tensors]
    others_at = [given.index(name) for name in kept if name not in tensors]
    # The backward's arguments are found among the tensors that are kept, the others, and the incoming gradients.
    pool = [*tensors, *(given[i] for i in others_at), *(f"d{name}" for name in results)]
    order = [pool.index(name) for name in backward.parameters]
    required = [i for i, a in enumerate(backward.arguments) if a.type == "Tensor" and a.name not in kept]
    gradients = [
        (forward.parameters.index(like), backward.parameters.index(like))
        for like in (result.name.removeprefix("d") for result in backward.results)
    ]
    number = len(forward.parameters) + 2  # needs_grad and the request come last

    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        found = output if isinstance(output, tuple) else (output,)
        named = dict(zip(forward.parameters, inputs, strict=False))
        asked = [result.when is None or result.when(named) for result in forward.results]
        without = [x for x, takes in zip(found, takes_gradient, strict=True) if x is not None and not takes]
        ctx.mark_non_differentiable(*without)
        ctx.set_materialize_grads(False)  # zeros of checkpoints would be as large as they are
        # Where PyTorch runs the op, an empty tensor stands for a result that was not asked for.
        values = (*inputs[: number - 2], *(x if is_asked else None for x, is_asked in zip(found, asked, strict=True)))
        ctx.save_for_backward(*[values[i] for i in tensors_at])
        ctx.others = [values[i] for i in others_at]
        ctx.asked, ctx.backend = asked, inputs[-1]

    def run(ctx: Any, *incoming: Tensor | None) -> tuple:
        ds = (d if is_asked else None for d, is_asked in zip(incoming, ctx.asked, strict=True))
        found = [*ctx.saved_tensors, *ctx.others, *ds]
        args = [found[i] for i in order]
        for i in required:
            if args[i] is None:
                args[i] = _zeros(backward, args, i)
        returned: list[Tensor | None] = [None] * number
        for (place, like), d in zip(gradients, run_backward(*args, ctx.backend), strict=True):
            returned[place] = None if args[like] is None else d
        return tuple(returned)

    return setup_context, run


def _zeros(op: OpSpec, args: Sequence[Any], i: int) -> Tensor:
    """Returns zeros for argument i of an op, sized by the other arguments."""
    sizes: dict[str, int] = {}
    for argument, x in zip(op.arguments, args, strict=True):
        if argument.shape is not None and x is not None:
            sizes |= zip(argument.shape.split(), x.shape, strict=True)
    shape, dtype = op.arguments[i].shape, op.arguments[i].dtype
    assert shape is not None
    assert dtype is not None
    return args[0].new_zeros([sizes[name] for name in shape.split()], dtype=dtype.allowed(args[0].dtype)[0])
