"""Training with the Triton backends: which forward and which backward are chosen, and what the two give together."""

from __future__ import annotations

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
    expected = oracle_gradients(x)
    found = gradients(x, request_)
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        assert relative_error(gradient, expected[name]) <= GRADIENT[dtype], name


def test_explain_shows_both(device):
    x = gla_inputs(device=device, dtype=torch.float32)
    arguments = (x.q.requires_grad_(), x.k, x.v, x.g)
    with gla.use_backend(FORWARD_ALONE):
        assert gla.explain("chunk_gla_fwd", *arguments).winner == ("triton_fused" if can_run(device) else None)
        assert gla.explain("chunk_gla_bwd", *arguments).winner == "reference"


@pytest.mark.gpu
@pytest.mark.parametrize("op", ["chunk_gla_fwd", "chunk_gla_bwd"])
def test_auto_takes_a_triton_backend_on_a_gpu(op):
    x = gla_inputs(device="cuda", dtype=torch.bfloat16)
    explanation = gla.explain(op, x.q, x.k, x.v, x.g)
    assert explanation.winner in ("triton_fused", "parallel_scan")


def can_run(device):
    (backend,) = [b for b in gla.backends() if b.name == "triton_fused"]
    return backend.capabilities.devices is None or device in backend.capabilities.devices
