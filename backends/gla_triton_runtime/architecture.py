"""Describes the kinds of GPU that the kernels run on; no other module knows compute capabilities. Imports no Triton."""

from __future__ import annotations

import enum
import functools
import os
from typing import NamedTuple

import torch

from gla_core.dispatch.backend import KnownDevice, OpCall, known_device

KiB = 1024


class Facts(NamedTuple):
    """The facts of a kind of GPU from which plans choose kernels and launch parameters.

    Attributes:
        known_as: name in messages.
        shared_memory: maximum number of bytes of shared memory of a block.
        tensor_memory: columns of tensor memory, in which matrix products accumulate; 0 if there is none.
        lanes: threads of a warp.
        has_tma: whether the GPU has TMA, a copy engine that addresses tensors by tensor maps.
        has_wgmma: whether warpgroups multiply matrices, which kernels with specialised warps require.
        has_tf32: whether the compiler multiplies float32 matrices in TF32.
        overlaps_kernels: whether a kernel may start while its predecessor ends (the launch option `launch_pdl`).
        limits_registers: whether the compiler accepts the launch option `maxnreg`.
    """

    known_as: str
    shared_memory: int
    tensor_memory: int = 0
    lanes: int = 32
    has_tma: bool = False
    has_wgmma: bool = False
    has_tf32: bool = True
    overlaps_kernels: bool = False
    limits_registers: bool = True


class Architecture(enum.Enum):
    """The kinds of GPU that plans distinguish, oldest first. The value of each is its `Facts`."""

    INTERPRETED = Facts("interpreted", 227 * KiB)
    SM80 = Facts("A100", 163 * KiB)
    SM86 = Facts("consumer cards before Blackwell", 99 * KiB)
    SM90 = Facts("Hopper", 227 * KiB, has_tma=True, has_wgmma=True, overlaps_kernels=True)
    SM100 = Facts("Blackwell", 227 * KiB, tensor_memory=512, has_tma=True, overlaps_kernels=True)
    SM120 = Facts("consumer cards from Blackwell on", 99 * KiB, has_tma=True, overlaps_kernels=True)
    AMD = Facts("AMD", 64 * KiB, lanes=64, has_tf32=False, limits_registers=False)

    @property
    def facts(self) -> Facts:
        """The facts of this kind of GPU."""
        return self.value


class Gpu(NamedTuple):
    """The facts of a device on which plans depend."""

    architecture: Architecture
    multiprocessors: int

    @property
    def facts(self) -> Facts:
        """The facts of the GPU's kind."""
        return self.architecture.facts


def interpreted() -> bool:
    """Returns whether Triton interprets its kernels. This is slow, but works on any device; tests use it."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def architecture_of(device: KnownDevice) -> Architecture:
    """Returns the architecture of an AMD GPU, or of an NVIDIA GPU of compute capability 8.0 or later.

    PyTorch also reports versions of AMD GPUs as compute capabilities, such as 9.4 for an MI300X, which is not Hopper.
    """
    major, minor = device.compute_capability
    if device.vendor == "AMD":
        return Architecture.AMD
    if major == 8:
        return Architecture.SM86 if minor in (6, 9) else Architecture.SM80
    return Architecture.SM90 if major == 9 else Architecture.SM100 if major < 12 else Architecture.SM120


@functools.cache
def gpu_of(device: torch.device) -> Gpu:
    """Returns the facts of a device. A CPU, where kernels are interpreted, counts as one multiprocessor."""
    if device.type != "cuda":
        return Gpu(Architecture.INTERPRETED, 1)
    known = known_device(device)
    return Gpu(Architecture.INTERPRETED if interpreted() else architecture_of(known), known.multiprocessors)


def gpu_of_call(call: OpCall) -> Gpu:
    """Returns the GPU that a call assumes, or the GPU of its device if it assumes none."""
    if call.assumed is None:
        return gpu_of(call.device)
    return Gpu(architecture_of(call.assumed), call.assumed.multiprocessors)
