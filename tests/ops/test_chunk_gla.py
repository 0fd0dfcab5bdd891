"""Values and gradients of chunk_gla against the float64 oracle."""

import dataclasses
import io

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gla_core as gla
from gla_core.conformance import oracle
from gla_core.conformance.tolerances import FORWARD, GRADIENT, relative_error
from gla_core.workloads.inputs import GATES, gla_inputs
from tests.grid import grid

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
LENGTHS = [0, 1, 2, 3, 5, 31, 32, 33, 63, 64, 65, 127, 128, 129, 191, 300]
WIDTHS = [(1, 1), (1, 7), (3, 1), (17, 5), (64, 128), (100, 33), (256, 255)]
PACKS = [(), (0,), (0, 0), (7,), (64, 64), (0, 65, 0, 1, 130, 0), (3,) * 20]


def run(inputs, scale=None, function=gla.chunk_gla, **kwargs):
    """Returns outputs, final state and the gradient of every differentiable input, for a fixed random loss."""
    arguments = {f.name: getattr(inputs, f.name) for f in dataclasses.fields(inputs)}
    offsets = arguments.pop("cu_seqlens")
    leaves = {name: x.detach().clone().requires_grad_() for name, x in arguments.items() if x is not None}
    o, state = function(**{**arguments, **leaves}, cu_seqlens=offsets, scale=scale, **kwargs)

    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(x.shape, generator=generator, dtype=torch.float64) for x in (o, state)]
    weights[0] = weights[0].to(inputs.q.dtype)  # so that both sides have the same rounded loss
    weights[1] = weights[1].to(torch.float32)
    loss = sum((x * w.to(x.device, x.dtype)).sum() for x, w in zip((o, state), weights, strict=True))
    loss = loss + 0 * sum(x.sum() for x in leaves.values())  # with T = 0 the oracle uses no input
    return o, state, dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))


def check(inputs, scale=None, **kwargs):
    dtype = inputs.q.dtype
    o, state, grads = run(inputs, scale, output_final_state=True, **kwargs)
    ref_o, ref_state, ref_grads = run(inputs, scale, function=oracle.chunk_gla)
    assert o.dtype == inputs.v.dtype
    assert o.is_contiguous()
    assert relative_error(o, ref_o) <= FORWARD[dtype]
    assert relative_error(state, ref_state) <= FORWARD[dtype]
    for name, ref in ref_grads.items():
        assert grads[name].dtype == getattr(inputs, name).dtype, name
        assert bool(grads[name].isfinite().all()), name
        assert relative_error(grads[name], ref) <= GRADIENT[dtype], name


@pytest.mark.parametrize(
    "sizes",
    [
        *grid(T=150, G=2, K=24, V=40, dtype=FLOATS, gates=[*GATES], initial_state=True),
        *grid(B=1, T=LENGTHS, K=8, V=4, gates="-inf", initial_state=True),
        *({"B": 1, "T": 70, "H": 1, "K": K, "V": V, "gates": "strong"} for K, V in WIDTHS),
        *(
            {"T": 70, "H": H, "G": G, "gates": "strong", "initial_state": True}
            for H, G in [(1, 1), (1, 4), (3, 2), (2, 5)]
        ),
        *grid(lengths=PACKS, G=2, gates=["none", "mild", "-inf"], initial_state=True),
        {"dtype": torch.bfloat16, "gate_dtype": torch.float32, "gates": "strong"},
        {"B": 0, "T": 10, "initial_state": True},
    ],
    ids=str,
)
def test_sizes(sizes, device):
    check(gla_inputs(**{"dtype": torch.float64, **sizes}, device=device))


def test_packed_offsets_may_be_int32(device):
    inputs = gla_inputs(lengths=(5, 0, 70), dtype=torch.float64, device=device)
    check(dataclasses.replace(inputs, cu_seqlens=inputs.cu_seqlens.int()))


@pytest.mark.parametrize("scale", [1.0, 0.3, -2, 0.0])
def test_scale(scale, device):
    check(gla_inputs(dtype=torch.float64, device=device), scale)


