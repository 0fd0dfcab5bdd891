"""Exchange of summaries between ranks: each rank computes the states that enter its pieces.

A summary is a transition D, diagonal [M, H, K] or dense [M, H, K, K], and the state from zero S [M, H, K, V] (see
gla_core/dispatch/transitions.py). The recurrence

    running <- D running + S

goes over the pieces in order, or backwards from the last one. It begins with the initial states, or backwards with the
gradients of the final states. The value of `running` before a piece is the state that enters that piece.

M is the number of sequences whose states are exchanged. Without packed sequences, or if initial states are given or
final states are asked for, it is the number of all sequences, including sequences that lie within one rank. Otherwise M
is 1: at most one packed sequence is cut at each bound between two pieces.

**Up to `MOST_GATHERED` ranks use a gather, more ranks use a scan.** With b = 4 M H K (V + 1) bytes per piece, or
b = 4 M H K (V + K) with dense transitions, and f seconds to fold one summary into `running`:

    gather    latency + P (R - 1) b / bandwidth + P R f           every rank gets all summaries, folds those before it
    scan      ceil(log2 P R + 1) (latency + b / bandwidth + f)    joins summaries of places 1, 2, 4 .. apart
    chain     (R + m - 2) (latency + b / (m bandwidth))           passes states from rank to rank, b in m slices

In us, with a latency of 20 us, 50 GB/s and f = 5 us (assumed, not measured), for one row of eight heads with
K = V = 128 in layout "contiguous":

    ranks       4      8     16     32     64    1024
    gather     72    134    259    508   1006  15,951
    scan      107    142    178    213    249     391
    chain      92    202    400    770   1480  21,380

A scan takes more rounds than a gather but sends little in each, so it is faster for many ranks, and its memory does not
grow with R. A chain adds a latency for every rank. Final states and gradients of initial states are needed on all
ranks: for these the gather is used for every R.

R ranks   P pieces of a rank   N sequences   H value heads   K, V key and value width
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from gla_core.dispatch import transitions
from gla_core.dispatch.transitions import Summary, apply, compose, is_dense
from gla_core.distributed.shard import Shard, all_gather

MOST_GATHERED = 8
"""Largest number of ranks for which one gather is faster than a scan."""


def gather(shard: Shard, summary: Summary, by_row: bool) -> Callable[[], list[Summary]]:
    """Starts to gather the summaries of all pieces.

    Args:
        summary: of this rank's pieces, [P * M, H, K] or [P * M, H, K, K], and [P * M, H, K, V].
        by_row: whether the first dimension is ordered as [M, P], the P pieces of a row side by side, not as [P, M].

    Returns:
        A function that waits for the gather and returns the summaries in the order of places.
    """
    sent = torch.cat([x.flatten() for x in summary])
    received = sent.new_empty(shard.ranks, len(sent))
    work = all_gather(received.view(-1), sent, shard.group, async_op=True)

    def wait() -> list[Summary]:
        assert work is not None  # it is None only in a process outside the group
        work.wait()
        flat = received.split([x.numel() for x in summary], 1)
        both = (part.view(-1, *x.shape) for part, x in zip(flat, summary, strict=True))
        return list(zip(*(_by_place(x, len(shard.places), by_row) for x in both), strict=True))

    return wait


def before_each(summary: Summary, segments: int, backwards: bool) -> tuple[Summary, Summary]:
    """Returns summaries of the tokens before each segment in its piece [M, segments, ...], and of each piece [M, ...].

    Args:
        summary: summaries of M * segments segments; the segments of a piece follow each other.
        backwards: whether the order begins with the last segment, so that "before" a segment is what follows it.
    """
    D, S = (x.unflatten(0, (-1, segments)) for x in summary)
    if backwards:
        D, S = D.flip(1), S.flip(1)
    neutral = torch.eye(D.shape[-1], dtype=D.dtype, device=D.device) if is_dense(D, S) else D.new_ones(())
    D, S = transitions.summaries_of_beginnings((D, S))
    whole = D[:, -1], S[:, -1]
    D, S = (
        torch.cat([neutral.expand_as(D[:, :1]), D[:, :-1]], 1),
        torch.cat([S.new_zeros(S[:, :1].shape), S[:, :-1]], 1),
    )
    return ((D.flip(1), S.flip(1)) if backwards else (D, S)), whole


def _by_piece(x: Tensor, dim: int, pieces: int, by_row: bool) -> Sequence[Tensor]:
    """Returns P views of x, one per piece; dimension `dim` of x has size P * M."""
    if by_row:
        return x.unflatten(dim, (-1, pieces)).unbind(dim + 1)
    return x.unflatten(dim, (pieces, -1)).unbind(dim)


def _by_place(x: Tensor, pieces: int, by_row: bool) -> list[Tensor]:
    """Returns views of x [R, P * M, ...], one [M, ...] per place; the ranks' second pieces lie in reverse order."""
    first, *second = (part.unbind(0) for part in _by_piece(x, 1, pieces, by_row))
    return [*first, *(x for part in second for x in reversed(part))]


