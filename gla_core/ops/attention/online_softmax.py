"""Computes softmax in one running pass over tiles: the abstract ops online_softmax and online_softmax_bwd.

Over the tiles of a row, with m the running maximum and z the running sum of exponentials:

    m' = max(m, m_tile)        z' = exp(m - m') z + exp(m_tile - m') z_tile        y = exp(x - m) / z

and backwards dx = y * (dy - sum(y * dy)).

Source: Milakov and Gimelshein, "Online normalizer calculation for softmax" (arXiv 1805.02867).

A backend's functions receive and return

    online_softmax(x, dim) -> y
    online_softmax_bwd(x, dim, dy) -> dx

with dim from 0 to x.ndim - 1. A row that is all -inf gives NaN, as torch.softmax does. A tile that is all -inf does not
turn a row with finite entries into NaN. The backward computes y again: a saved y would be rounded to x's dtype, and
small entries of dx would lose their digits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gla_core.dispatch.request import current_request
from gla_core.dispatch.tensors import wide
from gla_core.ops import autocast, checks
from gla_core.ops._autograd import gradient, in_pytorch
from gla_core.ops._run import bypasses_torch, plans_gradient, request_text, run
from gla_core.ops._torch_op import TorchOp, refuse_tangents, torch_op_of
from gla_core.ops.deprecated import backend_by_position
from gla_core.ops.spec import AS_INPUT, INPUT, Argument, OpSpec, Result


def online_softmax(x: Tensor, dim: int = -1, *rest: str | None, backend: str | None = None) -> Tensor:
    """Computes the softmax of x along dim, differentiable.

    Under autocast it computes and returns float32, as PyTorch's softmax does on a GPU.

    Args:
        x: a tensor of at least one dimension; float64, float32, float16 or bfloat16.
        dim: the dimension that sums to one.
        backend: a request such as "reference"; see `use_backend`.

    Returns:
        y, with the shape and dtype of x. A slice that is all -inf gives NaN, as in `torch.softmax`.

    Raises:
        ValueError, TypeError: x has a wrong rank or dtype, or dim is out of range.
        NoBackendError, UnknownBackendError: no backend can serve the request.
        NotImplementedError: x carries a tangent of forward-mode AD.

    Example:
        >>> gla.online_softmax(torch.tensor([0.0, 0.0, float("-inf")]))
        tensor([0.5000, 0.5000, 0.0000])
    """
    if rest:
        backend = backend_by_position("online_softmax", rest, backend)
    needs_grad = plans_gradient(x)
    if not needs_grad and bypasses_torch(x):
        return run(SOFTMAX, (x, _from_the_front(x, dim)), current_request(backend))
    (x,) = autocast.inputs(SOFTMAX, x)
    refuse_tangents(x)
    return _torch_softmax(x, _from_the_front(x, dim), needs_grad, request_text(backend))


def _from_the_front(x: Any, dim: Any) -> Any:
    """Returns dim counted from 0 if it is a dimension of x; returns anything else unchanged, for the checks."""
    dim = checks.integer(dim)
    if isinstance(dim, int) and dim < 0 and isinstance(x, Tensor) and -x.ndim <= dim:
        return dim + x.ndim
    return dim


def _bind(args: Mapping[str, Any], sizes: dict[str, Any]) -> None:
    """Binds the rows and columns of x."""
    x, dim, dy = args["x"], args["dim"], args.get("dy")
    if x.ndim == 0:
        raise ValueError("x has no dimension; expected at least one")
    if not -x.ndim <= dim < x.ndim:
        raise ValueError(f"dim is {dim}; x has {x.ndim} dimensions: expected {-x.ndim} to {x.ndim - 1}")
    if dy is not None and dy.shape != x.shape:
        raise ValueError(f"dy has shape {list(dy.shape)}; expected {list(x.shape)}, as x")
    rows = 1
    for size in (*x.shape[:dim], *x.shape[dim % x.ndim + 1 :]):
        rows = rows * size
    sizes |= {"rows": rows, "columns": x.shape[dim]}


_SIZES = {"rows": "ROWS", "columns": "COLUMNS"}
SOFTMAX = OpSpec(
    name="online_softmax",
    public="online_softmax",
    arguments=(Argument("x", "Tensor", None, INPUT, differentiable=True), Argument("dim", "int", default=-1)),
    results=(Result("y", like="x"),),
    sizes=_SIZES,
    bind=_bind,
    prepare=lambda x, dim: (x, _from_the_front(x, dim)),
    backward="online_softmax_bwd",
    autocast_in_float32=True,
)


def _softmax_bwd(x: Tensor, dim: int, dy: Tensor) -> Tensor:
    """Computes dx in PyTorch, for a backend that has no kernel for it."""
    y = torch.softmax(x, dim, dtype=wide(x.dtype))
    dx = y * (dy - (y * dy).sum(dim, keepdim=True))
    return dx.to(x.dtype).contiguous()


BACKWARD = OpSpec(
    name="online_softmax_bwd",
    public="online_softmax",
    arguments=(
        Argument("x", "Tensor", None, INPUT),
        Argument("dim", "int", default=-1),
        Argument("dy", "Tensor", None, AS_INPUT, None),
    ),
    results=(Result("dx", like="x"),),
    sizes=_SIZES,
    bind=_bind,
    prepare=lambda x, dim, dy: (x, _from_the_front(x, dim), dy),
    reads=None,  # a scaler of gradients has to see NaN in dy
    forward=SOFTMAX.name,
    lowering=in_pytorch(SOFTMAX, _softmax_bwd, forwards=3),
)


def _setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
    x, ctx.dim, dy, _ = inputs
    ctx.save_for_backward(x, dy)


def _second_derivative(ctx: Any, ddx: Tensor) -> tuple:
    """Differentiates dx = y * (dy - sum(y * dy)). PyTorch can differentiate its operations again.

    With s = sum(y * dy) and t = sum(y * ddx), the loss sum(dx * ddx) = sum(y * dy * ddx) - s * t.
    """
    x, dy = ctx.saved_tensors
    y = torch.softmax(x, ctx.dim, dtype=wide(x.dtype))

    def mean(a: Tensor) -> Tensor:
        return (y * a).sum(ctx.dim, keepdim=True)

    t = mean(ddx)
    dy_ = dy * ddx - mean(dy) * ddx - t * dy
    return (y * (dy_ - mean(dy_))).to(x.dtype), None, (y * (ddx - t)).to(dy.dtype), None


def _vmap(call: TorchOp, size: int, in_dims: tuple, args: tuple) -> tuple[Tensor, int]:
    joined = [
        a if not isinstance(a, Tensor) else a.expand(size, *a.shape) if at is None else a.movedim(at, 0)
        for a, at in zip(args, in_dims, strict=True)
    ]
    joined[1] = joined[1] % (joined[0].ndim - 1) + 1
    return call(*joined), 0


_torch_bwd = torch_op_of(BACKWARD, _setup_context, _second_derivative, _vmap)
_torch_softmax = torch_op_of(SOFTMAX, *gradient(SOFTMAX, BACKWARD, _torch_bwd), _vmap)
