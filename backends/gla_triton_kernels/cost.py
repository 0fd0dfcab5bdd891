"""Predicted seconds of the kernels that more than one backend launches.

Blocks queue for the multiprocessors and so run in waves, a block takes its steps one after another, and no kernel is
faster than memory:

    seconds = launch + max(waves * (start + steps * step), bytes / bandwidth)

While the device works the host prepares the next call, and in a CUDA graph there is nothing for it to prepare:

    seconds of a call = max(device, host)

The constants of an op are named beside its formula.
"""

from __future__ import annotations

from gla_core.dispatch.backend import Constants, OpCall
from gla_triton_kernels.runtime.architecture import Gpu, architecture_of


def in_all(call: OpCall, device: float, host: float) -> float:
    """Seconds of a call that takes the device and the host so long."""
    return device if call.capturing else max(device, host)


def gpu_of_constants(c: Constants) -> Gpu:
    """The GPU whose facts stand among the constants of a cost model, as plans ask for it."""
    major, minor = divmod(round(10 * c["compute_capability"]), 10)
    return Gpu(architecture_of(major, minor), int(c["multiprocessors"]))


def recurrent_gla_step(call: OpCall, c: Constants) -> float:
    """Seconds of recurrent_gla_step.py: every state is read once and written once."""
    B, H, K, V = (call.dims[name] for name in ("B", "H", "K", "V"))
    states = B * H * K * V * (call.state_dtype.itemsize if call.state_dtype else 4)
    return in_all(call, c["launch"] + 2 * states / c["bandwidth"], c["host"])


def attention_keys(call: OpCall) -> float:
    """Keys that a query of softmax_attention sees on average.

    Whether a call is causal is not known: taken for so if it has many queries.
    """
    Tq, Tk = call.dims["Tq"], call.dims["Tk"]
    return Tk - min(Tq, Tk) / 2 if Tq > 1 else Tk


def attention_products(call: OpCall) -> float:
    """Multiplications of softmax_attention; a matrix product takes 16 rows at least."""
    B, Tq, H, Hq, K, V = (call.dims[name] for name in ("B", "Tq", "H", "Hq", "K", "V"))
    return B * H * max(16, Tq * (Hq / max(H, 1))) * attention_keys(call) * (K + V)


def attention_bytes(call: OpCall) -> int:
    """Bytes of k and v."""
    B, Tk, H, K, V = (call.dims[name] for name in ("B", "Tk", "H", "K", "V"))
    return B * H * Tk * (K + V) * call.dtype.itemsize
