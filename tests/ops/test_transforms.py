"""torch.func's transforms and forward-mode AD work, or an error of one sentence names the one that does not."""

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import grad, hessian, jacrev, jvp, vjp, vmap

import gla_core as gla
from gla_core.workloads.inputs import gla_inputs, token_of

BACKENDS = ["auto", "reference", "parallel_scan,reference"]


@pytest.fixture
def x():
    return gla_inputs(T=7, G=2, K=3, V=4, dtype=torch.float64, initial_state=True)


def loss(q, k, v, g, state):
    o, final = gla.chunk_gla(q, k, v, g, initial_state=state, output_final_state=True)
    return o.square().sum() + final.pow(3).sum()


def leaves(x):
    return x.q, x.k, x.v, x.g, x.initial_state


def several(x, n=3):
    return torch.stack([x * (i + 1) for i in range(n)])


def test_grad_equals_autograd(x):
    inputs = [y.clone().requires_grad_() for y in leaves(x)]
    expected = torch.autograd.grad(loss(*inputs), inputs)
    torch.testing.assert_close(grad(loss, argnums=(0, 1, 2, 3, 4))(*leaves(x)), expected)


def test_tensors_that_have_left_a_transform_count_as_what_they_wrap(x):
    left = []

    def total(q, k):
        left.extend((q, k))
        return (q.sum() + k.sum()).square()

    grad(total, (0, 1))(x.q, x.k)
    q, k = left
    v = x.v.clone().requires_grad_()
    expected = torch.autograd.grad(gla.chunk_gla(x.q, x.k, v, x.g)[0].sum(), v)
    for arguments in ((q, x.k), (x.q, k), (q, k)):
        actual = torch.autograd.grad(gla.chunk_gla(*arguments, v, x.g)[0].sum(), v)
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_vmap_goes_over_any_of_the_inputs(x, backend):
    def op(q, g):
        return gla.chunk_gla(q, x.k, x.v, g, initial_state=x.initial_state, output_final_state=True, backend=backend)

    q, g = several(x.q), several(x.g)
    expected = [torch.stack(part) for part in zip(*(op(a, b) for a, b in zip(q, g, strict=True)), strict=True)]
    for in_dims, arguments in (((0, 0), (q, g)), ((2, 0), (q.movedim(0, 2), g))):
        torch.testing.assert_close(vmap(op, in_dims)(*arguments), expected)
    torch.testing.assert_close(vmap(lambda q: op(q, x.g)[0])(q), torch.stack([op(a, x.g)[0] for a in q]))


@pytest.mark.parametrize("form", ["constant", "head"])
def test_vmap_of_every_form_of_gate(form):
    """Each sample has a gate, or all share one. A constant gate has no batch that vmap could extend."""
    x = gla_inputs(T=7, R=2, K=3, V=4, dtype=torch.float64, gate_form=form, initial_state=True)

    def op(q, g):
        o, state = gla.chunk_gla(q, x.k, x.v, g, output_final_state=True)
        step = gla.recurrent_gla_step(q[:, 0], x.k[:, 0], x.v[:, 0], token_of(g, 0).detach(), x.initial_state)
        return o, state, *gla.chunk_gla_summary(x.k, x.v, g), *step

    def packed(q, g):
        return gla.chunk_gla(q, x.k, x.v, g)[0].pow(3).sum()

    q, g = several(x.q), several(x.g)
    gradient = grad(packed, (0, 1))
    for function in (op, gradient):
        for in_dims, arguments in (((0, 0), (q, g)), ((0, 1), (q, g.movedim(0, 1))), ((None, 0), (x.q, g))):
            each = zip(q if in_dims[0] == 0 else [x.q] * 3, g, strict=True)
            expected = [torch.stack(part) for part in zip(*(function(a, b) for a, b in each), strict=True)]
            torch.testing.assert_close(vmap(function, in_dims)(*arguments), expected)
        each = zip(*(function(a, x.g) for a in q), strict=True)
        for actual, wanted in zip(vmap(function, (0, None))(q, x.g), each, strict=True):
            torch.testing.assert_close(actual, torch.stack(wanted))
    shared = grad(lambda g: vmap(packed, (0, None))(q, g).sum())(x.g)
    torch.testing.assert_close(shared, sum(gradient(a, x.g)[1] for a in q))


@pytest.mark.parametrize(
    "op",
    [
        lambda q, x: (
            gla.recurrent_gla_step(q[:, 0], x.k[:, 0], x.v[:, 0], x.g[:, 0], x.initial_state)[1] + q[0, 0, 0, 0]
        ),
        lambda q, x: gla.recurrent_gla_step(q[:, 0], x.k[:, 0], x.v[:, 0], x.g[:, 0], x.initial_state)[0],
        lambda q, x: gla.online_softmax(q, 1),
        lambda q, x: gla.online_softmax(q),
        lambda q, x: gla.softmax_attention(q, x.k, x.v, causal=True)[0],
        lambda q, x: gla.linear_attention(q, x.k, x.v)[0],
    ],
)
def test_vmap_of_every_op(op, x):
    q = several(x.q)
    torch.testing.assert_close(vmap(op, (0, None))(q, x), torch.stack([op(y, x) for y in q]))


