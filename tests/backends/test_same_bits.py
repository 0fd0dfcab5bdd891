"""Calls that fill a GPU give the same bits every time: TMA overwrites no tile that warps are still loading."""

import pytest
import torch

import gla_core as gla
from gla_core.workloads.inputs import gla_inputs

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("gate_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "sizes", [{}, {"V": 256}, {"K": 64, "V": 64}, {"K": 256}, {"gate_form": "head"}], ids=lambda sizes: str(sizes)
)
def test_same_bits(sizes, gate_dtype):
    sizes = {"B": 4, "T": 4096, "H": 16, "K": 128, "V": 128} | sizes
    x = gla_inputs(**sizes, dtype=torch.bfloat16, gate_dtype=gate_dtype, device="cuda")
    leaves = [y.requires_grad_() for y in (x.q, x.k, x.v, x.g)]

    def pair():
        o, _ = gla.chunk_gla(*leaves, backend="triton_fused")
        return o, *torch.autograd.grad(o, leaves, torch.ones_like(o))

    expected = pair()
    for _ in range(20):
        assert all(map(torch.equal, pair(), expected))
