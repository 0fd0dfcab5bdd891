"""Tensors of any strides: if the last dimension is not contiguous the op takes a copy, with the same result."""

import functools

import pytest
import torch

import gla_core as gla
from gla_core.conformance.calls import last_two_swapped
from gla_core.dispatch import registry
from gla_core.dispatch.backend import Backend, Capabilities, LaunchError, arguments_of


def every_other(x):
    return torch.stack([x, x + 1], -1).flatten(-2)[..., ::2]


def chunk(inputs, gates=None):
    q, k, v, g, state = inputs
    return gla.chunk_gla(q, k, v, g if gates is None else gates, None, state, True)


def attention(inputs):
    return gla.softmax_attention(*inputs)


def softmax(inputs):
    return tuple(gla.online_softmax(*inputs, dim=dim) for dim in (0, 1, -1))


def random(*shapes):
    return [torch.randn(shape) for shape in shapes]


def chunk_inputs():
    q, k, v, g, state = random((2, 70, 2, 6), (2, 70, 2, 6), (2, 70, 2, 5), (2, 70, 2, 6), (2, 2, 6, 5))
    return [q, k, v, -g.exp(), state]


CALLS = {
    "chunk_gla": (chunk, chunk_inputs),
    "softmax_attention": (attention, lambda: random((2, 9, 2, 6), (2, 11, 2, 6), (2, 11, 2, 5))),
    "online_softmax": (softmax, lambda: random((3, 40, 7))),
}


@pytest.mark.parametrize("layout", [every_other, last_two_swapped])
@pytest.mark.parametrize("name", CALLS)
def test_results_and_gradients_are_those_of_copies(name, layout):
    call, make = CALLS[name]
    plain = make()
    views = [layout(x) for x in plain]
    assert all(x.stride(-1) != 1 for x in views)
    actual = []
    for inputs in (plain, views):
        leaves = [x.detach().requires_grad_() for x in inputs]
        results = call(leaves)
        incoming = [torch.ones_like(y).cumsum(-1) for y in results]
        actual.append([*results, *torch.autograd.grad(results, leaves, incoming), *call(inputs)])
    torch.testing.assert_close(*actual, rtol=0, atol=0)


def test_gates_and_incoming_gradients_that_repeat_along_the_last_dimension():
    inputs = chunk_inputs()
    one = inputs[3][..., :1].detach().requires_grad_()
    o, state = chunk(inputs, one.expand(2, 70, 2, 6))
    (dg,) = torch.autograd.grad(o.sum() + state.sum(), one)
    copy = one.expand(2, 70, 2, 6).detach().contiguous().requires_grad_()
    o, state = chunk(inputs, copy)
    (expected,) = torch.autograd.grad(o.sum() + state.sum(), copy)
    torch.testing.assert_close(dg, expected.sum(-1, keepdim=True))


@pytest.mark.parametrize("layout", [every_other, last_two_swapped])
def test_a_step(layout):
    q, k, v, g, state = random((2, 4, 6), (2, 2, 6), (2, 2, 5), (2, 2, 6), (2, 2, 6, 5))
    expected = gla.recurrent_gla_step(q, k, v, -g.exp(), state)
    before = state.clone()
    actual = gla.recurrent_gla_step(*(layout(x) for x in (q, k, v, -g.exp(), state)))
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
    assert torch.equal(state, before)


# ---- states with values first


def step_inputs(P=2):
    q, k, v, g, state = random((2, 4, 6), (2, 2, 6), (2, 2, 5), (2, 2, 6), (P, 2, 6, 5))
    return q, k, v, -g.exp(), state


@pytest.mark.parametrize("rows", [None, [3, -1]])
@pytest.mark.parametrize("inplace", [False, True])
def test_a_step_of_states_with_values_first(inplace, rows):
    *token, state = step_inputs(2 if rows is None else 4)
    rows = None if rows is None else torch.tensor(rows)
    o, new = gla.recurrent_gla_step(*token, state, None, rows)
    passed = state.mT.contiguous()
    actual, after = gla.recurrent_gla_step(*token, passed, None, rows, inplace, state_v_first=True)
    assert torch.equal(actual, o)
    assert torch.equal(after, new.mT)
    assert after.is_contiguous()
    assert (after is passed) == inplace
    assert torch.equal(passed, (new if inplace else state).mT)


@pytest.mark.parametrize("swaps", [False, True])
@pytest.mark.parametrize("inplace", [False, True])
def test_a_backend_receives_such_states_as_it_can_take_them(swaps, inplace):
    received = []
    reference = registry.get("reference").ops["recurrent_gla_step"]

    def step(q, k, v, g, state, scale, state_indices, inplace):
        received.append(state)
        return reference(q, k, v, g, state, scale, state_indices, None, None, inplace)

    *token, state = step_inputs()
    o, new = gla.recurrent_gla_step(*token, state, backend="reference")
    passed = state.mT.contiguous()
    with gla.register(Backend("mine", "1", {"recurrent_gla_step": step}, Capabilities(swapped_states=swaps))):
        for _ in range(2):  # the first call is checked
            start = passed.clone()
            arguments = (*token, start, None, None, inplace)
            actual, after = gla.recurrent_gla_step(*arguments, backend="mine", state_v_first=True)
            assert torch.equal(actual, o)
            assert torch.equal(after, new.mT)
            assert after.is_contiguous()
            assert (after is start) == inplace
            assert received[-1].is_contiguous() != swaps
            assert (received[-1].data_ptr() == start.data_ptr()) == swaps


