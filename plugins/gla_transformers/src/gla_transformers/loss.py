"""The parts of a language model's loss that GLA's configuration adds: l2warp, and a loss without all logits at once."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

IGNORED = -100
"""The label of tokens without a loss."""
PARTS = 8


def l2warp(logits: Tensor, rows: int) -> Tensor:
    """Returns a term of value 0 whose gradient keeps logits [..., D] from growing.

    The gradient is computed from 0.5e-4 / rows times the sum over all tokens of the square of the largest logit.
    Source: the RWKV language model.
    """
    penalty = 0.5e-4 / rows * logits.max(-1).values.float().square().sum()
    return penalty - penalty.detach()


def loss_in_parts(
    head: Callable[[Tensor], Tensor],
    x: Tensor,
    labels: Tensor,
    shifted: bool,
    num_items_in_batch: Tensor | int | None,
    with_l2warp: bool,
    ignored: int = IGNORED,
) -> Tensor:
    """Returns the loss of head(x), with an eighth of the logits in memory at a time; the backward computes them again.

    Args:
        head: maps [n, hidden_size] to logits [n, D].
        x: [B, T, hidden_size].
        labels: [B, T], the tokens themselves, or if `shifted` the token after each one; `ignored` for tokens without
            a loss.
        num_items_in_batch: number of labels to divide by; by default the number in this batch.
    """
    targets = labels if shifted else F.pad(labels[:, 1:], (0, 1), value=ignored)
    targets, x = targets.flatten().to(x.device), x.flatten(0, 1)
    count = (targets != ignored).sum() if num_items_in_batch is None else 1

    def part(x: Tensor, targets: Tensor) -> Tensor:
        logits = head(x).float()
        loss = F.cross_entropy(logits, targets, ignore_index=ignored, reduction="sum") / count
        return loss + l2warp(logits, rows) if with_l2warp else loss

    rows = len(targets)
    parts = zip(x.chunk(PARTS), targets.chunk(PARTS), strict=True)
    loss = torch.stack([checkpoint(part, *each, use_reentrant=False) for each in parts]).sum()
    return loss if num_items_in_batch is None else loss / num_items_in_batch
