"""Measures the seconds of the first call in a fresh process: the wait before the first result."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from gla_core.workloads.named import Workload

PROCESS = "gla_core.bench.first_call_process"
"""The module that the process runs."""


def first_call(
    workload: Workload, backend: str, device: torch.device, cache: Path | None = None, timeout: float | None = None
) -> dict[str, float]:
    """Measures the first call in a fresh process, and the first backward after it if there is one.

    The clock starts when the tensors exist and the device is awake. The time includes everything that the
    implementation imports, compiles and tunes.

    Args:
        backend: a backend's name or a baseline's.
        cache: an empty folder in which Triton keeps the kernels that it compiles; a temporary folder by default.
        timeout: seconds after which to give up.

    Returns:
        The seconds of first_call and, if the backend has a backward, of first_backward.

    Raises:
        RuntimeError: the call failed; the message is the last line of its error.
        subprocess.TimeoutExpired: the call took too long.
    """
    with tempfile.TemporaryDirectory() as temporary:
        process = subprocess.run(
            [sys.executable, "-m", PROCESS, workload.op, workload.name, backend, str(device)],
            env={**os.environ, "TRITON_CACHE_DIR": str(cache or temporary)},
            capture_output=True,
            text=True,
            timeout=timeout,
        )
    if process.returncode != 0:
        raise RuntimeError((process.stderr.strip().splitlines() or ["the process failed without a word"])[-1])
    return json.loads(process.stdout.strip().splitlines()[-1])
