"""On a CUDA device: no wait of the host, and capture into a CUDA graph where it is declared."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gla_core.conformance.calls import step, torch_op
from gla_core.conformance.cases import over
from gla_core.conformance.tolerances import GRADIENT


def tensors(result) -> dict[str, Tensor]:
    found = result if isinstance(result, tuple | list) else (result,)
    return {f"result {i}": x for i, x in enumerate(found)}


def without_waiting(function: Callable) -> None:
    function()  # what a first call may do: compile, load, measure
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        function()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def check_no_wait(case, backend):
    function, args = torch_op(case, backend.name)
    without_waiting(lambda: function(*args))


def check_capture(case, backend, measure):
    """Capture on one set of inputs, replay on other values in the same memory."""
    function, args = torch_op(case, backend.name)
    check_replay(lambda: function(*args), args, measure, case)


def check_replay(function, args, measure, case):
    floats = [x for x in args if isinstance(x, Tensor) and x.is_floating_point()]
    given = [x.clone() for x in floats]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            function()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = function()
    for x, y in zip(floats, given, strict=True):
        x.copy_(y / 2)
    graph.replay()
    replayed = {name: x.clone() for name, x in tensors(captured).items()}
    states = [x.clone() for x in floats]
    for x, y in zip(floats, given, strict=True):
        x.copy_(y / 2)
    measure(replayed, tensors(function()), 2 * GRADIENT[case.dtype])
    measure(named(states), named(floats), 2 * GRADIENT[case.dtype])  # what is written in place


def named(found: list[Tensor]) -> dict[str, Tensor]:
    return {f"argument {i}": x for i, x in enumerate(found)}


def inplace_step(case, backend):
    x = step(case)
    args = (*(x[name] for name in ("q", "k", "v", "g", "state")), None, x["state_indices"], backend.name)
    return lambda: torch.ops.gla.recurrent_gla_step_.default(*args), args


@over("chunk_gla_fwd", cuda=True)
def test_no_wait_chunk_gla_fwd(backend, case):
    check_no_wait(case, backend)


@over("chunk_gla_bwd", cuda=True)
def test_no_wait_chunk_gla_bwd(backend, case):
    check_no_wait(case, backend)


@over("chunk_gla_summary", cuda=True)
def test_no_wait_chunk_gla_summary(backend, case):
    check_no_wait(case, backend)


@over("recurrent_gla_step", cuda=True)
def test_no_wait_recurrent_gla_step(backend, case):
    check_no_wait(case, backend)
    without_waiting(inplace_step(case, backend)[0])


@over("online_softmax", cuda=True)
def test_no_wait_online_softmax(backend, case):
    check_no_wait(case, backend)


@over("softmax_attention", cuda=True)
def test_no_wait_softmax_attention(backend, case):
    check_no_wait(case, backend)


@over("chunk_gla_fwd", "short", "last_chunk_partial", "grouped", "ungated", "packed", graphs=True)
def test_graph_chunk_gla_fwd(backend, case, measure):
    check_capture(case, backend, measure)


@over("chunk_gla_bwd", "short", "last_chunk_partial", "grouped", "ungated", "packed", graphs=True)
def test_graph_chunk_gla_bwd(backend, case, measure):
    check_capture(case, backend, measure)


@over("chunk_gla_summary", "short", "last_chunk_partial", "ungated", "packed", graphs=True)
def test_graph_chunk_gla_summary(backend, case, measure):
    check_capture(case, backend, measure)


@over("recurrent_gla_step", "small", "grouped", "ungated", "pool", graphs=True)
def test_graph_recurrent_gla_step(backend, case, measure):
    check_capture(case, backend, measure)


@over("recurrent_gla_step", "small", "grouped", "ungated", "pool", graphs=True)
def test_graph_recurrent_gla_step_inplace(backend, case, measure):
    function, args = inplace_step(case, backend)
    check_replay(function, args, measure, case)


@over("online_softmax", "small", "odd_columns", graphs=True)
def test_graph_online_softmax(backend, case, measure):
    check_capture(case, backend, measure)


@over("softmax_attention", "small", "not_causal", "grouped", graphs=True)
def test_graph_softmax_attention(backend, case, measure):
    check_capture(case, backend, measure)
