"""Timing on a CPU, against a clock that only moves when a call moves it."""

import pytest
import torch

from gla_core.bench import measure

CPU = torch.device("cpu")


class Clock:
    """A fake clock, which only calls made by it move."""

    def __init__(self):
        self.now = 0.0
        self.made = []

    def __call__(self):
        return self.now

    def call(self, *seconds):
        """Returns a call that takes each of `seconds` in turn, then the last one repeatedly."""
        left = list(seconds)

        def run():
            self.now += left.pop(0) if len(left) > 1 else left[0]
            self.made.append(run)

        return run


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(measure, "clock", clock)
    return clock


def test_the_first_call_is_not_in_the_median(clock):
    assert measure.time_calls([clock.call(1000.0, 0.25)], CPU, budget=10) == measure.Timing(0.25, 40, 0.0)


def test_the_median_ignores_an_outlier(clock):
    slow_once = clock.call(1.0, *[1.0] * 5, 500.0, 1.0)  # first call, two to warm up, then the timed ones
    assert measure.time_calls([slow_once], CPU, budget=7).seconds == pytest.approx(1.0)
    assert clock.now > 500


def test_the_spread_is_the_middle_half_of_the_times_over_their_median(clock):
    seconds = [1.0, 1.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 60.0]  # the first call, two to warm up, then 2 3 4 5 6 60
    timing = measure.time_calls([clock.call(*seconds)], CPU, budget=6)
    assert timing == measure.Timing(4.5, 6, pytest.approx((5.75 - 3.25) / 4.5))


def test_few_calls_where_one_takes_longer_than_the_budget(clock):
    assert measure.time_calls([clock.call(60.0)], CPU, budget=1) == measure.Timing(60.0, measure.FEWEST, 0.0)
    assert len(clock.made) == 1 + 2 + measure.FEWEST


def test_no_more_calls_than_the_most(clock):
    assert measure.time_calls([clock.call(1e-9)], CPU, budget=1e9).calls == measure.MOST


def test_calls_are_taken_in_turn(clock):
    calls = [clock.call(1.0), clock.call(1.0)]
    measure.time_calls(calls, CPU, budget=4)
    assert clock.made == [calls[i % 2] for i in range(len(clock.made))]


def test_host_time_is_that_of_a_burst_over_its_calls(clock):
    timing = measure.time_host([clock.call(99.0, 0.125)], CPU, budget=10)
    assert timing.seconds == pytest.approx(0.125)
    assert timing.calls % 20 == 0


def test_host_time_does_not_hold_the_wait_for_the_device(clock, monkeypatch):
    def wait(device):
        clock.now += 1000

    monkeypatch.setattr(measure, "synchronize", wait)
    assert measure.time_host([clock.call(0.125)], CPU, budget=1).seconds == pytest.approx(0.125)


def test_copy_bandwidth_counts_both_ways(monkeypatch):
    monkeypatch.setattr(measure, "time_calls", lambda calls, device, budget: measure.Timing(0.5, 1))
    assert measure.copy_bandwidth(CPU, size=1000) == 4000


def test_copy_bandwidth_is_measured():
    assert 1e7 < measure.copy_bandwidth(CPU, size=2**20, budget=0.01) < 1e13


def test_a_cpu_needs_no_rotation():
    assert measure.rotations(1, CPU) == 1


def test_rotations_hold_twice_the_cache(monkeypatch):
    class Properties:
        L2_cache_size = 1000

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    cuda = torch.device("cuda")
    assert [measure.rotations(size, cuda) for size in (0, 1, 300, 2000, 10**9)] == [128, 128, 7, 1, 1]


def test_a_graph_needs_a_gpu():
    with pytest.raises(RuntimeError, match="needs a CUDA device, not cpu"):
        measure.time_graph([lambda: None], CPU)


@pytest.mark.gpu
def test_device_time_of_a_copy_is_near_its_bandwidth():
    device = torch.device("cuda")
    x = torch.empty(2**28, dtype=torch.uint8, device=device)
    y = torch.empty_like(x)
    bandwidth = measure.copy_bandwidth(device)
    for time in (measure.time_calls, measure.time_graph):
        assert 2 * 2**28 / time([lambda: y.copy_(x)], device).seconds == pytest.approx(bandwidth, rel=0.2)
    assert measure.time_host([lambda: y.copy_(x)], device).seconds < 1e-4
