"""Packed sequences of transformers' collators, converted to cu_seqlens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor


def offsets(said: Mapping[str, Any], alone: bool) -> tuple[Tensor | None, int | None]:
    """Returns cu_seqlens [N+1] and max_seqlen of packed sequences; None if the arguments describe none.

    Args:
        said: arguments of a model's call. `DataCollatorWithFlattening` gives cu_seq_lens_q and max_length_q on request,
            otherwise position_ids [1, T] that restart at 0 with each sequence. Reading position_ids waits for the
            device.
        alone: whether position_ids may describe packed sequences, because there is neither a mask nor an earlier state.
    """
    if said.get("cu_seq_lens_q") is not None:
        longest = said.get("max_length_q")
        return said["cu_seq_lens_q"], longest if isinstance(longest, int) else None
    positions = said.get("position_ids")
    if positions is None or not alone or positions.ndim != 2 or len(positions) != 1:
        return None, None
    starts = 1 + (positions[0, 1:] == 0).nonzero()[:, 0]
    if not len(starts):
        return None, None
    return F.pad(F.pad(starts, (1, 0)), (0, 1), value=positions.shape[1]), None
