"""Names the kinds of GPU that the kernels run on; no other module knows compute capabilities. Imports no Triton."""

from __future__ import annotations

import enum
import functools
import os
from typing import NamedTuple

import torch

from gla_core.dispatch.backend import OpCall


class Architecture(enum.Enum):
    """Kinds of GPU between which kernels differ, oldest first, each with its abilities.

    Attributes:
        known_as: name in messages.
        has_tma: whether the copy engine addresses tensors by maps.
        has_wgmma: whether warpgroups multiply matrices, which kernels with specialised warps require.
        overlaps_kernels: whether a kernel may be launched while its predecessor ends (programmatic dependent launch).
        has_little_shared_memory: whether a block has less than the 163 KiB of an A100.
    """

    INTERPRETED = ("interpreted", False, False, False, False)
    SM80 = ("A100", False, False, False, False)
    SM86 = ("consumer cards before Blackwell", False, False, False, True)
    SM90 = ("Hopper", True, True, True, False)
    SM100 = ("Blackwell", True, False, True, False)
    SM120 = ("consumer cards from Blackwell on", True, False, True, True)

    def __init__(self, known_as: str, tma: bool, wgmma: bool, overlaps: bool, little_shared_memory: bool) -> None:
        self.known_as = known_as
        self.has_tma = tma
        self.has_wgmma = wgmma
        self.overlaps_kernels = overlaps
        self.has_little_shared_memory = little_shared_memory


class Gpu(NamedTuple):
    """The facts of a device on which plans depend."""

    architecture: Architecture
    multiprocessors: int


def interpreted() -> bool:
    """Returns whether Triton interprets its kernels, for tests: slowly, on any device."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def architecture_of(major: int, minor: int) -> Architecture:
    """Returns the architecture of an NVIDIA GPU from its compute capability, which is 8.0 or later."""
    if major == 8:
        return Architecture.SM86 if minor in (6, 9) else Architecture.SM80
    return Architecture.SM90 if major == 9 else Architecture.SM100 if major < 12 else Architecture.SM120


def why_unsuited() -> str | None:
    """Returns why no CUDA device of this PyTorch can run the kernels, whatever its compute capability; None if one may.

    PyTorch for AMD GPUs also calls them CUDA devices, and reports their own versions as compute capabilities.
    """
    if torch.version.hip is None or interpreted():
        return None
    return f"needs an NVIDIA GPU; this PyTorch is built for AMD GPUs (ROCm {torch.version.hip})"


@functools.cache
def gpu_of(device: torch.device) -> Gpu:
    """Returns the facts of a device; a CPU, where kernels are interpreted, has one multiprocessor."""
    if device.type != "cuda":
        return Gpu(Architecture.INTERPRETED, 1)
    found = torch.cuda.get_device_properties(device)
    architecture = Architecture.INTERPRETED if interpreted() else architecture_of(found.major, found.minor)
    return Gpu(architecture, found.multi_processor_count)


def tf32_allowed() -> bool:
    """Returns whether PyTorch's setting allows products of float32 matrices in TF32."""
    return torch.get_float32_matmul_precision() != "highest"


def gpu_of_call(call: OpCall) -> Gpu:
    """Returns the GPU that a call assumes, or the GPU of its device if it assumes none."""
    if call.assumed is None:
        return gpu_of(call.device)
    return Gpu(architecture_of(*call.assumed.compute_capability), call.assumed.multiprocessors)
