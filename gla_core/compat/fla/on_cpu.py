"""PyTorch versions of the functions that some of flash-linear-attention's models have only in Triton, for a CPU.

The models are GLA, HGRN2, KDA, GatedDeltaNet and DeltaNet. The functions are norms, activations, convolutions and
losses with the same arguments and results. They are meant for training and generating on a machine without a GPU, not
for speed.

B batch   T tokens   D channels   N sequences   W the width of a convolution

Source: flash-linear-attention 0.6.0, fla/modules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gla_core.dispatch.tensors import wide
from gla_core.nn.activations import ACTIVATIONS


def rms_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None = None,
    eps: float = 1e-5,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
) -> Any:
    """Normalizes x + residual over the last dimension; with prenorm it also returns that sum."""
    total = x.to(wide(x.dtype)) if residual is None else x.to(wide(x.dtype)) + residual
    y = F.rms_norm(total, total.shape[-1:], None if weight is None else weight.to(total.dtype), eps)
    y = (y if bias is None else y + bias).to(x.dtype)
    kept = torch.float32 if residual_in_fp32 else x.dtype if residual is None else residual.dtype
    return (y, total.to(kept)) if prenorm else y


def rms_norm_linear(
    x: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    residual: Tensor | None = None,
    eps: float = 1e-5,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
) -> Any:
    """Computes `rms_norm`, followed by a linear map."""
    y, kept = rms_norm(x, norm_weight, norm_bias, residual, eps, True, residual_in_fp32)
    y = F.linear(y.to(linear_weight.dtype), linear_weight, linear_bias)
    return (y, kept) if prenorm else y


def rms_norm_gated(
    x: Tensor,
    g: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    activation: str = "swish",
    residual: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    eps: float = 1e-6,
) -> Any:
    """Computes `rms_norm` times an activation of the gate g."""
    y, kept = rms_norm(x.to(wide(x.dtype)), weight, bias, residual, eps, True, residual_in_fp32)
    y = (y * ACTIVATIONS[activation](g.to(y.dtype))).to(x.dtype)
    return (y, kept) if prenorm else y


def swiglu(x: Tensor, y: Tensor) -> Tensor:
    """Returns silu(x) * y."""
    return F.silu(x) * y


def swiglu_linear(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Computes `swiglu`, followed by a linear map."""
    return F.linear(swiglu(x, y).to(weight.dtype), weight, bias)


def logsigmoid(x: Tensor, temperature: float = 1.0) -> Tensor:
    """Returns the log of the logistic function, divided by a temperature."""
    return F.logsigmoid(x) / temperature


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool | None = False,
    activation: str | None = None,
    backend: str | None = None,
    cu_seqlens: Tensor | None = None,
    *_: Any,
    **__: Any,
) -> tuple[Tensor, Tensor | None]:
    """Convolves x [B, T, D] causally with weight [D, W]; also returns the last W inputs of each sequence [N, D, W]."""
    if cu_seqlens is None:
        y, final = _convolved(x, weight, bias, initial_state)
    else:
        parts = x.tensor_split(cu_seqlens[1:-1].long(), 1) if len(cu_seqlens) > 1 else ()
        before = [None] * len(parts) if initial_state is None else initial_state.split(1)
        results = [_convolved(part, weight, bias, state) for part, state in zip(parts, before, strict=True)]
        y, final = torch.cat([y for y, _ in results], 1), torch.cat([state for _, state in results])
    y = y if activation is None else ACTIVATIONS[activation](y)
    y = (y if residual is None else y + residual).to(x.dtype)
    return y, final if output_final_state else None


