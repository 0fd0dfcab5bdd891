"""Shards: the tokens that each rank holds. A `Shard` has everything that depends on the cut and not on a layer.

The tokens of a sequence, or of one row of packed sequences, are cut into R (or 2R) pieces. The number of a piece in
this order is its place. Rank r of R holds

    contiguous   piece r
    zigzag       pieces r and 2R-1-r, one after the other: the work of causal softmax attention is then even

With packed sequences, sequence n is the rows cu_seqlens[n] to cu_seqlens[n+1]. The rows that it shares with a piece are
a part. A piece has N parts, most of them empty. At each bound between two pieces at most one sequence is cut, so
exactly one state is passed on there, and the shapes do not depend on the lengths. At a bound x, the sequence
that is cut is

    the last n with cu_seqlens[n] < x, if x < cu_seqlens[n+1]

The part of a piece whose sequence continues behind the piece is the piece's `tail`. The part whose sequence began
before the piece is its `head`.

Everything is computed on the device of cu_seqlens, and the host reads none of it. So no step waits for the device, and
a CUDA graph that captures the making of a shard can replay it for other offsets.

R ranks   P pieces of a rank, 1 or 2   T tokens of all ranks   N sequences
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from gla_core.dispatch.environment import environment
from gla_core.distributed.outside_graphs import outside_graphs
from gla_core.ops import checks
from gla_core.ops.checks import INTEGERS

Layout = Literal["contiguous", "zigzag"]
LAYOUTS = ("contiguous", "zigzag")


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """The positions of packed sequences' parts in a rank's row, as int64 offsets like `cu_seqlens`.

    Attributes:
        cu_seqlens: [N+1], offsets of the sequences in the row of all ranks' tokens.
        parts: [P * N + 1], offsets of the parts, piece by piece.
        tails: [2 * P], offsets of the tails, and of the rows between two tails.
        heads: [2 * P], offsets of the heads, and of the rows between two heads.
        entered: [P], index of the part that the state before a piece enters.
        left: [P], index of the part that the state behind a piece leaves.
        before: [P], number of rows in front of a piece that belong to the sequence that continues in it.
        passed: [P * R], whether one sequence covers the whole piece and continues on both sides, for the pieces of all
            ranks in the order of their places.
        longest: number of tokens of the longest sequence, or an upper bound; None if the host does not know it.
    """

    cu_seqlens: Tensor
    parts: Tensor
    tails: Tensor
    heads: Tensor
    entered: Tensor
    left: Tensor
    before: Tensor
    passed: Tensor
    longest: int | None


@dataclass(frozen=True, slots=True, eq=False)
class Shard:
    """A rank's share of the tokens; `shard` makes it once per batch, and every layer uses it.

    Attributes:
        tokens: number of this rank's tokens in each row of the batch.
        layout: "contiguous" or "zigzag".
        group: the ranks in the order of their shards.
        rank, ranks: this process's rank in the group, and the number of ranks.
        packed: positions of packed sequences; None if each row of the batch is one sequence.
    """

    tokens: int
    layout: Layout
    group: dist.ProcessGroup
    rank: int
    ranks: int
    packed: Packed | None = None

    @property
    def places(self) -> tuple[int, ...]:
        """Returns the places of this rank's pieces among all pieces."""
        return _places(self.layout, self.rank, self.ranks)


