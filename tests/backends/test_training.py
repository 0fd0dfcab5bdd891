"""Training with the Triton backends: the choice of the forward and the backward, and the results of both together."""

import pytest
import torch

import gla_core as gla
from gla_core.conformance.calls import gradients, oracle_gradients
from gla_core.conformance.tolerances import GRADIENT, relative_error
from gla_core.workloads.inputs import GATES, gla_inputs

pytest.importorskip("triton")

FORWARD_ALONE = "chunk_gla_fwd=triton_fused;chunk_gla_bwd=reference"


@pytest.mark.kernels
@pytest.mark.parametrize("request_", ["triton_fused", "parallel_scan", FORWARD_ALONE])
@pytest.mark.parametrize("gates", GATES)
def test_gradients(device, gates, request_):
    dtype, T, K = (torch.bfloat16, 300, 64) if device == "cuda" else (torch.float32, 10, 16)
    sizes = {"B": 2, "T": T, "K": K, "V": K, "dtype": dtype, "gate_dtype": torch.float32, "device": device}
    x = gla_inputs(gates=gates, initial_state=True, **sizes)
    expected = oracle_gradients("chunk_gla", x)
    actual = gradients("chunk_gla", x, request_)
    assert actual.keys() == expected.keys()
    for name, gradient in actual.items():
        assert relative_error(gradient, expected[name]) <= GRADIENT[dtype], name


def test_explain_shows_both(device):
    x = gla_inputs(device=device, dtype=torch.float32)
    arguments = (x.q.requires_grad_(), x.k, x.v, x.g)
    with gla.use_backend(FORWARD_ALONE):
        assert gla.explain("chunk_gla_fwd", *arguments).winner == ("triton_fused" if can_run(device) else None)
        assert gla.explain("chunk_gla_bwd", *arguments).winner == "reference"


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton_fused", "parallel_scan"])
def test_states_are_kept_unless_they_are_computed_again(backend):
    x = gla_inputs(B=2, T=300, K=128, V=256, dtype=torch.bfloat16, gate_dtype=torch.float32, device="cuda")
    leaves, results = [y.requires_grad_() for y in (x.q, x.k, x.v, x.g)], []
    for again in (False, True):
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda y, kept=kept: kept.append(y) or y, lambda y: y):
            o, _ = gla.chunk_gla(*leaves, backend=backend, recompute_states=again)
        assert any(y.shape[-2:] == (128, 256) for y in kept) == (not again)
        results.append(torch.autograd.grad(o, leaves, torch.ones_like(o)))
    for y, expected in zip(*results, strict=True):
        assert relative_error(y, expected) <= GRADIENT[torch.bfloat16]


@pytest.mark.gpu
@pytest.mark.parametrize("op", ["chunk_gla_fwd", "chunk_gla_bwd"])
def test_auto_takes_a_triton_backend_on_a_gpu(op):
    x = gla_inputs(device="cuda", dtype=torch.bfloat16)
    explanation = gla.explain(op, x.q, x.k, x.v, x.g)
    assert explanation.winner in ("triton_fused", "parallel_scan")


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton_fused", "parallel_scan"])
def test_more_than_2_to_the_31_elements(backend):
    """The first and the last heads of a call of 2^31 elements equal a call with these heads alone. It needs 90 GB."""
    if torch.cuda.mem_get_info()[0] < 90e9:
        pytest.skip("needs 90 GB of free memory")
    shape, device = (2, 65_600, 130, 128), "cuda"
    assert torch.Size(shape).numel() > 2**31
    q, k, v, do = (torch.randn(shape, dtype=torch.bfloat16, device=device) for _ in range(4))
    g = -torch.rand(shape, device=device) / 16
    actual = pair(backend, do, q, k, v, g)
    for part in ((slice(0, 1), slice(None), slice(0, 2)), (slice(1, 2), slice(None), slice(128, 130))):
        expected = pair(backend, *(y[part].contiguous() for y in (do, q, k, v, g)))
        for y, separate in zip(actual, expected, strict=True):
            assert relative_error(y[part], separate) <= GRADIENT[torch.bfloat16]


def pair(backend, do, *inputs):
    """Returns o, dq, dk, dv and dg of a call with gates in float32."""
    leaves = [y.detach().requires_grad_() for y in inputs]
    o, _ = gla.chunk_gla(*leaves, backend=backend)
    return [o, *torch.autograd.grad(o, leaves, do)]


def can_run(device):
    (backend,) = [b for b in gla.backends() if b.name == "triton_fused"]
    return backend.capabilities.devices is None or device in backend.capabilities.devices
