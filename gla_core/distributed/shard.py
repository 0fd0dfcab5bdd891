"""How the tokens of sequences are cut into the shards that ranks hold: all that depends on the cut and not on a layer.

The tokens of a sequence, or of one row of packed sequences, are cut into pieces; place p of R (or 2R) is where a piece
lies among them. Rank r of R holds

    contiguous   piece r
    zigzag       pieces r and 2R-1-r, one after the other: the work of causal softmax attention is then even

Of packed sequences a piece holds parts of some: of sequence n the rows that it shares with cu_seqlens[n] to
cu_seqlens[n+1], empty for most. At each place between two pieces one sequence at most is cut, so that what passes there
is one state, of a number that the host knows whatever the lengths are. With x such a place, that sequence is

    the last n with cu_seqlens[n] < x, if x < cu_seqlens[n+1]

and of a piece, the sequence that goes on behind it has its `tail` there, the one that comes from before it its `head`.

Everything is computed on the device of cu_seqlens and read by nobody, so that no step waits, and a CUDA graph that
holds the making of a shard replays it for other offsets.

R ranks   P pieces of a rank, 1 or 2   T tokens of all ranks   N sequences
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from gla_core.dispatch.environment import environment
from gla_core.distributed.outside_graphs import outside_graphs
from gla_core.ops.checks import INTEGERS

Layout = Literal["contiguous", "zigzag"]
LAYOUTS = ("contiguous", "zigzag")


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """Where the parts of packed sequences lie in a rank's row; offsets are int64 [.. + 1], as `cu_seqlens` are.

    Attributes:
        cu_seqlens: those of the whole row [N+1].
        parts: offsets of the P * N parts in order, piece by piece.
        tails: offsets of 2 P stretches: for each piece what is before its tail, and its tail.
        heads: offsets of 2 P stretches: for each piece its head, and what is behind it.
        entered, left: [P], the part that the state before a piece enters, and that the state behind it leaves.
        before: [P], how many rows in front of a piece are of the sequence that goes on in it.
        passed: whether one sequence goes through a whole piece, for all pieces of all ranks [P * R] in order.
    """

    cu_seqlens: Tensor
    parts: Tensor
    tails: Tensor
    heads: Tensor
    entered: Tensor
    left: Tensor
    before: Tensor
    passed: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Shard:
    """A rank's part of the tokens, made by `shard` once per batch and used by every layer.

    Attributes:
        tokens: of this rank, in each row of the batch.
        layout: "contiguous" or "zigzag".
        group: the ranks in the order of their shards.
        rank, ranks: of this process in the group, and how many there are.
        packed: where packed sequences lie; None where each row of the batch is a sequence.
    """

    tokens: int
    layout: Layout
    group: dist.ProcessGroup
    rank: int
    ranks: int
    packed: Packed | None = None

    @property
    def places(self) -> tuple[int, ...]:
        """Of this rank's pieces among all."""
        return _places(self.layout, self.rank, self.ranks)


