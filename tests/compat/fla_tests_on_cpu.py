"""Runs flash-linear-attention's own tests of delta rules on a CPU, with `accelerate` in force.

Its tests are not in its wheel. In a folder that has `tests/` of its repository (at bc3b101d for 0.6.0):

    FLA_DISABLE_BACKEND_DISPATCH=1 PYTHONPATH=<this repository>/.fla python fla_tests_on_cpu.py

They take a quarter of an hour and up to 16 GB. Left out are tests of functions and backends that are not replaced, a
test that sizes of chunks are refused, and three for which flash-linear-attention's naive functions take more memory.
"""

import sys

import fla.utils
import fla.utils.hardware
import pytest

from gla_core.compat.fla import accelerate

SELECTED = {
    "tests/ops/test_delta.py": "test",
    "tests/ops/test_gdn.py": "(fused_recurrent or test_chunk) and not (fwd_h or flash_qla)",
    "tests/ops/test_kda.py": "not (test_gate or naive_chunk or invalid_chunk_size or intermediate_states or flash_kda "
    "or vllm_decode or ascend or H96 or (D256 and chunk_size64))",
}
"""The tests of each file, as pytest's option -k selects them."""


def main() -> int:
    """Runs the tests of each file, and returns the number of files with a failure."""
    fla.utils.device = fla.utils.hardware.device = "cpu"
    options = ["-q", "--noconftest", "-p", "no:cacheprovider", "-W", "ignore", "-rs", *sys.argv[1:]]
    with accelerate(cpu=True):
        return sum(pytest.main([path, "-k", tests, *options]) != 0 for path, tests in SELECTED.items())


if __name__ == "__main__":
    sys.exit(main())
