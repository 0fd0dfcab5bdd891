"""Predicts the seconds of a step, and of several. gla_triton_kernels/cost.py explains the constants."""

from __future__ import annotations

from gla_core.dispatch.backend import Constants, OpCall
from gla_triton_kernels.cost import in_all


def seconds(call: OpCall, c: Constants) -> float:
    """Returns the seconds of a step, which reads every state once and writes it once."""
    B, Hv, K, V = (call.dims[name] for name in ("B", "Hv", "K", "V"))
    states = B * Hv * K * V * (call.state_dtype.itemsize if call.state_dtype else 4)
    return in_all(call, c["launch"] + 2 * states / c["bandwidth"], c["host"])


def seconds_of_steps(call: OpCall, c: Constants) -> float:
    """Returns the seconds of several steps, which read every state once and write it after each token."""
    tokens, N, Hv, K, V = (call.dims[name] for name in ("T", "N", "Hv", "K", "V"))
    tokens = tokens if call.variable_length else N * tokens
    moved = (N + tokens) * Hv * K * V * (call.state_dtype.itemsize if call.state_dtype else 4)
    return in_all(call, c["launch"] + moved / c["bandwidth"], c["host"])
