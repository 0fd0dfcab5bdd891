"""Defines the torch.library op of an abstract op, with its schema, implementation, fake, gradient and torch.func rules.

PyTorch calls an op through its dispatcher when it compiles, counts or traces. torch.func takes gradients from an
`autograd.Function` only, which is also the fastest way to run eagerly. An op with a gradient is therefore both a
dispatcher op and an `autograd.Function`, made of the same functions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.autograd import forward_ad
from torch.compiler import is_compiling
from torch.utils._pytree import _register_namedtuple

from gla_core.dispatch.request import current_request, text_of
from gla_core.dispatch.tensors import wide
from gla_core.ops import _flops, autocast
from gla_core.ops._over_mesh import taking_dtensors, taking_dtensors_of_rows
from gla_core.ops._run import bypasses_torch, transformed
from gla_core.ops._run import run as run_op
from gla_core.ops.spec import HEADS, Argument, OpSpec, Result, picker, trailing_optional

_library = torch.library.Library("gla", "DEF")

TorchOp = Callable[..., Any]
_Results = TypeVar("_Results", bound=tuple)


def exportable(results: type[_Results]) -> type[_Results]:
    """Registers a NamedTuple of results as a decorator: `torch.export.save` then takes programs that return one."""
    _register_namedtuple(results, serialized_type_name=f"gla_core.{results.__name__}")
    return results


def torch_op_of(
    spec: OpSpec,
    setup_context: Callable[..., None] | None = None,
    backward: Callable[..., tuple] | None = None,
    vmap: Callable[..., tuple[Any, Any]] | None = None,
) -> TorchOp:
    """Defines `gla::<name of the op>`, which runs the op under a request, and returns the function that calls it.

    The function takes the op's arguments, needs_grad if the op has a gradient, and the request as a string. It may
    return an empty tensor in place of None. For the other arguments see `torch_op`.
    """
    return torch_op(spec.schema(), runner(spec), faker(spec), setup_context, backward, vmap, spec.flops, spec)


def eager_op_of(spec: OpSpec, setup_context: Callable[..., None], backward: Callable[..., tuple]) -> TorchOp:
    """Returns a function that runs an op of several results for a gradient, if `bypasses_torch` allows it.

    It takes the arguments of the torch op, as `OpSpec.prepared` returns them, with a `Request` in place of its text.
    """

    def forward(ctx: Any, args: tuple, *_: Any) -> tuple:
        results = tuple(run_op(spec, args[:-2], args[-1], True))
        setup_context(ctx, args, results)
        return results

    return _eager(spec.name, forward, getattr(torch.ops.gla, spec.name).default, backward)


def runner(spec: OpSpec, *last: Any) -> Callable[..., Any]:
    """Returns the function that runs an op as a torch op. `last` are the last arguments if the torch op omits them."""
    arguments = _arguments(spec, last)
    written = [spec.parameters.index(name) for name in spec.written]

    def run(*args: Any) -> Any:
        values, needs_grad, backend = arguments(args)
        results = run_op(spec, spec.prepared(values), current_request(backend), needs_grad)
        if written:
            tell_autograd(*[values[i] for i in written])
        return tuple(results) if isinstance(results, list) else results

    return run


def faker(spec: OpSpec, *last: Any) -> Callable[..., Any]:
    """Returns the function that replaces an op for tensors without values. `last` is the same as in `runner`."""
    arguments = _arguments(spec, last)

    def fake(x: Tensor, *args: Any) -> Any:
        values, _, _ = arguments((x, *args))
        empty = [None if e is None else e.empty(x) for e in spec.expected(*values)]
        return empty[0] if len(empty) == 1 else _without_none(x, empty)

    return fake


def _arguments(spec: OpSpec, last: tuple) -> Callable[[tuple], tuple[tuple, bool, str]]:
    """Returns a function that splits the arguments of a torch op into the op's, needs_grad, and the request."""
    taken, received = len(spec.contract) - len(last), len(spec.parameters) - len(last)
    options = (False, "") if spec.differentiable else ("",)
    arguments = (*spec.arguments[:taken], *spec.arguments[len(spec.contract) :])
    defaults = (None,) * trailing_optional(arguments) + options
    full, differentiable = received + len(options), spec.differentiable

    def apart(args: tuple) -> tuple[tuple, bool, str]:
        if len(args) < full:  # PyTorch leaves out defaults
            args += defaults[len(args) - full :]
        values = (*args[:taken], *last, *args[taken:received]) if last else args[:received]
        return values, differentiable and args[received] is True, args[-1]

    return apart


