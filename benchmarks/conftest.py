"""Benchmarks are run by `make bench`; figures that are not times stand in `extra_info` of each row.

Every op is timed over the shared workloads: those tagged ci on a CPU, those of models on a CUDA device. There the
figure to read is `device_seconds` in `extra_info`, measured with device events; pytest-benchmark's own times are those
of a call that waits for the device.
"""

from __future__ import annotations

import functools

import pytest
import torch

from gla_core.bench import measure, suite
from gla_core.bench.baselines import baselines

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BUDGET = 0.1 if DEVICE.type == "cpu" else 0.5
DIRECTIONS = ("forward", "forward+backward", "step")


def pytest_benchmark_update_machine_info(config, machine_info):
    machine_info.pop("node", None)
    machine_info["torch"] = torch.__version__
    machine_info["threads"] = torch.get_num_threads()
    machine_info["device"] = torch.cuda.get_device_name() if DEVICE.type == "cuda" else "cpu"


def pytest_generate_tests(metafunc):
    """A benchmark that takes `case` runs once for every case of the op that its file is named after."""
    if "case" in metafunc.fixturenames:
        op = metafunc.module.__name__.rpartition(".")[2].removeprefix("bench_")
        chosen = suite.default_workloads(op, DEVICE)
        found = [c for c in suite.cases(chosen, DEVICE, None, DIRECTIONS, False) if runnable(c)]
        metafunc.parametrize("case", found, ids=str)


def runnable(case):
    """Whether the backend accepts the call."""
    try:
        return suite.resolve(case, DEVICE) == case.backend
    except RuntimeError:
        return False


@functools.cache
def bandwidth():
    return measure.copy_bandwidth(DEVICE)


@functools.cache
def baseline_seconds(op, name, backend, direction):
    (workload,) = [w for w in suite.default_workloads(op, DEVICE) if w.name == name]
    return suite.measure_case(suite.Case(workload, backend, direction), DEVICE, None, BUDGET).seconds


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture
def run_case(benchmark):
    """Benchmark one case; `extra_info` says who ran it, how far it is from the floor and from what is to be beaten."""

    def run(case):
        workload, info = case.workload, benchmark.extra_info
        row = suite.measure_case(case, DEVICE, bandwidth(), BUDGET)
        assert row.seconds is not None, row.error
        info["backend"] = row.backend
        info["device_seconds"] = row.seconds
        info["GB/s"] = row.gigabytes_per_second
        info["floor_fraction"] = row.floor_fraction
        for name in baselines(workload.op, DEVICE):
            seconds = baseline_seconds(workload.op, workload.name, name, case.direction)
            info[f"ratio_to_{name}"] = seconds and seconds / row.seconds
        if case.direction == "step" and DEVICE.type == "cuda":
            graph = suite.measure_case(suite.Case(workload, case.backend, "step_graph"), DEVICE, bandwidth(), BUDGET)
            info["graph_seconds"], info["graph_error"] = graph.seconds, graph.error
        direction = case.direction if case.direction == "forward+backward" else "forward"
        call = suite.make_call(workload, case.backend, direction, DEVICE)

        def call_and_wait():
            call()
            measure.synchronize(DEVICE)

        benchmark.pedantic(call_and_wait, rounds=20, warmup_rounds=2)

    return run
