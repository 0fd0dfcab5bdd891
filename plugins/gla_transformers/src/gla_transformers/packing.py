"""Packed sequences, as collators of transformers, TRL and axolotl describe them, converted to cu_seqlens.

A description is a number for each token. It says where a sequence begins in a row:

    position_ids     the position does not follow the one before
    seq_idx          the number of the sequence changes
    attention_mask   numbers 1, 2, ... change; 0 is padding

If several are given, a sequence begins where one of them says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import is_compiling


class Packed(NamedTuple):
    """Sequences of a batch [B, T], which lie behind one another in one row of M tokens.

    Attributes:
        shape: B and T.
        cu_seqlens: [N+1] offsets of the sequences in the row.
        max_seqlen: number of tokens of the longest sequence; None if it is not known.
        places: [M] int64, the places of the row's tokens among those of the batch; None if the batch has no padding.
    """

    shape: tuple[int, int]
    cu_seqlens: Tensor
    max_seqlen: int | None = None
    places: Tensor | None = None

    def row(self, x: Tensor) -> Tensor:
        """Returns x [B, T, ...] as one row [1, M, ...]."""
        x = x.flatten(0, 1)
        return (x if self.places is None else x[self.places])[None]

    def batch(self, y: Tensor) -> Tensor:
        """Returns a row y [1, M, D] as a batch [B, T, D], which is 0 where there is padding."""
        y = y[0]
        if self.places is not None:
            B, T = self.shape
            y = y.new_zeros(B * T, y.shape[1]).index_copy(0, self.places, y)
        return y.unflatten(0, self.shape)


def packed(
    said: Mapping[str, Any], attention_mask: Tensor | None, x: Tensor, with_cache: bool
) -> tuple[Packed | None, Tensor | None]:
    """Returns the sequences that are packed in the rows of a batch, and the mask; None for what is not there.

    There are no packed sequences if each row is one sequence. There is no mask if its numbers are 1, or if sequences
    are packed. To read position_ids, seq_idx or a mask of numbers, the host waits for the device. It does not wait to
    read cu_seq_lens_q, and does not read a mask of truth values.

    Args:
        said: arguments of a model's call: position_ids and seq_idx, [B, T] or [1, T]; cu_seq_lens_q [N+1] and
            max_length_q, beside which no other is read.
        attention_mask: [B, T or more], of which the last T columns are used.
        x: the batch [B, T, ...].
        with_cache: whether the rows have a cache.

    Raises:
        ValueError: a shape is wrong; both cu_seq_lens_q and a mask are given; rows with a cache are packed.
        RuntimeError: in compiled code, the mask numbers sequences.
    """
    B, T = x.shape[:2]
    if said.get("cu_seq_lens_q") is not None:
        if attention_mask is not None:
            raise ValueError("both cu_seq_lens_q and attention_mask are given; packed sequences need no mask")
        longest = said.get("max_length_q")
        return Packed((B, T), said["cu_seq_lens_q"], longest if isinstance(longest, int) else None), None
    names = [name for name in ("position_ids", "seq_idx") if said.get(name) is not None]
    numbers = {name: _checked(name, said[name], B, T) for name in names}
    columns = None
    if attention_mask is not None:
        columns = _checked_mask(attention_mask, B, T)
        least, most = _extremes(attention_mask) if T > 1 and attention_mask.numel() > 0 else (0, 1)
        if most > 1:
            numbers["attention_mask"] = columns
        attention_mask = None if least == most == 1 else attention_mask
    if not numbers or T < 2:  # a step of decoding
        return None, attention_mask
    real = torch.ones(B, T, dtype=torch.bool, device=x.device) if columns is None else columns
    places = real.flatten().nonzero()[:, 0]
    begins, new_row = _begins(numbers, places), (places // T).diff() != 0
    if not bool((begins & ~new_row).any()):
        return None, attention_mask
    if with_cache:
        raise ValueError(
            f"{' and '.join(numbers)} describe packed sequences, which the rows of a cache do not keep apart; give "
            "each sequence a row of its own, or leave past_key_values out"
        )
    starts = 1 + (begins | new_row).nonzero()[:, 0]
    offsets = F.pad(F.pad(starts, (1, 0)), (0, 1), value=len(places))
    return Packed((B, T), offsets, places=None if len(places) == B * T else places), None


def _begins(numbers: Mapping[str, Tensor], places: Tensor) -> Tensor:
    """Returns whether a sequence begins at each of the places [M] of tokens but the first, [M-1]."""
    distance = places.diff()
    begins = torch.zeros_like(distance, dtype=torch.bool)
    for name, values in numbers.items():
        step = values.flatten()[places].diff()
        # Positions count the tokens, or also the padding between them.
        begins |= (step != 1) & (step != distance) if name == "position_ids" else step != 0
    return begins


def _extremes(mask: Tensor) -> tuple[float, float]:
    """Returns the least and the largest number of a mask; 0 and 1 if it holds truth values.

    Code that cannot read values returns these too, and asserts that no number is above 1.
    """
    if mask.dtype == torch.bool:
        return 0, 1
    if is_compiling() or mask.is_meta or (mask.is_cuda and torch.cuda.is_current_stream_capturing()):
        torch.ops.aten._assert_async.msg(
            (mask <= 1).all(),
            "attention_mask numbers packed sequences; compiled and captured code cannot read them: pass cu_seqlens",
        )
        return 0, 1
    least, most = torch.stack(mask.aminmax()).tolist()
    return least, most


def _checked(name: str, values: Tensor, B: int, T: int) -> Tensor:
    if tuple(values.shape) not in ((B, T), (1, T)):
        raise ValueError(f"{name} is {list(values.shape)}; expected [{B}, {T}] or [1, {T}], a number for each token")
    return values.expand(B, T)


def _checked_mask(mask: Tensor, B: int, T: int) -> Tensor:
    shape = list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
    if not isinstance(shape, list) or len(shape) != 2 or shape[0] != B or shape[1] < T:
        raise ValueError(
            f"attention_mask is {shape}; expected [{B}, {T} or more], with 0 for padding; packed sequences may be "
            "numbered 1, 2, ... in it"
        )
    return mask[:, -T:]
