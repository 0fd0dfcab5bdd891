"""How fast training is, and how much of it goes into GLA ops, as PyTorch's profiler sees it."""

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

os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # or the profiler writes on stderr that it begins and ends

WARM_UP = 2
"""Steps that are slow because they are the first."""
PROFILED = 3
"""Steps after these that the profiler watches, which costs time."""
OP = "chunk_gla"
"""Part of the names of the op and its gradient: as autograd functions, as torch ops and in compiled graphs."""


@dataclass(slots=True)
class Speed:
    """What the steps so far have cost: seconds of each that was not profiled, shares of GLA ops in those that were."""

    device: torch.device
    seconds: list[float] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)

    def measure(self, step: Callable[[], float]) -> float:
        """Take a step. Returns its result."""
        if len(self.seconds) == WARM_UP and len(self.shares) < PROFILED:
            result, share = profiled(step, self.device)
            self.shares.append(share)
            return result
        start = time.perf_counter()
        result = step()
        self.seconds.append(time.perf_counter() - start)
        return result

    def per_second(self, tokens: int) -> float:
        """How many tokens go through training in a second, of steps that have so many."""
        return tokens / statistics.mean(self.seconds[WARM_UP:] or self.seconds)


def profiled(step: Callable[[], float], device: torch.device) -> tuple[float, float]:
    """Take a step. Returns its result, and the share of GLA ops in it.

    On a CPU that is the ops' part of the time of the step, on a GPU of the time of all kernels; NaN where the profiler
    sees no kernels, as where the system does not let it.
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
    """Events of GLA ops that are inside no other such event."""
    for event in events:
        around = event.cpu_parent
        while around is not None and OP not in around.name:
            around = around.cpu_parent
        if OP in event.name and around is None:
            yield event
