"""gla_core.distributed on 1 to 4 processes and on two GPUs; start.py lists the modules of the checks."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

START = Path(__file__).parent / "start.py"


def go_through_checks(*arguments):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, START, *map(str, arguments)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.slow
@pytest.mark.parametrize("numbers", ["3", pytest.param("1,2,4", marks=pytest.mark.thorough)])
def test_ranks(numbers, tmp_path):
    go_through_checks(tmp_path, numbers, "cpu")


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two ranks need two GPUs")
def test_ranks_on_gpus(tmp_path):
    go_through_checks(tmp_path, 2, "cuda")
