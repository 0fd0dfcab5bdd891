"""The conformance kit on parallel_scan: in PyTorch on a CPU; its kernels compiled, or interpreted part by part."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

# float32 differs from float16 in how a state is built alone: token by token.
PARTS = ["chunk_gla and float32 and (values or hand_off or packed_equals)", "chunk_gla and not float32", "softmax"]
TWICE = " and not same_bits and not unchanged"  # what an interpreter computes twice is the same


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
@pytest.mark.parametrize("device", ["cpu"])
@pytest.mark.parametrize("tests", PARTS)
def test_interpreted(tests, device):
    """But for recurrent_gla_step, whose kernel is that of triton_fused."""
    pytest.importorskip("triton")
    kit(tests + TWICE, device, interpret="1")


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_compiled():
    kit("", "cuda", interpret="0")
