"""The fresh process that `gla_core.bench.first_call` starts: it times its first call.

Run as `python -m gla_core.bench.first_call_process OP WORKLOAD BACKEND DEVICE`; prints JSON.
"""

from __future__ import annotations

import json
import sys

import torch

from gla_core.bench import suite
from gla_core.bench.baselines import READ_BY_A_LOSS
from gla_core.bench.measure import clock, synchronize
from gla_core.workloads.named import Workload, select


def first_calls(workload: Workload, backend: str, device: torch.device, backward: bool = True) -> dict[str, float]:
    """Measures a call (first_call) and, if `backward` is set and the backend has one, its backward (first_backward).

    The times do not include what this process has imported, compiled and tuned before.
    """
    differentiable = backward and suite.has_backward(workload.op, backend)
    arguments = suite.make_arguments(workload, device, gradients=differentiable)
    function = suite.bound(workload.op, backend, arguments)
    synchronize(device)
    start = clock()
    outputs = function()
    synchronize(device)
    seconds = {"first_call": clock() - start}
    if differentiable:
        incoming = [torch.ones_like(x) for x in outputs[: READ_BY_A_LOSS.get(workload.op)]]
        synchronize(device)
        start = clock()
        suite.gradients_of(outputs, suite.leaves(arguments), incoming, backend)
        synchronize(device)
        seconds["first_backward"] = clock() - start
    return seconds


if __name__ == "__main__":
    op, name, backend, device = sys.argv[1:]
    (workload,) = [w for w in select(op) if w.name == name]
    print(json.dumps(first_calls(workload, backend, torch.device(device))))
