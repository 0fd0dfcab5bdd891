"""chunk_gla: every backend over the shared workloads; the reference on a CPU, and its peak memory as T grows."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

import pytest
import torch

import gla_core as gla
from gla_core.conformance import oracle
from gla_core.workloads.inputs import gla_inputs

H, K, V = 4, 64, 64


def bench_workload(case, run_case):
    run_case(case)


def per_token_loop(q, k, v, g):
    """The recurrence as it is written, in the dtype of the inputs: the least a loop over tokens can do."""
    alpha, state, o = g.exp(), torch.zeros(q.shape[0], H, K, V), []
    for t in range(q.shape[1]):
        state = alpha[:, t, :, :, None] * state + k[:, t, :, :, None] * v[:, t, :, None, :]
        o.append(K**-0.5 * torch.einsum("bhk,bhkv->bhv", q[:, t], state))
    return torch.stack(o, dim=1)


def median_seconds(function, rounds):
    function()
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def bench_forward_against_the_loop(benchmark):
    x = gla_inputs(B=1, T=2048, H=H, K=K, V=V)

    def forward():
        return gla.chunk_gla(x.q, x.k, x.v, x.g, backend="reference")[0]

    torch.testing.assert_close(forward(), per_token_loop(x.q, x.k, x.v, x.g), rtol=1e-3, atol=1e-4)
    with torch.no_grad():
        loop = median_seconds(lambda: per_token_loop(x.q, x.k, x.v, x.g), 9)
        in_float64 = median_seconds(lambda: oracle.chunk_gla(x.q, x.k, x.v, x.g), 3)
        ours = median_seconds(forward, 60)
        benchmark.pedantic(forward, rounds=60, warmup_rounds=5)
    benchmark.extra_info["times_faster_than_loop"] = loop / ours
    benchmark.extra_info["times_faster_than_oracle_loop"] = in_float64 / ours


PEAK = """
import resource, sys, torch, gla_core as gla
from gla_core.workloads.inputs import gla_inputs
T, backward = int(sys.argv[1]), sys.argv[2] == "True"
x = gla_inputs(B=1, T=T, H=4, K=64, V=64)
leaves = [y.requires_grad_(backward) for y in (x.q, x.k, x.v, x.g)]
gla.chunk_gla(*[y[:, :64] for y in leaves])
with open("/proc/self/clear_refs", "w") as f:
    f.write("5")  # peak from here on
def now(key):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(key)) * 1024
before = now("VmRSS")
o, _ = gla.chunk_gla(*leaves)
if backward:
    o.sum().backward()
print(now("VmHWM") - before)
"""


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "forward+backward"])
def bench_peak_memory(benchmark, backward):
    """Bytes over what the inputs take, at T from 1k to 64k; `growth` is the ratio per doubling, 2 where linear."""

    def peak(T):
        command = [sys.executable, "-c", PEAK, str(T), str(backward)]
        return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    peaks = {T: peak(T) for T in (1024, 2048, 4096, 8192, 16384, 32768, 65536)}
    benchmark.extra_info["bytes_per_token"] = {str(T): round(p / T) for T, p in peaks.items()}
    benchmark.extra_info["growth"] = [round(peaks[2 * T] / peaks[T], 2) for T in list(peaks)[:-1]]
    benchmark.pedantic(peak, (1024,), rounds=1)
