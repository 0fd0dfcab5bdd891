"""Reads the states of gated linear attention from the side of their values: o_t = scale q_t S_t^T.

    S_t = diag(exp(g_t)) S_{t-1} + k_t^T v_t        q_t in R^V        o_t in R^K

This is the gradient of the queries in chunk_gla.py, with q in place of the gradient of the outputs:

    o = gradient of sum over t of q_t . GLA_t(x, k, v, g) with respect to x

The sum is linear in x and in q. With do the gradient of o, the gradient of q is therefore GLA(do, k, v, g), and those
of k, v and g come from the same backward with do in place of x.

B batch   T tokens   N sequences   H heads of k, v and g   Hq heads of q, a multiple of H   K, V key and value width
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gla_core.ops import autocast
from gla_core.ops._run import request_text
from gla_core.ops.gla.chunk_gla import FORWARD, torch_bwd, torch_fwd


def read_by_values(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    scale: float,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Computes scale q_t S_t^T [B, T, Hq, K], differentiable in q, k, v, g and initial_state.

    Args:
        q: [B, T, Hq, V], dtype of k.

    The other arguments and the errors are as in `chunk_gla`.
    """
    q, k, v, g = autocast.inputs(FORWARD, q, k, v, g)
    return _ReadByValues.apply(q, k, v, g, initial_state, scale, cu_seqlens, request_text(None))


class _ReadByValues(torch.autograd.Function):
    @staticmethod
    def forward(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor | None,
        state: Tensor | None,
        scale: float,
        offsets: Any,
        backend: str,
    ) -> Tensor:
        x = k.new_zeros(*k.shape[:2], q.shape[2], k.shape[3])
        return torch_bwd(x, k, v, g, scale, state, offsets, None, None, q, None, None, None, backend)[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        *tensors, ctx.scale, offsets, ctx.backend = inputs
        ctx.save_for_backward(*tensors, offsets)

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor) -> tuple:
        (do,) = incoming
        q, k, v, g, state, offsets = ctx.saved_tensors
        begin, end = (do, k, v, g, ctx.scale, state), (None, None, None)
        dq = torch_fwd(*begin, False, offsets, *end, False, ctx.backend)[0]
        _, dk, dv, dg, dstate = torch_bwd(*begin, offsets, None, None, q, *end, ctx.backend)
        return dq, dk, dv, dg, None if state is None else dstate, None, None, None