def fold(
    summaries: Iterable[tuple[int, Summary]],
    start: Tensor,
    places: Collection[int],
    passed: Tensor | None,
    to_end: bool,
) -> tuple[dict[int, Tensor], Tensor]:
    """Runs the recurrence; returns its value before each of `places` [M, H, K, V], and after the last piece.

    Args:
        summaries: all pieces' summaries with their places, in the order of the recurrence.
        start: [M, H, K, V], the value before the first of these pieces.
        passed: [P * R], whether the sequence that enters a piece also leaves it; if not, the state that leaves belongs
            to another sequence. None if it always does.
        to_end: whether the second result is needed. If not, the recurrence stops at the last of `places`.
    """
    running, entering = start, {}
    for place, (transition, state) in summaries:
        if place in places:
            entering[place] = running
        if not to_end and len(entering) == len(places):
            break
        if passed is not None:
            running = torch.where(passed[place], running, 0)
        running = apply(transition, running, state)
    return entering, running


def scan(
    shard: Shard, summary: Summary, start: Tensor, passed: Tensor | None, backwards: bool, by_row: bool
) -> dict[int, Tensor]:
    """Returns the recurrence's value before each of this rank's places [M, H, K, V], by point-to-point messages.

    Args:
        summary, by_row: as in `gather`.
        start, passed: as in `fold`.
        backwards: whether the order begins with the last place.
    """
    last = _last(shard)
    order = {last - place if backwards else place: place for place in shard.places}
    parts = (_by_piece(x, 0, len(order), by_row) for x in summary)
    pieces = {}
    for position, D, S in zip(order, *parts, strict=True):
        pieces[position] = (D if passed is None else torch.where(passed[order[position]], D, 0), S)
    # The state that enters a place is the state that leaves the place before it.
    running = _from_before(shard, pieces, 1, backwards)
    if 0 in pieces:
        running[0] = (torch.zeros_like(pieces[0][0]), start)
    distance = 1
    while distance <= last:
        received = _from_before(shard, running, distance, backwards)
        for position, before in received.items():
            running[position] = compose(running[position], before)
        distance *= 2
    return {order[position]: S for position, (_, S) in running.items()}


def _from_before(shard: Shard, sent: dict[int, Summary], distance: int, backwards: bool) -> dict[int, Summary]:
    """Exchanges summaries; returns the summaries `distance` positions before this rank's positions, if they exist.

    A position is a place counted in the order of the recurrence.
    """
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
    """Returns the global rank of the process that holds this position."""
    last = _last(shard)
    place = last - position if backwards else position
    return dist.get_global_rank(shard.group, min(place, last - place) if shard.layout == "zigzag" else place)


def _last(shard: Shard) -> int:
    """Returns the number of the last place."""
    return len(shard.places) * shard.ranks - 1
