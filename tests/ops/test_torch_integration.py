"""The torch.library ops: opcheck, torch.compile static and dynamic, forward and backward, fake tensors."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import gla_core as gla
from gla_core.dispatch.backend import OP_PARAMETERS, Backend
from gla_core.dispatch.registry import get
from gla_core.ops import ABSTRACT_OPS, PUBLIC_OPS
from gla_core.workloads.inputs import arguments, gla_inputs, token_of
from gla_core.workloads.named import select


def token(x):
    return (token_of(y, 0) for y in (x.q, x.k, x.v, x.g))


def opcheck_cases():
    x = gla_inputs(T=9, G=2, K=4, V=3, initial_state=True)
    packed = gla_inputs(lengths=(3, 0, 5), K=4, V=3, gate_dtype=torch.float32, dtype=torch.bfloat16)
    grad = [y.clone().requires_grad_() for y in (x.q, x.k, x.v, x.g, x.initial_state)]
    do, dstate = torch.randn(2, 9, 4, 3), torch.randn(2, 2, 4, 3)
    ops = torch.ops.gla
    chunk = (grad[0], grad[1], grad[2], grad[3], None, grad[4])
    attention = [torch.randn(2, 6, 2, 4, requires_grad=True) for _ in range(3)]
    yield "fwd", ops.chunk_gla_fwd, (*chunk, True, None, None)
    yield "fwd, no state", ops.chunk_gla_fwd, (*chunk[:3], None, 0.5, None, False, None, None)
    yield "fwd, checkpoints", ops.chunk_gla_fwd, (*chunk, True, None, 64)
    yield (
        "fwd, packed",
        ops.chunk_gla_fwd,
        (packed.q, packed.k, packed.v, packed.g, None, None, True, packed.cu_seqlens, 64),
    )
    yield "bwd", ops.chunk_gla_bwd, (x.q, x.k, x.v, x.g, None, x.initial_state, None, None, None, do, dstate)
    yield "bwd, no gate", ops.chunk_gla_bwd, (x.q, x.k, x.v, None, None, None, None, None, None, do, None)
    checkpoints = torch.randn(2, 1, 2, 4, 3)
    yield "bwd, checkpoints", ops.chunk_gla_bwd, (x.q, x.k, x.v, x.g, None, None, None, checkpoints, 64, do, dstate)
    yield "step", ops.recurrent_gla_step, (*token(x), x.initial_state, None, None)
    yield "step_", ops.recurrent_gla_step_, (*token(x), x.initial_state, None, torch.tensor([1, -1]))
    yield "step, bonus", ops.recurrent_gla_step, (*token(x), x.initial_state, None, None, None, torch.randn(2, 4))
    yield "softmax", ops.online_softmax, (torch.randn(3, 5, requires_grad=True), 0)
    yield "attention", ops.softmax_attention, (*attention, None, True)
    y = [z.detach() for z in attention]
    o, lse = gla.softmax_attention(*y, causal=True)
    yield (
        "attention_bwd",
        ops.softmax_attention_bwd,
        (*y, o, lse, None, True, torch.randn_like(o), torch.randn_like(lse)),
    )


@pytest.mark.parametrize(("op", "args"), [pytest.param(op, args, id=name) for name, op, args in opcheck_cases()])
def test_opcheck(op, args):
    torch.library.opcheck(op.default, args)


def test_every_abstract_op_is_one_torch_op_with_the_parameters_of_the_contract():
    assert list(ABSTRACT_OPS) == list(OP_PARAMETERS)
    for name, parameters in OP_PARAMETERS.items():
        schema = [a.name for a in getattr(torch.ops.gla, name).default._schema.arguments]
        others = ("max_seqlen", "needs_grad", "backend")
        assert [p for p in schema if p not in others] == [p for p in parameters if p not in ("inplace", "out")]


def compiled(function, dynamic, backend="aot_eager"):
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, dynamic=dynamic, backend=backend)


def chunk(q, k, v, g, initial_state):
    o, state = gla.chunk_gla(q * 1.0, k, v, g, initial_state=initial_state, output_final_state=True)
    return o * 2.0, state


def attention(q, k, v):
    return gla.merge_attention(*gla.softmax_attention(q, k, v, causal=True), *gla.softmax_attention(q, k, v))


def compile_cases():
    x = gla_inputs(T=70, G=2, initial_state=True, dtype=torch.float64)
    yield "chunk_gla", chunk, (x.q, x.k, x.v, x.g, x.initial_state)
    for form in ("constant", "head"):
        y = gla_inputs(T=70, R=2, initial_state=True, dtype=torch.float64, gate_form=form)
        yield f"chunk_gla {form}", chunk, (y.q, y.k, y.v, y.g, y.initial_state)
    yield "linear_attention", lambda q, k, v: gla.linear_attention(q, k, v)[0], (x.q, x.k, x.v)
    yield "softmax_attention", attention, (x.q, x.k, x.v)
    yield "online_softmax", lambda y: gla.online_softmax(y, 1), (x.q,)
    packed = gla_inputs(lengths=(30, 0, 41), dtype=torch.float64)

    def chunk_packed(q, k, v, g):
        return gla.chunk_gla(q, k, v, g, cu_seqlens=packed.cu_seqlens)[0]

    yield "chunk_gla packed", chunk_packed, (packed.q, packed.k, packed.v, packed.g)


def compile_parameters():
    """Yields every case with dynamic shapes, and with static ones; of the latter only the first is no thorough test."""
    for number, (name, function, args) in enumerate(compile_cases()):
        yield pytest.param(function, args, True, id=f"{name}-dynamic")
        marks = pytest.mark.thorough if number else ()
        yield pytest.param(function, args, False, id=f"{name}-static", marks=marks)


@pytest.mark.parametrize(("function", "args", "dynamic"), compile_parameters())
def test_compiled_equals_eager(function, args, dynamic):
    results = []
    for f in (function, compiled(function, dynamic)):
        leaves = [y.clone().requires_grad_() for y in args]
        outs = f(*leaves)
        outs = outs if isinstance(outs, tuple) else (outs,)
        grads = torch.autograd.grad([o.square().sum() for o in outs], leaves)
        results.append([*outs, *grads])
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_compiled_step_equals_eager(dynamic, inplace):
    x = gla_inputs(T=1, initial_state=True, dtype=torch.float64)

    def step(q, k, v, g, state):
        return gla.recurrent_gla_step(q, k, v, g, state, inplace=inplace)

    states = [x.initial_state.clone() for _ in range(2)]
    expected = step(*token(x), states[0])
    o, state = compiled(step, dynamic)(*token(x), states[1])
    torch.testing.assert_close(o, expected[0])
    torch.testing.assert_close(state, expected[1])
    torch.testing.assert_close(states[1], states[0])


@pytest.mark.slow
def test_inductor_runs_forward_and_backward(fresh_graphs):
    """The op stands between products of matrices: what else Inductor computes there takes a C++ compiler seconds."""
    x = gla_inputs(T=70, initial_state=True)
    into, out_of = torch.randn(x.q.shape[-1], x.q.shape[-1]), torch.randn(x.v.shape[-1], 5)

    def projected(q, k, v, g, initial_state):
        o, state = gla.chunk_gla(q @ into, k, v, g, initial_state=initial_state, output_final_state=True)
        return o @ out_of, state

    leaves = [[y.clone().requires_grad_() for y in (x.q, x.k, x.v, x.g, x.initial_state)] for _ in range(2)]
    for function, inputs in zip((projected, compiled(projected, None, "inductor")), leaves, strict=True):
        o, state = function(*inputs)
        (o.sum() + state.sum()).backward()
    for eager, fast in zip(*leaves, strict=True):
        torch.testing.assert_close(fast.grad, eager.grad, rtol=1e-4, atol=1e-5)


def test_no_recompilation_for_a_backend_or_a_length():
    compilations = []

    def count(graph, example_inputs):
        compilations.append(graph)
        return graph.forward

    function = compiled(lambda q, k, v: gla.chunk_gla(q, k, v)[0], True, count)
    for T in (40, 50, 100, 129):
        x = gla_inputs(T=T)
        for request in ("auto", "reference"):
            with gla.use_backend(request):
                function(x.q, x.k, x.v)
    assert len(compilations) == 1
    assert not [n for n in compilations[0].graph.nodes if n.op == "call_function" and "reference" in str(n.args)]


def test_no_recompilation_for_each_bound_of_lengths():
    compilations = []

    def count(graph, example_inputs):
        compilations.append(graph)
        return graph.forward

    function = compiled(
        lambda x, n: gla.chunk_gla(x.q, x.k, x.v, cu_seqlens=x.cu_seqlens, max_seqlen=n)[0], None, count
    )
    x = gla_inputs(lengths=(30, 40))
    for longest in (40, 41, 50, 64, 70):
        function(x, longest)
    assert len(compilations) == 2  # for the first as a constant, then for any


def test_a_compiled_graph_takes_the_backend_in_force_when_it_runs():
    calls = []
    reference = get("reference").ops["online_softmax"]

    def online_softmax(x, dim):
        calls.append(x.shape)
        return reference(x, dim)

    function = compiled(lambda x: gla.online_softmax(x), False)
    x = torch.randn(3, 5)
    expected = reference(x, -1)
    torch.testing.assert_close(function(x), expected)
    assert not calls
    with gla.register(Backend("spy", "0", {"online_softmax": online_softmax})), gla.use_backend("spy"):
        assert torch.equal(function(x), expected)
    assert calls == [(3, 5)]


def test_a_compiled_call_may_name_its_backend():
    function = compiled(lambda x: gla.online_softmax(x, backend="reference"), False)
    x = torch.randn(3, 5)
    assert torch.equal(function(x), gla.online_softmax(x, backend="reference"))


def test_fake_tensors_give_shapes_without_running():
    with FakeTensorMode():
        q = torch.empty(2, 10**6, 4, 8, dtype=torch.bfloat16)
        k = torch.empty(2, 10**6, 2, 8, dtype=torch.bfloat16)
        o, state = gla.chunk_gla(q, k, k, output_final_state=True)
    assert (o.shape, o.dtype) == ((2, 10**6, 4, 8), torch.bfloat16)
    assert (state.shape, state.dtype) == ((2, 2, 8, 8), torch.float32)


def test_bad_shapes_are_refused_while_compiling():
    function = compiled(lambda q, k: gla.chunk_gla(q, k, k)[0], False)
    with pytest.raises(Exception, match=r"k has shape \[1, 3, 1, 4\]; expected \[B, T, H, K\]"):
        function(torch.ones(1, 2, 1, 4), torch.ones(1, 3, 1, 4))


@pytest.mark.gpu
def test_packed_sequences_wait_for_nothing():
    x = gla_inputs(lengths=(30, 0, 100), initial_state=True, device="cuda")
    leaves = [y.requires_grad_() for y in (x.q, x.k, x.v, x.g)]
    o, _ = gla.chunk_gla(*leaves, initial_state=x.initial_state, cu_seqlens=x.cu_seqlens, backend="reference")
    do = torch.ones_like(o)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        o, _ = gla.chunk_gla(*leaves, initial_state=x.initial_state, cu_seqlens=x.cu_seqlens, backend="reference")
        o.backward(do)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_a_captured_step_replays():
    x = gla_inputs(B=3, T=1, initial_state=True, device="cuda")
    rows = torch.tensor([2, -1, 0], device="cuda")
    static = [y.clone() for y in (*token(x), x.initial_state)]

    def step(q, k, v, g, state):
        return gla.recurrent_gla_step(q, k, v, g, state, slots=rows, inplace=True, backend="reference")[0]

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step(*static)
    torch.cuda.synchronize()
    static[4].copy_(x.initial_state)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = step(*static)
    graph.replay()
    expected_state = x.initial_state.clone()
    expected = step(*token(x), expected_state)
    torch.testing.assert_close(o, expected)
    torch.testing.assert_close(static[4], expected_state)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("op", PUBLIC_OPS)
def test_a_trace_computes_other_sizes(op):
    """Each op is traced with one workload, and run with the others that have the same arguments and other sizes."""
    function, alike = getattr(gla, op), {}
    for workload in select(op, ["ci"]):
        x = arguments(workload)
        kinds = {name: y.ndim if isinstance(y, torch.Tensor) else y for name, y in x.items()}
        alike.setdefault(str(kinds), []).append(x)
    first, *others = max(alike.values(), key=len)
    names = [name for name, y in first.items() if isinstance(y, torch.Tensor)]

    def call(*tensors):
        copies = {name: y.clone() for name, y in zip(names, tensors, strict=True)}
        results = function(**{**first, **copies})
        results = results if isinstance(results, tuple) else (results,)
        return *(y for y in results if y is not None), *copies.values()  # some are written

    traced = torch.jit.trace(call, tuple(first[name] for name in names))
    assert others
    for x in others:
        tensors = [x[name] for name in names]
        torch.testing.assert_close(traced(*tensors), call(*tensors), equal_nan=True)
