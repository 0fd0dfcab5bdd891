"""Results of backends are checked once per signature, and are new, contiguous memory on every backend."""

import re

import pytest
import torch

import gla_core as gla
from gla_core.dispatch.backend import Backend
from gla_core.dispatch.registry import get
from gla_core.workloads.inputs import gla_inputs

OWN = ["auto", "reference", "parallel_scan,reference"]
FWD, BWD, STEP = (get("reference").ops[op] for op in ("chunk_gla_fwd", "chunk_gla_bwd", "recurrent_gla_step"))


def changed(change):
    def chunk_gla_fwd(q, k, v, g, scale, initial_state, output_final_state, cu_seqlens, checkpoint_every):
        o, state, checkpoints = FWD(q, k, v, g, scale, initial_state, output_final_state, cu_seqlens, checkpoint_every)
        actual = change(o, state, q)
        return (*actual, checkpoints) if isinstance(actual, tuple) else actual

    return Backend("wrong", "0", {"chunk_gla_fwd": chunk_gla_fwd})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda o, s, q: None, "returned None; expected a tuple (o, state, None)"),
        (lambda o, s, q: (o, s, s), "returned 4 values; expected a tuple (o, state, None)"),
        (lambda o, s, q: (o, None), "returned None for state; expected a tensor"),
        (lambda o, s, q: (o.double(), s), "returned o as torch.float64; expected torch.float32"),
        (lambda o, s, q: (o[:, 1:].clone(), s), "returned o of shape [2, 8, 2, 4]; expected [2, 9, 2, 4]"),
        (lambda o, s, q: (o.to("meta"), s), "returned o on meta; expected cpu"),
        (lambda o, s, q: (o.transpose(1, 2).contiguous().transpose(1, 2), s), "expected a contiguous tensor"),
        (lambda o, s, q: (q, s), "returned o in the memory of an input; expected a tensor of its own"),
        (lambda o, s, q: (o.view(o.shape), s), "returned o as a view of another tensor; expected a fresh one"),
    ],
)
def test_a_wrong_result_names_the_backend(change, message, fresh_registry):
    x = gla_inputs(T=9, K=4, V=4)
    with gla.register(changed(change)):
        for _ in range(2):  # a failed signature is checked again
            with pytest.raises(gla.BackendError, match=re.escape(message)) as caught:
                gla.chunk_gla(x.q, x.k, x.v, x.g, output_final_state=True, backend="wrong")
            assert str(caught.value).startswith("chunk_gla_fwd: backend 'wrong' returned")


def test_a_state_that_nobody_asked_for_is_a_wrong_result(fresh_registry):
    x = gla_inputs(T=9, K=4, V=4)
    with gla.register(changed(lambda o, s, q: (o, o.clone()))), pytest.raises(gla.BackendError, match="expected None"):
        gla.chunk_gla(x.q, x.k, x.v, x.g, backend="wrong")


def test_results_in_a_list_have_gradients(fresh_registry):
    def chunk_gla_fwd(q, k, v, g, scale, initial_state, output_final_state, cu_seqlens, checkpoint_every):
        return [*FWD(q, k, v, g, scale, initial_state, output_final_state, cu_seqlens, checkpoint_every)]

    def chunk_gla_bwd(q, k, v, g, scale, initial_state, cu_seqlens, checkpoints, checkpoint_every, do, dstate):
        return [*BWD(q, k, v, g, scale, initial_state, cu_seqlens, checkpoints, checkpoint_every, do, dstate)]

    x = gla_inputs(T=9)
    leaves = [y.requires_grad_() for y in (x.q, x.k, x.v, x.g)]
    with gla.register(Backend("lists", "0", {"chunk_gla_fwd": chunk_gla_fwd, "chunk_gla_bwd": chunk_gla_bwd})):
        results = [gla.chunk_gla(*leaves, backend=name)[0] for name in ("lists", "reference")]
        actual, expected = (torch.autograd.grad(o.sum(), leaves) for o in results)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def test_a_step_in_place_returns_the_state_it_was_given(fresh_registry):
    def recurrent_gla_step(q, k, v, g, state, scale, state_indices, inplace):
        return STEP(q, k, v, g, state, scale, state_indices, None, None, False)

    x = gla_inputs(T=1, K=4, V=4, initial_state=True)
    token = [y[:, 0] for y in (x.q, x.k, x.v, x.g)]
    backend = Backend("wrong", "0", {"recurrent_gla_step": recurrent_gla_step})
    with gla.register(backend), pytest.raises(gla.BackendError, match="another tensor for state; expected the one"):
        gla.recurrent_gla_step(*token, x.initial_state, inplace=True, backend="wrong")


