"""What a causal convolution reads of other ranks: the last rows before each part of a sequence that this rank has.

Every rank sends the last `room` rows of each of its pieces, and which of them are there, for a piece may be shorter or
empty. The history of a part is then, of all that are there before its piece, the last `room` rows, as far as they are
of the part's sequence. One gather forwards; backwards one sum of gradients, scattered to the ranks that hold the rows.

R ranks   P pieces of a rank   B batch   T tokens of this rank   D width of all inputs together
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from gla_core.distributed.outside_graphs import outside_graphs
from gla_core.distributed.shard import Shard, all_gather, in_order, reduce_scatter


@outside_graphs
def histories(inputs: Sequence[Tensor], room: int, shard: Shard) -> list[Tensor]:
    """The `room` rows before each part of a sequence that this rank has, zeros where there are none.

    Differentiable, with one collective forwards and one backwards; every rank has to go through both.

    Args:
        inputs: [B, T, ..] each, of this rank, of one dtype.
        room: at least 1.

    Returns:
        Of each input [parts, room, ..]: of packed sequences the parts are those of `shard.packed.parts`, else the P
        pieces of the first row of the batch, of the second and so on.
    """
    pieces, T = len(shard.places), shard.tokens // len(shard.places)
    own = torch.cat([_last(x.unflatten(1, (pieces, T)), room) for x in inputs], dim=-1)  # [B, P, room, D]
    there = torch.arange(room, device=own.device) >= room - T
    received = _Gathered.apply(torch.cat([own.flatten(), there.to(own.dtype)]), shard.group)  # [R, ..]
    rows = in_order(*received[:, :-room].unflatten(1, own.shape).unbind(2))  # [P R, B, room, D]
    there = in_order(*[received[:, -room:].bool()] * pieces)  # [P R, room]
    index, found = _before(shard, there.flatten())
    rows = rows.transpose(1, 2).flatten(0, 1)[index]  # [P, room, B, D]
    rows = torch.where(found[..., None, None], rows, 0).permute(2, 0, 1, 3).flatten(0, 1)  # [B P, room, D]
    if shard.packed is not None:
        parts = len(shard.packed.parts) - 1
        rows = rows.new_zeros(parts, *rows.shape[1:]).index_copy(0, shard.packed.entered, rows)
    return list(rows.split([x.shape[2] for x in inputs], dim=-1))


def _last(x: Tensor, room: int) -> Tensor:
    """The last rows [B, P, room, ..] of pieces [B, P, T, ..], behind zeros where T is less."""
    x = x[:, :, max(0, x.shape[2] - room) :]
    return F.pad(x, (0, 0, room - x.shape[2], 0))


def _before(shard: Shard, there: Tensor) -> tuple[Tensor, Tensor]:
    """Which rows are before each of this rank's pieces, in order and ending at it, and whether there are so many.

    Args:
        there: [P R room], of the last rows of all pieces those that exist.

    Returns:
        Indices into them [P, room], and whether they are of the sequence that goes on in the piece [P, room].
    """
    room = len(there) // (len(shard.places) * shard.ranks)
    count = there.cumsum(0)
    ends = F.pad(count, (1, 0))[::room]  # [P R + 1], how many are before each place
    ends = torch.cat([ends[place : place + 1] for place in shard.places])[:, None]
    back = torch.arange(room, 0, -1, device=there.device)  # the last row before a piece is one row back
    found = back <= ends
    if shard.packed is not None:
        found &= back <= shard.packed.before[:, None]
    return torch.searchsorted(count, ends - back + 1).clamp(max=len(there) - 1), found


class _Gathered(torch.autograd.Function):
    """What all ranks send [n], as [R, n]."""

    @staticmethod
    def forward(ctx: Any, sent: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        received = sent.new_empty(dist.get_world_size(group), len(sent))
        all_gather(received.view(-1), sent, group)
        return received

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        own = gradient.new_empty(gradient.shape[1])
        reduce_scatter(own, gradient.flatten(), ctx.group)
        return own, None
