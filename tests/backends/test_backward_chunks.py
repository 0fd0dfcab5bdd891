"""The backward that computes all chunks side by side, in the op around it, against the reference in float64.

Plans take it on GPUs without wgmma. It multiplies narrow blocks, which Triton 3.6 and 3.7 miscompile on Hopper, so
these tests run interpreted or on other GPUs.
"""

import dataclasses

import pytest
import torch

from gla_core.conformance.tolerances import GRADIENT, relative_error
from gla_core.dispatch.backend import CHUNK
from gla_triton_kernels.gla import backward
from gla_triton_kernels.gla.general import kernels as general
from gla_triton_runtime.architecture import gpu_of
from tests.backends.prepared_calls import call_prepared
from tests.backends.test_backward import DTYPES, SCALE, case, expected, states
from tests.grid import grid, thorough

pytest.importorskip("triton")
pytestmark = pytest.mark.kernels

KERNEL = dataclasses.replace(general.BACKWARD_CHUNKS, refusal=lambda call, gpu: None)
ONE_GATE_A_HEAD = {"T": 70, "R": 2, "K": 20, "V": 16, "gates": ["mild", "-inf"], "gate_form": ["head", "constant"]}
ANYWHERE = {"lengths": (66, 0, 1, 64), "padding": 12, "offset": 5, "K": 16, "V": 16, "gates": "-inf"}
"""Packed sequences whose rows begin and end anywhere."""


@pytest.fixture(autouse=True)
def _not_on_hopper(device):
    if gpu_of(torch.device(device)).facts.has_wgmma:
        pytest.skip("Triton 3.6 and 3.7 miscompile narrow blocks on Hopper")


def gradients(x, entering):
    def prepare(call):
        return backward.prepare(call, cut=False, kernels=(KERNEL,))

    arguments = (SCALE, x.initial_state, x.cu_seqlens, entering, CHUNK, x.do, x.dstate)
    return call_prepared("chunk_gla_bwd", prepare, x.q, x.k, x.v, x.g, *arguments)


def check(x):
    """Compares with the reference, and returns the gradients."""
    entering = states(x).float().contiguous()
    actual = gradients(x, entering)
    for y, ref in zip(actual, expected(x, entering), strict=True):
        if y is not None:
            budget = max(GRADIENT[x.q.dtype], GRADIENT[y.dtype])
            assert relative_error(y, ref) <= budget
    return actual


@pytest.mark.parametrize(
    "sizes",
    [
        *grid(T=70, K=20, V=35, gates=["none", "mild", "-inf"], dtype=DTYPES, initial_state=True),
        *grid(**ONE_GATE_A_HEAD, dtype=DTYPES[0], initial_state=True),
        *thorough(grid(**ONE_GATE_A_HEAD, dtype=DTYPES[1:], initial_state=True)),
        *grid(B=2, T=70, H=2, G=3, K=16, V=16, gates=["none", "-inf"], dstate=False),
        *grid(**ANYWHERE, gate_form=["key", "constant"], initial_state=False, dstate=False),
        *grid(**ANYWHERE, gate_form=["key", "constant"], initial_state=True, dstate=True),
    ],
    ids=str,
)
def test_gradients(device, sizes):
    check(case(device, **sizes))


def test_the_same_bits_every_run(device):
    x = case(device, T=70, K=20, V=35, gates="strong", initial_state=True)
    first, again = (gradients(x, states(x).float().contiguous()) for _ in range(2))
    assert all(torch.equal(y, z) for y, z in zip(first, again, strict=True))
