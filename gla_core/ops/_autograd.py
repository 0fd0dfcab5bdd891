"""Derives the gradient of an op whose backward is an op too, from the names in their two descriptions.

    kept           every argument and result of the forward that the backward takes by the same name
    d<result>      an argument of the backward: the incoming gradient of a result of the forward
    d<argument>    a result of the backward: the gradient of an argument of the forward

The request of the forward travels to the backward.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gla_core.dispatch.backend import Lowering, OpCall, Parts
from gla_core.dispatch.request import request_of, text_of
from gla_core.ops._run import bypasses_torch, run
from gla_core.ops.spec import OpSpec, picker, size_of


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
    available = (*forward.parameters, *results)
    kept = [argument for argument in backward.arguments if argument.name in available]
    tensors = [argument.name for argument in kept if argument.dtype is not None]
    others = [argument.name for argument in kept if argument.dtype is None]
    tensors_of, others_of = (picker([available.index(name) for name in names]) for names in (tensors, others))
    # The arguments of the backward come from the kept tensors, the other kept values, and the incoming gradients.
    sources = [*tensors, *others, *(f"d{name}" for name in results)]
    arguments_of = picker([sources.index(name) for name in backward.parameters])
    required = [i for i, a in enumerate(backward.arguments) if a.type == "Tensor" and a not in kept]
    likes = [result.name.removeprefix("d") for result in backward.results]
    likes_of = picker([backward.parameters.index(like) for like in likes])
    has_one_result = len(likes) == 1
    parameters, number = forward.parameters, len(forward.parameters)
    # A backward that does not know of an argument would return wrong gradients.
    unknown = [i for i, a in enumerate(forward.arguments) if a.is_optional_input and a.name not in backward.parameters]
    # There is no gradient for needs_grad and the request; a None stands behind the gradients.
    gradients_of = picker([likes.index(name) if name in likes else -1 for name in (*parameters, "", "")])

    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        outputs = output if isinstance(output, tuple) else (output,)
        ctx.mark_non_differentiable(*[outputs[i] for i in without_gradient if outputs[i] is not None])
        ctx.set_materialize_grads(False)  # zeros for checkpoints would be as large as the checkpoints
        absent: tuple[int, ...] = ()  # results that are None, but outside eager mode empty tensors of one dimension
        for i, is_asked_for in optional:
            x = outputs[i]
            if x is not None and x.ndim == 1 and not is_asked_for(dict(zip(parameters, inputs, strict=False))):
                absent = (*absent, i)
        outputs = _without(outputs, absent) if absent else outputs
        values = (*inputs[:number], *outputs)
        ctx.save_for_backward(*tensors_of(values))
        alone = next((i for i in unknown if inputs[i] is not None), None) if unknown else None
        ctx.kept = others_of(values), absent, inputs[-1], alone

    def compute(ctx: Any, *incoming: Tensor | None) -> tuple:
        others, absent, request, alone = ctx.kept
        if alone is not None:
            raise RuntimeError(
                f"{forward.name} has no gradient of a call with {parameters[alone]}; call {forward.public}, whose "
                "gradient is computed without it"
            )
        ds = _without(incoming, absent) if absent else incoming
        args = arguments_of((*ctx.saved_tensors, *others, *ds))
        for i in required:
            if args[i] is None:
                args = (*args[:i], _zeros(backward, args, i), *args[i + 1 :])
        if bypasses_torch(args[0]) and not torch.is_grad_enabled():
            computed = run(backward, backward.prepared(args), request_of(request))
            return gradients_of((computed, None) if has_one_result else (*computed, None))
        computed = run_backward(*args, text_of(request))  # an empty tensor for a gradient that does not exist
        computed = (computed,) if has_one_result else computed
        gradients = [None if x is None else d for x, d in zip(likes_of(args), computed, strict=True)]
        return gradients_of((*gradients, None))

    return setup_context, compute


def in_pytorch(forward: OpSpec, compute: Callable[..., Any], forwards: int) -> Lowering:
    """Returns the lowering of a backward to its forward: PyTorch computes it for a backend that has only the forward.

    Args:
        compute: takes the arguments of the backward in order, and returns its results. It does not call the forward.
        forwards: the number of forwards that are predicted to take as long as the backward.
    """

    def parts(call: OpCall) -> Parts:
        part = dataclasses.replace(call, op=forward.name, given=call.given.intersection(forward.contract))
        return ((part, forwards),)

    return Lowering(forward.name, parts, lambda *_: compute)


def _without(values: tuple, places: Sequence[int]) -> tuple:
    """Returns the values, with None at these places."""
    return tuple(None if i in places else x for i, x in enumerate(values))


def _zeros(op: OpSpec, args: Sequence[Any], i: int) -> Tensor:
    """Returns zeros for argument i of an op, sized by the other arguments; like the first one if it has any shape."""
    sizes: dict[str, int] = {}
    for argument, x in zip(op.arguments, args, strict=True):
        if argument.shape is not None and x is not None:
            sizes |= zip(argument.dims(x), x.shape, strict=True)
    shape, dtype = op.arguments[i].shape, op.arguments[i].dtype
    if shape is None:
        return torch.zeros_like(args[0])
    assert dtype is not None
    return args[0].new_zeros([size_of(name, sizes) for name in shape.split()], dtype=dtype.allowed(args[0].dtype)[0])
