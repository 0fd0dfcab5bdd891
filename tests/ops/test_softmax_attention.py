"""Values and gradients of softmax_attention and merge_attention against attention in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gla_core as gla
from gla_core.conformance import oracle
from gla_core.conformance.tolerances import FORWARD, GRADIENT, relative_error
from gla_core.dispatch.backend import Backend, Capabilities
from gla_core.dispatch.registry import get
from tests.reference import function


def attention_inputs(B=2, Tq=50, Tk=70, H=2, G=1, K=16, V=24, dtype=torch.float64, device="cpu", seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(B, Tq, H * G, K), (B, Tk, H, K), (B, Tk, H, V)]
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(device, dtype) for s in shapes]


def check(q, k, v, **kwargs):
    dtype = q.dtype
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    ref_leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
    o, lse = gla.softmax_attention(*leaves, **kwargs)
    ref_o, ref_lse = oracle.softmax_attention(*ref_leaves, **kwargs)
    assert o.dtype == dtype
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert relative_error(o, ref_o) <= FORWARD[dtype]
    assert relative_error(lse, ref_lse) <= FORWARD[dtype]
    do, dlse = torch.randn_like(o), torch.randn_like(lse)
    grads = torch.autograd.grad([o, lse], leaves, [do, dlse])
    ref_grads = torch.autograd.grad([ref_o, ref_lse], ref_leaves, [do.double(), dlse.double()])
    for name, grad, ref in zip("qkv", grads, ref_grads, strict=True):
        assert relative_error(grad, ref) <= GRADIENT[dtype], name


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_every_dtype(dtype, causal, device):
    check(*attention_inputs(G=2, dtype=dtype, device=device), causal=causal)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("Tq", "Tk"), [(1, 1), (1, 300), (255, 255), (256, 257), (300, 513), (3, 1100)])
def test_every_length(Tq, Tk, causal, device):
    check(*attention_inputs(B=1, Tq=Tq, Tk=Tk, device=device), causal=causal)


@settings(max_examples=40)
@given(
    B=st.integers(1, 2),
    Tk=st.integers(1, 90),
    H=st.integers(1, 2),
    G=st.integers(1, 3),
    K=st.integers(1, 20),
    V=st.integers(1, 20),
    seed=st.integers(0, 2**31),
    causal=st.booleans(),
    data=st.data(),
)
def test_any_shape(causal, data, Tk, **shape):
    Tq = data.draw(st.integers(0, Tk))
    if Tq:
        check(*attention_inputs(Tq=Tq, Tk=Tk, **shape), causal=causal, scale=0.7)


def test_the_last_causal_query_sees_every_key():
    q, k, v = attention_inputs(Tq=1, Tk=40)
    for got, expected in zip(gla.softmax_attention(q, k, v, causal=True), gla.softmax_attention(q, k, v), strict=True):
        assert torch.equal(got, expected)


def test_queries_without_keys_are_nan_and_spoil_no_gradient():
    q, k, v = (x.requires_grad_() for x in attention_inputs(Tq=5, Tk=3))
    o, lse = gla.softmax_attention(q, k, v, causal=True)  # the first two queries see no key
    assert bool(o[:, :2].isnan().all())
    assert bool(lse[:, :2].isneginf().all())
    expected, _ = oracle.softmax_attention(q[:, 2:], k, v, causal=True)
    assert relative_error(o[:, 2:], expected) < 1e-12
    losses = (o[:, 2:].sum(), expected.sum())
    for grad, ref in zip(*(torch.autograd.grad(loss, [q, k, v]) for loss in losses), strict=True):
        assert relative_error(grad, ref) < 1e-12


def test_no_keys_and_no_queries():
    q, k, v = attention_inputs(Tq=2, Tk=0)
    o, lse = gla.softmax_attention(q, k, v)
    assert bool(o.isnan().all())
    assert bool(lse.isneginf().all())
    q, k, v = attention_inputs(Tq=0, Tk=2)
    assert gla.softmax_attention(q, k, v)[0].shape == (2, 0, 2, 24)


def test_a_large_score_does_not_overflow():
    q, k, v = attention_inputs(dtype=torch.float32)
    o, lse = gla.softmax_attention(1e3 * q, 1e3 * k, v)
    ref_o, ref_lse = oracle.softmax_attention(1e3 * q, 1e3 * k, v)
    assert relative_error(lse, ref_lse) < 1e-5
    assert bool(o.isfinite().all())
    assert relative_error(o, ref_o) < 1e-2  # scores of 1e6 carry a rounding of 0.1 into the exponent


@pytest.mark.parametrize("cut", [0, 1, 35, 70])
def test_merged_parts_equal_the_whole(cut):
    q, k, v = (x.requires_grad_() for x in attention_inputs(G=2))
    parts = [gla.softmax_attention(q, k[:, part], v[:, part]) for part in (slice(0, cut), slice(cut, None))]
    o, lse = gla.merge_attention(*parts[0], *parts[1])
    ref_o, ref_lse = oracle.softmax_attention(q, k, v)
    assert relative_error(o, ref_o) < 1e-12
    assert relative_error(lse, ref_lse) < 1e-12
    do = torch.randn_like(o)
    grads = torch.autograd.grad(o, [q, k, v], do)
    for grad, ref in zip(grads, torch.autograd.grad(ref_o, [q, k, v], do), strict=True):
        assert relative_error(grad, ref) < 1e-12


def test_merging_two_empty_parts_is_nan():
    q, k, v = attention_inputs(Tk=0)
    o, lse = gla.merge_attention(*gla.softmax_attention(q, k, v), *gla.softmax_attention(q, k, v))
    assert bool(o.isnan().all())
    assert bool(lse.isneginf().all())


def test_merging_is_associative():
    q, k, v = attention_inputs(Tk=90)
    a, b, c = (gla.softmax_attention(q, k[:, i : i + 30], v[:, i : i + 30]) for i in (0, 30, 60))
    left = gla.merge_attention(*gla.merge_attention(*a, *b), *c)
    right = gla.merge_attention(*a, *gla.merge_attention(*b, *c))
    assert relative_error(left[0], right[0]) < 1e-13
    assert relative_error(left[1], right[1]) < 1e-13


def test_merging_shapes_that_do_not_agree():
    with pytest.raises(ValueError, match=r"do not agree; expected o \[\.\.\., V\] and lse \[\.\.\.\]"):
        gla.merge_attention(torch.ones(2, 3, 4), torch.ones(2, 3), torch.ones(2, 3, 4), torch.ones(2))


def test_views_give_the_same_as_copies(device):
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in attention_inputs(device=device))
    for got, expected in zip(
        gla.softmax_attention(q, k, v),
        gla.softmax_attention(q.contiguous(), k.contiguous(), v.contiguous()),
        strict=True,
    ):
        torch.testing.assert_close(
            got, expected, rtol=1e-12, atol=1e-12
        )  # a BLAS may sum strided rows in another order


def test_gradcheck():
    leaves = [x.requires_grad_() for x in attention_inputs(B=1, Tq=3, Tk=4, H=1, G=2, K=2, V=3)]
    assert torch.autograd.gradcheck(lambda q, k, v: gla.softmax_attention(q, k, v, causal=True), leaves)


def test_a_second_derivative_is_refused_not_wrong():
    q, k, v = attention_inputs(B=1, Tq=3, Tk=4)
    (dq,) = torch.autograd.grad(gla.softmax_attention(q.requires_grad_(), k, v)[0].sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        dq.sum().backward()


def gradients_of(outputs, q, k, v, backend):
    """Returns the gradients of the sum of the squares of some results, o and lse."""
    results = gla.softmax_attention(q, k, v, causal=True, backend=backend)
    return torch.autograd.grad(sum(results[i].square().sum() for i in outputs), (q, k, v))


@pytest.mark.parametrize("outputs", [(0,), (1,), (0, 1)])
def test_a_backend_without_a_backward_has_the_gradients_of_pytorch(outputs):
    leaves = [x.requires_grad_() for x in attention_inputs()]
    forward = {"softmax_attention": get("reference").ops["softmax_attention"]}
    expected = gradients_of(outputs, *leaves, "reference")
    with gla.register(Backend("mine", "1", forward, Capabilities(dtypes=frozenset({torch.float64})))):
        actual = gradients_of(outputs, *leaves, "mine")
        assert gla.explain("softmax_attention_bwd", *leaves, backend="mine").winner == "mine"
    assert all(map(torch.equal, actual, expected))


@pytest.mark.parametrize("outputs", [(0,), (1,), (0, 1)])
def test_a_backward_receives_the_results_and_the_gradients_that_there_are(outputs):
    """A missing gradient of o is zeros, and a missing gradient of lse is None."""
    leaves = [x.requires_grad_() for x in attention_inputs()]
    received = []

    def softmax_attention_bwd(q, k, v, o, lse, scale, causal, do, dlse):
        received.append((o, lse, scale, causal, do, dlse))
        return function("softmax_attention_bwd")(q, k, v, o, lse, scale, causal, do, dlse)

    ops = {
        "softmax_attention": get("reference").ops["softmax_attention"],
        "softmax_attention_bwd": softmax_attention_bwd,
    }
    with gla.register(Backend("mine", "1", ops, Capabilities(dtypes=frozenset({torch.float64})))):
        actual = gradients_of(outputs, *leaves, "mine")
    ((o, lse, scale, causal, do, dlse),) = received
    results = gla.softmax_attention(*leaves, causal=True, backend="reference")
    assert torch.equal(o, results.o)
    assert torch.equal(lse, results.lse)
    assert (scale, causal) == (leaves[0].shape[-1] ** -0.5, True)
    assert torch.equal(do, 2 * o if 0 in outputs else torch.zeros_like(o))
    assert dlse is None if 1 not in outputs else torch.equal(dlse, 2 * lse)
    assert all(map(torch.equal, actual, gradients_of(outputs, *leaves, "reference")))