@pytest.mark.parametrize(
    "op",
    [
        lambda q, x: gla.chunk_gla(q, x.k, x.v, x.g)[0],
        lambda q, x: gla.online_softmax(q, 1),
        lambda q, x: gla.softmax_attention(q, x.k, x.v, causal=True)[0],
    ],
)
def test_gradients_of_samples_and_of_vmap(op, x):
    """Both vmap over grad and grad over vmap work."""

    def scaled(factor, q):
        return op(factor * q, x).pow(3).sum()

    q, factor = several(x.q), torch.tensor(1.3, dtype=torch.float64)
    each = torch.stack([grad(scaled)(factor, y) for y in q])
    torch.testing.assert_close(vmap(grad(scaled), (None, 0))(factor, q), each)
    torch.testing.assert_close(grad(lambda f: vmap(scaled, (None, 0))(f, q).sum())(factor), each.sum())


def test_jacrev_equals_rows_of_vjp(x):
    def f(q):
        return gla.chunk_gla(q, x.k, x.v, x.g)[0].sum((0, 2))

    o, pull = vjp(f, x.q)
    i = torch.zeros_like(o)
    i[3, 2] = 1
    torch.testing.assert_close(jacrev(f)(x.q)[3, 2], pull(i)[0])


NO_FORWARD_MODE = "no forward-mode derivative"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "op",
    [
        lambda q, x, b: gla.chunk_gla(q, x.k, x.v, x.g, backend=b),
        lambda q, x, b: gla.recurrent_gla_step(q[:, 0], x.k[:, 0], x.v[:, 0], None, x.initial_state, backend=b),
        lambda q, x, b: gla.recurrent_gla_step(
            x.q[:, 0].detach(), x.k[:, 0], x.v[:, 0], None, x.initial_state, bonus=q[0, 0, :2], backend=b
        ),
        lambda q, x, b: gla.online_softmax(q, backend=b),
        lambda q, x, b: gla.softmax_attention(q, x.k, x.v, backend=b),
    ],
)
def test_a_tangent_is_never_dropped(op, backend, x):
    with forward_ad.dual_level():
        op(x.q, x, backend)
        with pytest.raises(NotImplementedError, match=NO_FORWARD_MODE):
            op(forward_ad.make_dual(x.q, x.q), x, backend)
    with pytest.raises(NotImplementedError, match=NO_FORWARD_MODE):
        jvp(lambda q: op(q, x, backend), (x.q,), (x.q,))
    with pytest.raises(NotImplementedError, match=NO_FORWARD_MODE):
        jvp(lambda q: vmap(lambda y: op(y, x, backend))(q), (several(x.q),), (several(x.q),))


def packed(q, x):
    return gla.chunk_gla(q[:1], x.k[:1], x.v[:1], cu_seqlens=torch.tensor([0, 3, 7]))[0]


def in_place(q, x):
    return gla.recurrent_gla_step(q[:, 0], x.k[:, 0], x.v[:, 0], None, x.initial_state, inplace=True)[0]


def in_place_op(q, x):
    args = (q[:, 0], x.k[:, 0], x.v[:, 0], None, x.initial_state, None, None)
    return torch.ops.gla.recurrent_gla_step_.default(*args)


def in_pool(q, x):
    return gla.recurrent_gla_step(q[:, 0], x.k[:, 0], x.v[:, 0], None, x.initial_state, slots=torch.tensor([1, 0]))[0]


@pytest.mark.parametrize(
    ("call", "error", "sentence"),
    [
        (lambda x: vmap(lambda q: packed(q, x))(several(x.q)), NotImplementedError, "packed sequences"),
        (lambda x: vmap(lambda q: in_pool(q, x))(several(x.q)), NotImplementedError, "a pool of states"),
        (lambda x: vmap(lambda q: in_place(q, x))(several(x.q)), NotImplementedError, "no op that writes"),
        (lambda x: vmap(lambda q: in_place_op(q, x))(several(x.q)), NotImplementedError, "no op that writes"),
        (lambda x: jvp(lambda q: in_place(q, x), (x.q,), (x.q,)), NotImplementedError, "no op that writes"),
        (lambda x: grad(lambda q: in_pool(q, x).sum())(x.q), RuntimeError, "train with chunk_gla"),
        (lambda x: grad(lambda q: grad(loss)(q, *leaves(x)[1:]).sum())(x.q), RuntimeError, "no second derivative"),
        (lambda x: hessian(lambda q: loss(q, *leaves(x)[1:]))(x.q), NotImplementedError, NO_FORWARD_MODE),
    ],
)
def test_what_does_not_work_is_refused_in_a_sentence(call, error, sentence, x):
    with pytest.raises(error, match=sentence):
        call(x)
