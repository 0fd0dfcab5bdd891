"""The backward that computes all chunks side by side, in the op around it, against the reference in float64.

Plans take it on GPUs without wgmma. It multiplies narrow blocks, which Triton 3.6 miscompiles on Hopper, so these tests
run interpreted or on other GPUs.
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

pytest.importorskip("triton")
pytestmark = pytest.mark.kernels

KERNEL = dataclasses.replace(general.BACKWARD_CHUNKS, refusal=lambda call, gpu: None)


@pytest.fixture(autouse=True)
def _not_on_hopper(device):
    if gpu_of(torch.device(device)).facts.has_wgmma:
        pytest.skip("Triton 3.6 miscompiles narrow blocks on Hopper")


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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("gates", ["none", "mild", "-inf"])
def test_several_blocks_of_keys_and_values(device, gates, dtype):
    check(case(device, T=70, K=20, V=35, gates=gates, dtype=dtype, initial_state=True))


@pytest.mark.parametrize(
    "dtype", [DTYPES[0], *(pytest.param(x, marks=pytest.mark.thorough) for x in DTYPES[1:])], ids=str
)
@pytest.mark.parametrize("gate_form", ["head", "constant"])
@pytest.mark.parametrize("gates", ["mild", "-inf"])
def test_gates_that_keys_share(device, gates, gate_form, dtype):
    sizes = {"T": 70, "R": 2, "K": 20, "V": 16}
    check(case(device, **sizes, gates=gates, gate_form=gate_form, dtype=dtype, initial_state=True))


@pytest.mark.parametrize("gates", ["none", "-inf"])
def test_grouped_queries(device, gates):
    check(case(device, B=2, T=70, H=2, G=3, K=16, V=16, gates=gates, dstate=False))


@pytest.mark.parametrize("gate_form", ["key", "constant"])
@pytest.mark.parametrize(("initial_state", "dstate"), [(False, False), (True, True)])
def test_packed_sequences_whose_rows_begin_and_end_anywhere(device, initial_state, dstate, gate_form):
    sizes = {"lengths": (66, 0, 1, 64), "padding": 12, "offset": 5, "K": 16, "V": 16}
    check(case(device, **sizes, gates="-inf", gate_form=gate_form, initial_state=initial_state, dstate=dstate))


def test_the_same_bits_every_run(device):
    x = case(device, T=70, K=20, V=35, gates="strong", initial_state=True)
    first, again = (gradients(x, states(x).float().contiguous()) for _ in range(2))
    assert all(torch.equal(y, z) for y, z in zip(first, again, strict=True))
