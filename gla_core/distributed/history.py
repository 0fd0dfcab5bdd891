"""Rows of other ranks that a causal convolution reads: the last rows before each of this rank's pieces.

Every rank sends the last `room` rows of each of its pieces, and a mask of the rows that exist, since a piece may have
fewer rows or none. The history of a piece is the last `room` existing rows before it, without the rows of another
sequence. The forward makes one gather. The backward makes one reduce-scatter of the gradients to the ranks that hold
the rows.

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
    """Returns the `room` rows before each of this rank's pieces, or of its parts of packed sequences.

    Rows that do not exist are zeros. The call is differentiable, with one collective in the forward and one in the
    backward. Every rank has to run both.

    Args:
        inputs: tensors [B, T, ..] of this rank, all of one dtype.
        room: number of rows, at least 1.

    Returns:
        One tensor per input: [B P, room, ..], with the P pieces of a row of the batch side by side. With packed
        sequences, [parts, room, ..] in the order of `shard.packed.parts`.
    """
    pieces, T = len(shard.places), shard.tokens // len(shard.places)
    last = torch.cat([_last(x.unflatten(1, (pieces, T)), room) for x in inputs], dim=-1)  # [B, P, room, D]
    there = torch.arange(room, device=last.device) >= room - T
    received = _Gathered.apply(torch.cat([last.flatten(), there.to(last.dtype)]), shard.group)  # [R, ..]
    rows = in_order(*received[:, :-room].unflatten(1, last.shape).unbind(2))  # [P R, B, room, D]
    there = in_order(*[received[:, -room:].bool()] * pieces)  # [P R, room]
    index, exists = _before(shard, there.flatten())
    rows = rows.transpose(1, 2).flatten(0, 1)[index]  # [P, room, B, D]
    rows = torch.where(exists[..., None, None], rows, 0).permute(2, 0, 1, 3).flatten(0, 1)  # [B P, room, D]
    if shard.packed is not None:
        parts = len(shard.packed.parts) - 1
        rows = rows.new_zeros(parts, *rows.shape[1:]).index_copy(0, shard.packed.entered, rows)
    return list(rows.split([x.shape[2] for x in inputs], dim=-1))


def _last(x: Tensor, room: int) -> Tensor:
    """Returns the last rows [B, P, room, ..] of pieces [B, P, T, ..], padded with zeros in front if T < room."""
    x = x[:, :, max(0, x.shape[2] - room) :]
    return F.pad(x, (0, 0, room - x.shape[2], 0))


def _before(shard: Shard, there: Tensor) -> tuple[Tensor, Tensor]:
    """Finds the `room` rows in front of each of this rank's pieces.

    Args:
        there: [P R room], whether each of the gathered rows exists.

    Returns:
        Indices into the gathered rows [P, room], in order, and whether each of these rows exists and belongs to the
        sequence that continues in the piece [P, room].
    """
    room = len(there) // (len(shard.places) * shard.ranks)
    count = there.cumsum(0)
    ends = F.pad(count, (1, 0))[::room]  # [P R + 1], number of existing rows before each place
    ends = torch.cat([ends[place : place + 1] for place in shard.places])[:, None]
    back = torch.arange(room, 0, -1, device=there.device)  # the last row before a piece is one row back
    exists = back <= ends
    if shard.packed is not None:
        exists &= back <= shard.packed.before[:, None]
    return torch.searchsorted(count, ends - back + 1).clamp(max=len(there) - 1), exists


class _Gathered(torch.autograd.Function):
    """Gathers [n] of every rank to [R, n]."""

    @staticmethod
    def forward(ctx: Any, sent: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        received = sent.new_empty(dist.get_world_size(group), len(sent))
        all_gather(received.view(-1), sent, group)
        return received

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        received = gradient.new_empty(gradient.shape[1])
        reduce_scatter(received, gradient.flatten(), ctx.group)
        return received, None
