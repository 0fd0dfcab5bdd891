"""Softmax attention over blocks of keys: one program attends to all keys, or several programs attend to splits of them.

kernel.py plan.py           the types of kernels and plans; the choice of a kernel for a call
launches.py                 the launches of a call
forward.py forward_sm90.py  the kernels that attend; merge.py merges splits
backward.py                 the kernels of the gradients
cost.py                     predicted seconds
"""

from __future__ import annotations

from collections.abc import Callable

from gla_core.dispatch.backend import OpCall, Prepared
from gla_triton_kernels.softmax_attention.kernel import Plan
from gla_triton_kernels.softmax_attention.plan import explained, plan_gradient
from gla_triton_runtime.architecture import Gpu, gpu_of_call


def ops(plan: Callable[[OpCall, Gpu], Plan]) -> dict[str, Prepared]:
    """Returns softmax_attention, computed by the plans of a function of plan.py, and softmax_attention_bwd."""

    def prepare(call: OpCall) -> Callable[..., tuple]:
        from gla_triton_kernels.softmax_attention import launches

        return launches.prepare(call, plan(call, gpu_of_call(call)))

    return {
        "softmax_attention": Prepared(prepare, ("q", "k", "v", "scale", "causal"), explained(plan)),
        "softmax_attention_bwd": Prepared(_prepare_gradient, _GRADIENT_TAKES),
    }


_GRADIENT_TAKES = ("q", "k", "v", "o", "lse", "scale", "causal", "do", "dlse")


def _prepare_gradient(call: OpCall) -> Callable[..., tuple]:
    from gla_triton_kernels.softmax_attention import launches

    return launches.prepare_gradient(call, plan_gradient(call, gpu_of_call(call)))
