"""FLA's kernels, called through the backend, against the float64 recurrence."""

import pytest
import torch

import gla_core as gla
from gla_core.conformance import oracle
from gla_core.conformance.tolerances import FORWARD, GRADIENT, relative_error
from gla_core.workloads.inputs import gla_inputs
from gla_fla import native

pytestmark = pytest.mark.gpu

SIZES = {
    "plain": {"B": 2, "T": 130, "H": 2, "K": 64, "V": 64},
    "ungated": {"B": 2, "T": 70, "H": 2, "K": 64, "V": 32, "gates": "none"},
    "shorter than a chunk": {"B": 1, "T": 7, "H": 2, "K": 32, "V": 32},
    "odd widths": {"B": 1, "T": 77, "H": 3, "K": 19, "V": 37},
    "packed": {"lengths": (0, 65, 1, 0, 130, 3), "H": 2, "K": 32, "V": 32},
}


def bfloat16_inputs(**sizes):
    return gla_inputs(dtype=torch.bfloat16, gate_dtype=torch.float32, initial_state=True, device="cuda", **sizes)


def forward_and_gradients(function, x):
    leaves = [t.detach().clone().requires_grad_() for t in (x.q, x.k, x.v, x.g, x.initial_state) if t is not None]
    q, k, v, *rest = leaves
    g, state = rest if x.g is not None else (None, *rest)
    o, final = function(q, k, v, g, state)
    outputs = (o, final)
    flat = [torch.linspace(-1, 1, t.numel(), device=t.device).reshape(t.shape) for t in outputs]
    weights = [w.bfloat16().to(t.dtype) for w, t in zip(flat, outputs, strict=True)]
    return o, final, torch.autograd.grad(outputs, leaves, weights)


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_values_and_gradients(sizes):
    x = bfloat16_inputs(**sizes)
    o, final, gradients = forward_and_gradients(
        lambda q, k, v, g, s: gla.chunk_gla(q, k, v, g, None, s, True, x.cu_seqlens, backend="gla_fla"), x
    )
    o_ref, final_ref, expected = forward_and_gradients(
        lambda q, k, v, g, s: oracle.chunk_gla(q, k, v, g, None, s, x.cu_seqlens), x
    )
    assert relative_error(o, o_ref) < FORWARD[torch.bfloat16]
    assert relative_error(final, final_ref) < FORWARD[torch.bfloat16]
    assert [t.dtype for t in gradients] == [t.dtype for t in expected]
    assert max(map(relative_error, gradients, expected)) < GRADIENT[torch.bfloat16]


def test_it_is_fla_bit_for_bit():
    x = bfloat16_inputs(B=2, T=130, H=2, K=64, V=64)
    ours = forward_and_gradients(lambda q, k, v, g, s: gla.chunk_gla(q, k, v, g, None, s, True, backend="gla_fla"), x)
    theirs = forward_and_gradients(
        lambda q, k, v, g, s: native.chunk_gla(q, k, v, g, initial_state=s, output_final_state=True), x
    )
    assert torch.equal(ours[0], theirs[0])
    assert torch.equal(ours[1], theirs[1])
    assert all(map(torch.equal, ours[2], theirs[2]))


def test_the_least_width_of_v_with_a_gradient():
    x = bfloat16_inputs(B=1, T=40, H=1, K=16, V=9)
    q, v = x.q.requires_grad_(), x.v.requires_grad_()
    o, _ = gla.chunk_gla(q, x.k, v, x.g, backend="gla_fla")
    expected = torch.autograd.grad(oracle.chunk_gla(q, x.k, v, x.g)[0].sum(), (q, v))
    gradients = torch.autograd.grad(o.sum(), (q, v))
    assert max(map(relative_error, gradients, expected)) < GRADIENT[torch.bfloat16]


@pytest.mark.parametrize("gates", ["none", "mild", "-inf"])
@pytest.mark.parametrize("inplace", [False, True])
def test_a_step(gates, inplace):
    x = bfloat16_inputs(B=3, T=1, H=2, K=64, V=32, gates=gates)
    state, before = x.initial_state, x.initial_state.clone()
    g = None if x.g is None else x.g[:, 0]
    o, new = gla.recurrent_gla_step(x.q[:, 0], x.k[:, 0], x.v[:, 0], g, state, inplace=inplace, backend="gla_fla")
    o_ref, new_ref = oracle.chunk_gla(x.q, x.k, x.v, x.g, None, before)
    assert relative_error(o, o_ref[:, 0]) < FORWARD[torch.bfloat16]
    assert relative_error(new, new_ref) < 1e-6
    assert torch.equal(state, new if inplace else before)


def test_a_step_is_captured_into_a_graph():
    x = bfloat16_inputs(B=3, T=1, H=2, K=64, V=32)
    token = [t[:, 0].contiguous() for t in (x.q, x.k, x.v, x.g)]
    state = x.initial_state

    def step():
        return gla.recurrent_gla_step(*token, state, backend="gla_fla")

    expected = step()  # tunes
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, new = step()
    graph.replay()
    assert torch.equal(o, expected[0])
    assert torch.equal(new, expected[1])


def test_float32_needs_leave_to_use_tf32():
    x = gla_inputs(B=1, T=64, H=1, K=32, V=32, device="cuda")
    explanation = gla.explain("chunk_gla_fwd", x.q, x.k, x.v, x.g, backend="gla_fla")
    assert "TF32" in explanation.candidates[0].refusal
    torch.set_float32_matmul_precision("high")
    try:
        o, _ = gla.chunk_gla(x.q, x.k, x.v, x.g, backend="gla_fla")
    finally:
        torch.set_float32_matmul_precision("highest")
    error = relative_error(o, oracle.chunk_gla(x.q, x.k, x.v, x.g)[0])
    assert 1e-5 < error < 4e-3  # TF32 was used: the error is above the budget of float32, and below the one of bfloat16
