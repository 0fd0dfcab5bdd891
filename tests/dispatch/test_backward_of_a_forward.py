"""The backward of a forward: the request that it runs under, and the backend that runs it."""

import pytest
import torch

import gla_core as gla

pytestmark = pytest.mark.usefixtures("only_reference")


def grads_of(inputs, o):
    return torch.autograd.grad(o.sum(), inputs)


@pytest.mark.parametrize("how", ["argument", "inner", "variable"])
def test_a_backward_runs_under_the_request_of_its_forward(set_environment, spy, qkvg, how):
    a, b = spy("a"), spy("b")
    inputs = qkvg(grad=True)
    if how == "variable":
        set_environment(GLA_BACKEND="b")
    with gla.use_backend("b" if how == "inner" else "chunk_gla_fwd=b"):
        o, _ = gla.chunk_gla(*inputs, backend="b" if how == "argument" else None)
    set_environment(GLA_BACKEND="a")  # the block has ended
    grads_of(inputs, o)
    assert (a.calls, b.calls) == ([], ["chunk_gla_fwd", "chunk_gla_bwd"])


def test_a_request_in_force_at_the_backward_does_not_count(spy, qkvg):
    a, b, c = spy("a"), spy("b"), spy("c")
    inputs = qkvg(grad=True)
    with gla.use_backend("c"):
        o, _ = gla.chunk_gla(*inputs)
    under_auto, _ = gla.chunk_gla(*inputs)
    with gla.use_backend("b"):
        grads_of(inputs, o)
        grads_of(inputs, under_auto)
    assert (a.calls, b.calls) == (["chunk_gla_fwd", "chunk_gla_bwd"], [])
    assert c.calls == ["chunk_gla_fwd", "chunk_gla_bwd"]


def test_a_backward_in_another_thread_keeps_the_request(spy, qkvg, in_time):
    a, b = spy("a"), spy("b")
    inputs = qkvg(grad=True)
    with gla.use_backend("b"):
        o, _ = gla.chunk_gla(*inputs)
    in_time(lambda: o.sum().backward())
    assert inputs[0].grad is not None
    assert (a.calls, b.calls) == ([], ["chunk_gla_fwd", "chunk_gla_bwd"])


def test_forward_and_backward_by_different_backends(spy, qkvg):
    a, b = spy("a"), spy("b")
    inputs, again = qkvg(grad=True), qkvg(grad=True)
    o, state = gla.chunk_gla(*inputs, output_final_state=True, backend="chunk_gla_fwd=a;chunk_gla_bwd=b")
    grads = torch.autograd.grad(o.sum() + state.sum(), inputs)
    assert (a.calls, b.calls) == (["chunk_gla_fwd"], ["chunk_gla_bwd"])
    o, state = gla.chunk_gla(*again, output_final_state=True, backend="reference")
    torch.testing.assert_close(grads, torch.autograd.grad(o.sum() + state.sum(), again), rtol=0, atol=0)


def test_a_strict_backend_without_backward_is_refused_before_the_forward(spy, qkvg):
    forward_only = spy("forward_only", ops=["chunk_gla_fwd"])
    with pytest.raises(gla.NoBackendError) as error:
        gla.chunk_gla(*qkvg(grad=True), backend="forward_only")
    assert "forward_only: does not implement chunk_gla_bwd; it implements chunk_gla_fwd" in str(error.value)
    assert forward_only.calls == []
    gla.chunk_gla(*qkvg(), backend="forward_only")  # it can run calls that need no gradient
    with torch.no_grad():
        gla.chunk_gla(*qkvg(grad=True), backend="forward_only")
    assert len(forward_only.calls) == 2


@pytest.mark.parametrize(
    ("request_", "proposed"),
    [
        ("forward_only", "forward_only,whole"),
        ("chunk_gla_fwd=forward_only;*=forward_only", "chunk_gla_fwd=forward_only;*=forward_only,whole"),
        ("*=auto;chunk_gla_bwd=forward_only", "*=auto;chunk_gla_bwd=forward_only,whole"),
        ("chunk_gla_bwd=forward_only", "chunk_gla_bwd=forward_only,whole"),
    ],
)
def test_a_strict_request_that_cannot_train_is_refused_with_one_that_can(spy, qkvg, request_, proposed):
    forward_only = spy("forward_only", ops=["chunk_gla_fwd"], cost=lambda call: 1.0)
    whole = spy("whole", cost=lambda call: 2.0)
    inputs = qkvg(grad=True)
    with pytest.raises(gla.NoBackendError) as error:
        gla.chunk_gla(*inputs, backend=request_)
    assert f"; {proposed!r} would run it:\n" in str(error.value)
    grads_of(inputs, gla.chunk_gla(*inputs, backend=proposed)[0])
    assert (forward_only.calls, whole.calls) == (["chunk_gla_fwd"], ["chunk_gla_bwd"])


def test_where_nobody_can_run_a_call_no_request_is_proposed(spy, x, set_environment, own_backends):
    spy("half", dtypes=frozenset({torch.float16}))
    set_environment(GLA_BLOCK_PLUGINS=",".join(own_backends))
    with pytest.raises(gla.NoBackendError, match=r"\(request: half, from backend=\):\n"):
        gla.online_softmax(x, backend="half")


@pytest.mark.parametrize("request_", ["auto", "forward_only,whole", "chunk_gla_fwd=forward_only;chunk_gla_bwd=whole"])
def test_a_backend_without_backward_serves_where_the_request_leaves_the_backward_to_another(spy, qkvg, request_):
    forward_only = spy("forward_only", ops=["chunk_gla_fwd"], cost=lambda call: 1.0)
    whole = spy("whole", cost=lambda call: 2.0)
    inputs = qkvg(grad=True)
    grads_of(inputs, gla.chunk_gla(*inputs, backend=request_)[0])
    assert (forward_only.calls, whole.calls) == (["chunk_gla_fwd"], ["chunk_gla_bwd"])


def test_without_the_forwards_backend_the_backward_is_an_error(spy, qkvg):
    b = spy("b")
    inputs = qkvg(grad=True)
    o, _ = gla.chunk_gla(*inputs, backend="b")
    b.handle.unregister()
    with pytest.raises(gla.UnknownBackendError, match="'b'"):
        grads_of(inputs, o)
