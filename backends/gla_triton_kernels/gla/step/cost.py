"""Predicts the seconds of one step, and of several steps. gla_triton_kernels/cost.py explains the constants."""

from __future__ import annotations

from gla_core.dispatch.backend import Constants, OpCall
from gla_triton_kernels.cost import in_all


def seconds(call: OpCall, c: Constants) -> float:
    """Returns the seconds of a step, with or without a norm. A step reads every state once and writes it once."""
    return _seconds_of_states(call, c, 2 * call.dims["B"])


def seconds_of_steps(call: OpCall, c: Constants) -> float:
    """Returns the seconds of several steps. They read every state once and write it after each token."""
    tokens, N = call.dims["T"], call.dims["N"]
    return _seconds_of_states(call, c, N + (tokens if call.variable_length else N * tokens))


def seconds_of_replay(call: OpCall, c: Constants) -> float:
    """Returns the seconds of new tokens after accepted tokens. The kernel reads every state once and writes it once."""
    return _seconds_of_states(call, c, 2 * call.dims["N"])


def _seconds_of_states(call: OpCall, c: Constants, states: int) -> float:
    """Returns the seconds of a kernel that reads and writes `states` states of all heads, in total."""
    Hv, K, V = (call.dims[name] for name in ("Hv", "K", "V"))
    moved = states * Hv * K * V * (call.state_dtype.itemsize if call.state_dtype else 4)
    return in_all(call, c["launch"] + moved / c["bandwidth"], c["host"])
