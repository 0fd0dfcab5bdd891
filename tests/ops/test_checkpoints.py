"""Checkpoints of chunk_gla: their values, their rows, and their treatment by PyTorch."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gla_core as gla
from gla_core.conformance import oracle
from gla_core.conformance.tolerances import FORWARD, GRADIENT, relative_error
from gla_core.dispatch import registry
from gla_core.dispatch.backend import Backend
from gla_core.workloads.inputs import gla_inputs


def states_by_steps(q, k, v, g, state, every):
    """Returns the states before every `every`-th token of one sequence, from the recurrence."""
    actual = []
    for t in range(k.shape[1]):
        if t % every == 0:
            actual.append(state)
        state = g[:, t].double().exp()[..., None] * state + k[:, t].double()[..., None] * v[:, t].double()[..., None, :]
    return torch.stack(actual, dim=1) if actual else state[:, None][:, :0]


@settings(max_examples=30)
@given(T=st.integers(0, 400), every=st.sampled_from([64, 128, 192, 256]), initial=st.booleans(), seed=st.integers(0, 9))
def test_states_that_enter_every_so_many_tokens(T, every, initial, seed):
    x = gla_inputs(B=2, T=T, K=3, V=2, dtype=torch.float64, initial_state=initial, seed=seed)
    inputs = (x.q, x.k, x.v, x.g, None, x.initial_state, True)
    o, state, actual = gla.chunk_gla(*inputs, backend="reference", checkpoint_every=every)
    start = torch.zeros(2, 2, 3, 2, dtype=torch.float64) if x.initial_state is None else x.initial_state
    expected = states_by_steps(x.q, x.k, x.v, x.g, start, every)
    assert actual.shape == (2, -(-T // every), 2, 3, 2) == expected.shape
    assert relative_error(actual, expected) <= FORWARD[torch.float64]
    again, final = gla.chunk_gla(*inputs, backend="reference")
    assert torch.equal(o, again)
    assert torch.equal(state, final)


@settings(max_examples=30)
@given(
    lengths=st.lists(st.integers(0, 200), min_size=1, max_size=6),
    padding=st.sampled_from([0, 1, 130]),
    every=st.sampled_from([64, 128]),
)
def test_a_packed_sequences_checkpoints_lie_where_its_offset_says(lengths, padding, every):
    x = gla_inputs(lengths=tuple(lengths), padding=padding, K=3, V=2, dtype=torch.float64, initial_state=True)
    arguments = (x.q, x.k, x.v, x.g, None, x.initial_state, False, x.cu_seqlens)
    *_, actual = gla.chunk_gla(*arguments, checkpoint_every=every)
    assert actual.shape == (1, len(lengths) + x.q.shape[1] // every, 2, 3, 2)
    unused = set(range(actual.shape[1]))
    for i, (a, b) in enumerate(itertools.pairwise(x.cu_seqlens.tolist())):
        expected = states_by_steps(*(y[:, a:b] for y in (x.q, x.k, x.v, x.g)), x.initial_state[i : i + 1], every)
        rows = range(i + a // every, i + a // every + expected.shape[1])
        assert unused.issuperset(rows)
        unused -= set(rows)
        if expected.shape[1]:
            assert relative_error(actual[:, rows.start : rows.stop], expected) <= FORWARD[torch.float64]
    assert not actual[:, sorted(unused)].any()


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (torch.float64, torch.float64),
        (torch.float32, torch.float32),
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.bfloat16),
    ],
    ids=str,
)
def test_dtype(dtype, expected):
    x = gla_inputs(T=130, dtype=dtype)
    *_, actual = gla.chunk_gla(x.q, x.k, x.v, x.g, checkpoint_every=64)
    assert actual.dtype == expected
    ref = oracle.chunk_gla_with_checkpoints(x.q, x.k, x.v, x.g, checkpoint_every=64)[2]
    assert relative_error(actual, ref) <= FORWARD[dtype]


def test_decoding_goes_on_from_a_checkpoint():
    x = gla_inputs(B=1, T=200, K=8, V=8)
    o, _, actual = gla.chunk_gla(x.q, x.k, x.v, x.g, checkpoint_every=64)
    rest, _ = gla.chunk_gla(*(y[:, 128:] for y in (x.q, x.k, x.v, x.g)), initial_state=actual[:, 2].contiguous())
    assert relative_error(rest, o[:, 128:].double()) <= FORWARD[torch.float32]


@pytest.mark.parametrize("sizes", [{"B": 2, "T": 300}, {"lengths": (0, 65, 1, 0, 130, 3), "padding": 9}], ids=str)
@pytest.mark.parametrize("every", [None, 64, 128])
def test_gradients_are_the_same(sizes, every):
    x = gla_inputs(**sizes, G=2, K=8, V=4, gates="-inf", initial_state=True)
    leaves = [y.requires_grad_() for y in (x.q, x.k, x.v, x.g, x.initial_state)]
    wide = [y.detach().double().requires_grad_() for y in leaves]
    o, state, *actual = gla.chunk_gla(*leaves[:4], None, leaves[4], True, x.cu_seqlens, checkpoint_every=every)
    refs = oracle.chunk_gla(*wide[:4], None, wide[4], x.cu_seqlens)
    assert not any(y.requires_grad for y in actual)
    weights = [torch.randn_like(y) for y in (o, state)]
    out = torch.autograd.grad((o, state), leaves, weights)
    for d, ref in zip(out, torch.autograd.grad(refs, wide, [w.double() for w in weights]), strict=True):
        assert relative_error(d, ref) <= GRADIENT[torch.float32]


def test_no_gradient_of_them_is_made():
    """A gradient of the checkpoints would be zeros of their size."""
    x = gla_inputs(B=1, T=128, H=1, K=5, V=7)
    x.q.requires_grad_()
    o, _, checkpoints = gla.chunk_gla(x.q, x.k, x.v, x.g, checkpoint_every=64)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
        o.sum().backward()
    filled = [event.input_shapes[0] for event in profile.events() if event.name in ("aten::zero_", "aten::fill_")]
    assert list(checkpoints.shape) not in filled


@pytest.mark.parametrize("dynamic", [False, True])
def test_in_a_compiled_graph(dynamic):
    def function(q, k, v, g):
        o, _, actual = gla.chunk_gla(q * 1.0, k, v, g, checkpoint_every=64)
        return o, actual.float().sum((-1, -2))

    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for T in (70, 130, 200):
        x = gla_inputs(B=1, T=T, K=4, V=4)
        leaves = [y.requires_grad_() for y in (x.q, x.k, x.v, x.g)]
        torch.testing.assert_close(compiled(*leaves), function(*leaves))


def test_under_vmap():
    q, k, v = (torch.randn(3, 2, 70, 2, 4) for _ in range(3))
    *_, actual = torch.vmap(lambda *x: gla.chunk_gla(*x, output_final_state=True, checkpoint_every=64))(q, k, v)
    *_, flat = gla.chunk_gla(*(x.flatten(0, 1) for x in (q, k, v)), checkpoint_every=64)
    torch.testing.assert_close(actual.flatten(0, 1), flat)


@pytest.mark.parametrize(("every", "error"), [(0, ValueError), (65, ValueError), (-64, ValueError), (64.0, TypeError)])
def test_a_bad_interval(every, error):
    x = gla_inputs(T=9)
    with pytest.raises(error, match=r"checkpoint_every is .*; expected"):
        gla.chunk_gla(x.q, x.k, x.v, x.g, checkpoint_every=every)


def test_checkpoints_need_their_interval():
    x = gla_inputs(B=1, T=70, K=4, V=4)
    checkpoints = torch.zeros(1, 2, 2, 4, 4)
    with pytest.raises(ValueError, match="checkpoint_every is None; expected the number of tokens between"):
        gla.explain("chunk_gla_bwd", x.q, x.k, x.v, x.g, checkpoints=checkpoints)
    with pytest.raises(ValueError, match=r"checkpoints has shape \[1, 2, 2, 4, 4\]; expected \[B, n, Hv, K, V\] .*n=1"):
        gla.explain("chunk_gla_bwd", x.q, x.k, x.v, x.g, checkpoints=checkpoints, checkpoint_every=128)


def test_a_backward_need_not_return_them():
    """Only the forward returns them; any backward may receive them."""
    reference = registry.get("reference").ops["chunk_gla_bwd"]
    received = []

    def chunk_gla_bwd(q, k, v, g, scale, initial_state, cu_seqlens, checkpoints, checkpoint_every, do, dstate):
        received.append((checkpoints.shape, checkpoint_every))
        return reference(q, k, v, g, scale, initial_state, cu_seqlens, None, None, do, dstate)

    x = gla_inputs(T=130)
    x.q.requires_grad_()
    with gla.register(Backend("mine", "1", {"chunk_gla_bwd": chunk_gla_bwd})):
        request = "chunk_gla_fwd=reference;chunk_gla_bwd=mine"
        o, _, checkpoints = gla.chunk_gla(x.q, x.k, x.v, x.g, checkpoint_every=64, backend=request)
        o.sum().backward()
        assert gla.explain("chunk_gla_fwd", x.q, x.k, x.v, x.g, checkpoint_every=64, backend=request).winner
    assert received == [(checkpoints.shape, 64)]


def test_a_backend_without_them_is_passed_over():
    x = gla_inputs(T=9)
    function = registry.get("reference").ops["chunk_gla_fwd"]
    with gla.register(Backend("mine", "1", {"chunk_gla_fwd": function}, cost=lambda call: 0.0)):
        assert gla.explain("chunk_gla_fwd", x.q, x.k, x.v, x.g).winner == "mine"
        explanation = gla.explain("chunk_gla_fwd", x.q, x.k, x.v, x.g, checkpoint_every=64)
        refusals = {c.name: c.refusal for c in explanation.candidates}
        assert refusals["mine"] == "returns no checkpoints; call it without checkpoint_every"
        assert explanation.winner in ("reference", "parallel_scan")
        with pytest.raises(gla.NoBackendError, match="returns no checkpoints"):
            gla.chunk_gla(x.q, x.k, x.v, x.g, checkpoint_every=64, backend="mine")
