"""Predicts the seconds of the kernels that more than one backend launches.

Blocks wait for free multiprocessors and therefore run in waves. A block takes its steps one after another, and memory
limits every kernel:

    seconds = launch + max(waves * (start + steps * step), bytes / bandwidth)

While the device works, the host prepares the next call. In a CUDA graph, the host prepares nothing:

    seconds of a call = max(device, host + device / 100)        in a CUDA graph: device

The hundredth of the device time ranks calls whose time is the time of the host: the call with less device time is
preferred.

The constants of an op are named beside its formula.
"""

from __future__ import annotations

from gla_core.dispatch.backend import Constants, KnownDevice, OpCall
from gla_triton_runtime.architecture import Gpu, architecture_of


def in_all(call: OpCall, device: float, host: float) -> float:
    """Returns the seconds of a call from its seconds on the device and on the host."""
    return device if call.capturing else max(device, host + device / 100)


def gpu_of_constants(c: Constants) -> Gpu:
    """Returns the GPU that the constants of a cost model describe, in the form that plans take."""
    major, minor = divmod(round(10 * c["compute_capability"]), 10)
    device = KnownDevice("", int(c["multiprocessors"]), (major, minor), "NVIDIA" if major else "AMD")
    return Gpu(architecture_of(device), device.multiprocessors)
