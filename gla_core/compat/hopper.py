"""Says which calls of some functions on a GPU are computed here: those whose kernels for Hopper were measured.

On an H200 they are faster than flash-linear-attention's, which compute all other calls of these functions on a GPU:
docs/models.md has the times.
"""

from __future__ import annotations

from typing import Any

import torch

from gla_core.ops.calls import needs_gradient

LEAST, MOST, MOST_VALUES = 33, 128, 256
"""The fewest keys and values of a head, the most, and the most values without a gate for each key."""
UNTRAINED = 256, 512
"""The most keys and values without a gate for each key, if no gradient is needed."""
IN_WORDS = "on Hopper in bfloat16 with K and V from 33 to 128 (wider without a gate for each key)"


def computes_delta_rule(q: Any, v: Any, g: Any, *others: Any) -> bool:
    """Returns whether the kernels for Hopper compute a delta rule of q [B, T, H, K], v [B, T, Hv, V], gates and others.

    Args:
        g: gates [B, T, Hv, K] or [B, T, Hv], or None.
        others: further arguments, which may need gradients.
    """
    K, V = q.shape[3], v.shape[3]
    if g is not None and g.ndim == 4:
        most_keys, most_values = MOST, MOST
    elif needs_gradient(q, v, g, *others):
        most_keys, most_values = MOST, MOST_VALUES
    else:
        most_keys, most_values = UNTRAINED
    return LEAST <= K <= most_keys and LEAST <= V <= most_values and is_bfloat16_on_hopper(q)


def is_bfloat16_on_hopper(x: Any) -> bool:
    """Returns whether a tensor has the dtype and is on a GPU of the kind with which calls were measured."""
    on_gpu = x.dtype == torch.bfloat16 and x.device.type == "cuda"
    return on_gpu and torch.cuda.get_device_capability(x.device) == (9, 0)


def neither(words: str) -> str:
    """Returns the reason of a call that is left to the original, though calls that `words` say are computed here."""
    return f"neither on a CPU, nor {words}"
