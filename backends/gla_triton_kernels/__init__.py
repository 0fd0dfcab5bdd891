"""The Triton kernels of the backends `gla_triton_fused` and `gla_parallel_scan`. The package is not a backend itself.

Each family of ops has a folder; chunks/ has what families with a recurrent state share. Plans decide which kernel a
call takes, and `cost.py` predicts the time. Neither imports Triton. The other files hold the kernels, which are
imported when a call is prepared. In gla/, each generation of GPU has a folder.
"""

from __future__ import annotations

import importlib.util

import torch

from gla_core.dispatch.backend import OpCall, Reason
from gla_triton_runtime.architecture import interpreted

MAX_WIDTH = 1024
"""The largest K or V of a head whose state the kernels can keep on chip."""

MAX_LENGTH = 3 * 2**29
"""The maximum number of tokens of a sequence, or columns of a softmax. Kernels count both in 32 bits, and tiles reach
past the end."""


def dtypes() -> frozenset[torch.dtype]:
    """Returns the dtypes that the kernels compute here. Triton's interpreter computes wrong products of bfloat16."""
    return frozenset({torch.float32, torch.float16} | (set() if interpreted() else {torch.bfloat16}))


def refusal(call: OpCall) -> Reason | None:
    """Returns the reason why the kernels cannot compute a call here, or None."""
    if importlib.util.find_spec("triton") is None:
        return "needs the package triton: pip install triton"
    for name in ("T", "Tq", "Tk", "columns"):
        if call.dims.get(name, 0) > MAX_LENGTH:
            return f"computes {name} up to {MAX_LENGTH}; {name} is {call.dims[name]}"
    return None


def notes() -> list[str]:
    """Returns the remarks of `gla doctor` on the kernels here."""
    if importlib.util.find_spec("triton") is None or not (torch.cuda.is_available() or interpreted()):
        return []
    from gla_triton_runtime.replay import why_not_replayed

    reason = why_not_replayed()
    return [] if reason is None else [f"launches of repeated calls are not replayed: {reason}"]
