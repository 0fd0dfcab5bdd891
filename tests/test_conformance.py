"""The conformance kit on our own backends: the whole kit, or a sample of it where kernels are interpreted.

tests/conformance runs it on the reference; `make conformance` runs all of it on all backends.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gla_core.conformance.run import run

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

# Every property on the smallest workload of each op, and padding. Padding is tested in float16, because float32 is
# computed token by token. tests/backends has the forms of gates. Left out: the interpreter gives the same bits twice
# anyway; opcheck, compiled graphs, autocast and projected inputs test the op and not the kernel. Values and gradients
# are enough of pools and of delta rules, because tests/backends/test_random_serving.py draws all that may be said of
# slots and test_chunk_delta.py tests the kernels, and of Mamba-2's scan, which other kernels compute where they are
# interpreted.
PADDED = "padded and not per_head and not gated_padded and (float16 or may_be_int32 or g_is_zero)"
SMALLEST = "(short or small) and not (test_gradients and float16)"
OTHERS = "(not (chunk_gla_pool or chunk_ssd or delta) or test_values[ or test_gradients[ or test_refusals)"
LONG = "delta_summary and padded or delta_gradient_summary and padded"
PROPERTIES = f"(same_bits or batch_invariance or unchanged or test_torch or test_autocast or projected or {LONG})"
SAMPLE = f"({SMALLEST} or test_refusals or {PADDED}) and {OTHERS} and not {PROPERTIES}"


def kit(backend, device, tests=""):
    """Runs the tests of the kit that match the expression."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--pyargs", "gla_core.conformance"]
    command += ["--gla-backend", backend, "--gla-device", device, "-k", tests]
    if INTERPRETED:
        command += ["-p", "quick_interpreter"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


@pytest.mark.kernels
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "backend", ["triton_fused", pytest.param("parallel_scan", marks=pytest.mark.thorough if INTERPRETED else ())]
)
def test_kernels(backend, device):
    few = "short and (test_values[ or test_gradients)"  # the kernels that only parallel_scan has
    sample = SAMPLE if backend == "triton_fused" else few
    kit(backend, device, sample if device == "cpu" else "")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_parallel_scan_in_pytorch():
    """Values in float32, of the smallest workloads in every dtype, and the rest of these in float32.

    `make conformance` runs all.
    """
    values = "test_values[ and (float32 or small or short)"
    rest = "float32 and (small or short or packed) and not test_torch"
    assert run("parallel_scan", "cpu", select=f"{values} or test_refusals or {rest}") == 0
