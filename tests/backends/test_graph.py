"""CUDA graphs of launches: the same results, on any stream and by any thread, however many are made and dropped."""

import itertools
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import gla_core as gla
from gla_core.workloads.inputs import gla_inputs

pytest.importorskip("triton")

from gla_triton_runtime import replay
from gla_triton_runtime.graph import Graph

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("lengths", [None, (300, 5, 719)])
def test_a_graph_gives_what_launches_give(lengths, monkeypatch):
    """The results are equal on any stream, forward and backward, and if the calls are captured into another graph."""
    sizes = {"B": 2, "T": 1024} if lengths is None else {"lengths": lengths}
    x = gla_inputs(**sizes, H=2, K=128, V=128, dtype=torch.bfloat16, device="cuda")
    leaves = [y.requires_grad_() for y in (x.q, x.k, x.v, x.g)]

    def pair():
        o, _ = gla.chunk_gla(*leaves, cu_seqlens=x.cu_seqlens, backend="parallel_scan")
        return o, *torch.autograd.grad(o, leaves, torch.ones_like(o))

    monkeypatch.setattr(replay, "_graphed", [])
    expected = [y.detach().clone() for y in pair()]
    aside = torch.cuda.Stream()
    for stream in [torch.cuda.current_stream()] * 8 + [aside] * 8:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            actual = pair()
        torch.cuda.current_stream().wait_stream(stream)
        assert all(map(torch.equal, actual, expected))
        del actual
    assert replay._graphed
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        actual = pair()
    graph.replay()
    assert all(map(torch.equal, actual, expected))


def test_graphs_are_dropped_and_made_anew(monkeypatch):
    """Many graphs are made, with garbage collection and other captures in between."""
    made = itertools.count()
    monkeypatch.setattr(replay, "Graph", lambda launch: (next(made), Graph(launch))[1])
    monkeypatch.setattr(replay, "_MOST_GRAPHS", 5)
    monkeypatch.setattr(replay, "_REPLAYS_AGAIN", 2)
    monkeypatch.setattr(replay, "_graphed", [])
    sizes = {"B": 1, "T": 1024, "H": 1, "K": 64, "V": 64, "dtype": torch.bfloat16, "device": "cuda"}
    inputs = [gla_inputs(**sizes) for _ in range(40)]

    def call(x):
        return gla.chunk_gla(x.q, x.k, x.v, x.g, backend="parallel_scan")[0]

    expected = [call(x).clone() for x in inputs]
    for turn in range(60):
        for x, o in zip(inputs, expected, strict=True):
            garbage = [torch.cuda.Event(), x]
            garbage.append(garbage)
            assert torch.equal(call(x), o)
        if turn % 10 == 0:
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                call(inputs[0])
            torch.cuda.empty_cache()
    assert next(made) > 200


def test_graphs_are_made_and_dropped_beside_a_capture():
    """The capturing thread and another one make and drop graphs, in the strictest capture mode."""

    def make_and_drop():
        Graph(lambda stream: None)

    x, outer, other = torch.zeros(1, device="cuda"), torch.cuda.CUDAGraph(), ThreadPoolExecutor(1)
    other.submit(torch.zeros, 1, device="cuda").result()  # only threads that have used the device make graphs
    with torch.cuda.graph(outer, capture_error_mode="global"):
        x += 1
        make_and_drop()
        other.submit(make_and_drop).result()
        x += 1
    outer.replay()
    assert x.item() == 2


def test_a_thread_may_begin_with_a_graph():
    x = torch.zeros(1, device="cuda")

    def add_one(stream):
        with torch.cuda.stream(torch.cuda.ExternalStream(stream)):
            x.add_(1)

    graph = Graph(add_one)
    ThreadPoolExecutor(1).submit(graph.start, torch.cuda.current_stream().cuda_stream).result()
    assert x.item() == 1
