"""gla_core.distributed on 1 to 4 processes beside one that has all tokens; the checks are those of ranks.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

RANKS = Path(__file__).parent / "ranks.py"


@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_ranks(number, tmp_path):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, RANKS, tmp_path, str(number)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert ran.returncode == 0, ran.stdout + ran.stderr
