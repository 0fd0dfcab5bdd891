"""The kernels for SM90 that compute gradients, and what pairs.py adds to them, against the reference in float64."""

import pytest
import torch

from gla_core.conformance.tolerances import GRADIENT, relative_error
from gla_core.dispatch.backend import CHUNK
from gla_core.dispatch.tensors import checkpoint_dtype
from gla_core.workloads.inputs import gla_inputs
from gla_reference.chunk_gla import chunk_gla_bwd, chunk_gla_fwd
from gla_triton_kernels.gla import backward
from gla_triton_kernels.gla.sm90 import kernels as sm90
from gla_triton_runtime.architecture import gpu_of
from tests.backends.prepared_calls import described
from tests.grid import grid

pytest.importorskip("triton")

from gla_triton_kernels.gla.tensors import BackwardTensors
from gla_triton_runtime.launch import start

BFLOAT16, SCALE = torch.bfloat16, 0.1
BUDGET = {BFLOAT16: GRADIENT[BFLOAT16], torch.float16: GRADIENT[torch.float16], torch.float32: 1e-3}
"""The allowed errors; float32 is computed under the matmul precision "high"."""
LENGTHS = (70, 0, 3, 200, 64)
PACKED = {"lengths": LENGTHS, "padding": 5}
FIVE, THREE = ["none", "mild", "strong", "extreme", "-inf"], ["none", "mild", "-inf"]
SIZES = [(128, 128), (64, 64), (64, 128), (128, 64), (104, 72), (64, 200), (128, 256), (200, 320), (256, 64), (264, 72)]
"""Keys and values; from (64, 200) to (256, 64) those of the kernel for wide heads."""

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("needs_sm90")]


def case(dstate=True, mild=None, **sizes):
    """Returns inputs, and the gradients of o and of the final state. Gates of the keys `mild` are divided by 1,000."""
    sizes = {"B": 2, "T": 300, "H": 3, "K": 128, "V": 128, "gate_dtype": torch.float32, "initial_state": True, **sizes}
    x = gla_inputs(**{"dtype": BFLOAT16, **sizes}, device="cuda")
    if mild is not None:
        x.g[..., mild] /= 1000
    N = len(x.q) if x.cu_seqlens is None else len(x.cu_seqlens) - 1
    Hv, (K, V), Ho = x.v.shape[2], (x.k.shape[3], x.v.shape[3]), max(x.q.shape[2], x.v.shape[2])
    do = torch.randn(*x.q.shape[:2], Ho, V, dtype=x.q.dtype, device="cuda")
    return x, do, torch.randn(N, Hv, K, V, device="cuda") if dstate else None


def expected(x, do, dstate):
    """Returns the checkpoints in the dtype that kernels read, and the gradients in float64."""
    inputs = (x.q, x.k, x.v, x.g, x.initial_state, do, dstate)
    q, k, v, g, initial, do, dstate = (None if y is None else y.double() for y in inputs)
    checkpoints = chunk_gla_fwd(q, k, v, g, SCALE, initial, False, x.cu_seqlens, CHUNK)[2]
    gradients = chunk_gla_bwd(q, k, v, g, SCALE, initial, x.cu_seqlens, None, None, do, dstate)
    return checkpoints.to(checkpoint_dtype(x.q.dtype)), gradients


def computed(x, do, dstate, checkpoints):
    """Returns the kernel's gradients. Results are filled with NaN first, and rows of no sequence stay NaN."""
    arguments = (x.q, x.k, x.v, x.g, SCALE, x.initial_state, x.cu_seqlens, checkpoints, CHUNK, do, dstate)
    call = described("chunk_gla_bwd", *arguments)
    # If all kernels refuse the call, this fails.
    kernels = (sm90.BACKWARD_WIDE, sm90.BACKWARD, sm90.BACKWARD_HEAD)
    ((_, plan),) = backward.plan(call, gpu_of(call.device), False, kernels)
    assert plan.entering is None
    inputs = (x.q, x.k, x.v, x.g, x.initial_state)
    results = [None if y is None else torch.full_like(y, torch.nan) for y in inputs]
    tensors = BackwardTensors(*inputs, x.cu_seqlens, checkpoints, do, dstate, *results)
    start(backward.launches(plan, tensors, SCALE))
    return results


def check(**sizes):
    x, do, dstate = case(**sizes)
    checkpoints, reference = expected(x, do, dstate)
    first, second = (computed(x, do, dstate, checkpoints) for _ in range(2))
    end = x.q.shape[1] if x.cu_seqlens is None else int(x.cu_seqlens[-1])
    for i, (y, again, ref) in enumerate(zip(first, second, reference, strict=True)):
        if y is not None and ref is not None:
            inside = (slice(None), slice(None) if i == 4 else slice(end))
            assert relative_error(y[inside], ref[inside]) <= BUDGET[x.q.dtype], i
            assert torch.equal(y[inside], again[inside]), i
    return x, first


@pytest.mark.parametrize(
    "sizes",
    [
        *(sizes for K, V in SIZES for sizes in grid(gates=FIVE, K=K, V=V)),
        *grid(T=[1, 40, 64, 65, 128, 512], K=[128, 256], gates=["mild", "-inf"], initial_state=False, dstate=False),
        *grid(**PACKED, gates=THREE, K=[64, 128, 200]),
        *grid(K=[128, 256], gates=["mild", "-inf"], gate_dtype=BFLOAT16),
        *grid(G=4, H=2, K=[64, 128, 256], gates=THREE),
        *grid(G=4, H=2, K=[64, 128, 256], gates=THREE, **PACKED),
        *grid(R=4, H=2, K=[64, 128, 256], gates=THREE),
        *grid(R=4, H=2, K=[64, 128, 256], gates=THREE, **PACKED),
    ],
    ids=str,
)
def test_gradients(sizes):
    check(**sizes)


# On 132 multiprocessors, blocks of state_gradients.py have 64, 128 and 192 values.
@pytest.mark.parametrize(("H", "V"), [(1, 256), (24, 256), (24, 136)])
@pytest.mark.parametrize("mild", [slice(64), slice(64, 128)], ids=str)
@pytest.mark.parametrize("lengths", [None, LENGTHS])
def test_a_part_of_the_keys_is_mild(lengths, mild, H, V):
    check(gates="extreme", mild=mild, lengths=lengths, H=H, K=200, V=V)


@pytest.mark.usefixtures("tf32_allowed")
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("gates", FIVE)
@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"K": 64, "V": 64},
        {"K": 72, "V": 200},
        {"K": 64, "V": 256, "R": 2},
        {"K": 264, "V": 136, "G": 2},
        {"K": 256, "V": 200, **PACKED},
        {"G": 2, "initial_state": False},
        {"R": 2, "initial_state": False},
        PACKED,
        {"gate_form": "head"},
        {"gate_form": "head", "K": 64, "V": 64, **PACKED},
    ],
    ids=str,
)
def test_other_dtypes(dtype, gates, sizes):
    check(dtype=dtype, gates=gates, **sizes)


@pytest.mark.parametrize("gates", ["mild", "strong", "-inf"])
@pytest.mark.parametrize("K", [128, 256])
@pytest.mark.parametrize("dtype", [BFLOAT16, torch.float16], ids=str)
def test_dg_is_exactly_0_where_nothing_passes(dtype, gates, K):
    x, (*_, dg, _) = check(dtype=dtype, K=K, gates=gates, initial_state=False)
    assert not dg[:, 0].any()
    assert not dg[x.g == -torch.inf].any()
