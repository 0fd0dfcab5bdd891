"""What kind of GPU the kernels run on: the one place that knows compute capabilities. Imports no Triton."""

from __future__ import annotations

import enum
import functools
import os
from typing import NamedTuple

import torch


class Architecture(enum.IntEnum):
    """Kinds of GPU that kernels differ for, oldest first."""

    INTERPRETED = 0
    SM80 = 80  # A100
    SM86 = 86  # consumer cards before Blackwell: less shared memory
    SM90 = 90  # Hopper
    SM100 = 100  # Blackwell
    SM120 = 120  # consumer cards from Blackwell on: less shared memory

    @property
    def has_tma(self) -> bool:
        """Whether the copy engine addresses tensors by maps."""
        return self >= Architecture.SM90

    @property
    def has_wgmma(self) -> bool:
        """Whether warpgroups multiply matrices: for kernels with specialised warps."""
        return self is Architecture.SM90

    @property
    def overlaps_kernels(self) -> bool:
        """Whether a kernel may be launched while the one before it ends (programmatic dependent launch)."""
        return self >= Architecture.SM90

    @property
    def has_little_shared_memory(self) -> bool:
        """Less than an A100's 163 KiB a block."""
        return self in (Architecture.SM86, Architecture.SM120)


class Gpu(NamedTuple):
    """All that plans ask of a device."""

    architecture: Architecture
    multiprocessors: int


def interpreted() -> bool:
    """Whether Triton's kernels run anywhere, slowly, for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def architecture_of(major: int, minor: int) -> Architecture:
    """The architecture of a compute capability, of 8.0 and up."""
    if major == 8:
        return Architecture.SM86 if minor in (6, 9) else Architecture.SM80
    return Architecture.SM90 if major == 9 else Architecture.SM100 if major < 12 else Architecture.SM120


@functools.cache
def gpu_of(device: torch.device) -> Gpu:
    """What is known of a device; one multiprocessor where the kernels are interpreted on a CPU."""
    if device.type != "cuda":
        return Gpu(Architecture.INTERPRETED, 1)
    found = torch.cuda.get_device_properties(device)
    architecture = Architecture.INTERPRETED if interpreted() else architecture_of(found.major, found.minor)
    return Gpu(architecture, found.multi_processor_count)


def tf32_allowed() -> bool:
    """Whether float32 matrices may be multiplied in TF32, by PyTorch's setting."""
    return torch.get_float32_matmul_precision() != "highest"
