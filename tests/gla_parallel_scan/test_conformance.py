"""The conformance kit on parallel_scan: in PyTorch on a CPU, and its kernels, on a GPU or interpreted, part by part."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PARTS = ["chunk_gla and float32", "chunk_gla and not float32", "recurrent_gla_step", "softmax"]


def kit(tests, device, interpret):
    """Run the tests of the kit that the expression names."""
    run = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--pyargs", "gla_core.conformance"]
    run += ["--gla-backend", "parallel_scan", "--gla-device", device, "-k", tests]
    environment = os.environ | {"TRITON_INTERPRET": interpret}
    done = subprocess.run(run, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_in_pytorch():
    kit("", "cpu", interpret="0")


@pytest.mark.slow
@pytest.mark.usefixtures("where_kernels_run")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("tests", PARTS)
def test_kernels(device, tests):
    pytest.importorskip("triton")
    kit(tests, device, interpret="1" if device == "cpu" else "0")
