"""Batches whose rows hold padding: the tokens of every row are brought to its front, in order, and back.

    mask       0 0 1 1 1        0 1 0 1 1        1 1 1 0 0
    order      2 3 4 0 1        1 3 4 0 2        0 1 2 3 4         lengths 3 3 3

What a layer computes of the padding behind them reaches no token. All is computed on the device, without waiting.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Padding(NamedTuple):
    """Where the tokens of a batch are.

    Attributes:
        order: [B, T], the place in the batch of each token of a row, and then of its padding.
        lengths: [B], how many tokens a row has.
        inside: [B, T], whether there is a token, once tokens have been brought to the front.
    """

    order: Tensor
    lengths: Tensor
    inside: Tensor

    def front(self, x: Tensor) -> Tensor:
        """The tokens of x [B, T, D] in front, and zeros behind them."""
        x = x.gather(1, self.order[..., None].expand(-1, -1, x.shape[2]))
        return self.zeroed(x)

    def back(self, y: Tensor) -> Tensor:
        """What `front` has moved of y [B, T, D] where it came from, and zeros for padding."""
        return torch.zeros_like(y).scatter(1, self.order[..., None].expand(-1, -1, y.shape[2]), self.zeroed(y))

    def zeroed(self, x: Tensor) -> Tensor:
        """Zeros behind the tokens of x [B, T, ...]."""
        return torch.where(self.inside.view(*self.inside.shape, *[1] * (x.ndim - 2)), x, 0)


def padding(mask: Tensor, T: int) -> Padding:
    """The `Padding` of a mask [B, T or more], not 0 where there is a token; of more columns the last T count."""
    mask = mask[:, mask.shape[1] - T :].bool()
    order = mask.to(torch.uint8).argsort(dim=1, descending=True, stable=True)
    lengths = mask.sum(1)
    return Padding(order, lengths, torch.arange(T, device=mask.device) < lengths[:, None])
