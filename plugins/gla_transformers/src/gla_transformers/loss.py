"""A language model's loss in parts: of whole logits, and without all logits at once. With l2warp, GLA's option."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import is_compiling
from torch.utils.checkpoint import checkpoint

from gla_core.ops.calls import transformed

IGNORED = -100
"""The label of tokens without a loss."""
PARTS = 8
ROWS = 1024
"""Number of tokens whose logits are in float32 at a time."""


def l2warp(logits: Tensor, rows: int) -> Tensor:
    """Returns a term of value 0 whose gradient keeps logits [..., D] from growing.

    The gradient is computed from 0.5e-4 / rows times the sum over all tokens of the square of the largest logit.
    Source: the RWKV language model.
    """
    penalty = 0.5e-4 / rows * logits.max(-1).values.float().square().sum()
    return penalty - penalty.detach()


def next_token_loss(
    logits: Tensor,
    labels: Tensor | None,
    vocab_size: int,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = IGNORED,
    shift_labels: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """Returns the loss of logits [B, T, vocab_size] as transformers' ForCausalLMLoss does, computed in float32.

    For the backward it keeps the logits as they are, and no copy in float32.

    Args:
        labels: [B, T], the tokens themselves; `ignore_index` for tokens without a loss. Not used with shift_labels.
        num_items_in_batch: number of labels to divide by; by default the number in this batch.
        shift_labels: [B, T], the token after each one.
    """
    targets = targets_of(labels, ignore_index) if labels is not None and shift_labels is None else shift_labels
    assert targets is not None
    targets = targets.flatten().to(logits.device)
    loss = sum_of_losses(logits.reshape(-1, vocab_size), targets, ignore_index)
    if num_items_in_batch is None:
        return loss / (targets != ignore_index).sum()
    return loss / (num_items_in_batch.to(loss.device) if isinstance(num_items_in_batch, Tensor) else num_items_in_batch)


def targets_of(labels: Tensor, ignored: int) -> Tensor:
    """Returns the label after each of labels [B, T]; `ignored` after the last one."""
    return F.pad(labels[:, 1:], (0, 1), value=ignored)


def sum_of_losses(logits: Tensor, targets: Tensor, ignored: int) -> Tensor:
    """Returns the sum of the cross entropies of logits [n, D], in float32. `ignored` in targets [n] counts as 0."""
    if type(logits) is not Tensor or is_compiling() or transformed():
        return _sum_of_losses(logits, targets, ignored)
    found = _SumOfLosses.apply(logits, targets, ignored)
    assert isinstance(found, Tensor)
    return found


def _sum_of_losses(logits: Tensor, targets: Tensor, ignored: int) -> Tensor:
    return F.cross_entropy(logits.float(), targets, ignore_index=ignored, reduction="sum")


class _SumOfLosses(torch.autograd.Function):
    """Computes `_sum_of_losses` in parts. The gradient is softmax(logits), less 1 at the targets."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, ignored: int) -> Tensor:
        if len(logits) != len(targets):
            raise ValueError(f"logits have {len(logits)} rows, and labels {len(targets)}; expected the same number")
        losses, normalizers = [], []
        for x, target in zip(logits.split(ROWS), targets.split(ROWS), strict=True):
            logs = x.float().log_softmax(-1)
            losses.append(F.nll_loss(logs, target, ignore_index=ignored, reduction="sum"))
            most, place = x.max(-1, keepdim=True)
            normalizers.append(most.float() - logs.gather(1, place))
        ctx.ignored = ignored
        ctx.save_for_backward(logits, targets, torch.cat(normalizers))
        return torch.stack(losses).sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,), (logits, targets, normalizers) = gradients, ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph
            logits = logits.view_as(logits)
            loss = _sum_of_losses(logits, targets, ctx.ignored)
            return *torch.autograd.grad(loss, logits, gradient, create_graph=True), None, None
        found = torch.empty_like(logits)
        parts = zip(*(x.split(ROWS) for x in (logits, targets, normalizers, found)), strict=True)
        for x, target, normalizer, place in parts:
            counts = target != ctx.ignored
            y = (x - normalizer).exp_()
            y[torch.arange(len(y), device=y.device), torch.where(counts, target, 0)] -= 1
            torch.mul(y, torch.where(counts, gradient, 0)[:, None], out=place)
        return found, None, None


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
    targets = labels if shifted else targets_of(labels, ignored)
    targets, x = targets.flatten().to(x.device), x.flatten(0, 1)
    count = (targets != ignored).sum() if num_items_in_batch is None else 1

    def part(x: Tensor, targets: Tensor) -> Tensor:
        logits = head(x)
        loss = sum_of_losses(logits, targets, ignored) / count
        return loss + l2warp(logits, rows) if with_l2warp else loss

    rows = len(targets)
    parts = zip(x.chunk(PARTS), targets.chunk(PARTS), strict=True)
    loss = torch.stack([checkpoint(part, *each, use_reentrant=False) for each in parts]).sum()
    return loss if num_items_in_batch is None else loss / num_items_in_batch
