"""Says which calls of delta rules on a GPU are computed here: those of the kernels for Hopper, which were measured.

On an H200 they are faster than flash-linear-attention's, which compute all other calls on a GPU.
"""

from __future__ import annotations

from typing import Any

import torch

KEYS, MOST_VALUES = range(33, 129), 128
"""The key widths, and the most values of a head."""
IN_WORDS = "on Hopper in bfloat16 with K from 33 to 128 and V up to 128"
NOT_COMPUTED = f"neither on a CPU, nor {IN_WORDS}"
"""The reason of a call that is left to the original."""


def computes_delta_rule(q: Any, v: Any) -> bool:
    """Returns whether the kernels for Hopper compute a delta rule of q [B, T, H, K] and v [B, T, Hv, V]."""
    if q.dtype != torch.bfloat16 or q.shape[3] not in KEYS or v.shape[3] > MOST_VALUES:
        return False
    return q.device.type == "cuda" and torch.cuda.get_device_capability(q.device) == (9, 0)
