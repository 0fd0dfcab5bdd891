"""How long the segments of a sequence are: the arithmetic of `_segments.py` and of cost models, without Triton.

A device has `slots` for blocks, that is, as many as run at once. Sequences that fill the slots stay whole. Others are
cut, so that blocks of segments fill them; a cut costs another pass over k, v and g, a scan, and two launches.
"""

from __future__ import annotations

import functools

CHUNK = 64
"""A segment is a multiple of so many tokens, the longest chunk of the kernels."""
STATES = 0.5
"""Time to build the state of a chunk, as a part of the time to compute its outputs."""
SPILLING = 1.5
"""Time that a block takes to write a state, scan and read it, in chunks."""
SPLITTING = 4.0
"""Time of two more launches, in chunks."""
MOST_WAVES = 3
FILLED = 4
"""Blocks per slot from which packed sequences, whole, keep the slots busy whatever their lengths are."""


def blocks_of(H: int, Hq: int, K: int, V: int, on_hopper: bool) -> tuple[int, int]:
    """Blocks that compute one sequence by Hopper's or the general kernel; how many a multiprocessor runs at once."""
    if on_hopper:
        return H * -(-V // 128), 1
    return H * -(-V // 64), 4 if Hq > H and K <= 128 < 2 * V else 2


@functools.lru_cache(maxsize=4096)
def segment_length(sequences: int, T: int, blocks: int, slots: int, packed: bool) -> int:
    """Tokens of a segment; T or more where sequences stay whole.

    Args:
        sequences: how many there are. T: tokens of one of them, or of all where they are packed.
        blocks: blocks that compute one sequence: its heads times the parts of v. slots: blocks that run at once.
    """
    if packed:
        return _fair_share(sequences, T, blocks, slots)
    chunks = -(-T // CHUNK)
    pieces = {1, *(min(chunks, waves * slots // max(1, sequences * blocks)) for waves in range(1, MOST_WAVES + 1))}
    best = min(sorted(pieces - {0}), key=lambda n: _chunks_of_time(n, chunks, sequences * blocks, slots), default=1)
    return CHUNK * max(1, -(-chunks // best))


def _chunks_of_time(pieces: int, chunks: int, blocks: int, slots: int) -> float:
    """Predicted time, in chunks of one block, where each sequence is cut into so many pieces."""
    waves, length = -(-blocks * pieces // slots), -(-chunks // pieces)
    return waves * length if pieces == 1 else waves * ((1 + STATES) * length + SPILLING) + SPLITTING


def _fair_share(sequences: int, T: int, blocks: int, slots: int) -> int:
    """Half of what one slot would do were all work even: only sequences that are longer hold the others up."""
    if sequences * blocks >= FILLED * slots:
        return max(T, 1)
    return CHUNK * max(1, -(-T * blocks // (2 * slots * CHUNK)))
