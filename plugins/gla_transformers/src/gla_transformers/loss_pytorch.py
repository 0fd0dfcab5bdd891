"""Computes the losses and the gradient of `loss_kernel` by PyTorch's operators, on any device and in any dtype."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

ROWS = 1024
"""Number of tokens whose logits are in float32 at a time."""


def losses(logits: Tensor, targets: Tensor, ignored: int) -> tuple[Tensor, Tensor]:
    """Returns the losses [n] and the normalizers [n] of logits [n, D], log sum exp, in float32."""
    parts = []
    for x, target in zip(logits.split(ROWS), targets.split(ROWS), strict=True):
        logs = x.float().log_softmax(-1)
        most, place = x.max(-1, keepdim=True)
        normalizer = most.float() - logs.gather(1, place)
        parts.append((F.nll_loss(logs, target, ignore_index=ignored, reduction="none"), normalizer[:, 0]))
    all_losses, normalizers = zip(*parts, strict=True)
    return torch.cat(all_losses), torch.cat(normalizers)


def gradient(logits: Tensor, targets: Tensor, normalizers: Tensor, dloss: Tensor, ignored: int) -> Tensor:
    """Returns the gradient of the logits from dloss [], that of the sum: softmax(logits), less 1 at the targets."""
    dlogits = torch.empty_like(logits)
    parts = zip(*(x.split(ROWS) for x in (logits, targets, normalizers, dlogits)), strict=True)
    for x, target, normalizer, place in parts:
        counts = target != ignored
        y = (x - normalizer[:, None]).exp_()
        y[torch.arange(len(y), device=y.device), torch.where(counts, target, 0)] -= 1
        torch.mul(y, torch.where(counts, dloss, 0)[:, None], out=place)
    return dlogits
