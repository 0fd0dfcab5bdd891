"""Benchmarks are run by `make bench`; figures that are not times stand in `extra_info` of each row."""

from __future__ import annotations

import pytest
import torch


def pytest_benchmark_update_machine_info(config, machine_info):
    machine_info.pop("node", None)
    machine_info["torch"] = torch.__version__
    machine_info["threads"] = torch.get_num_threads()


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)