@settings(max_examples=60)
@given(
    T=st.integers(0, 300),
    B=st.integers(1, 2),
    H=st.integers(1, 2),
    G=st.integers(1, 3),
    K=st.integers(1, 40),
    V=st.integers(1, 40),
    gates=st.sampled_from(GATES),
    initial_state=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_any_shape(**shape):
    check(gla_inputs(**shape, dtype=torch.float64))


@settings(max_examples=40)
@given(
    lengths=st.lists(st.integers(0, 140), max_size=6).map(tuple),
    G=st.integers(1, 2),
    K=st.integers(1, 20),
    V=st.integers(1, 20),
    gates=st.sampled_from(GATES),
    initial_state=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_any_packing(**shape):
    check(gla_inputs(**shape, dtype=torch.float64))


def test_strided_views_give_the_same_as_copies(device):
    inputs = gla_inputs(T=90, G=2, dtype=torch.float32, initial_state=True, device=device)
    heads_first = {n: getattr(inputs, n).transpose(1, 2).contiguous().transpose(1, 2) for n in ("q", "k", "v", "g")}
    padded_state = torch.nn.functional.pad(inputs.initial_state, (0, 0, 1, 2))[:, :, 1:-2]
    views = dataclasses.replace(inputs, **heads_first, initial_state=padded_state)
    assert not views.q.is_contiguous()
    results = (run(y, output_final_state=True)[:2] for y in (views, inputs))
    assert all(torch.equal(got, expected) for got, expected in zip(*results, strict=True))


def test_inputs_are_left_alone(device):
    # One chunk in the dtype of the computation, so that the backend need not copy the inputs.
    inputs = gla_inputs(T=64, H=1, dtype=torch.float32, initial_state=True, device=device)
    before = {name: getattr(inputs, name).clone() for name in ("q", "k", "v", "g", "initial_state")}
    run(inputs, output_final_state=True)
    for name, x in before.items():
        assert torch.equal(getattr(inputs, name), x), name


def test_one_call_equals_two_joined(device):
    x = gla_inputs(T=200, dtype=torch.float64, gates="-inf", initial_state=True, device=device)
    whole, final = gla.chunk_gla(x.q, x.k, x.v, x.g, initial_state=x.initial_state, output_final_state=True)
    first, state = gla.chunk_gla(
        *(y[:, :77] for y in (x.q, x.k, x.v, x.g)), initial_state=x.initial_state, output_final_state=True
    )
    rest, last = gla.chunk_gla(*(y[:, 77:] for y in (x.q, x.k, x.v, x.g)), initial_state=state, output_final_state=True)
    assert relative_error(torch.cat([first, rest], dim=1), whole) < 1e-13
    assert relative_error(last, final) < 1e-13


def test_the_state_is_none_unless_asked_for():
    x = gla_inputs(T=5)
    assert gla.chunk_gla(x.q, x.k, x.v, x.g)[1] is None
    assert gla.chunk_gla(x.q.requires_grad_(), x.k, x.v, x.g)[1] is None


@pytest.mark.parametrize("requires_grad", [False, True])
def test_results_have_names(requires_grad):
    x = gla_inputs(T=70, K=4, V=3, dtype=torch.float64)
    tokens = (x.q.requires_grad_(requires_grad), x.k, x.v, x.g)
    actual = gla.chunk_gla(*tokens, output_final_state=True)
    o, state = actual
    assert type(actual) is gla.ChunkGla
    assert actual.o is o
    assert actual.state is state
    more = gla.chunk_gla(*tokens, output_final_state=True, checkpoint_every=64)
    o, state, checkpoints = more
    assert type(more) is gla.ChunkGlaWithCheckpoints
    assert torch.equal(more.o, actual.o)
    assert torch.equal(more.state, actual.state)
    assert more.checkpoints is checkpoints
    assert gla.chunk_gla(*tokens, checkpoint_every=64).state is None
    swapped = gla.chunk_gla(*tokens, output_final_state=True, checkpoint_every=64, state_v_first=True)
    assert torch.equal(swapped.state, more.state.mT)
    assert torch.equal(swapped.checkpoints, more.checkpoints.mT)


@pytest.mark.parametrize("every", [None, 64])
def test_named_results_leave_a_compiled_graph_and_an_exported_program(every):
    class Module(torch.nn.Module):
        def forward(self, q, k, v):
            actual = gla.chunk_gla(q, k, v, output_final_state=True, checkpoint_every=every)
            return type(actual)(actual.o + 1, *actual[1:])

    x = gla_inputs(T=70, K=4, V=3, dtype=torch.float64)
    expected = Module()(x.q, x.k, x.v)
    torch._dynamo.reset()
    compiled = torch.compile(Module(), fullgraph=True, backend="aot_eager")(x.q, x.k, x.v)
    file = io.BytesIO()
    torch.export.save(torch.export.export(Module(), (x.q, x.k, x.v)), file)
    file.seek(0)
    exported = torch.export.load(file).module()(x.q, x.k, x.v)
    for actual in (compiled, exported):
        assert type(actual) is type(expected)
        torch.testing.assert_close(actual, expected)


def test_a_gate_of_minus_infinity_cuts_exactly(device):
    """After alpha = 0 outputs and gradients do not depend on earlier tokens, not even in the last bit."""
    x = gla_inputs(B=1, T=100, dtype=torch.float32, gates="mild", initial_state=True, device=device)
    cut = 41
    x.g[:, cut] = -torch.inf
    leaves = [y.detach().clone().requires_grad_() for y in (x.q, x.k, x.v, x.g, x.initial_state)]
    o, _ = gla.chunk_gla(*leaves[:4], initial_state=leaves[4])
    dq, dk, dv, dg, dinitial = torch.autograd.grad(o[:, cut:].sum(), leaves)
    for grad in (dq[:, :cut], dk[:, :cut], dv[:, :cut], dg[:, : cut + 1], dinitial):
        assert torch.equal(grad, torch.zeros_like(grad))


@pytest.mark.parametrize("sizes", [{"B": 1, "T": 9, "G": 2}, {"lengths": (3, 0, 5)}], ids=str)
def test_gradcheck(sizes):
    x = gla_inputs(**sizes, H=1, K=3, V=2, dtype=torch.float64, gates="strong", initial_state=True)
    leaves = [y.requires_grad_() for y in (x.q, x.k, x.v, x.g, x.initial_state)]

    def function(q, k, v, g, initial_state):
        return gla.chunk_gla(q, k, v, g, None, initial_state, True, x.cu_seqlens)

    assert torch.autograd.gradcheck(function, leaves)


def test_gradient_of_a_part_of_the_inputs():
    x = gla_inputs(T=20, dtype=torch.float64)
    v = x.v.clone().requires_grad_()
    o, _ = gla.chunk_gla(x.q, x.k, v, x.g)
    o.sum().backward()
    expected = v.detach().clone().requires_grad_()
    oracle.chunk_gla(x.q, x.k, expected, x.g)[0].sum().backward()
    assert relative_error(v.grad, expected.grad) < 1e-13


WAYS = {
    "eager": lambda loss: lambda *x: torch.autograd.grad(loss(*x), x),
    "compiled": lambda loss: (
        lambda *x: torch.autograd.grad(torch.compile(loss, backend="aot_eager", fullgraph=True)(*x), x)
    ),
    "func": lambda loss: torch.func.grad(loss, (0, 1, 2, 3, 4)),
    "vmap": lambda loss: (
        lambda *x: [y[0] for y in torch.vmap(torch.func.grad(loss, (0, 1, 2, 3, 4)))(*(y[None] for y in x))]
    ),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("every", [None, 64])
@pytest.mark.parametrize("used", [0, 1], ids=["o", "final state"])
def test_gradient_of_one_of_the_results(used, every, way):
    x = gla_inputs(T=70, G=2, K=3, V=4, dtype=torch.float64, initial_state=True)
    leaves = [y.requires_grad_() for y in (x.q, x.k, x.v, x.g, x.initial_state)]

    def losses(q, k, v, g, state):
        arguments = (q, k, v, g, None, state, True)
        actual = gla.chunk_gla(*arguments, checkpoint_every=every, backend="reference")
        return actual[used].pow(3).sum(), 0 * actual[1 - used].sum()

    expected = torch.autograd.grad(sum(losses(*leaves)), leaves)
    torch._dynamo.reset()
    actual = WAYS[way](lambda *x: losses(*x)[0])(*leaves)
    torch.testing.assert_close(actual, expected)


def test_a_second_derivative_is_refused_not_wrong():
    x = gla_inputs(T=5, dtype=torch.float64)
    q = x.q.requires_grad_()
    (dq,) = torch.autograd.grad(gla.chunk_gla(q, x.k, x.v, x.g)[0].square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        dq.sum().backward()


def test_the_same_inputs_give_the_same_bits(device):
    x = gla_inputs(T=300, K=64, V=64, gates="-inf", initial_state=True, device=device)
    first = run(x, output_final_state=True)
    for _ in range(3):
        again = run(x, output_final_state=True)
        assert torch.equal(again[0], first[0])
        assert torch.equal(again[1], first[1])
        assert all(torch.equal(again[2][name], first[2][name]) for name in first[2])
