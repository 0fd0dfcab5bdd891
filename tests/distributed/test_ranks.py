"""gla_core.distributed on 1 to 4 processes; the checks are those of the modules that start.py names."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

START = Path(__file__).parent / "start.py"


@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_ranks(number, tmp_path):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, START, tmp_path, str(number)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert ran.returncode == 0, ran.stdout + ran.stderr
