"""Computes the gradients of softmax attention by PyTorch's own kernels, which are cuDNN's or FlashAttention's.

They are faster than backward.py, because they compute scores once: several programs add to the same number of dq, in no
fixed order. The last bits of dq may therefore differ from call to call. plan.py says which calls they compute.

B batch   Tq, Tk queries and keys   H key/value heads   Hq query heads   K, V key and value width
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gla_core.dispatch.backend import OpCall
from gla_triton_kernels.softmax_attention.fold import launch_fold
from gla_triton_runtime.launch import failing
from gla_triton_runtime.prepared import Launches, rehearsed

Gradients = tuple[Tensor, Tensor, Tensor]
"""dq [B, Tq, Hq, K], dk [B, Tk, H, K], dv [B, Tk, H, V]."""


def prepare(compute: Callable[..., Gradients], call: OpCall) -> Callable[..., Gradients]:
    """Returns the function that computes calls of the same signature by `cudnn` or `flash`.

    If a gradient reaches lse, the function folds it into o first.
    """
    launched = Launches(call.device)

    def fold(o: Tensor, do: Tensor, dlse: Tensor) -> tuple[Tensor, Tensor]:
        tensors = (o, do, dlse, o.new_empty(o.shape), o.new_empty(o.shape))
        if unrecorded := launched.replay(tensors):
            unrecorded.start(launch_fold(*tensors))
        return tensors[3:]

    if "dlse" in call.layouts:
        rehearsed(fold, call)

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
    ) -> Gradients:
        if dlse is not None:
            o, do = fold(o, do, dlse)
        with failing(compute.__name__):
            return compute(q, k, v, o, lse.transpose(1, 2).contiguous(), scale, causal, do)

    return run


def cudnn(q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, scale: float, causal: bool, do: Tensor) -> Gradients:
    """Computes the gradients by cuDNN; lse is [B, Hq, Tq]."""
    heads_first = (x.transpose(1, 2) for x in (do, q, k, v, o))
    unused = torch.empty((), dtype=torch.int64, device=q.device)  # the state of a random generator, for dropout
    gradients = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        *heads_first, lse[..., None], unused, unused, None, None, None, q.shape[1], k.shape[1], 0.0, causal, scale=scale
    )
    return _fresh(*(x.transpose(1, 2) for x in gradients))


def flash(q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, scale: float, causal: bool, do: Tensor) -> Gradients:
    """Computes the gradients by FlashAttention; lse is [B, Hq, Tq]."""
    unused = torch.empty((), dtype=torch.int64, device=q.device)
    gradients = torch.ops.aten._flash_attention_backward(
        do, q, k, v, o, lse, None, None, q.shape[1], k.shape[1], 0.0, causal, unused, unused, scale=scale
    )
    return _fresh(*gradients)


def _fresh(*gradients: Tensor) -> Gradients:
    """Returns gradients as contiguous tensors that are no views, without a copy of those that are contiguous."""
    dq, dk, dv = (
        x.new_empty(0).set_(x.untyped_storage(), 0, x.shape, x.stride()) if x.is_contiguous() else x.contiguous()
        for x in gradients
    )
    return dq, dk, dv
