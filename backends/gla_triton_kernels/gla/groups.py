"""Computes the gradients of each head of a group apart, and sums them over the group.

H key heads   Hq query heads   Hv value heads
"""

from __future__ import annotations

import math

from torch import Tensor

from gla_triton_kernels.chunks.partials import launch_sum
from gla_triton_kernels.gla.tensors import BackwardTensors
from gla_triton_runtime.launch import Launch


def for_query_heads(x: BackwardTensors) -> BackwardTensors:
    """Returns x with new memory for dk, dv, dg and dinitial_state, with Hq heads each; x itself if H is Hq."""
    heads = x.q.shape[2]
    if heads == x.k.shape[2]:
        return x
    dk, dv = (_with_heads(y, 2, heads) for y in (x.dk, x.dv))
    dg = None if x.dg is None else _with_heads(x.dg, min(2, x.dg.ndim - 1), heads)  # constant gates are [Hv]
    return x._replace(dk=dk, dv=dv, dg=dg, dinitial_state=_with_heads(x.dinitial_state, 1, heads))


def for_value_heads(x: BackwardTensors) -> BackwardTensors:
    """Returns x with new memory for dq and dk, with Hv heads each; x itself if k has as many heads as v."""
    heads = x.v.shape[2]
    if heads == x.k.shape[2]:
        return x
    return x._replace(dq=_with_heads(x.dq, 2, heads), dk=_with_heads(x.dk, 2, heads))


def _with_heads(y: Tensor | None, dim: int, heads: int) -> Tensor | None:
    return None if y is None else y.new_empty(*y.shape[:dim], heads, *y.shape[dim + 1 :])


def launch_sums_over_groups(each: BackwardTensors, x: BackwardTensors) -> list[Launch]:
    """Returns the launches that sum the gradients in `each` over groups of heads to the gradients in x.

    Args:
        each: the result of `for_query_heads` or `for_value_heads`.
    """
    written = (
        *((each.dq, x.dq, 3), (each.dk, x.dk, 3), (each.dv, x.dv, 3), (each.dg, x.dg, 3)),
        (each.dinitial_state, x.dinitial_state, 2),
    )
    return [
        launch
        for parts, y, dims in written
        if parts is not None and y is not None and parts is not y
        for launch in launch_sum(parts, y, math.prod(y.shape[:dims]))
    ]
