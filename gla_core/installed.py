"""Versions of what is installed on this machine: distributions, and the NVIDIA driver."""

from __future__ import annotations

import importlib.metadata
import subprocess


def version_of(distribution: str) -> str | None:
    """Returns the version of a distribution; None if it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def driver() -> str | None:
    """Returns the version of the NVIDIA driver; None without one."""
    return first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")


def first_line(*command: str) -> str | None:
    """Returns the first line that a program prints; None if it is missing, fails or prints nothing."""
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return next(iter(run.stdout.splitlines()), None) if run.returncode == 0 else None
