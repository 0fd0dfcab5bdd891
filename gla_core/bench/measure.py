"""Measures the median time of calls after a warm-up: by events on a CUDA device, by the wall clock elsewhere.

A measurement takes a list of callables that do the same on different tensors, and calls them in a cycle. `rotations`
says how many are needed so that no call finds its inputs in the device's cache.
"""

from __future__ import annotations

import itertools
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

clock = time.perf_counter

Call = Callable[[], object]

FEWEST, MOST = 3, 2000  # minimum and maximum number of timed calls
_BURST = 20  # calls enqueued at a time for host time, few enough for the device's queue of launches
_MOST_ROTATIONS = 128
_BUSY = 0.5  # load average per core above which a machine counts as busy


@dataclass(frozen=True, slots=True)
class Timing:
    """The median seconds of one call, the number of timed calls, and the spread of their times.

    Attributes:
        spread: distance between the first and the third quartile, as a share of the median; None for a single time.
    """

    seconds: float
    calls: int
    spread: float | None = None


def time_calls(calls: Sequence[Call], device: torch.device, budget: float = 0.5) -> Timing:
    """Measures the seconds of one call.

    On a CUDA device this is the time between two events around it in the stream, so the time is the
    host's if a call takes the host longer than the device.

    Args:
        calls: callables that are called in a cycle; see the module's docstring.
        budget: seconds to spend after the first call, which may compile.
    """
    cycle = itertools.cycle(calls)
    next(cycle)()
    number = _affordable(_warm_up(cycle, device, budget / 5), budget)
    sample = _device_samples if device.type == "cuda" else _wall_samples
    return _timing(sample(cycle, device, number), number)


def time_graph(calls: Sequence[Call], device: torch.device, budget: float = 0.5) -> Timing:
    """Measures the seconds of one call when all of `calls` are captured into one CUDA graph that is replayed.

    Raises:
        RuntimeError: the calls cannot be captured.
    """
    if device.type != "cuda":
        raise RuntimeError(f"a CUDA graph needs a CUDA device, not {device}")
    with torch.cuda.device(device):
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):  # lets the first calls compile and allocate
            for call in itertools.islice(itertools.cycle(calls), max(FEWEST, len(calls))):
                call()
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call()
        replay = time_calls([graph.replay], device, budget)
    return Timing(replay.seconds / len(calls), replay.calls * len(calls), replay.spread)


def time_host(calls: Sequence[Call], device: torch.device, budget: float = 0.5) -> Timing:
    """Measures the seconds that the host needs for one call, without waiting for the device.

    Use it for shapes on which the device keeps up.
    """
    cycle = itertools.cycle(calls)
    next(cycle)()
    bursts = _affordable(_BURST * _warm_up(cycle, device, budget / 5), budget)
    samples = []
    for _ in range(bursts):
        start = clock()
        for _ in range(_BURST):
            next(cycle)()
        samples.append((clock() - start) / _BURST)
        synchronize(device)
    return _timing(samples, bursts * _BURST)


def copy_bandwidth(device: torch.device, size: int | None = None, budget: float = 0.5) -> float:
    """Measures the bytes per second of a copy on the device, read and written together.

    Args:
        size: bytes to copy; by default 1 GiB on a CUDA device, 128 MiB elsewhere.
    """
    size = size or (2**30 if device.type == "cuda" else 2**27)
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / time_calls([lambda: target.copy_(source)], device, budget).seconds


def rotations(size: int, device: torch.device) -> int:
    """Returns the number of sets of `size` bytes that fill twice the device's cache, at most 128; 1 on a CPU."""
    if device.type != "cuda":
        return 1
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    return min(_MOST_ROTATIONS, math.ceil(2 * cache / max(size, 1)))


def how_busy() -> str | None:
    """Returns a sentence if this machine was busy in the last minute, by its load average; None otherwise."""
    cores = os.cpu_count()
    if cores is None or not hasattr(os, "getloadavg"):
        return None
    load = os.getloadavg()[0]
    if load <= _BUSY * cores:
        return None
    return (
        f"this machine was busy in the last minute: load average {load:.1f} on {cores} cores; "
        "if other programs still run, times are too long"
    )


def synchronize(device: torch.device) -> None:
    """Waits for a CUDA device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _timing(samples: Sequence[float], calls: int) -> Timing:
    median = statistics.median(samples)
    first, _, third = statistics.quantiles(samples, n=4, method="inclusive")
    return Timing(median, calls, (third - first) / median if median else None)


def _affordable(estimate: float, budget: float) -> int:
    return max(FEWEST, min(MOST, round(budget / max(estimate, 1e-9))))


def _warm_up(cycle: Iterator[Call], device: torch.device, budget: float) -> float:
    """Calls for `budget` seconds, at least twice; returns an estimate of the seconds of a call."""
    synchronize(device)
    start, number = clock(), 0
    while number < 2 or (clock() - start < budget and number < MOST):
        next(cycle)()
        number += 1
        if number % _BURST == 0:  # otherwise the host would run ahead of its budget
            synchronize(device)
    synchronize(device)
    return (clock() - start) / number


def _wall_samples(cycle: Iterator[Call], device: torch.device, number: int) -> list[float]:
    samples = []
    for call in itertools.islice(cycle, number):
        start = clock()
        call()
        samples.append(clock() - start)
    return samples


def _device_samples(cycle: Iterator[Call], device: torch.device, number: int) -> list[float]:
    with torch.cuda.device(device):
        pairs = [tuple(torch.cuda.Event(enable_timing=True) for _ in range(2)) for _ in range(number)]
        for (start, end), call in zip(pairs, cycle, strict=False):
            start.record()
            call()
            end.record()
        torch.cuda.synchronize()
    return [start.elapsed_time(end) / 1e3 for start, end in pairs]
