"""Batches whose rows hold padding: `front` moves the tokens of every row to its front, and `back` moves them back.

    mask       0 0 1 1 1        0 1 0 1 1        1 1 1 0 0
    order      2 3 4 0 1        1 3 4 0 2        0 1 2 3 4         lengths 3 3 3

With the padding behind the tokens, no token depends on it. Everything is computed on the device, and the host does not
wait.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from gla_core.nn.interface import Output


class Padding(NamedTuple):
    """Positions of the tokens in a batch with padding.

    Attributes:
        order: [B, T], the column of each token of a row, followed by the columns of its padding.
        lengths: [B], number of tokens of each row.
        inside: [B, T], whether a column holds a token once the tokens are in front.
    """

    order: Tensor
    lengths: Tensor
    inside: Tensor

    def front(self, x: Tensor) -> Tensor:
        """Moves the tokens of x [B, T, D] to the front, and puts zeros behind them."""
        x = x.gather(1, self.order[..., None].expand(-1, -1, x.shape[2]))
        return self.zeroed(x)

    def back(self, y: Tensor) -> Tensor:
        """Moves the tokens of y [B, T, D] back to the columns where `front` found them; padding becomes zeros."""
        return torch.zeros_like(y).scatter(1, self.order[..., None].expand(-1, -1, y.shape[2]), self.zeroed(y))

    def zeroed(self, x: Tensor) -> Tensor:
        """Returns x [B, T, ...] with zeros behind the tokens."""
        return self.filled(x, 0)

    def filled(self, x: Tensor, value: float) -> Tensor:
        """Returns x [B, T, ...] with a value behind the tokens."""
        return torch.where(self.inside.view(*self.inside.shape, *[1] * (x.ndim - 2)), x, value)


def within(y: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Returns y [1, T, D] with zeros in the rows outside the sequences with offsets cu_seqlens [N+1]."""
    rows = torch.arange(y.shape[1], device=y.device)
    return torch.where(((rows >= cu_seqlens[0]) & (rows < cu_seqlens[-1]))[:, None], y, 0)


def padding(mask: Tensor, T: int) -> Padding:
    """Returns the `Padding` of a mask [B, T or more], nonzero at tokens; only the last T columns are used."""
    mask = mask[:, mask.shape[1] - T :].bool()
    order = mask.to(torch.uint8).argsort(dim=1, descending=True, stable=True)
    lengths = mask.sum(1)
    return Padding(order, lengths, torch.arange(T, device=mask.device) < lengths[:, None])


def with_residual(output: Output, residual: Tensor | None, mask: Callable[[Tensor], Tensor] | None) -> Output:
    """Returns a function that computes y, and adds a residual if there is one.

    Args:
        mask: sets rows of y without tokens to 0, before the residual is added; None if the output does so.
    """
    if mask is None:
        return output if residual is None else functools.partial(output, residual=residual)
    return lambda *args: mask(output(*args)) if residual is None else residual + mask(output(*args))
