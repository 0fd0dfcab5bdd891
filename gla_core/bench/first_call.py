"""Seconds of the first call in a fresh process: what a user waits for before the first result.

Run as `python -m gla_core.bench.first_call OP WORKLOAD BACKEND DEVICE`; prints JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from gla_core.workloads.named import Workload, select


def first_call(
    workload: Workload,
    backend: str,
    device: torch.device,
    cache: Path | None = None,
    timeout: float | None = None,
) -> dict[str, float]:
    """Seconds of the first call, and of the first backward after it where there is one.

    The tensors exist and the device is awake when the clock starts; what the implementation imports, compiles and tunes
    is in the time.

    Args:
        backend: a backend's name or a baseline's.
        cache: an empty folder for what Triton compiles, which then holds it; a temporary one by default.
        timeout: seconds after which to give up.

    Returns:
        first_call and, where the backend has a backward, first_backward.

    Raises:
        RuntimeError: the call failed; holds the last line of its error. subprocess.TimeoutExpired: it took too long.
    """
    with tempfile.TemporaryDirectory() as temporary:
        process = subprocess.run(
            [sys.executable, "-m", __name__, workload.op, workload.name, backend, str(device)],
            env={**os.environ, "TRITON_CACHE_DIR": str(cache or temporary)},
            capture_output=True,
            text=True,
            timeout=timeout,
        )
    if process.returncode != 0:
        raise RuntimeError((process.stderr.strip().splitlines() or ["the process failed without a word"])[-1])
    return json.loads(process.stdout.strip().splitlines()[-1])


def _measure(op: str, name: str, backend: str, device: torch.device) -> dict[str, float]:
    from gla_core.bench import suite
    from gla_core.bench.measure import clock, synchronize

    (workload,) = [w for w in select(op) if w.name == name]
    differentiable = suite.has_backward(op, backend)
    arguments = suite.make_arguments(workload, device, gradients=differentiable)
    function = suite.bound(workload.op, backend, arguments)
    synchronize(device)
    start = clock()
    outputs = function()
    synchronize(device)
    seconds = {"first_call": clock() - start}
    if differentiable:
        incoming = [torch.ones_like(x) for x in outputs]
        synchronize(device)
        start = clock()
        torch.autograd.grad(outputs, suite.leaves(arguments), incoming)
        synchronize(device)
        seconds["first_backward"] = clock() - start
    return seconds


if __name__ == "__main__":
    op, name, backend, device = sys.argv[1:]
    print(json.dumps(_measure(op, name, backend, torch.device(device))))
