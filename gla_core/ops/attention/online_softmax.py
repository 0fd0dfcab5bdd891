"""Computes softmax in one running pass over tiles: the abstract op online_softmax.

Over the tiles of a row, with m the running maximum and z the running sum of exponentials:

    m' = max(m, m_tile)        z' = exp(m - m') z + exp(m_tile - m') z_tile        y = exp(x - m) / z

and backwards dx = y * (dy - sum(y * dy)).

Source: Milakov and Gimelshein, "Online normalizer calculation for softmax" (arXiv 1805.02867).

A backend's function receives and returns online_softmax(x, dim) -> y, with dim from 0 to x.ndim - 1. A row that is
all -inf gives NaN, as torch.softmax does. A tile that is all -inf does not turn a row with finite entries into NaN.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gla_core.dispatch.request import current_request
from gla_core.dispatch.tensors import wide
from gla_core.ops import autocast, checks
from gla_core.ops._deprecated import backend_by_position
from gla_core.ops._run import bypasses_torch, plans_gradient, request_text, run
from gla_core.ops._torch_op import TorchOp, refuse_tangents, torch_op_of
from gla_core.ops.spec import INPUT, Argument, OpSpec, Result


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
    x, dim = args["x"], args["dim"]
    if x.ndim == 0:
        raise ValueError("x has no dimension; expected at least one")
    if not -x.ndim <= dim < x.ndim:
        raise ValueError(f"dim is {dim}; x has {x.ndim} dimensions: expected {-x.ndim} to {x.ndim - 1}")
    rows = 1
    for size in (*x.shape[:dim], *x.shape[dim % x.ndim + 1 :]):
        rows = rows * size
    sizes |= {"rows": rows, "columns": x.shape[dim]}


SOFTMAX = OpSpec(
    name="online_softmax",
    public="online_softmax",
    arguments=(
        Argument("x", "Tensor", None, INPUT, differentiable=True),
        Argument("dim", "int", default=-1),
    ),
    results=(Result("y", like="x"),),
    sizes={"rows": "ROWS", "columns": "COLUMNS"},
    bind=_bind,
    prepare=lambda x, dim: (x, _from_the_front(x, dim)),
    autocast_in_float32=True,
)


def _setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
    ctx.save_for_backward(inputs[0])
    ctx.dim = inputs[1]


def _backward(ctx: Any, dy: Tensor) -> tuple:
    # y is computed again: a saved y would be rounded to x's dtype, and small entries of dx would lose their digits.
    (x,) = ctx.saved_tensors
    y = torch.softmax(x, ctx.dim, dtype=wide(x.dtype))
    dx = y * (dy - (y * dy).sum(ctx.dim, keepdim=True))
    return dx.to(x.dtype), None, None, None


def _vmap(call: TorchOp, size: int, in_dims: tuple, args: tuple) -> tuple[Tensor, int]:
    x, dim, *rest = args
    x = x.movedim(in_dims[0], 0)
    return call(x, dim % (x.ndim - 1) + 1, *rest), 0


_torch_softmax = torch_op_of(SOFTMAX, _setup_context, _backward, _vmap)
