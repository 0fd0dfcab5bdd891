"""Says which calls of some functions on a GPU are computed here: those whose kernels for Hopper were measured.

On an H200 they are faster than flash-linear-attention's, which compute all other calls of these functions on a GPU:
docs/models.md has the times.
"""

from __future__ import annotations

from typing import Any

import torch

LEAST, MOST = 33, 128
"""The fewest keys and values of a head, and the most."""
WIDEST = 256, 512
"""The most keys and values without a gate for each key."""
IN_WORDS = "on Hopper in bfloat16 with K and V from 33 to 128 (wider without a gate for each key)"


def computes_delta_rule(q: Any, v: Any, g: Any) -> bool:
    """Returns whether the kernels for Hopper compute a delta rule of q [B, T, H, K], v [B, T, Hv, V] and gates.

    Args:
        g: gates [B, T, Hv, K] or [B, T, Hv], or None.
    """
    K, V = q.shape[3], v.shape[3]
    most_keys, most_values = (MOST, MOST) if g is not None and g.ndim == 4 else WIDEST
    return LEAST <= K <= most_keys and LEAST <= V <= most_values and is_bfloat16_on_hopper(q)


def is_bfloat16_on_hopper(x: Any) -> bool:
    """Returns whether a tensor has the dtype and is on a GPU of the kind with which calls were measured."""
    on_gpu = x.dtype == torch.bfloat16 and x.device.type == "cuda"
    return on_gpu and torch.cuda.get_device_capability(x.device) == (9, 0)


def neither(words: str) -> str:
    """Returns the reason of a call that is left to the original, though calls that `words` say are computed here."""
    return f"neither on a CPU, nor {words}"
