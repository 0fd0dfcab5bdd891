"""What all ranks gather, and how each folds it to what enters its own pieces.

A summary is a decay D [M, H, K] and a state from zero S [M, H, K, V] (see gla_core/ops/chunk_gla_summary.py). Over the
pieces in order, or backwards from the last,

    running <- diag(D) running + S

begins with the initial states, or the gradients of the final ones, and what it is before a piece enters that piece.

M is the number of sequences where all are passed on, those that end in one rank too: without packed sequences, or where
states are given or asked for. Otherwise M is 1: the sequence that is cut at a place.

**One gather, not a chain.** With b = 4 M H K (V + 1) bytes a piece, a rank receives those of all others, and a chain
from rank to rank sends b once, in m parts, so that it receives, decays and sends at the same time:

    gather    latency + P (R - 1) b / bandwidth
    chain     (R - 1 + m - 1) (latency + b / (m bandwidth))        contiguous, P = 1

With each further rank a gather takes b / bandwidth longer and a chain at least a latency. So where b is less than
latency * bandwidth no number of ranks makes a chain quicker, and where it is several times as much, three or four do.
At 10 us and 100 GB/s (assumed, not measured) that is 1 MB, one sequence of 15 heads with K = V = 128: what packed
sequences send of a layer. A chain would pay for batches of many long sequences; there is none here.

R ranks   P pieces of a rank   N sequences   H heads   K, V key and value width
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

import torch
from torch import Tensor

from gla_core.distributed.shard import Shard, all_gather

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


def _by_place(x: Tensor, pieces: int, by_row: bool) -> list[Tensor]:
    """Views of x [R, P * M, ...], one [M, ...] for each place: the second pieces lie in the order of falling ranks."""
    parts = x.unflatten(1, (-1, pieces)).unbind(2) if by_row else x.unflatten(1, (pieces, -1)).unbind(1)
    first, *second = (part.unbind(0) for part in parts)
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