def test_states_that_are_swapped_and_those_that_only_seem_so():
    """Both states have the same stride of values. After a step in place on the first, the second is still refused."""
    *token, state = step_inputs()
    gla.recurrent_gla_step(*token, state.mT.contiguous(), inplace=True, state_v_first=True)
    apart = torch.zeros(2, 2, 6, 5 * 6)[..., ::6]
    assert apart.stride(-1) == state.mT.contiguous().mT.stride(-1)
    with pytest.raises(ValueError, match="is written in place"):
        gla.recurrent_gla_step(*token, apart, inplace=True)


def test_after_a_backend_that_cannot_launch_the_state_that_was_given_is_written():
    def step(q, k, v, g, state, scale, state_indices, inplace):
        raise LaunchError("no")

    *token, state = step_inputs()
    expected, passed = gla.recurrent_gla_step(*token, state, backend="reference")[1], state.mT.contiguous()
    backend = Backend("a", "1", {"recurrent_gla_step": step}, cost=lambda call: 0.0)
    with gla.register(backend), pytest.warns(UserWarning, match="'a' could not launch"):
        gla.recurrent_gla_step(*token, passed, inplace=True, state_v_first=True)
    torch.testing.assert_close(passed, expected.mT)


@pytest.mark.parametrize("inplace", [False, True])
def test_a_compiled_step_of_states_with_values_first(inplace):
    *token, state = step_inputs()
    step = torch.compile(
        lambda *x: gla.recurrent_gla_step(*x, inplace=inplace, state_v_first=True), fullgraph=True, backend="aot_eager"
    )
    o, new = gla.recurrent_gla_step(*token, state)
    passed = state.mT.contiguous()
    actual, after = step(*token, passed)
    torch.testing.assert_close(actual, o)
    torch.testing.assert_close(after, new.mT)
    torch.testing.assert_close(passed, (new if inplace else state).mT)
    assert after.is_contiguous()


def test_whole_sequences_with_states_of_values_first():
    q, k, v, g, state = chunk_inputs()
    leaves = [x.requires_grad_() for x in (q, k, v, g, state)]
    o, final, checkpoints = gla.chunk_gla(*leaves[:4], None, state, True, checkpoint_every=64)
    swapped = state.detach().mT.contiguous().requires_grad_()
    actual = gla.chunk_gla(*leaves[:4], None, swapped, True, checkpoint_every=64, state_v_first=True)
    assert all(torch.equal(x, expected) for x, expected in zip(actual, (o, final.mT, checkpoints.mT), strict=True))
    assert all(x.mT.is_contiguous() for x in actual[1:])
    do, dfinal = torch.randn_like(o), torch.randn_like(final)
    grads = torch.autograd.grad((o, final), leaves, (do, dfinal))
    again = torch.autograd.grad(actual[:2], [*leaves[:4], swapped], (do, dfinal.mT))
    assert all(torch.equal(x, expected) for x, expected in zip(again, (*grads[:4], grads[4].mT), strict=True))
    o, final = gla.chunk_gla(*(x.detach() for x in leaves[:4]), state_v_first=True)
    assert final is None


@pytest.mark.parametrize("swaps", [False, True])
def test_states_with_values_first_come_to_a_backend_that_takes_them_as_they_are(swaps):
    """The initial state and the gradient of the final state arrive without a copy."""
    received = []

    def listening(op, name):
        function = registry.get("reference").ops[op]

        @functools.wraps(function)
        def computed(*args):
            received.append(args[arguments_of(function).index(name)])
            return function(*args)

        return computed

    *tokens, state = chunk_inputs()
    passed = state.mT.contiguous().requires_grad_()
    ops = {
        "chunk_gla_fwd": listening("chunk_gla_fwd", "initial_state"),
        "chunk_gla_bwd": listening("chunk_gla_bwd", "dstate"),
    }
    with gla.register(Backend("mine", "1", ops, Capabilities(swapped_states=swaps))):
        _, final = gla.chunk_gla(*tokens, None, passed, True, backend="mine", state_v_first=True)
        dfinal = torch.randn_like(final, memory_format=torch.contiguous_format)
        final.backward(dfinal)
    assert [x.data_ptr() == y.data_ptr() for x, y in zip(received, (passed, dfinal), strict=True)] == [swaps, swaps]
    assert [x.is_contiguous() for x in received] == [not swaps, not swaps]


def test_in_a_compiled_graph(fresh_graphs):
    inputs = [last_two_swapped(x) for x in chunk_inputs()]
    compiled = torch.compile(chunk, fullgraph=True)
    for a, b in zip(compiled(inputs), chunk(inputs), strict=True):
        torch.testing.assert_close(a, b)


def test_a_copy_is_taken_of_what_needs_one_alone(monkeypatch):
    """A backend receives contiguous rows; heads-first views and expanded tensors arrive unchanged."""
    received = []

    def computed(q, k, v, g, scale, initial_state, output_final_state, cu_seqlens, checkpoint_every):
        received.extend([q, k, v, g])
        return torch.empty(v.shape), None, None

    handle = gla.register(Backend("mine", "1", {"chunk_gla_fwd": computed}))
    q, k, v, g, _ = chunk_inputs()
    k, g = k.transpose(1, 2).contiguous().transpose(1, 2), g[:1].expand(2, 70, 2, 6)
    try:
        gla.chunk_gla(last_two_swapped(q), k, v, g, backend="mine")
    finally:
        handle.unregister()
    got_q, got_k, got_v, got_g = received
    assert torch.equal(got_q, q)
    assert got_q.is_contiguous()
    assert all(a is b for a, b in zip((got_k, got_v, got_g), (k, v, g), strict=True))
