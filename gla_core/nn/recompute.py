"""Functions whose backward computes them again, so that autograd keeps only their arguments.

It suits norms, and an activation times a gate: quick to compute, and large to keep. A linear layer that reads the
result would keep it for the gradient of its weight; `not_kept` prevents this too.

    z = recomputed(gated, gate, x)       keeps gate and x
    with not_kept(z):
        y = down_proj(z)                 keeps its weight, and not z

The backward then computes z once, for down_proj and for the gradients of gate and x. If the function has a formula for
its gradients, as kernels have, autograd need not record it a second time, which takes the host long:

    z = recomputed(kernels.gated, gate, x, gradients=kernels.gated_backward)

z is computed in the backward of down_proj. If the function reads weights of another module, as a norm does, these may
have no memory then: FSDP frees weights outside of their own module's forward and backward. They have no memory when
down_proj runs either, and then `not_kept` has no effect:

    z = recomputed(normed, x, weight, weights=(weight,))
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks
from torch.compiler import is_compiling, is_dynamo_compiling, is_exporting
from torch.utils.checkpoint import checkpoint

from gla_core.nn.plain import is_in_memory
from gla_core.ops.calls import tracing, transformed


def recomputed(
    function: Callable[..., Tensor],
    *tensors: Tensor | None,
    gradients: Callable[..., Sequence[Any]] | None = None,
    weights: Sequence[Tensor | None] = (),
) -> Tensor:
    """Returns `function(*tensors)`; autograd keeps only the tensors for the backward.

    Under torch.compile the function is marked, so that the compiler computes it again too. In an exported graph,
    under torch.jit.trace and under torch.func it is a plain call.

    Args:
        function: a function that depends on no other tensor that needs a gradient. Autocast must not change its result.
        tensors: the arguments of `function`.
        gradients: maps the tensors and the gradient of the result to the gradients of the tensors, in eager calls. The
            result then has no second derivative. By default autograd differentiates `function`.
        weights: those of the tensors that are weights of a module, which may lose their memory after its forward.
    """
    if not torch.is_grad_enabled():
        return function(*tensors)
    if is_dynamo_compiling() and not _exports() and any(x is not None and x.requires_grad for x in tensors):
        y = checkpoint(function, *tensors, use_reentrant=False, preserve_rng_state=False)
    elif is_compiling() or tracing() or transformed():
        return function(*tensors)
    elif gradients is not None:
        y = _WithGradients.apply(function, gradients, weights, *tensors)
    else:
        y = _Recomputed.apply(function, weights, *tensors)
    assert isinstance(y, Tensor)
    return y


def _exports() -> bool:
    return is_exporting()


# Dynamo then calls the function. PyTorch 2.11's Dynamo itself takes is_exporting as True in every graph.
_exports._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


def not_kept(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Returns a context in which autograd does not keep x if `recomputed` returned it, and no effect otherwise.

    It has no effect either if a weight from which x was computed is without memory.

    Run only linear layers, and the like, of x in the context: it replaces the hooks for saved tensors that a caller may
    have set.
    """
    node: Any = x.grad_fn if type(x) is Tensor and not is_compiling() else None
    if node is None or node.name() not in _NODES or not x.is_contiguous():
        return contextlib.nullcontext()
    if not all(weight is None or is_in_memory(weight) for weight in node.weights):
        return contextlib.nullcontext()
    place, number, dtype, version = x.data_ptr(), x.numel(), x.dtype, x._version  # the hooks do not hold x

    def pack(saved: Tensor) -> Any:
        alike = type(saved) is Tensor and saved.dtype == dtype and saved.numel() == number and saved.is_contiguous()
        is_x = alike and saved.data_ptr() == place and saved._version == version
        return saved.shape if is_x else (saved, saved._version)

    def unpack(packed: Any) -> Tensor:
        return _made(node)[1].view(packed) if isinstance(packed, torch.Size) else _unchanged(*packed)

    return saved_tensors_hooks(pack, unpack)


def _unchanged(x: Tensor, version: int) -> Tensor:
    """Returns x, if it still has this version: autograd checks only what it keeps itself."""
    if x._version != version:
        raise RuntimeError(
            f"a tensor {list(x.shape)} that the backward needs was changed in place after the forward; run the "
            "backward first"
        )
    return x


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: Callable[..., Tensor], weights: Sequence[Any], *tensors: Tensor | None) -> Tensor:
        ctx.function, ctx.weights, ctx.made = function, weights, None
        ctx.save_for_backward(*tensors)
        return function(*tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        create_graph = torch.is_grad_enabled()
        (views, y), ctx.made = _made(ctx), None
        needed = [x for x, needs in zip(views, ctx.needs_input_grad[2:], strict=True) if needs]
        computed = iter(torch.autograd.grad(y, needed, gradients, create_graph=create_graph))
        return None, None, *(next(computed) if needs else None for needs in ctx.needs_input_grad[2:])


class _WithGradients(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, function: Callable[..., Tensor], gradients: Callable, weights: Sequence[Any], *tensors: Tensor | None
    ) -> Tensor:
        ctx.function, ctx.gradients, ctx.weights, ctx.made = function, gradients, weights, None
        ctx.save_for_backward(*tensors)
        return function(*tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if ctx.made is None:
            tensors = _arguments(ctx)
        else:
            kept, ctx.made = ctx.made[0], None
            tensors = [None if x is None else _unchanged(x, version) for x, version in kept]
        return None, None, None, *ctx.gradients(*tensors, dy)


_NODES = ("_RecomputedBackward", "_WithGradientsBackward")
"""The names of the nodes of these functions in autograd's graph."""


def _made(ctx: Any) -> tuple[Sequence[Any], Tensor]:
    """Returns the arguments and the result of the function, computed again unless `not_kept` has computed them.

    The arguments are views for the gradient by autograd, and pairs of a tensor and its version for a formula.
    """
    if ctx.made is not None:
        return ctx.made
    tensors = _arguments(ctx)
    if ctx.name() == "_WithGradientsBackward":
        kept = [(x, 0 if x is None else x._version) for x in tensors]
        ctx.made = kept, recomputed(ctx.function, *tensors, gradients=ctx.gradients)
    else:
        with torch.enable_grad():
            # With views in their place, no gradient passes through one tensor to another on which it depends.
            views = [None if x is None else x.view_as(x) for x in tensors]
            ctx.made = views, ctx.function(*views)
    return ctx.made


def _arguments(ctx: Any) -> Sequence[Tensor | None]:
    """Returns the arguments of the function, with their memory."""
    tensors = ctx.saved_tensors  # checkpointing allows one read
    for x in tensors:
        if x is not None and not is_in_memory(x):
            raise RuntimeError(
                f"a tensor {list(x.shape)} that the backward computes with has no memory; expected it in memory until "
                "the backward has run: if its module is a unit of FSDP or offloaded, let it keep its weights after the "
                "forward"
            )
    return tensors
