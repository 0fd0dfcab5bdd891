"""Cuts sequences into segments of C tokens, and assigns slots of a scan to the states of the segments.

Tokens [B, T, H, ...] become [n, R, H, C, ...], with n segments in each of R rows:

    dense    R = B, one row per sequence, padded at its end to a multiple of C
    packed   R = 1, the segments of all sequences in order; each sequence begins a new segment

    The scan runs over slots. A sequence has one slot for its initial state, followed by one slot for each of its
    segments. After the scan, the slot before a segment's own slot holds the state that enters it.

B batch   T tokens   H value heads   N sequences   K, V key and value width   D keys of a decay: K, or 1
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from gla_core.dispatch.tensors import ceil_div
from gla_parallel_scan.pytorch.scan import scan_states

Index = Tensor | slice


@dataclass(frozen=True, slots=True)
class Segments:
    """A cut of rows of tokens into n segments of C tokens.

    Attributes:
        C: number of tokens of a segment.
        n: number of segments of a row.
        tokens: range of the tokens that belong to a sequence.
        position: position of each of these tokens among the n * C positions of a row; None if token t has position t.
        slots: number of slots.
        initial, final: the slots of the states that enter sequences, and of the states that leave sequences.
        entering, own: the slots of the states that enter segments, and of the states of segments from a zero state.
        opens: [slots], whether a slot holds an initial state; None if only the first slot does.
        place: for packed sequences, three tensors [n]: the sequence of each segment, the first token of this sequence,
            and the number of its segments before this segment.
    """

    C: int
    n: int
    tokens: slice
    position: Tensor | None
    slots: int
    initial: Index
    final: Index
    entering: Index
    own: Index
    opens: Tensor | None
    place: tuple[Tensor, Tensor, Tensor] | None = None

    def cut(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns a copy of x [B, T, H, ...] as [n, R, H, C, ...], with 0 at positions without a token."""
        B, T, H, *inner = x.shape
        filled = self.n * self.C == self.tokens.stop - self.tokens.start
        empty = x.new_empty if filled else x.new_zeros
        segments = empty(self.n, B, H, self.C, *inner, dtype=dtype)
        rows = segments.movedim((1, 0, 3), (0, 1, 2))  # [R, n, C, H, ...]
        if self.position is not None:
            rows[:, self.position // self.C, self.position % self.C] = x[:, self.tokens].to(dtype)
            return segments
        full, rest = divmod(T, self.C)
        rows[:, :full] = x[:, : full * self.C].unflatten(1, (full, self.C))
        if rest:
            rows[:, full, :rest] = x[:, full * self.C :]
        return segments

    def join(self, x: Tensor, scale: float, out: Tensor) -> None:
        """Writes scale * x, with x [n, R, H, C, ...], to out [B, T, H, ...]; tokens of no sequence become 0."""
        rows = x.movedim((1, 0, 3), (0, 1, 2))  # [R, n, C, H, ...]
        if self.position is not None:
            out[:, : self.tokens.start] = out[:, self.tokens.stop :] = 0
            torch.mul(rows[:, self.position // self.C, self.position % self.C], scale, out=out[:, self.tokens])
            return
        full, rest = divmod(self.tokens.stop, self.C)
        torch.mul(rows[:, :full], scale, out=out[:, : full * self.C].unflatten(1, (full, self.C)))
        if rest:
            torch.mul(rows[:, full, :rest], scale, out=out[:, full * self.C :])

    def scan(self, decay: Tensor, update: Tensor, initial_state: Tensor | None) -> tuple[Tensor, Tensor]:
        """Computes the states that enter segments and the states that leave sequences.

        The arguments `decay` and `update` are the decay of each segment and its state from a zero initial state.

        Args:
            decay: [n, R, H, D]. update: [n, R, H, K, V]. initial_state: [N, H, K, V].

        Returns:
            The states that enter segments [n, R, H, K, V], and the states that leave sequences [N, H, K, V].
        """
        decays = decay.new_ones(self.slots, *decay.shape[1:])  # [slots, R, H, D]
        states = update.new_empty(self.slots, *update.shape[1:])  # [slots, R, H, K, V]
        decays[self.own], states[self.own] = decay, update
        states[self.initial] = 0 if initial_state is None else initial_state.unflatten(0, (-1, decay.shape[1]))
        scan_states(decays, states, self.opens)
        return states[self.entering], states[self.final].flatten(0, 1)

    def keep(self, entering: Tensor, L: int, out: Tensor) -> None:
        """Writes checkpoints to out [B, rows, H, K, V]: the states before tokens 0, L, 2 L .. of each sequence.

        Args:
            entering: the states that enter segments, [n, R, H, K, V].
            L: tokens between checkpoints, a multiple of C.
        """
        every = L // self.C
        if self.place is None:
            out.copy_(entering[::every].transpose(0, 1))
            return
        sequence, start, before = self.place
        rows, kept = sequence + start // L + before // every, before % every == 0
        out[:, rows[kept]] = entering[kept].transpose(0, 1).to(out.dtype)


def dense(T: int, C: int) -> Segments:
    """Returns the cut of rows of T tokens, one sequence per row."""
    n = ceil_div(T, C)
    initial, final, entering, own = slice(0, 1), slice(n, None), slice(0, n), slice(1, None)
    return Segments(C, n, slice(0, T), None, n + 1, initial, final, entering, own, opens=None)


def packed(C: int, cu_seqlens: Tensor) -> Segments:
    """Returns the cut of one row of packed sequences. The host reads the number of segments, which is free on a CPU."""
    starts, lengths = cu_seqlens[:-1].long(), cu_seqlens.long().diff()  # [N], [N]
    tokens = slice(int(cu_seqlens[0]), int(cu_seqlens[-1]))
    segments = (lengths + C - 1) // C  # [N], number of segments of each sequence
    first = segments.cumsum(0) - segments  # [N], first segment of each sequence
    arange = functools.partial(torch.arange, device=starts.device)
    number = arange(len(starts))  # [N]
    n, initial = int(segments.sum()), first + number  # and [N]
    position = arange(tokens.start, tokens.stop) + (first * C - starts).repeat_interleave(lengths)
    sequence, segment = number.repeat_interleave(segments), arange(n)  # [n]
    own = 1 + segment + sequence  # [n]
    place = sequence, starts[sequence], segment - first[sequence]
    opens = starts.new_zeros(n + len(starts), dtype=torch.bool).index_fill_(0, initial, True)  # [slots]
    return Segments(C, n, tokens, position, n + len(starts), initial, initial + segments, own - 1, own, opens, place)