@outside_graphs
def shard(
    tokens: int,
    cu_seqlens: Tensor | None = None,
    group: dist.ProcessGroup | DeviceMesh | None = None,
    layout: Layout = "contiguous",
    lengths: Sequence[int] | None = None,
    max_seqlen: int | None = None,
) -> Shard:
    """Describes how a batch is cut into shards. All ranks of a group call it, once per batch.

    Args:
        tokens: number T of this rank's tokens; 0 is legal. In layout "zigzag" each of the two pieces has half of them.
        cu_seqlens: [N+1] int32 or int64, N at least 1: offsets of packed sequences in the row of all ranks' tokens, the
            same on all ranks. Rows before the first offset and behind the last one belong to no sequence; there are
            none in layout "zigzag".
        group: the ranks in the order of their shards; all ranks by default. A DeviceMesh must have one dimension.
        layout: "contiguous": rank r holds piece r of R; "zigzag": rank r holds pieces r and 2R-1-r of 2R.
        lengths: number of tokens of every rank, if the host knows them. Without it, packed sequences cost one small
            gather. Without packed sequences it is not used.
        max_seqlen: number of tokens of the longest packed sequence, or an upper bound; a hint, as in
            `gla_core.chunk_gla`. It is worth giving: from the number of parts, most of which are empty, a kernel would
            take sequences for shorter than they are.

    Returns:
        The value for `chunk_gla(..., shard=...)`.

    Raises:
        ValueError, TypeError: an argument does not fit. With GLA_CHECK=1, every rank also raises ValueError if offsets,
            layouts or lengths differ between ranks.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout is {layout!r}; expected one of {', '.join(LAYOUTS)}")
    if layout == "zigzag" and tokens % 2:
        raise ValueError(f"tokens is {tokens}; expected an even number in layout 'zigzag', half of either piece")
    tokens, max_seqlen = checks.integer(tokens), checks.integer(max_seqlen)
    group = _process_group(group)
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    if lengths is not None and (len(lengths) != ranks or lengths[rank] != tokens):
        raise ValueError(f"lengths is {list(lengths)}; expected {ranks} numbers, {tokens} for rank {rank}")
    if cu_seqlens is not None and (cu_seqlens.ndim != 1 or len(cu_seqlens) < 2 or cu_seqlens.dtype not in INTEGERS):
        raise ValueError(
            f"cu_seqlens has shape {list(cu_seqlens.shape)} and dtype {cu_seqlens.dtype}; expected [N+1] with N of at "
            "least 1, int32 or int64"
        )
    checks.longest(max_seqlen)
    if environment().check_values:
        _check_agreement(tokens, cu_seqlens, group, layout, lengths, max_seqlen)
    if cu_seqlens is None:
        return Shard(tokens, layout, group, rank, ranks)
    bounds = _bounds(_lengths(tokens, cu_seqlens, group, ranks, lengths), layout)
    packed = _packed(cu_seqlens, bounds, _places(layout, rank, ranks), max_seqlen)
    return Shard(tokens, layout, group, rank, ranks, packed)


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
    """Returns the number of tokens of every rank [R], int64.

    Known numbers are filled in one by one, because a CUDA graph allows no copy from the host.
    """
    if known is not None:
        return torch.cat([cu_seqlens.new_full((1,), n, dtype=torch.int64) for n in known])
    lengths = cu_seqlens.new_empty(ranks, dtype=torch.int64)
    all_gather(lengths, cu_seqlens.new_full((1,), tokens, dtype=torch.int64), group)
    return lengths


def all_gather(received: Tensor, sent: Tensor, group: dist.ProcessGroup, async_op: bool = False) -> dist.Work | None:
    """Gathers the tensors that all ranks send, one after another.

    The function of torch.distributed has a new name since PyTorch 2.13.
    """
    function = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return function(received, sent, group, async_op=async_op)


def reduce_scatter(received: Tensor, sent: Tensor, group: dist.ProcessGroup) -> None:
    """Sums the slices that all ranks send to this rank; each rank sends one slice per rank, one after another.

    The function of torch.distributed has a new name since PyTorch 2.13.
    """
    function = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    function(received, sent, group=group)


def in_order(*pieces: Tensor) -> Tensor:
    """Returns the pieces of all ranks in the order of places [P R, ..].

    Args:
        pieces: P tensors [R, ..]: the first piece of each rank, and in layout "zigzag" the second.
    """
    first, *second = pieces
    return torch.cat([first, *(piece.flip(0) for piece in second)])


def _bounds(lengths: Tensor, layout: Layout) -> Tensor:
    """Returns the bounds of all ranks' pieces in the row of all tokens [P R + 1]."""
    if layout == "zigzag":
        lengths = in_order(lengths // 2, lengths // 2)
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0))


