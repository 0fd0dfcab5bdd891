"""Describes the launches of softmax attention: one kernel attends, and a second one merges splits of the keys.

Those of the gradients are in backward.py.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gla_core.dispatch.backend import OpCall
from gla_triton_kernels.softmax_attention.backward import launch_gradients
from gla_triton_kernels.softmax_attention.kernel import GradientPlan, Plan
from gla_triton_kernels.softmax_attention.merge import launch_merge
from gla_triton_runtime.architecture import Gpu, gpu_of_call
from gla_triton_runtime.launch import Launch
from gla_triton_runtime.prepared import Launches, rehearsed

Tensors = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""q [B, Tq, Hq, K], k [B, Tk, H, K], v [B, Tk, H, V], o [B, Tq, Hq, V], lse [B, Tq, Hq]."""


def prepare(call: OpCall, plan: Plan) -> Callable[..., tuple[Tensor, Tensor]]:
    """Compiles the kernels of a plan, and returns the function that computes calls of the same signature.

    Raises:
        LaunchError: a kernel does not compile for this device, or does not fit it.
    """
    launched = Launches(call.device)

    def run(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
        o = v.new_empty((*q.shape[:3], v.shape[3]))
        lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
        if lse.numel():
            if scale < 0:  # the kernels assume that the largest product gives the largest score
                q, scale = _negated(q), -scale
            tensors = (q, k, v, o, lse)
            if unrecorded := launched.replay(tensors, scale):
                unrecorded.start(launches(plan, tensors, scale, causal))
        return o, lse

    return rehearsed(run, call)


def _negated(q: Tensor) -> Tensor:
    """Returns -q with the strides of q, for which launches are recorded. Plain -q of a slice has other strides."""
    reach = 1 + sum((size - 1) * stride for size, stride in zip(q.shape, q.stride(), strict=True))
    return q.as_strided((reach,), (1,)).neg().as_strided(q.shape, q.stride(), 0)


def launches(plan: Plan, tensors: Tensors, scale: float, causal: bool) -> list[Launch]:
    """Returns the launches that write o and lse."""
    q, k, v, o, lse = tensors
    launch_attention = plan.kernel.load()
    if plan.split is None:
        return launch_attention(plan, q, k, v, scale, causal, o, lse)
    splits = plan.splits(k.shape[1])
    split_o = torch.empty((splits, *o.shape), dtype=torch.float32, device=q.device)
    split_lse = lse.new_empty((splits, *lse.shape))
    attended = launch_attention(plan, q, k, v, scale, causal, split_o, split_lse)
    return [*attended, *launch_merge(split_o, split_lse, o, lse)]


def prepare_gradients(
    plan_gradients: Callable[[OpCall, Gpu], GradientPlan], call: OpCall
) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """Plans a backward, compiles its kernels, and returns the function that computes calls of the same signature.

    Raises:
        LaunchError: a kernel does not compile for this device, or does not fit it.
    """
    plan, launched = plan_gradients(call, gpu_of_call(call)), Launches(call.device)

    def run(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor,
        lse: Tensor,
        scale: float,
        causal: bool,
        do: Tensor,
        dlse: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        if not q.numel() or not k.numel():
            return q.new_zeros(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape)
        dq, dk, dv = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
        tensors = (q, k, v, o, lse, do, dlse, dq, dk, dv)
        if unrecorded := launched.replay(tensors, scale):
            launches = launch_gradients(plan, q, k, v, o, lse, scale, causal, do, dlse, dq, dk, dv)
            unrecorded.start(launches)
        return dq, dk, dv

    return rehearsed(run, call)
