"""Times every op on every backend: over workloads tagged ci on a CPU, over workloads of models on a CUDA device.

On a CUDA device, read `device_seconds` in `extra_info`, which device events measure; pytest-benchmark's own times
include the wait for the device. `-k chunk_gla` selects an op, `-k parallel_scan` a backend.
"""

from __future__ import annotations

import functools

import torch

from gla_core.bench import measure, suite
from gla_core.bench.baselines import baselines
from gla_core.workloads.named import Workload

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BUDGET = 0.1 if DEVICE.type == "cpu" else 0.5
DIRECTIONS = ("forward", "forward+backward", "step")
LONG = Workload("long_on_a_cpu", "chunk_gla", frozenset(), {"B": 1, "T": 2048, "H": 4, "K": 64, "V": 64})
CHOSEN = [*suite.default_workloads(None, DEVICE), *([LONG] if DEVICE.type == "cpu" else [])]


def runnable(case):
    """Returns whether the backend accepts the call."""
    try:
        return suite.resolve(case, DEVICE) == case.backend
    except RuntimeError:
        return False


def pytest_generate_tests(metafunc):
    cases = [case for case in suite.cases(CHOSEN, DEVICE, None, DIRECTIONS, False) if runnable(case)]
    metafunc.parametrize("case", cases, ids=lambda case: f"{case.workload.op}-{case}")


@functools.cache
def bandwidth():
    return measure.copy_bandwidth(DEVICE)


@functools.cache
def baseline_seconds(op, name, backend, direction):
    (workload,) = [w for w in CHOSEN if (w.op, w.name) == (op, name)]
    return suite.measure_case(suite.Case(workload, backend, direction), DEVICE, None, BUDGET).seconds


def bench_op(benchmark, case):
    """Times a case; `extra_info` has the backend that ran, the fraction of the floor, and ratios to baselines."""
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
