"""Softmax attention over blocks of keys: one program attends to all keys, or several programs attend to splits of them.

kernel.py plan.py           the types of kernels and plans; the choice of a kernel for a call
launches.py                 the launches of a call
forward.py forward_sm90.py  the kernels that attend; merge.py merges splits
backward.py                 the kernels of the gradients
library.py                  gradients by PyTorch's kernels; fold.py folds the gradient of lse into o for them
cost.py                     predicted seconds
"""

from __future__ import annotations

from collections.abc import Callable

from gla_core.dispatch.backend import OpCall, Prepared
from gla_triton_kernels.softmax_attention.kernel import Plan
from gla_triton_kernels.softmax_attention.plan import explain_gradients, explained, gradient_kernel
from gla_triton_runtime.architecture import Gpu, gpu_of_call


def softmax_attention(plan: Callable[[OpCall, Gpu], Plan]) -> Prepared:
    """Returns the op softmax_attention, computed by the plans of a function of plan.py."""

    def prepare(call: OpCall) -> Callable[..., tuple]:
        from gla_triton_kernels.softmax_attention import launches

        return launches.prepare(call, plan(call, gpu_of_call(call)))

    return Prepared(prepare, ("q", "k", "v", "scale", "causal"), explained(plan))


def _prepare_gradients(call: OpCall) -> Callable[..., tuple]:
    return gradient_kernel(call, gpu_of_call(call)).load()(call)


GRADIENTS = Prepared(
    _prepare_gradients, ("q", "k", "v", "o", "lse", "scale", "causal", "do", "dlse"), explain_gradients
)
"""The op softmax_attention_bwd."""
