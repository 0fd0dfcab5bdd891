"""On a CUDA device, no op makes the host wait, and CUDA graphs capture every op whose backend declares it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gla_core.conformance.calls import torch_op
from gla_core.conformance.cases import EVERY_OP, WRITING, over
from gla_core.conformance.tolerances import GRADIENT


def tensors(result) -> dict[str, Tensor]:
    results = result if isinstance(result, tuple | list) else (result,)
    return {f"result {i}": x for i, x in enumerate(results)}


def without_waiting(function: Callable) -> None:
    function()  # a first call may compile, load and measure
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        function()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def check_replay(function, args, budget, measure):
    """Captures a call on one set of inputs, and replays it on other values in the same memory."""
    floats = [x for x in args if isinstance(x, Tensor) and x.is_floating_point()]
    values = [x.clone() for x in floats]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            function(*args)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = function(*args)
    for x, y in zip(floats, values, strict=True):
        x.copy_(y / 2)
    graph.replay()
    replayed = {name: x.clone() for name, x in tensors(captured).items()}
    states = [x.clone() for x in floats]
    for x, y in zip(floats, values, strict=True):
        x.copy_(y / 2)
    measure(replayed, tensors(function(*args)), budget)
    measure(named(states), named(floats), budget)  # results that are written in place


def named(arguments: list[Tensor]) -> dict[str, Tensor]:
    return {f"argument {i}": x for i, x in enumerate(arguments)}


@over(EVERY_OP, cuda=True)
def test_no_wait(backend, case):
    function, args = torch_op(case, backend.name)
    without_waiting(lambda: function(*args))


@over(WRITING, cuda=True)
def test_no_wait_inplace(backend, case):
    function, args = torch_op(case, backend.name, inplace=True)
    without_waiting(lambda: function(*args))


@over(EVERY_OP, cuda=True, requires="cuda_graphs")
def test_graph(backend, case, measure):
    check_replay(*torch_op(case, backend.name), 2 * GRADIENT[case.dtype], measure)


@over(WRITING, cuda=True, requires="cuda_graphs")
def test_graph_inplace(backend, case, measure):
    check_replay(*torch_op(case, backend.name, inplace=True), 2 * GRADIENT[case.dtype], measure)