def _without_none(x: Tensor, results: Any) -> Any:
    # A torch op cannot return None.
    if isinstance(results, Tensor):
        return results
    return tuple([x.new_empty(0, dtype=wide(x.dtype)) if result is None else result for result in results])


def torch_op(
    schema: str,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    setup_context: Callable[..., None] | None = None,
    backward: Callable[..., tuple] | None = None,
    vmap: Callable[..., tuple[Any, Any]] | None = None,
    flops: Callable[..., int] | None = None,
    spec: OpSpec | None = None,
) -> TorchOp:
    """Defines `gla::<name>` and returns the function that calls it.

    Args:
        schema: the schema for torch.library; it begins with the name.
        run: takes real tensors, the first argument among them, and returns a tensor, or a tuple of tensors and None.
        fake: takes and returns tensors without values.
        setup_context, backward: as in `torch.library.register_autograd`; `backward` alone if it only raises. If a
            result of `run` is None, they get None in eager mode and an empty tensor otherwise.
        vmap: as in `torch.library.register_vmap`; by default the new dimension joins the batch, or the heads if a
            tensor has heads and no batch, such as the rates of `chunk_ssd`.
        flops: takes the shapes of the tensors and returns the number of floating-point operations.
        spec: the description of the op whose first arguments the torch op takes. With it the function takes DTensors.
    """
    name = schema.partition("(")[0]
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, _as_torch_op(run), "CompositeExplicitAutograd")
    torch.library.register_fake(f"gla::{name}", fake, lib=_library)
    call: TorchOp = getattr(torch.ops.gla, name).default
    if flops is not None:
        _flops.count(getattr(torch.ops.gla, name), flops)

    def batched(info: Any, in_dims: tuple, *args: Any) -> tuple[Any, Any]:
        rule = vmap or functools.partial(_join_heads if _lacks_batch(spec, args) else _join_batch, spec)
        return rule(call, info.batch_size, in_dims, args)

    torch.library.register_vmap(f"gla::{name}", batched, lib=_library)
    if backward is not None:
        setup_context = setup_context or (lambda ctx, inputs, output: None)
        torch.library.register_autograd(f"gla::{name}", backward, setup_context=setup_context, lib=_library)
        call = _differentiable(name, run, call, setup_context, backward, batched)
    if spec is None:
        return call
    if "rows" in spec.sizes:
        return taking_dtensors_of_rows(call)
    return taking_dtensors(spec, call, in_place="(a!)" in schema)


