"""The way of a call to its kernels: one like an earlier call is replayed, others are planned, started, recorded."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gla_core.dispatch.backend import OpCall
from gla_triton_kernels.runtime.architecture import gpu_of
from gla_triton_kernels.runtime.launch import Launch, on_device_of, start
from gla_triton_kernels.runtime.replay import layouts, record, replay
from gla_triton_kernels.runtime.tma import addressable
from gla_triton_kernels.softmax_attention import forward, forward_sm90, merge
from gla_triton_kernels.softmax_attention.plan import Kernel, Plan


def softmax_attention(
    plan_of: Callable[..., Plan], q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    """See gla_core/ops/softmax_attention.py; `plan_of` is one of the functions of plan.py."""
    o = v.new_empty((*q.shape[:3], v.shape[3]))
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    if not lse.numel():
        return o, lse
    if scale < 0:  # the kernels take the greatest product for the greatest score
        q, scale = -q, -scale
    key = ("softmax_attention", plan_of, q.device, layouts(q, k, v), causal, torch.get_float32_matmul_precision())
    tensors = (q, k, v, o, lse)
    if not replay(key, tensors, scale):
        with on_device_of(q):
            launches = _launches(plan_of, q, k, v, scale, causal, o, lse)
            start(launches)
            record(key, tensors, launches)
    return o, lse


def _launches(
    plan_of: Callable[..., Plan], q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, o: Tensor, lse: Tensor
) -> list[Launch]:
    """Returns the launches that write o and lse."""
    reached = {name for name, x in (("q", q), ("k", k), ("v", v)) if addressable(x)}
    plan = plan_of(_call(q, k, v, causal), gpu_of(q.device), reached)
    if plan.kernel is Kernel.FORWARD_SM90:
        return forward_sm90.launch_attention(plan, q, k, v, scale, causal, o, lse)
    if plan.split is None:
        return forward.launch_attention(plan, q, k, v, scale, causal, o, lse)
    splits = plan.splits(k.shape[1])
    split_o = torch.empty((splits, *o.shape), dtype=torch.float32, device=q.device)
    split_lse = lse.new_empty((splits, *lse.shape))
    attended = forward.launch_attention(plan, q, k, v, scale, causal, split_o, split_lse)
    return [*attended, *merge.launch_merge(split_o, split_lse, o, lse)]


def _call(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> OpCall:
    (B, Tq, Hq, K), (_, Tk, H, V) = q.shape, v.shape
    return OpCall(
        op="softmax_attention",
        device=q.device,
        dtype=q.dtype,
        dims={"B": B, "Tq": Tq, "Tk": Tk, "H": H, "Hq": Hq, "K": K, "V": V},
        scalars={"causal": causal},
        float32_matmul_precision=torch.get_float32_matmul_precision(),
    )
