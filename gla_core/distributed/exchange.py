"""What ranks send each other of their pieces, and how each makes of it what enters its own.

A summary is a decay D [M, H, K] and a state from zero S [M, H, K, V] (see gla_core/ops/chunk_gla_summary.py). Over the
pieces in order, or backwards from the last,

    running <- diag(D) running + S

begins with the initial states, or the gradients of the final ones, and what it is before a piece enters that piece.

M is the number of sequences where all are passed on, those that end in one rank too: without packed sequences, or where
states are given or asked for. Otherwise M is 1: the sequence that is cut at a place.

**A gather, or of more than `MOST_GATHERED` ranks a scan.** With b = 4 M H K (V + 1) bytes a piece, and f seconds to
take one more summary into what is running:

    gather    latency + P (R - 1) b / bandwidth + P R f           all to all, each folds what is before its own
    scan      ceil(log2 P R + 1) (latency + b / bandwidth + f)    summaries of places 1, 2, 4 .. apart are joined
    chain     (R + m - 2) (latency + b / (m bandwidth))           from rank to rank, b in m parts

In us, at 20 us, 50 GB/s and f = 5 us (assumed, not measured), one row of eight heads with K = V = 128, contiguous:

    ranks       4      8     16     32     64    1024
    gather     72    134    259    508   1006  15,951
    scan      107    142    178    213    249     391
    chain      92    202    400    770   1480  21,380

A scan takes more rounds but sends little in each, so it wins once there are many ranks, and its memory does not grow
with them. A chain has a latency for every rank. Final states, and gradients of initial ones, are wanted on all ranks:
they take the gather, whatever R is.

R ranks   P pieces of a rank   N sequences   H heads   K, V key and value width
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from gla_core.distributed.shard import Shard, all_gather

MOST_GATHERED = 8
"""Ranks up to which one gather is quicker than a scan."""
Summary = tuple[Tensor, Tensor]
"""Decay [M, H, K] and state from zero [M, H, K, V] of a piece."""


def gather(shard: Shard, decay: Tensor, state: Tensor, by_row: bool) -> Callable[[], list[Summary]]:
    """Start to gather the summaries of all pieces; what it returns waits, and gives them in the order of places.

    Args:
        decay, state: [P * M, H, K] and [P * M, H, K, V] of this rank's pieces.
        by_row: the P pieces of a row of the batch follow each other, not the M sequences of a piece.
    """
    sent = torch.cat([decay.flatten(), state.flatten()])
    received = sent.new_empty(shard.ranks, len(sent))
    work = all_gather(received.view(-1), sent, shard.group, async_op=True)

    def wait() -> list[Summary]:
        assert work is not None  # of a process that is in the group
        work.wait()
        decays = received[:, : decay.numel()].view(-1, *decay.shape)
        states = received[:, decay.numel() :].view(-1, *state.shape)
        pieces = len(shard.places)
        return list(zip(*(_by_place(x, pieces, by_row) for x in (decays, states)), strict=True))

    return wait


def up_to_each(summary: Summary, segments: int, backwards: bool) -> Summary:
    """The summaries of each piece up to and including each of its segments [M, segments, ...], in their order.

    By doubling: what is 1, 2, 4 .. segments apart is joined, all at once.

    Args:
        summary: of M * segments of them, those of a piece one after another.
        backwards: whether the last one is the first in order.
    """
    D, S = (x.unflatten(0, (-1, segments)) for x in summary)
    if backwards:
        D, S = D.flip(1), S.flip(1)
    distance = 1
    while distance < segments:
        joined = _joined((D[:, :-distance], S[:, :-distance]), (D[:, distance:], S[:, distance:]))
        D, S = (torch.cat([x[:, :distance], y], 1) for x, y in zip((D, S), joined, strict=True))
        distance *= 2
    return D, S


def _joined(first: Summary, then: Summary) -> Summary:
    """The summary of two stretches of a sequence, one behind the other."""
    D, S = then
    return D * first[0], torch.addcmul(S, D[..., None], first[1])


def before_each(upto: Summary, backwards: bool) -> Summary:
    """The summaries of what is before each segment in its piece, of what `up_to_each` gives; each where it lies."""
    D, S = upto
    D = torch.cat([torch.ones_like(D[:, :1]), D[:, :-1]], 1)
    S = torch.cat([torch.zeros_like(S[:, :1]), S[:, :-1]], 1)
    return (D.flip(1), S.flip(1)) if backwards else (D, S)


def _by_piece(x: Tensor, dim: int, pieces: int, by_row: bool) -> Sequence[Tensor]:
    """Views of x, of which a dimension holds P * M, one for each of the P pieces."""
    if by_row:
        return x.unflatten(dim, (-1, pieces)).unbind(dim + 1)
    return x.unflatten(dim, (pieces, -1)).unbind(dim)


def _by_place(x: Tensor, pieces: int, by_row: bool) -> list[Tensor]:
    """Views of x [R, P * M, ...], one [M, ...] for each place: the second pieces lie in the order of falling ranks."""
    first, *second = (part.unbind(0) for part in _by_piece(x, 1, pieces, by_row))
    return [*first, *(x for part in second for x in reversed(part))]


def fold(
    summaries: Iterable[tuple[int, Summary]],
    start: Tensor,
    places: Collection[int],
    passed: Tensor | None,
    to_end: bool,
) -> tuple[dict[int, Tensor], Tensor]:
    """What is there before each of `places` [M, H, K, V], and after the last piece.

    Args:
        summaries: of all pieces with their places, in the order of the recurrence. start: [M, H, K, V].
        passed: whether what comes before a piece also leaves it [P * R]; otherwise what leaves is of another sequence.
            None if it always does.
        to_end: whether the second result is wanted; it is otherwise what there is once all places have been met.
    """
    running, found = start, {}
    for place, (decay, state) in summaries:
        if place in places:
            found[place] = running
        if not to_end and len(found) == len(places):
            break
        if passed is not None:
            running = torch.where(passed[place], running, 0)
        running = torch.addcmul(state, decay[..., None], running)
    return found, running


def scan(
    shard: Shard,
    decay: Tensor,
    state: Tensor,
    start: Tensor,
    passed: Tensor | None,
    backwards: bool,
    by_row: bool,
) -> dict[int, Tensor]:
    """What is there before each of this rank's places [M, H, K, V], by messages between two ranks at a time.

    Args:
        decay, state, by_row: as of `gather`. start, passed: as of `fold`.
        backwards: whether the last place comes first.
    """
    last = _last(shard)
    order = {last - place if backwards else place: place for place in shard.places}
    parts = (_by_piece(x, 0, len(order), by_row) for x in (decay, state))
    own = {}
    for position, D, S in zip(order, *parts, strict=True):
        own[position] = (D if passed is None else torch.where(passed[order[position]], D, 0), S)
    # What enters a place is what leaves the one before it, once that is joined with all before it.
    running = _from_before(shard, own, 1, backwards)
    if 0 in own:
        running[0] = (torch.zeros_like(own[0][0]), start)
    distance = 1
    while distance <= last:
        received = _from_before(shard, running, distance, backwards)
        for position, before in received.items():
            running[position] = _joined(before, running[position])
        distance *= 2
    return {order[position]: S for position, (_, S) in running.items()}


def _from_before(shard: Shard, sent: dict[int, Summary], distance: int, backwards: bool) -> dict[int, Summary]:
    """What stands in the positions so far before those of this rank, each sent by the rank that has it."""
    last = _last(shard)
    received: dict[int, Tensor] = {}
    messages = []
    flat = {position: torch.cat([D.flatten(), S.flatten()]) for position, (D, S) in sent.items()}
    for position, x in flat.items():
        there, here = position + distance, position - distance
        if there <= last and there not in flat:
            messages.append(dist.P2POp(dist.isend, x, _peer(shard, there, backwards), shard.group))
        if here in flat:
            received[position] = flat[here]
        elif here >= 0:
            received[position] = torch.empty_like(x)
            messages.append(dist.P2POp(dist.irecv, received[position], _peer(shard, here, backwards), shard.group))
    for work in dist.batch_isend_irecv(messages) if messages else ():
        work.wait()
    return {
        position: (x[: D.numel()].view_as(D), x[D.numel() :].view_as(S))
        for position, x in received.items()
        for D, S in (sent[position],)
    }


def _peer(shard: Shard, position: int, backwards: bool) -> int:
    """The rank, among all processes, that has the place in this position."""
    last = _last(shard)
    place = last - position if backwards else position
    return dist.get_global_rank(shard.group, min(place, last - place) if shard.layout == "zigzag" else place)


def _last(shard: Shard) -> int:
    """The last place of all."""
    return len(shard.places) * shard.ranks - 1
