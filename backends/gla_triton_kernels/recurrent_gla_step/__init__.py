"""One token of gated linear attention, for decoding: step.py has the kernel, plan.py its launch parameters."""

from __future__ import annotations

from collections.abc import Callable

from gla_core.dispatch.backend import OpCall, Prepared


def _prepare(call: OpCall) -> Callable[..., tuple]:
    from gla_triton_kernels.recurrent_gla_step.step import prepare

    return prepare(call)


STEP = Prepared(_prepare, ("q", "k", "v", "g", "state", "scale", "state_indices", "gate_normalizer", "inplace"))
"""recurrent_gla_step: one kernel reads every state once and writes it once."""