def _packed(cu_seqlens: Tensor, bounds: Tensor, places: tuple[int, ...], longest: int | None) -> Packed:
    offsets = cu_seqlens.long()
    N = len(offsets) - 1
    # For each bound: the last sequence that begins before it, its offsets, and whether the bound cuts it.
    sequence = (torch.searchsorted(offsets, bounds) - 1).clamp(0, N - 1)  # [P R + 1]
    first, last = offsets[:-1][sequence], offsets[1:][sequence]
    is_cut = (first < bounds) & (bounds < last)
    passed = is_cut[:-1] & is_cut[1:] & (sequence[:-1] == sequence[1:])

    def at_bounds(x: Tensor, behind: int = 0) -> Tensor:
        """Returns x [P R + 1] at the bounds in front of this rank's pieces [P, 1]; with behind=1 behind them."""
        return torch.cat([x[p + behind : p + behind + 1] for p in places])[:, None]

    start, end = at_bounds(bounds), at_bounds(bounds, 1)
    before = (end - start).cumsum(0) - (end - start)  # rows of this rank in front of each of its pieces

    def in_row(x: Tensor) -> Tensor:
        """Converts places in the row of all tokens [P or 1, ..] to offsets in this rank's row, piece by piece."""
        return (before + x.clamp(start, end) - start).flatten()

    tail, head = torch.where(is_cut, first, bounds), torch.where(is_cut, last, bounds)
    piece = torch.cat([before.new_full((1,), i * N) for i in range(len(places))])  # index of each piece's first part
    return Packed(
        cu_seqlens,
        parts=torch.cat([in_row(offsets[None, :-1]), in_row(offsets[None, -1:])[-1:]]),
        tails=in_row(torch.cat([at_bounds(tail, 1), end], 1)),
        heads=in_row(torch.cat([start, at_bounds(head)], 1)),
        entered=at_bounds(sequence)[:, 0] + piece,
        left=at_bounds(sequence, 1)[:, 0] + piece,
        before=at_bounds((bounds - first) * is_cut)[:, 0],
        passed=passed,
        longest=longest,
    )


def _check_agreement(
    tokens: int,
    cu_seqlens: Tensor | None,
    group: dist.ProcessGroup,
    layout: Layout,
    lengths: Sequence[int] | None,
    max_seqlen: int | None,
) -> None:
    """Checks, for GLA_CHECK=1, that the arguments are valid and the same on all ranks; it reads values of tensors."""
    offsets = None if cu_seqlens is None else cu_seqlens.tolist()
    known = None if lengths is None else list(lengths)
    agreed = {"layout": layout, "cu_seqlens": offsets, "lengths": known, "max_seqlen": max_seqlen}
    refuse_ranks_that_differ(agreed, group, "every rank has to describe the same row of all ranks' tokens")
    if offsets is None:
        return
    numbers: list = [None] * dist.get_world_size(group)
    dist.all_gather_object(numbers, tokens, group)
    T = sum(numbers)
    checks.offset_values(cu_seqlens, T, max_seqlen)
    if layout == "zigzag" and (offsets[0], offsets[-1]) != (0, T):
        raise ValueError(
            f"cu_seqlens is {offsets}; expected offsets from 0 to the ranks' {T} tokens in layout 'zigzag'"
        )


def refuse_ranks_that_differ(agreed: Mapping[str, object], group: dist.ProcessGroup, what: str) -> None:
    """Checks, for GLA_CHECK=1, that all ranks have the same values under the same names.

    Args:
        what: a sentence that says what has to be the same on every rank; it ends the message.

    Raises:
        ValueError: on every rank, if a value differs between ranks.
    """
    ranks: list = [None] * dist.get_world_size(group)
    dist.all_gather_object(ranks, agreed, group)
    for rank, values in enumerate(ranks):
        for name, value in values.items():
            if value != ranks[0][name]:
                raise ValueError(
                    f"{name} is {value} on rank {rank} of the group and {ranks[0][name]} on rank 0: {what}"
                )