@outside_graphs
def shard(
    tokens: int,
    cu_seqlens: Tensor | None = None,
    group: dist.ProcessGroup | DeviceMesh | None = None,
    layout: Layout = "contiguous",
    lengths: Sequence[int] | None = None,
) -> Shard:
    """Say how a batch is cut: to be called by all ranks of a group, once per batch.

    Args:
        tokens: of this rank, T of its tensors; 0 is legal. In layout "zigzag" half of them are of either piece.
        cu_seqlens: [N+1] int32 or int64, N at least 1: offsets of packed sequences in the row of all ranks' tokens
            together, the same on all ranks. Rows behind the last offset belong to no sequence; there are none in layout
            "zigzag".
        group: the ranks in the order of their shards; all ranks by default. A DeviceMesh has one dimension.
        layout: "contiguous": ranks in order; "zigzag": rank r of R holds pieces r and 2R-1-r of 2R.
        lengths: the tokens of every rank, where they are known to the host. Otherwise packed sequences cost one small
            gather; without packed sequences nobody asks.

    Returns:
        What `chunk_gla(..., shard=...)` takes.

    Raises:
        ValueError, TypeError: an argument that does not fit. With GLA_CHECK=1 also offsets, layouts or lengths that
            differ between ranks, on all of them.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout is {layout!r}; expected one of {', '.join(LAYOUTS)}")
    if layout == "zigzag" and tokens % 2:
        raise ValueError(f"tokens is {tokens}; expected an even number in layout 'zigzag', half of either piece")
    group = _process_group(group)
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    if lengths is not None and (len(lengths) != ranks or lengths[rank] != tokens):
        raise ValueError(f"lengths is {list(lengths)}; expected {ranks} of them, of rank {rank} {tokens}")
    if cu_seqlens is not None and (cu_seqlens.ndim != 1 or len(cu_seqlens) < 2 or cu_seqlens.dtype not in INTEGERS):
        raise ValueError(
            f"cu_seqlens has shape {list(cu_seqlens.shape)} and dtype {cu_seqlens.dtype}; expected [N+1] with N of at "
            "least 1, int32 or int64"
        )
    if environment().check_values:
        _check_agreement(tokens, cu_seqlens, group, layout, lengths)
    if cu_seqlens is None:
        return Shard(tokens, layout, group, rank, ranks)
    bounds = _bounds(_lengths(tokens, cu_seqlens, group, ranks, lengths), layout)
    return Shard(tokens, layout, group, rank, ranks, _packed(cu_seqlens, bounds, _places(layout, rank, ranks)))


def _places(layout: Layout, rank: int, ranks: int) -> tuple[int, ...]:
    return (rank,) if layout == "contiguous" else (rank, 2 * ranks - 1 - rank)


def _process_group(group: dist.ProcessGroup | DeviceMesh | None) -> dist.ProcessGroup:
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(f"group is a DeviceMesh of {group.ndim} dimensions; expected one: take mesh['its name']")
        return group.get_group()
    if group is None:
        group = dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group is {type(group).__name__}; expected a ProcessGroup or DeviceMesh that this rank is in")
    return group


def _lengths(
    tokens: int, cu_seqlens: Tensor, group: dist.ProcessGroup, ranks: int, known: Sequence[int] | None
) -> Tensor:
    """The tokens of every rank [R], int64. Filled in number by number: a CUDA graph allows no copy from the host."""
    if known is not None:
        return torch.cat([cu_seqlens.new_full((1,), n, dtype=torch.int64) for n in known])
    found = cu_seqlens.new_empty(ranks, dtype=torch.int64)
    all_gather(found, cu_seqlens.new_full((1,), tokens, dtype=torch.int64), group)
    return found


def all_gather(received: Tensor, sent: Tensor, group: dist.ProcessGroup, async_op: bool = False) -> dist.Work | None:
    """What all ranks send, one after another; by the name that it has since PyTorch 2.13, or had before."""
    function = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return function(received, sent, group, async_op=async_op)


def reduce_scatter(received: Tensor, sent: Tensor, group: dist.ProcessGroup) -> None:
    """The sum of what all ranks send for this one, of one after another; by either name, as `all_gather`."""
    function = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    function(received, sent, group=group)


def in_order(*pieces: Tensor) -> Tensor:
    """The pieces of all ranks in the order of places [P R, ..], given the first of each rank [R, ..] and the second."""
    first, *second = pieces
    return torch.cat([first, *(piece.flip(0) for piece in second)])


def _bounds(lengths: Tensor, layout: Layout) -> Tensor:
    """Where the pieces of all ranks begin and end in the whole row [P R + 1]."""
    if layout == "zigzag":
        lengths = in_order(lengths // 2, lengths // 2)
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0))


def _packed(cu_seqlens: Tensor, bounds: Tensor, places: tuple[int, ...]) -> Packed:
    offsets = cu_seqlens.long()
    N = len(offsets) - 1
    # Of each bound the last sequence that begins before it, where that begins and ends, and whether it is cut there.
    sequence = (torch.searchsorted(offsets, bounds) - 1).clamp(0, N - 1)  # [P R + 1]
    first, last = offsets[:-1][sequence], offsets[1:][sequence]
    is_cut = (first < bounds) & (bounds < last)
    passed = is_cut[:-1] & is_cut[1:] & (sequence[:-1] == sequence[1:])

    def own(x: Tensor, behind: int = 0) -> Tensor:
        """Of what stands at bounds, that in front of this rank's pieces, or behind them [P, 1]."""
        return torch.cat([x[p + behind : p + behind + 1] for p in places])[:, None]

    start, end = own(bounds), own(bounds, 1)
    before = (end - start).cumsum(0) - (end - start)  # rows of this rank in front of each of its pieces

    def in_row(begins: Tensor, closing: Tensor) -> Tensor:
        """Offsets in this rank's row of stretches that begin at these rows [P, ..] of the whole one."""
        begins, closing = (before + x.clamp(start, end) - start for x in (begins, closing))
        return torch.cat([begins.flatten(), closing[-1]])

    tail, head = torch.where(is_cut, first, bounds), torch.where(is_cut, last, bounds)
    piece = torch.cat([before.new_full((1,), i * N) for i in range(len(places))])  # the first part of each
    return Packed(
        cu_seqlens,
        parts=in_row(offsets[None, :-1], offsets[None, -1:]),
        tails=in_row(torch.cat([start, own(tail, 1)], 1), end),
        heads=in_row(torch.cat([start, own(head)], 1), end),
        entered=own(sequence)[:, 0] + piece,
        left=own(sequence, 1)[:, 0] + piece,
        before=own((bounds - first) * is_cut)[:, 0],
        passed=passed,
    )


def _check_agreement(
    tokens: int, cu_seqlens: Tensor | None, group: dist.ProcessGroup, layout: Layout, lengths: Sequence[int] | None
) -> None:
    """A check of GLA_CHECK=1: reads values, and asks all ranks for theirs."""
    offsets = None if cu_seqlens is None else cu_seqlens.tolist()
    known = None if lengths is None else list(lengths)
    agreed = {"layout": layout, "cu_seqlens": offsets, "lengths": known}
    refuse_ranks_that_differ(agreed, group, "the row of all ranks' tokens is described on every rank")
    if offsets is None:
        return
    found: list = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, tokens, group)
    T = sum(found)
    rises = all(a <= b for a, b in itertools.pairwise(offsets))
    if offsets[0] != 0 or not rises or offsets[-1] > T or (layout == "zigzag" and offsets[-1] != T):
        upto = "to" if layout == "zigzag" else "to at most"
        raise ValueError(f"cu_seqlens is {offsets}; expected offsets that rise from 0 {upto} the ranks' {T} tokens")


def refuse_ranks_that_differ(agreed: Mapping[str, object], group: dist.ProcessGroup, what: str) -> None:
    """A check of GLA_CHECK=1: raise ValueError on every rank unless all have the same values by these names.

    Args:
        what: is the same on every rank, or should be; it ends the message.
    """
    found: list = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, agreed, group)
    for rank, its in enumerate(found):
        for name, value in its.items():
            if value != found[0][name]:
                raise ValueError(
                    f"{name} is {value} on rank {rank} of the group and {found[0][name]} on rank 0: {what}"
                )
