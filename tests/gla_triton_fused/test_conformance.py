"""The conformance kit on triton_fused, op by op: on a GPU where there is one, interpreted elsewhere."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("triton")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("op", ["chunk_gla", "recurrent_gla_step", "online_softmax", "softmax_attention"])
def test_conformance(device, op):
    kit = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--pyargs", "gla_core.conformance", "-k", op]
    run = [sys.executable, *kit, "--gla-backend", "triton_fused", "--gla-device", device]
    done = subprocess.run(run, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
