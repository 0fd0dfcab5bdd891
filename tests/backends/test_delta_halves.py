"""Gradients of a delta rule by halves of the values, where the reference computes the halves in float64."""

import functools

import pytest
import torch

from gla_core.conformance.tolerances import relative_error
from gla_core.workloads.inputs import delta_inputs
from gla_reference.chunk_delta import chunk_delta_bwd, chunk_delta_fwd
from gla_triton_kernels.delta import halves
from tests.backends.prepared_calls import call_prepared


@pytest.mark.parametrize("kept", [True, False], ids=["checkpoints", "no checkpoints"])
@pytest.mark.parametrize(
    "sizes",
    [
        {"gate_form": "head", "R": 2, "initial_state": True},
        {"gates": "none", "initial_state": True},
        {"gate_form": "constant", "R": 2, "initial_state": True},
        {"gate_form": "head", "lengths": (70, 0, 30), "B": 1, "initial_state": True},
        {"gate_form": "head"},
        {"gate_form": "head", "K": 1, "initial_state": True},
    ],
    ids=str,
)
def test_halves_have_the_gradients_of_the_whole(sizes, kept):
    x = delta_inputs(**{"T": 100, "K": 8, "V": 12, "dtype": torch.float64, **sizes})
    tokens = x.q, x.k, x.v, x.g, x.beta, 0.3, x.initial_state
    _, state, checkpoints = chunk_delta_fwd(*tokens, True, x.cu_seqlens, 64, None)
    do, dstate = torch.randn_like(x.v), torch.randn_like(state)
    seen = (checkpoints, 64) if kept else (None, None)
    rest = x.cu_seqlens, *seen, do.mT.contiguous().mT, dstate.mT.contiguous().mT, None
    actual = call_prepared("chunk_delta_bwd", functools.partial(halves.joined, chunk_delta_bwd), *tokens, *rest)
    for a, b in zip(actual, chunk_delta_bwd(*tokens, *rest), strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert (a.shape, a.dtype) == (b.shape, b.dtype)
            assert relative_error(a, b) < 1e-12
