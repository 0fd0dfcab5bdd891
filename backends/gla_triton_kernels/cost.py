"""Predicted seconds of the kernels that more than one backend launches.

Blocks queue for the multiprocessors and so run in waves, a block takes its steps one after another, and no kernel is
faster than memory:

    seconds = launch + max(waves * (start + steps * step), bytes / bandwidth)

While the device works the host prepares the next call, which starts a little later; in a CUDA graph there is nothing to
prepare:

    seconds of a call = max(device + gap, host + device / 100)        in a CUDA graph: device

The hundredth tells calls apart that wait for the host: the one that asks less of the device is to be preferred.

The constants of an op are named beside its formula.
"""

from __future__ import annotations

from gla_core.dispatch.backend import Constants, OpCall
from gla_triton_kernels.runtime.architecture import Gpu, architecture_of


def in_all(call: OpCall, device: float, host: float, gap: float = 0.0) -> float:
    """Seconds of a call that takes the device and the host so long; `gap` passes on the device before the next one."""
    return device if call.capturing else max(device + gap, host + device / 100)


def gpu_of_constants(c: Constants) -> Gpu:
    """The GPU whose facts stand among the constants of a cost model, as plans ask for it."""
    major, minor = divmod(round(10 * c["compute_capability"]), 10)
    return Gpu(architecture_of(major, minor), int(c["multiprocessors"]))
