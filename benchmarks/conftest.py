"""The benchmarks that `make bench` runs beside `gla bench`; numbers that are not times are in `extra_info` of a row."""

from __future__ import annotations

import pytest
import torch


def pytest_benchmark_update_machine_info(config, machine_info):
    machine_info.pop("node", None)
    machine_info["torch"] = torch.__version__
    machine_info["threads"] = torch.get_num_threads()
    machine_info["device"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)
