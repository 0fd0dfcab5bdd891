"""Kinds of GPU that the kernels run on: the one place that knows compute capabilities. Imports no Triton."""

from __future__ import annotations

import enum
import functools
import os
from typing import NamedTuple

import torch

from gla_core.dispatch.backend import OpCall


class Architecture(enum.Enum):
    """Kinds of GPU that kernels differ for, oldest first, each with what it can do.

    Attributes:
        has_tma: the copy engine addresses tensors by maps.
        has_wgmma: warpgroups multiply matrices: for kernels with specialised warps.
        overlaps_kernels: a kernel may be launched while the one before it ends (programmatic dependent launch).
        has_little_shared_memory: less than an A100's 163 KiB a block.
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
    """All that plans ask of a device."""

    architecture: Architecture
    multiprocessors: int


def interpreted() -> bool:
    """Returns whether Triton's kernels run anywhere, slowly, for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def architecture_of(major: int, minor: int) -> Architecture:
    """The architecture of an NVIDIA GPU's compute capability, of 8.0 and up."""
    if major == 8:
        return Architecture.SM86 if minor in (6, 9) else Architecture.SM80
    return Architecture.SM90 if major == 9 else Architecture.SM100 if major < 12 else Architecture.SM120


def why_unsuited() -> str | None:
    """Returns why no CUDA device that PyTorch sees can run the kernels, whatever its capability; None if one may.

    PyTorch for AMD GPUs calls them CUDA devices too, and reports their own versions as compute capabilities.
    """
    if torch.version.hip is None or interpreted():
        return None
    return f"needs an NVIDIA GPU; this PyTorch is built for AMD GPUs (ROCm {torch.version.hip})"


@functools.cache
def gpu_of(device: torch.device) -> Gpu:
    """Returns the facts of a device; one multiprocessor where the kernels are interpreted on a CPU."""
    if device.type != "cuda":
        return Gpu(Architecture.INTERPRETED, 1)
    found = torch.cuda.get_device_properties(device)
    architecture = Architecture.INTERPRETED if interpreted() else architecture_of(found.major, found.minor)
    return Gpu(architecture, found.multi_processor_count)


def tf32_allowed() -> bool:
    """Returns whether float32 matrices may be multiplied in TF32, by PyTorch's setting."""
    return torch.get_float32_matmul_precision() != "highest"


def gpu_of_call(call: OpCall) -> Gpu:
    """Returns the GPU of a call, or the GPU that it assumes."""
    if call.assumed is None:
        return gpu_of(call.device)
    return Gpu(architecture_of(*call.assumed.compute_capability), call.assumed.multiprocessors)
