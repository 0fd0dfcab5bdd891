"""Cuts sequences into chunks of C tokens, and carries a state from chunk to chunk.

Both layouts turn [B, T, H, ...] into [R, H, n, C, ...], where each of the R rows has n consecutive chunks:

    Dense   R = B, one sequence per row, padded at its end to a multiple of C
    Packed  R = 1, the chunks of all sequences in order; each sequence begins a new chunk

The host reads no values of tensors here, so it does not wait for a device, even if sequences are packed.

B batch   T tokens   H value heads   N sequences   C chunk length   K, V key and value width
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from einops import rearrange
from torch import Tensor

from gla_core.dispatch.tensors import ceil_div

Step = Callable[[int | slice, Tensor], Tensor]
"""Takes numbers of chunks c and the states that enter them, and returns the states that leave them.

States are [R, H, K, V] if c is a number, and [R, H, m, K, V] if c is a slice of m chunks.
"""


def chunk(B: int, T: int, C: int, cu_seqlens: Tensor | None) -> Dense | Packed:
    """Returns the layout for B rows of T tokens; packed if `cu_seqlens` is given."""
    return Dense(B, T, C) if cu_seqlens is None else Packed(T, C, cu_seqlens)


class Dense:
    """The layout with one sequence per row."""

    def __init__(self, B: int, T: int, C: int) -> None:
        self.N, self.T, self.C = B, T, C
        self.n = ceil_div(T, C)

    def split(self, x: Tensor) -> Tensor:
        """Cuts [B, T, H, ...] to [B, H, n, C, ...]; positions past the end hold 0."""
        missing = self.n * self.C - self.T
        if missing:
            x = torch.cat([x, x.new_zeros(x.shape[0], missing, *x.shape[2:])], dim=1)
        return rearrange(x, "b (n c) h ... -> b h n c ...", c=self.C)

    def join(self, x: Tensor, out: Tensor) -> None:
        """Writes x [B, H, n, C, ...] to out [B, T, H, ...]; the inverse of `split`."""
        out.copy_(rearrange(x, "b h n c ... -> b (n c) h ...")[:, : self.T])

    def scan(self, state: Tensor, step: Step, reverse: bool = False) -> tuple[Tensor, Tensor]:
        """Carries a state [N, H, K, V] through the chunks.

        Args:
            reverse: whether to go from the last chunk to the first.

        Returns:
            The state that enters each chunk [R, H, n, K, V], and the state that leaves each sequence [N, H, K, V].
        """
        entering = state.new_empty(*state.shape[:2], self.n, *state.shape[2:])
        for c in reversed(range(self.n)) if reverse else range(self.n):
            entering[:, :, c] = state
            state = step(c, state)
        return entering, state

    def checkpoints(self, entering: Tensor, L: int) -> Tensor:
        """Returns checkpoints every L tokens [B, ceil(T / L), H, K, V] from the states that enter chunks."""
        return entering[:, :, :: L // self.C].transpose(1, 2)

    def resume(self, checkpoints: Tensor, L: int, step: Step, dtype: torch.dtype) -> Tensor:
        """Returns the states that enter all chunks [R, H, n, K, V], computed from checkpoints every L tokens."""
        checkpoints, every = checkpoints.transpose(1, 2), L // self.C
        entering = checkpoints.new_empty(*checkpoints.shape[:2], self.n, *checkpoints.shape[3:], dtype=dtype)
        entering[:, :, ::every] = checkpoints
        for i in range(1, every):
            before = slice(i - 1, self.n - 1, every)
            entering[:, :, i::every] = step(before, entering[:, :, before])
        return entering


class Packed:
    """The layout with all sequences in one row of T // C + N chunks, an upper bound on the chunks of N sequences.

    Unused chunks belong to sequence N.
    """

    def __init__(self, T: int, C: int, cu_seqlens: Tensor) -> None:
        self.T, self.C, self.N = T, C, len(cu_seqlens) - 1
        self.n = T // C + self.N if T else 0
        starts = cu_seqlens.long()  # [N+1]
        chunks = (starts.diff() + C - 1) // C  # [N], number of chunks of each sequence
        ends = chunks.cumsum(0)  # [N]
        number = torch.arange(self.n, device=starts.device)  # [n]
        self.sequence = torch.searchsorted(ends, number, right=True)  # [n], N for an unused chunk
        first = torch.cat([ends - chunks, ends[-1:]])[self.sequence] if self.N else number  # [n], first of its sequence
        self.starts, self.position = starts, number - first  # [N+1], [n]: number of the chunk in its sequence
        last = torch.cat([ends - 1, ends[-1:]])[self.sequence] if self.N else number
        self.is_first, self.is_last = number == first, number == last
        tokens = torch.arange(C, device=starts.device)  # [C]
        self.row = (starts[self.sequence] + (number - first) * C)[:, None] + tokens  # [n, C], row in the packed tensor
        end = torch.cat([starts[1:], starts[:1]])[self.sequence]  # [n]; cu_seqlens[0] for an unused chunk
        self.inside = self.row < end[:, None]  # [n, C]

    def split(self, x: Tensor) -> Tensor:
        """Cuts [1, T, H, ...] to [1, H, n, C, ...]; positions past the end of a sequence hold 0."""
        x = x[:, self.row.clamp(max=self.T - 1)]  # [1, n, C, H, ...]
        x = torch.where(self.inside.reshape(1, self.n, self.C, *[1] * (x.ndim - 3)), x, 0)
        return rearrange(x, "b n c h ... -> b h n c ...")

    def join(self, x: Tensor, out: Tensor) -> None:
        """Computes `Dense.join`; tokens that belong to no sequence become 0."""
        x = rearrange(x, "b h n c ... -> b (n c) h ...")
        joined = x.new_zeros(1, self.T + 1, *x.shape[2:])  # positions past an end all go to row T
        joined[:, torch.where(self.inside, self.row, self.T).flatten()] = x
        out.copy_(joined[:, : self.T])

    def scan(self, state: Tensor, step: Step, reverse: bool = False) -> tuple[Tensor, Tensor]:
        """Computes `Dense.scan`; each sequence has its own state, and an empty sequence keeps it."""
        entering = state.new_empty(1, state.shape[1], self.n, *state.shape[2:])
        leaving = torch.cat([state, state.new_zeros(1, *state.shape[1:])])  # [N+1, H, K, V]
        opens = self.is_last if reverse else self.is_first
        current = state.new_zeros(1, *state.shape[1:])  # [1, H, K, V]
        for c in reversed(range(self.n)) if reverse else range(self.n):
            sequence = self.sequence[c : c + 1]
            current = torch.where(opens[c], leaving.index_select(0, sequence), current)
            entering[:, :, c] = current
            current = step(c, current)
            leaving.index_copy_(0, sequence, current)
        return entering, leaving[: self.N]

    def checkpoints(self, entering: Tensor, L: int) -> Tensor:
        """Computes `Dense.checkpoints`, in N + T // L rows; see gla_core/ops/gla/chunk_gla.py. Unused rows are 0."""
        rows = self._checkpoint_rows(L)
        states = entering.new_zeros(1, self.N + self.T // L + 1, *entering.shape[1:2], *entering.shape[3:])
        states[:, rows] = entering.transpose(1, 2)  # states that are not checkpoints go to the last row
        return states[:, :-1]

    def resume(self, checkpoints: Tensor, L: int, step: Step, dtype: torch.dtype) -> Tensor:
        """Computes `Dense.resume`."""
        every = L // self.C
        padded = torch.cat([checkpoints, checkpoints.new_zeros(1, 1, *checkpoints.shape[2:])], dim=1)
        entering = padded[:, self._checkpoint_rows(L)].transpose(1, 2).to(dtype)
        for i in range(1, every):
            after = step(slice(None), entering)[:, :, :-1]
            here = (self.position[1:] % every == i)[:, None, None]
            entering[:, :, 1:] = torch.where(here, after, entering[:, :, 1:])
        return entering

    def _checkpoint_rows(self, L: int) -> Tensor:
        """Returns the checkpoint row of each chunk's entering state [n], or N + T // L if it is not a checkpoint."""
        every = L // self.C
        row = self.sequence + self.starts[self.sequence] // L + self.position // every
        is_one = (self.sequence < self.N) & (self.position % every == 0)
        return torch.where(is_one, row, self.N + self.T // L)
