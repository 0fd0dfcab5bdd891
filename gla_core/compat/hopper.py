"""Says which calls of delta rules on a GPU are computed here: those of the kernels for Hopper, which were measured.

On an H200 they are faster than flash-linear-attention's, which compute all other calls on a GPU.
"""

from __future__ import annotations

from typing import Any

import torch

WIDTHS = range(33, 129)
"""The key and the value widths."""
IN_WORDS = "on Hopper in bfloat16 with K and V from 33 to 128"
NOT_COMPUTED = f"neither on a CPU, nor {IN_WORDS}"
"""The reason of a call that is left to the original."""


def computes_delta_rule(q: Any, v: Any) -> bool:
    """Returns whether the kernels for Hopper compute a delta rule of q [B, T, H, K] and v [B, T, Hv, V]."""
    if q.dtype != torch.bfloat16 or q.shape[3] not in WIDTHS or v.shape[3] not in WIDTHS:
        return False
    return q.device.type == "cuda" and torch.cuda.get_device_capability(q.device) == (9, 0)
