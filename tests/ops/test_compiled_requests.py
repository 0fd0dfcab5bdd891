"""Requests and torch.compile: the settings that a graph keeps, and those that apply where it runs."""

import functools

import pytest
import torch

import gla_core as gla
from gla_core.dispatch.backend import Backend
from gla_core.dispatch.registry import get
from gla_core.workloads.inputs import gla_inputs

OPS = ("online_softmax", "chunk_gla_fwd", "chunk_gla_bwd")


@pytest.fixture
def ran(only_reference):
    """Registers backends a, b, c and d, and returns a list of their runs from then on, such as 'a.online_softmax'."""
    calls = []

    def recording(name, op):
        reference = get("reference").ops[op]

        @functools.wraps(reference)
        def run(*args):
            calls.append(f"{name}.{op}")
            return reference(*args)

        return run

    handles = [gla.register(Backend(name, "1", {op: recording(name, op) for op in OPS})) for name in "abcd"]
    yield calls
    for handle in handles:
        handle.unregister()


def compiled(function, fullgraph=True, **options):
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=fullgraph, **options)


def nested(x):
    with gla.use_backend("b"):
        y = gla.online_softmax(x)
        with gla.use_backend("chunk_gla_fwd=a;online_softmax=c"):
            y = gla.online_softmax(y)
            y = gla.online_softmax(y, backend="d")
            y = gla.online_softmax(y, backend="chunk_gla_fwd=d")
        y = gla.online_softmax(y)
    return gla.online_softmax(y)


@pytest.mark.parametrize(("backend", "dynamic"), [("eager", False), ("aot_eager", True)])
def test_blocks_in_a_compiled_function_nest_as_everywhere(ran, backend, dynamic):
    function, x = compiled(nested, backend=backend, dynamic=dynamic), torch.randn(3, 5)
    # Outside the blocks, the request in force where the graph runs applies.
    for request, last in [("a", ["a.online_softmax"]), ("reference", [])]:
        with gla.use_backend(request):
            torch.testing.assert_close(function(x), nested(x))
        each_call = [f"{name}.online_softmax" for name in "bcdcb"] + last
        assert ran == 2 * each_call
        ran.clear()


def test_a_decorated_function_within_a_compiled_one(ran):
    @gla.use_backend("b")
    def softmax(x):
        return gla.online_softmax(x)

    compiled(lambda x: gla.online_softmax(softmax(x), backend="c"), backend="eager")(torch.randn(3, 5))
    assert ran == ["b.online_softmax", "c.online_softmax"]


def test_a_block_ends_with_an_exception_a_graph_break_and_a_recompilation(ran):
    def function(x, fail):
        try:
            with gla.use_backend("b"):
                x = gla.online_softmax(x)
                if fail:
                    raise KeyError
                torch._dynamo.graph_break()
                x = gla.online_softmax(x)
        except KeyError:
            pass
        return gla.online_softmax(x, backend="chunk_gla_fwd=a")

    function = compiled(function, fullgraph=False, backend="eager", dynamic=False)
    for fail, columns in [(True, 5), (False, 5), (True, 6), (False, 6)]:
        with gla.use_backend("c"):
            function(torch.randn(3, columns), fail)
        assert ran == ["b.online_softmax"] * (1 if fail else 2) + ["c.online_softmax"]
        ran.clear()


def test_an_exception_that_leaves_the_compiled_function_ends_its_blocks(ran):
    def function(x):
        with gla.use_backend("b"):
            x = gla.online_softmax(x)
            raise KeyError

    with pytest.raises(KeyError):
        compiled(function, fullgraph=False, backend="eager")(torch.randn(3, 5))
    compiled(gla.online_softmax, backend="eager")(torch.randn(3, 5), backend="chunk_gla_fwd=a")
    assert ran == ["b.online_softmax"]


def test_a_misspelled_block_in_a_compiled_function_is_an_error_when_the_op_runs(ran):
    def function(x):
        with gla.use_backend("refrence"):
            return gla.online_softmax(x)

    with pytest.raises(gla.UnknownBackendError, match=r"use_backend: unknown backend 'refrence'; did you mean"):
        compiled(function, backend="eager")(torch.randn(3, 5))


def test_a_compiled_backward_sees_what_the_graph_holds_and_what_its_thread_sees(ran, device, monkeypatch):
    monkeypatch.setenv("GLA_BACKEND", "a")
    gla.reload_environment()

    def chunk(*inputs, backend=None):
        return gla.chunk_gla(*inputs, backend=backend)[0]

    def forward_and_backward(function):
        x = gla_inputs(T=5, device=device)
        inputs = [y.clone().requires_grad_() for y in (x.q, x.k, x.v, x.g)]
        ran.clear()
        with gla.use_backend("c"):
            compiled(function, backend="aot_eager")(*inputs).sum().backward()
        return [call.split(".")[0] for call in ran]

    # On a GPU the backward runs on a thread of autograd, where a block around the call has no effect.
    assert forward_and_backward(chunk) == ["c", "c" if device == "cpu" else "a"]
    assert forward_and_backward(gla.use_backend("b")(chunk)) == ["b", "b"]
    assert forward_and_backward(functools.partial(chunk, backend="d")) == ["d", "d"]