def causal_conv1d_update(
    x: Tensor,
    cache: Tensor,
    residual: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Convolves one token of each sequence, x [N, D], [N, 1, D] or [1, N, D], and writes the cache [N, D, W]."""
    assert weight is not None
    tokens = x.reshape(cache.shape[0], 1, cache.shape[1])
    y, final = causal_conv1d(tokens, weight, bias, None, cache, True, activation)
    cache.copy_(final)  # pyright: ignore[reportArgumentType]
    y = y.reshape(x.shape)
    return y if residual is None else y + residual, cache


def cross_entropy_loss(
    logits: Tensor,
    target: Tensor,
    label_smoothing: float = 0.0,
    logit_scale: float = 1.0,
    lse_square_scale: float = 0.0,
    logit_softcapping: float | None = None,
    ignore_index: int = -100,
    *_: Any,
    **__: Any,
) -> tuple[Tensor, Tensor]:
    """Returns the loss of each row, 0 for ignored rows, and the part of it that comes from lse_square_scale."""
    logits = _scaled(logits, logit_scale, logit_softcapping)
    losses = F.cross_entropy(
        logits, target, reduction="none", label_smoothing=label_smoothing, ignore_index=ignore_index
    )
    z_losses = lse_square_scale * torch.logsumexp(logits, -1).square() * (target != ignore_index)
    return losses + z_losses, z_losses


class FusedCrossEntropyLoss(nn.Module):
    """Computes `cross_entropy_loss` of each row, or its sum or mean over the rows that are not ignored."""

    def __init__(
        self,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        logit_scale: float = 1.0,
        lse_square_scale: float = 0.0,
        logit_softcapping: float | None = None,
        inplace_backward: bool = False,
        process_group: Any = None,
        return_z_loss: bool = False,
    ) -> None:
        super().__init__()
        self.options = (label_smoothing, logit_scale, lse_square_scale, logit_softcapping, ignore_index)
        self.ignore_index, self.reduction, self.return_z_loss = ignore_index, reduction, return_z_loss

    def forward(self, input: Tensor, target: Tensor) -> Any:
        """Computes the loss of logits [T, D] for targets [T]."""
        losses = cross_entropy_loss(input, target, *self.options)
        if self.reduction != "none":
            count = (target != self.ignore_index).sum() if self.reduction == "mean" else 1
            losses = tuple(x.sum() / count for x in losses)
        return losses if self.return_z_loss else losses[0]


def fused_linear_cross_entropy_loss(
    x: Tensor,
    target: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    logit_scale: float = 1.0,
    logit_softcapping: float | None = None,
    num_chunks: int = 8,
    reduction: str = "mean",
    use_l2warp: bool = False,
    *_: Any,
    **__: Any,
) -> Tensor:
    """Computes the cross-entropy of a linear map of x [T, D]. Raises NotImplementedError for l2warp."""
    if use_l2warp:
        raise NotImplementedError("no l2warp on a CPU with fuse_linear_cross_entropy; turn one of the two off")
    logits = _scaled(F.linear(x, weight, bias), logit_scale, logit_softcapping)
    return F.cross_entropy(
        logits, target, reduction=reduction, label_smoothing=label_smoothing, ignore_index=ignore_index
    )


REPLACED: Mapping[str, Mapping[str, Callable]] = {
    "fla.modules.norm.layernorm": {"rms_norm": rms_norm, "rms_norm_linear": rms_norm_linear},
    "fla.modules.norm.fused_norm_gate": {"rms_norm_gated": rms_norm_gated},
    "fla.modules.activations.ops": {
        "swiglu": swiglu,
        "swiglu_linear": swiglu_linear,
        "logsigmoid": logsigmoid,
        "swish": ACTIVATIONS["swish"],
        "sigmoid": ACTIVATIONS["sigmoid"],
        "sqrelu": ACTIVATIONS["sqrelu"],
        "fast_gelu_impl": ACTIVATIONS["gelu"],
    },
    "fla.modules.causal_conv1d.ops": {"causal_conv1d": causal_conv1d, "causal_conv1d_update": causal_conv1d_update},
    "fla.modules.fused_cross_entropy.ops": {
        "cross_entropy_loss": cross_entropy_loss,
        "FusedCrossEntropyLoss": FusedCrossEntropyLoss,
    },
    "fla.modules.fused_linear_cross_entropy.ops": {"fused_linear_cross_entropy_loss": fused_linear_cross_entropy_loss},
}
"""Replacements, by the module that defines the original and then by name."""


def _convolved(x: Tensor, weight: Tensor, bias: Tensor | None, before: Tensor | None) -> tuple[Tensor, Tensor]:
    """Convolves x [N, T, D] after the inputs `before` [N, D, W]; also returns the last W inputs [N, D, W]."""
    D, W = weight.shape
    before = x.new_zeros(x.shape[0], D, W) if before is None else before.to(x.dtype)
    rows = torch.cat([before, x.mT], 2)  # [N, D, W + T]
    y = F.conv1d(rows, weight[:, None].to(x.dtype), None if bias is None else bias.to(x.dtype), groups=D)
    return y[..., 1:].mT, rows[..., rows.shape[2] - W :].clone()  # the first output is for the token before x


def _scaled(logits: Tensor, scale: float, softcap: float | None) -> Tensor:
    logits = logits.to(wide(logits.dtype)) * scale
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)
