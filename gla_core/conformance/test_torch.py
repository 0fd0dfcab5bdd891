"""Under PyTorch: opcheck, and torch.compile in one graph, static and dynamic, forward and backward."""

from __future__ import annotations

import pytest
import torch

import gla_core as gla
from gla_core.conformance.calls import attention, chunk, run_step, softmax, step, torch_op, training_request
from gla_core.conformance.cases import over
from gla_core.conformance.tolerances import FORWARD, GRADIENT


def check_op(case, request):
    function, args = torch_op(case, request)
    function(*args)  # a refusal is seen here, as it is
    torch.library.opcheck(function, args)


def compiled(function, dynamic):
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, dynamic=dynamic, backend="aot_eager")


@over("chunk_gla_fwd", "packed", one_dtype=True)
def test_opcheck_chunk_gla_fwd(backend, case):
    check_op(case, backend.name)


@over("chunk_gla_bwd", "packed", "ungated", one_dtype=True)
def test_opcheck_chunk_gla_bwd(backend, case):
    check_op(case, backend.name)


@over("chunk_gla_summary", "packed", "ungated", one_dtype=True)
def test_opcheck_chunk_gla_summary(backend, case):
    check_op(case, backend.name)


@over("recurrent_gla_step", "pool", one_dtype=True)
def test_opcheck_recurrent_gla_step(backend, case):
    check_op(case, backend.name)


@over("recurrent_gla_step", "pool", one_dtype=True)
def test_opcheck_recurrent_gla_step_inplace(backend, case):
    x = step(case)
    run_step(step(case), backend.name)
    args = tuple(x[name] for name in ("q", "k", "v", "g", "state"))
    torch.library.opcheck(torch.ops.gla.recurrent_gla_step_.default, (*args, None, x["state_indices"], backend.name))


@over("online_softmax", "other_dimension", one_dtype=True)
def test_opcheck_online_softmax(backend, case):
    check_op(case, backend.name)


@over("softmax_attention", "grouped", one_dtype=True)
def test_opcheck_softmax_attention(backend, case):
    check_op(case, backend.name)


def compare(function, args, names, dynamic, measure, dtype, backward=False):
    """Compiled against eager, in one graph: outputs, and the gradients of the arguments where there is a backward."""
    results = []
    for f in (lambda *y: function(*y), compiled(function, dynamic)):
        leaves = [y.clone().requires_grad_(backward) for y in args]
        outs = f(*leaves)
        named = dict(zip(names, outs, strict=False))
        if backward:
            grads = torch.autograd.grad([o.square().sum() for o in outs], leaves)
            named |= {f"d{i}": d for i, d in enumerate(grads)}
        results.append(named)
    eager, fast = results
    measure(fast, eager, 2 * (GRADIENT if backward else FORWARD)[dtype])


def compiled_chunk(request, offsets):
    def function(q, k, v, g, initial_state):
        return gla.chunk_gla(q * 1.0, k, v, g, None, initial_state, True, offsets, backend=request)

    return function


@over("chunk_gla_fwd", "packed", one_dtype=True)
def test_compiled_chunk_gla(backend, case, measure):
    x = chunk(case)
    function = compiled_chunk(backend.name, x.cu_seqlens)
    compare(function, (x.q, x.k, x.v, x.g, x.initial_state), ("o", "state"), True, measure, case.dtype)


@over("chunk_gla_bwd", "packed", one_dtype=True)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_compiled_chunk_gla_with_backward(backend, case, dynamic, measure):
    x = chunk(case)
    function = compiled_chunk(training_request(backend), x.cu_seqlens)
    compare(function, (x.q, x.k, x.v, x.g, x.initial_state), ("o", "state"), dynamic, measure, case.dtype, True)


@over("chunk_gla_summary", "packed", one_dtype=True, gradients=True)
def test_compiled_chunk_gla_summary(backend, case, measure):
    x, request = chunk(case), training_request(backend, "chunk_gla_summary")

    def function(k, v, g):
        return gla.chunk_gla_summary(k * 1.0, v, g, x.cu_seqlens, backend=request)

    compare(function, (x.k, x.v, x.g), ("decay", "state"), True, measure, case.dtype, True)


@pytest.mark.parametrize("inplace", [False, True], ids=["new", "inplace"])
@over("recurrent_gla_step", "small", one_dtype=True)
def test_compiled_recurrent_gla_step(backend, case, inplace, measure):
    x = step(case)
    args = tuple(x[name] for name in ("q", "k", "v", "g", "state"))

    def function(q, k, v, g, state):
        return gla.recurrent_gla_step(q * 1.0, k, v, g, state, inplace=inplace, backend=backend.name)

    compare(function, args, ("o", "state"), True, measure, case.dtype)


@over("online_softmax", "small", one_dtype=True)
def test_compiled_online_softmax(backend, case, measure):
    x, dim = softmax(case)

    def function(x):
        return (gla.online_softmax(x * 1.0, dim, backend=backend.name),)

    compare(function, (x,), ("y",), True, measure, case.dtype, backend.can(case.op).gradients)


@over("softmax_attention", "small", one_dtype=True)
def test_compiled_softmax_attention(backend, case, measure):
    *qkv, causal = attention(case)

    def function(q, k, v):
        return gla.softmax_attention(q * 1.0, k, v, None, causal, backend=backend.name)

    compare(function, qkv, ("o", "lse"), True, measure, case.dtype, backend.can(case.op).gradients)
