"""The conformance kit on triton_fused, part by part: on a GPU where there is one, interpreted elsewhere."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("triton")

# Interpreted, chunk_gla takes as long as all others together: two processes share it.
PARTS = ["chunk_gla and float32", "chunk_gla and not float32", "recurrent_gla_step", "softmax"]
TWICE = " and not same_bits and not unchanged"  # what an interpreter computes twice is the same


@pytest.mark.slow
@pytest.mark.usefixtures("where_kernels_run")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("tests", PARTS)
def test_conformance(device, tests):
    wanted = tests + TWICE if device == "cpu" else tests
    kit = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--pyargs", "gla_core.conformance", "-k", wanted]
    run = [sys.executable, *kit, "--gla-backend", "triton_fused", "--gla-device", device]
    done = subprocess.run(run, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
