"""Measures costs of a call besides its work: dispatch and import. `gla bench` has host time and first calls."""

from __future__ import annotations

import subprocess
import sys
import timeit

import pytest
import torch

import gla_core as gla
from gla_core.dispatch.backend import Backend

B, T, H, K = 1, 64, 16, 128
O_STEP, O_CHUNK, STATE = torch.empty(B, H, K), torch.empty(B, T, H, K), torch.empty(B, H, K, K)


def recurrent_gla_step(q, k, v, g, state, scale, state_indices, inplace):
    return O_STEP, state


def chunk_gla_fwd(q, k, v, g, scale, initial_state, output_final_state, cu_seqlens, checkpoint_every):
    return O_CHUNK, None, None


def seconds(function, number=20_000):
    return min(timeit.repeat(function, number=number, repeat=5)) / number


CALLS = {
    "recurrent_gla_step": (
        lambda x: gla.recurrent_gla_step(x, x, x, x, STATE, inplace=True),
        lambda x: recurrent_gla_step(x, x, x, x, STATE, 1.0, None, True),
        (B, H, K),
    ),
    "chunk_gla": (
        lambda x: gla.chunk_gla(x, x, x, x),
        lambda x: chunk_gla_fwd(x, x, x, x, 1.0, None, False, None, None),
        (B, T, H, K),
    ),
}


@pytest.mark.parametrize("op", CALLS)
def bench_dispatch(benchmark, op):
    """Times the public call, and its overhead over the function of a backend that does nothing: eager, no gradients."""
    public, direct, shape = CALLS[op]
    x = torch.randn(shape)
    functions = {f.__name__: f for f in (recurrent_gla_step, chunk_gla_fwd)}
    with gla.register(Backend("nothing", "0", functions)), gla.use_backend("nothing"), torch.no_grad():
        benchmark.extra_info["direct_us"] = 1e6 * seconds(lambda: direct(x))
        benchmark.extra_info["overhead_us"] = 1e6 * seconds(lambda: public(x)) - benchmark.extra_info["direct_us"]
        benchmark.pedantic(public, (x,), rounds=200, iterations=100, warmup_rounds=10)


def bench_import(benchmark):
    """Measures the seconds that `import gla_core` adds to `import torch`, each in a fresh process."""
    code = "import torch, time; t = time.perf_counter(); import gla_core; print(time.perf_counter() - t)"

    def added():
        result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        return float(result.stdout)

    times = sorted(added() for _ in range(9))
    benchmark.extra_info["added_seconds_median"] = times[4]
    benchmark.pedantic(added, rounds=1)
