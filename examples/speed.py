"""Measures the speed of training, and, by PyTorch's profiler, the share of time that GLA ops take."""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # otherwise the profiler reports on stderr when it begins and ends

WARM_UP = 2
"""The number of first steps, which are slow."""
PROFILED = 3
"""The number of steps after these that run under the profiler, which costs time."""
OP = "chunk_gla"
"""The substring in all names of the op and its gradient: as autograd functions, as torch ops and in compiled graphs."""


@dataclass(slots=True)
class Speed:
    """The cost of the steps so far: seconds of each without the profiler, and GLA's share of each under it."""

    device: torch.device
    seconds: list[float] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)

    def measure(self, step: Callable[[], float]) -> float:
        """Takes a step, and returns its result."""
        if len(self.seconds) == WARM_UP and len(self.shares) < PROFILED:
            result, share = profiled(step, self.device)
            self.shares.append(share)
            return result
        start = time.perf_counter()
        result = step()
        self.seconds.append(time.perf_counter() - start)
        return result

    def per_second(self, tokens: int) -> float:
        """Returns the number of tokens per second, for steps of `tokens` tokens."""
        return tokens / statistics.mean(self.seconds[WARM_UP:] or self.seconds)


def profiled(step: Callable[[], float], device: torch.device) -> tuple[float, float]:
    """Takes a step; returns its result, and the share of GLA ops in its time.

    On a CPU this is a share of the step's time, on a GPU of the time of all kernels. It is NaN if the profiler sees no
    kernels, for example because the system does not permit it.
    """
    on_gpu = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu) as profiler:
        start = time.perf_counter()
        result = step()
        seconds = time.perf_counter() - start
    events = [event for event in profiler.events() or () if event.device_type.name == "CPU"]
    if on_gpu:
        whole = sum(event.self_device_time_total for event in events)
        return result, sum(event.device_time_total for event in _outermost(events)) / whole if whole else math.nan
    return result, sum(event.cpu_time_total for event in _outermost(events)) / 1e6 / seconds


def _outermost(events: list[Any]) -> Iterator[Any]:
    """Yields the events of GLA ops that are not inside another such event."""
    for event in events:
        around = event.cpu_parent
        while around is not None and OP not in around.name:
            around = around.cpu_parent
        if OP in event.name and around is None:
            yield event
