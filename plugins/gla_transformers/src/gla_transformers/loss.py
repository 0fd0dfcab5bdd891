"""A language model's loss: of whole logits, and without all logits at once. With l2warp, GLA's option."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import is_compiling
from torch.utils.checkpoint import checkpoint

from gla_core.extension import transformed
from gla_transformers import loss_pytorch
from gla_transformers.dispatch import is_eager, module_of

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
    """Returns the sum of the cross entropies of logits [n, D], in float32. `ignored` in targets [n] counts as 0.

    For another label out of range, PyTorch raises an error, and the kernels give NaN: the loss and its row's gradient.
    """
    if type(logits) is not Tensor or is_compiling() or transformed():
        return _sum_of_losses(logits, targets, ignored)
    if len(logits) != len(targets):
        raise ValueError(f"logits have {len(logits)} rows, and labels {len(targets)}; expected the same number")
    total = _SumOfLosses.apply(_functions(logits, targets), logits, targets, ignored)
    assert isinstance(total, Tensor)
    return total


def _sum_of_losses(logits: Tensor, targets: Tensor, ignored: int) -> Tensor:
    return F.cross_entropy(logits.float(), targets, ignore_index=ignored, reduction="sum")


def _functions(logits: Tensor, targets: Tensor) -> ModuleType:
    """Returns the module of the functions `losses` and `gradient`: of kernels, or of PyTorch's operators."""
    kinds = type(targets), targets.dtype, targets.device
    fits = is_eager(logits) and logits.stride(1) == 1 and kinds == (Tensor, torch.int64, logits.device)
    return (_kernels_of(logits.device) if fits else None) or loss_pytorch


def _kernels_of(device: torch.device) -> ModuleType | None:
    return module_of("loss_kernel", device)


class _SumOfLosses(torch.autograd.Function):
    """Computes `_sum_of_losses`, and keeps the logits and a normalizer of each row for the backward."""

    @staticmethod
    def forward(ctx: Any, functions: Any, logits: Tensor, targets: Tensor, ignored: int) -> Tensor:
        losses, normalizers = functions.losses(logits, targets, ignored)
        ctx.functions, ctx.ignored = functions, ignored
        ctx.save_for_backward(logits, targets, normalizers)
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,), (logits, targets, normalizers) = gradients, ctx.saved_tensors
        if not torch.is_grad_enabled():
            return None, ctx.functions.gradient(logits, targets, normalizers, gradient, ctx.ignored), None, None
        logits = logits.view_as(logits)  # create_graph
        loss = _sum_of_losses(logits, targets, ctx.ignored)
        return None, *torch.autograd.grad(loss, logits, gradient, create_graph=True), None, None


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
