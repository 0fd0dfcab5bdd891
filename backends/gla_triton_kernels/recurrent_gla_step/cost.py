"""Predicted seconds of a step. Constants: launch, host, bandwidth, as in gla_triton_kernels/cost.py."""

from __future__ import annotations

from gla_core.dispatch.backend import Constants, OpCall
from gla_triton_kernels.cost import in_all


def seconds(call: OpCall, c: Constants) -> float:
    """Every state is read once and written once."""
    B, H, K, V = (call.dims[name] for name in ("B", "H", "K", "V"))
    states = B * H * K * V * (call.state_dtype.itemsize if call.state_dtype else 4)
    return in_all(call, c["launch"] + 2 * states / c["bandwidth"], c["host"])