def results(backend, T, dtype):
    x = gla_inputs(B=1, T=T, H=1, K=4, V=4, initial_state=True, dtype=dtype)
    y = gla_inputs(lengths=(T, 0, 2), K=4, V=4, dtype=dtype)
    yield "chunk_gla", gla.chunk_gla(x.q, x.k, x.v, x.g, None, x.initial_state, True, backend=backend), x.initial_state
    yield "packed", gla.chunk_gla(y.q, y.k, y.v, y.g, None, None, True, y.cu_seqlens, backend=backend), None
    yield "attention", gla.softmax_attention(x.q, x.k, x.v, backend=backend), None
    for dim in range(4):
        yield f"softmax {dim}", (gla.online_softmax(x.q, dim, backend=backend),), x.q
    if T:
        token = [z[:, 0] for z in (x.q, x.k, x.v, x.g)]
        yield "step", gla.recurrent_gla_step(*token, x.initial_state, backend=backend), x.initial_state
        rows = torch.tensor([0])
        pool = gla.recurrent_gla_step(*token, x.initial_state, slots=rows, backend=backend)
        yield "pool", pool, x.initial_state


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("T", [0, 1, 9, 64])
@pytest.mark.parametrize("backend", OWN)
def test_results_are_fresh_and_can_be_changed_in_place(backend, T, dtype):
    for name, actual, args in results(backend, T, dtype):
        before = None if args is None else args.clone()
        for y in actual:
            assert not y._is_view(), name
            assert y.is_contiguous(), name
            y.mul_(2)
        assert before is None or torch.equal(args, before), name


def test_at_no_token_the_final_state_is_a_copy_of_the_initial_one():
    for backend in OWN:
        x = gla_inputs(T=0, K=4, V=4, initial_state=True)
        state = gla.chunk_gla(x.q, x.k, x.v, x.g, None, x.initial_state, True, backend=backend)[1]
        assert torch.equal(state, x.initial_state)
        assert state.data_ptr() != x.initial_state.data_ptr()


@pytest.mark.parametrize("backend", ["auto", "reference", "parallel_scan,reference"])
@pytest.mark.parametrize("offsets", [[0, 5, 5, 12], [2, 5, 12], [0, 0], [4]])
def test_rows_of_no_sequence_are_zero_whatever_they_hold(offsets, backend):
    x = gla_inputs(B=1, T=20, K=4, V=4)
    alone = slice(offsets[0], offsets[-1])
    leaves = [y.clone() for y in (x.q, x.k, x.v, x.g)]
    for y in leaves:
        y[:, : alone.start] = y[:, alone.stop :] = torch.nan
        y.requires_grad_()
    o, state = gla.chunk_gla(*leaves, cu_seqlens=torch.tensor(offsets), output_final_state=True, backend=backend)
    do = torch.randn_like(o)
    do[:, alone.stop :] = torch.nan
    gradients = torch.autograd.grad(o, leaves, do)
    for y in (o, *gradients):
        assert torch.equal(y[:, alone.stop :], torch.zeros_like(y[:, alone.stop :]))
        assert torch.equal(y[:, : alone.start], torch.zeros_like(y[:, : alone.start]))
        assert y.isfinite().all()
    inside = [y[:, alone] for y in (x.q, x.k, x.v, x.g)]
    moved = torch.tensor(offsets) - offsets[0]
    expected, final = gla.chunk_gla(*inside, cu_seqlens=moved, output_final_state=True, backend=backend)
    torch.testing.assert_close(o[:, alone], expected)
    torch.testing.assert_close(state, final)
    normalised, _ = gla.linear_attention(*(y.detach() for y in leaves[:3]), cu_seqlens=torch.tensor(offsets))
    assert normalised.isfinite().all()