def _as_torch_op(run: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `run`: an empty tensor replaces a result that is None, and autocast is off inside `run`."""

    def run_as_torch_op(x: Tensor, *args: Any) -> Any:
        if not autocast.in_force():
            return _without_none(x, run(x, *args))
        with autocast.off(x.device.type):
            return _without_none(x, run(x, *args))

    return run_as_torch_op


def _differentiable(
    name: str, run: Callable, op: Any, setup_context: Callable, backward: Callable, vmap: Callable
) -> TorchOp:
    """Returns a function that calls the op, in eager mode and under torch.func as an `autograd.Function`."""

    def forward(*args: Any) -> Any:
        return _without_none(args[0], run(*args)) if bypasses_torch(args[0]) else op(*args)

    def forward_eagerly(ctx: Any, args: tuple, *_: Any) -> Any:
        results = run(*args)
        setup_context(ctx, args, results)
        return results

    func = _function(name, forward=forward, setup_context=setup_context, backward=backward, vmap=vmap, jvp=_refuse_jvp)
    eagerly = _eager(name, forward_eagerly, op, backward)

    def call(*args: Any) -> Any:
        if bypasses_torch(args[0]):
            return eagerly(*args) if torch.is_grad_enabled() else run(*args)
        return op(*args) if is_compiling() or not transformed() else func.apply(*args)

    return call


def _eager(name: str, forward: Callable, op: Any, backward: Callable) -> TorchOp:
    """Returns a function that calls the op as an `autograd.Function` in eager mode. The request may be a `Request`.

    This takes half the time of PyTorch's dispatcher. PyTorch inspects the signature of a Function with setup_context in
    every call, so this one has no setup_context, and `forward` calls it. The first argument of `forward` after ctx is a
    tuple of all arguments, and the others are the tensors among them: autograd takes time for each argument.
    """
    tensors_of = picker([i for i, argument in enumerate(op._schema.arguments) if "Tensor" in str(argument.type)])

    def backward_of_all(ctx: Any, *grads: Any) -> tuple:
        return None, *tensors_of(backward(ctx, *grads))

    function = _function(name, forward=forward, backward=backward_of_all, jvp=_refuse_jvp)
    # `Function.apply` would first look for tensors of torch.func among the arguments.
    without_torch_func: Any = super(torch.autograd.Function, function)
    apply = without_torch_func.apply

    def call(*args: Any) -> Any:
        try:
            return apply(args, *tensors_of(args))
        except RuntimeError:
            # A tensor of torch.func that has left its transform has no address; PyTorch's dispatcher unwraps it.
            if not any(isinstance(x, Tensor) and is_functorch_wrapped_tensor(x) for x in args):
                raise
        return op(*args[:-1], text_of(args[-1]))

    return call


def _function(name: str, **members: Callable) -> Any:
    return type(name, (torch.autograd.Function,), {key: staticmethod(f) for key, f in members.items()})


def no_second_derivative(op: str) -> Callable[..., tuple]:
    """Returns the `backward` of an op's backward, which raises RuntimeError."""

    def refuse(ctx: Any, *grads: Tensor) -> NoReturn:
        raise RuntimeError(f"{op} has no second derivative; do not pass create_graph=True through it")

    return refuse


def refuse_tangents(*tensors: Any) -> None:
    """Raises NotImplementedError for a tensor that carries a tangent of forward-mode AD."""
    if forward_ad._current_level < 0 or transformed():  # torch.func asks the op itself
        return
    for x in tensors:
        if isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None:
            _refuse_jvp()


def _refuse_jvp(*_: Any) -> NoReturn:
    raise NotImplementedError(
        "the ops of gla_core have no forward-mode derivative (torch.func.jvp, dual tensors); use reverse mode: "
        "backward(), torch.func.grad or vjp"
    )


def refusal_in_place(instead: str) -> Callable[..., NoReturn]:
    """Returns a function that raises NotImplementedError, as the `vmap` of an op that writes into its arguments.

    Args:
        instead: what the user can call instead.
    """

    def refuse(*_: Any) -> NoReturn:
        raise NotImplementedError(f"torch.func transforms no op that writes a pool or a state; call {instead}")

    return refuse


def tell_autograd(*written: Tensor | None) -> None:
    """Tells autograd, which cannot see it, that tensors were written: a backward that saved one of them then raises."""
    for x in written:
        if x is not None and not x.is_inference():
            torch.autograd.graph.increment_version(x)


_NO_VMAP = (
    "torch.vmap goes over neither packed sequences (cu_seqlens) nor a pool of states (slots); give them a batch "
    "dimension, or call the op once for each"
)


def _join_batch(spec: OpSpec | None, call: TorchOp, size: int, in_dims: tuple, args: tuple) -> tuple[Any, Any]:
    """Computes the rule of torch.vmap: the new dimension, of `size`, joins the batch."""
    constant = _constant_gate(spec, in_dims, args)
    joined = []
    for i, (x, dim) in enumerate(zip(args, in_dims, strict=True)):
        if isinstance(x, Tensor) and not x.is_floating_point():
            raise NotImplementedError(_NO_VMAP)
        if isinstance(x, Tensor):
            x = x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
            if i == constant:  # it has no batch, and becomes a gate of each token and head
                tokens = joined[0].shape[: joined[0].ndim - 2]
                x = x.to(wide(joined[0].dtype))  # so that only the sum of the tokens' gradients is rounded
                x = x.view(size, *[1] * len(tokens), -1).expand(size, tokens[0] // size, *tokens[1:], -1)
            x = x.flatten(0, 1)
        joined.append(x)
    results = _without_none(joined[0], call(*joined))
    # An empty tensor of one dimension stands for a result that is None.
    parts = [x if x.ndim == 1 else x.unflatten(0, (size, x.shape[0] // size)) for x in results]
    if spec is not None and constant is not None:
        gate = spec.parameters[constant]
        parts = [
            x.flatten(1, -2).sum(1).to(args[constant].dtype) if result.like == gate and x.ndim > 1 else x
            for result, x in zip(spec.results, parts, strict=False)
        ]
    return tuple(parts), tuple(None if x.ndim == 1 else 0 for x in results)


def _join_heads(spec: OpSpec, call: TorchOp, size: int, in_dims: tuple, args: tuple) -> tuple[Any, Any]:
    """Computes the rule of torch.vmap for an op whose tensors all have heads: the new dimension joins the heads."""

    def place(x: Argument | Result, ndim: int) -> int:
        like = arguments[x.like] if isinstance(x, Result) and x.like else x
        shapes = (like.shape, *(like.forms or {}).values()) if isinstance(like, Argument) else (like.shape,)
        names = next(shape.split() for shape in shapes if shape is not None and len(shape.split()) == ndim)
        return next(i for i, name in enumerate(names) if name in HEADS)

    arguments = {argument.name: argument for argument in spec.arguments}
    joined = list(args)
    for i, (argument, x, dim) in enumerate(zip(spec.arguments, args, in_dims, strict=False)):
        if isinstance(x, Tensor) and x.is_floating_point():
            x = x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
            at = place(argument, x.ndim - 1)
            joined[i] = x.movedim(0, at).flatten(at, at + 1)
        elif dim is not None:
            raise NotImplementedError(_NO_VMAP)
    results = _without_none(joined[0], call(*joined))
    is_absent = [x.ndim == 1 and not x.numel() for x in results]  # an empty tensor stands for a result that is None
    at = [None if a else place(r, x.ndim) for r, x, a in zip(spec.results, results, is_absent, strict=True)]
    parts = [x if i is None else x.unflatten(i, (size, -1)) for x, i in zip(results, at, strict=True)]
    return tuple(parts), tuple(at)


def _lacks_batch(spec: OpSpec | None, args: tuple) -> bool:
    """Returns whether an argument is a tensor whose first dimension is the heads. Another form of a gate is not one."""
    arguments = () if spec is None else zip(spec.arguments, args, strict=False)
    return any(isinstance(x, Tensor) and (each.shape or "").partition(" ")[0] in HEADS for each, x in arguments)


def _constant_gate(spec: OpSpec | None, in_dims: tuple, args: tuple) -> int | None:
    """Returns the position of the gate if it is constant, so that it has no batch."""
    for i, argument in enumerate(spec.arguments if spec is not None else ()):
        if argument.forms is not None and isinstance(args[i], Tensor):
            return i if args[i].ndim - (in_dims[i] is not None) == 1 else None
    return None
