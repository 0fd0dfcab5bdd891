"""Constants fitted to times: known constants are found again."""

import math
import random
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gla_core.bench.fit import error, fit
from gla_core.dispatch.backend import OpCall


def chunk(B, T, K, capturing=False):
    dims = {"B": B, "T": T, "H": 2, "Hq": 2, "K": K, "V": K, "N": B}
    cpu = torch.device("cpu")
    return OpCall(op="chunk_gla_fwd", device=cpu, dtype=torch.bfloat16, dims=dims, capturing=capturing)


CALLS = [
    chunk(B, T, K, capturing)
    for capturing in (False, True)
    for K in (64, 256)
    for B in (1, 16, 256)
    for T in (1, 16, 256, 4096, 65536)
    if B * T <= 2**18
]


def kernel(call, c):
    """A formula like real ones: it has kinks where one bound replaces another, and steps where a wave is full."""
    d = call.dims
    waves = math.ceil(d["B"] * d["H"] / c["multiprocessors"])
    moved = d["B"] * d["T"] * d["H"] * 12 * d["K"] / c["bandwidth"]
    device = c["launch"] + max(moved, waves * math.ceil(d["T"] / 64) * c["step"] * d["K"] / 128)
    return device if call.capturing else max(device, c["host"])


TRUE = {"launch": 8e-6, "bandwidth": 3.2e12, "step": 2.5e-6, "host": 2.1e-5}
FIXED = {"multiprocessors": 132.0}


def times(noise=0.0):
    rng = random.Random(0)
    return [(call, kernel(call, {**TRUE, **FIXED}) * math.exp(rng.gauss(0, noise))) for call in CALLS]


@pytest.mark.parametrize("seed", range(3))
def test_known_constants_are_found_from_a_start_that_is_far_off(seed):
    rng = random.Random(seed)
    start = {name: value * math.exp(rng.uniform(-1.5, 1.5)) for name, value in TRUE.items()}
    assert fit(kernel, start, times(), FIXED) == pytest.approx(TRUE, rel=0.01)


def test_noise_is_averaged():
    fitted = fit(kernel, {name: 2 * value for name, value in TRUE.items()}, times(0.05), FIXED)
    assert fitted == pytest.approx(TRUE, rel=0.1)
    assert statistics.median(abs(error(kernel, {**fitted, **FIXED}, s)) for s in times()) < 0.03


def test_a_few_times_that_are_far_off_spoil_nothing():
    samples = [(call, seconds * (3 if i % 10 == 0 else 1)) for i, (call, seconds) in enumerate(times(0.01))]
    fitted = fit(kernel, {name: 2 * value for name, value in TRUE.items()}, samples, FIXED)
    assert fitted == pytest.approx(TRUE, rel=0.1)


def test_the_same_samples_give_the_same_constants():
    assert fit(kernel, TRUE, times(0.05), FIXED) == fit(kernel, TRUE, times(0.05), FIXED)


def test_a_constant_that_nothing_depends_on_stays():
    only_graphs = [(call, seconds) for call, seconds in times() if call.capturing]
    fitted = fit(kernel, {**TRUE, "host": 7.0}, only_graphs, FIXED)
    assert fitted == pytest.approx({**TRUE, "host": 7.0}, rel=0.01)


def test_without_samples_the_start_stays():
    assert fit(kernel, TRUE, [], FIXED) == pytest.approx(TRUE)


@settings(max_examples=25)
@given(launch=st.floats(1e-6, 1e-3), rate=st.floats(1e6, 1e12), off=st.tuples(st.floats(0.1, 10), st.floats(0.1, 10)))
def test_a_launch_and_a_rate(launch, rate, off):
    def formula(call, c):
        return c["launch"] + call.dims["T"] / c["rate"]

    true = {"launch": launch, "rate": rate}
    samples = [(call, formula(call, true)) for call in (chunk(1, 4**n, 16) for n in range(14))]
    fitted = fit(formula, {"launch": launch * off[0], "rate": rate * off[1]}, samples)
    assert max(abs(error(formula, fitted, s)) for s in samples) < 0.05
    assert all(value > 0 for value in fitted.values())


def test_an_error_is_the_log_of_predicted_over_measured():
    call = chunk(1, 1, 1)
    assert error(lambda call, c: 2.0, {}, (call, 1.0)) == math.log(2)
    for nonsense in (lambda call, c: c["missing"], lambda call, c: 0.0, lambda call, c: -1.0):
        assert error(nonsense, {}, (call, 1.0)) == math.inf
