"""Measures peak memory of the reference's chunk_gla on a CPU, forward and backward, as T grows."""

from __future__ import annotations

import subprocess
import sys

import pytest

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
    """Measures bytes beyond the inputs, for T from 1k to 64k; `growth` is the ratio per doubling of T, 2 if linear."""

    def peak(T):
        command = [sys.executable, "-c", PEAK, str(T), str(backward)]
        return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    peaks = {T: peak(T) for T in (1024, 2048, 4096, 8192, 16384, 32768, 65536)}
    benchmark.extra_info["bytes_per_token"] = {str(T): round(p / T) for T, p in peaks.items()}
    benchmark.extra_info["growth"] = [round(peaks[2 * T] / peaks[T], 2) for T in list(peaks)[:-1]]
    benchmark.pedantic(peak, (1024,), rounds=1)
