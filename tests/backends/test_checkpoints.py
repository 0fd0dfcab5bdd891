"""Checkpoints that the kernels of chunk_gla_fwd make, against the reference's checkpoints in float64."""

import functools

import pytest
import torch

import gla_core as gla
from gla_core.conformance.tolerances import FORWARD, relative_error
from gla_core.workloads.inputs import gla_inputs
from gla_triton_kernels.gla import forward as launcher
from gla_triton_kernels.gla.general import kernels as general
from gla_triton_kernels.gla.sm90 import kernels as sm90
from tests.backends.prepared_calls import call_prepared, described, preparing
from tests.kernels import DTYPES, INTERPRETED

pytest.importorskip("triton")

DTYPE = DTYPES[-1]  # the interpreter is slow for float32, which is computed token by token
LENGTHS = (70, 0, 65, 1, 0, 200, 3)

pytestmark = [pytest.mark.kernels, pytest.mark.usefixtures("poisoned")]


@pytest.fixture
def cut(change_plans):
    """Returns a function that sets the length of segments. Until it is called, plans choose the length."""
    change_plans("INTERPRETED_SEGMENT", 1024)
    return lambda length: change_plans("segment_length", lambda *_: length)


@pytest.fixture
def forward(backend):
    """Returns the backend's chunk_gla_fwd."""
    return functools.partial(call_prepared, "chunk_gla_fwd", preparing(backend, "chunk_gla_fwd"))


def forward_by(cut, *kernels):
    """Returns chunk_gla_fwd by one of these kernels; `cut` as in `launcher.plan`."""
    return functools.partial(call_prepared, "chunk_gla_fwd", lambda call: launcher.prepare(call, cut, kernels))


def check(forward, every, initial_state=True, first=0, **sizes):
    """Compares with the reference."""
    x = gla_inputs(**{"B": 1, "H": 1, "K": 19, "V": 37, "dtype": DTYPE, **sizes}, initial_state=initial_state)
    offsets = None if x.cu_seqlens is None else x.cu_seqlens + first
    o, _, actual = forward(x.q, x.k, x.v, x.g, 0.3, x.initial_state, False, offsets, every)
    *wide, state = (None if y is None else y.double() for y in (x.q, x.k, x.v, x.g, x.initial_state))
    options = {"cu_seqlens": offsets, "backend": "reference", "checkpoint_every": every}
    ref_o, _, ref = gla.chunk_gla(*wide, 0.3, state, **options)
    assert relative_error(o, ref_o) <= FORWARD[x.q.dtype]
    assert relative_error(actual, ref) <= FORWARD[x.q.dtype]
    assert actual.dtype == (torch.bfloat16 if x.q.dtype == torch.bfloat16 else torch.float32)
    unused = (ref == 0).flatten(2).all(2)
    assert not actual[unused].any()


@pytest.mark.thorough
@pytest.mark.parametrize(("T", "every"), [(0, 64), (5, 64), (64, 64), (65, 128), (200, 64), (200, 128), (200, 192)])
def test_equal_sequences(forward, device, T, every):
    check(forward, every, T=T, B=2, G=2, device=device)


@pytest.mark.thorough
@pytest.mark.parametrize("gates", ["none", "-inf"] if INTERPRETED else ["none", "mild", "strong", "-inf"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gates(forward, device, gates, dtype):
    check(forward, 64, T=130, gates=gates, gate_dtype=torch.float32, dtype=dtype, device=device)


def test_without_an_initial_state(forward, device):
    check(forward, 64, T=70, initial_state=False, device=device)
    check(forward, 64, lengths=(5, 0, 70), initial_state=False, device=device)


@pytest.mark.parametrize("every", [64, 128, 192])
def test_packed_sequences(forward, device, every):
    check(forward, every, lengths=LENGTHS, padding=200, first=90, K=3, V=5, device=device)


@pytest.mark.parametrize("lengths", [(), (0,), (0, 0), (5,), (0, 64, 0)])
def test_hardly_a_sequence(forward, device, lengths):
    check(forward, 64, lengths=lengths, padding=9, device=device)
    check(forward, 64, lengths=lengths, device=device)


@pytest.mark.parametrize("backend", ["parallel_scan"])
@pytest.mark.parametrize(
    ("length", "every"),
    [
        (64, 192),
        (128, 64),
        (192, 128),
        pytest.param(64, 64, marks=pytest.mark.thorough),
        pytest.param(128, 192, marks=pytest.mark.thorough),
    ],
)
def test_segments(cut, forward, device, length, every):
    """A checkpoint may be at the start of a segment, or within it."""
    cut(length)
    check(forward, every, T=270, B=2, K=3, V=5, device=device)
    check(forward, every, lengths=LENGTHS, padding=500, first=90, K=3, V=5, device=device)


@pytest.mark.gpu
@pytest.mark.usefixtures("needs_sm90")
@pytest.mark.parametrize("length", [64, 128, 192, 2048])
@pytest.mark.parametrize("gates", ["none", "mild", "-inf"])
@pytest.mark.parametrize(("K", "V"), [(64, 64), (128, 128), (104, 72), (256, 128), (136, 40)])
def test_kernels_for_hopper(cut, change_plans, K, V, gates, length):
    cut(length)
    change_plans("SM90_TOKENS", 0)
    change_plans("SM90_WIDE_TOKENS", 0)
    wide_without_gates = K > 128 and gates == "none"  # which no kernel for SM90 computes
    kernels = (general.FORWARD,) if wide_without_gates else (sm90.FORWARD, sm90.FORWARD_WIDE)
    forward = forward_by(True, *kernels)
    sizes = {"H": 3, "K": K, "V": V, "gates": gates, "gate_dtype": torch.float32, "dtype": torch.bfloat16}
    for every in (64, 128, 192):
        check(forward, every, T=500, B=2, device="cuda", **sizes)
        check(forward, every, lengths=LENGTHS, padding=500, first=90, device="cuda", **sizes)


@pytest.mark.gpu
@pytest.mark.parametrize(("K", "V"), [(64, 64), (128, 128), (256, 128), (512, 64)])
@pytest.mark.parametrize("cut", [False, True])
def test_general_kernel_by_tma(change_plans, cut, K, V):
    change_plans("TMA_ELEMENTS", 0)
    forward = forward_by(cut, general.FORWARD)
    check(forward, 64, T=500, B=2, H=3, K=K, V=V, gate_dtype=torch.float32, device="cuda")


@pytest.mark.gpu
def test_a_call_that_is_replayed(backend):
    """Each call computes new checkpoints, also after calls with another interval."""
    prepare, runs = preparing(backend, "chunk_gla_fwd"), {}

    def forward(*arguments):
        every = arguments[-1]
        if every not in runs:
            runs[every] = prepare(described("chunk_gla_fwd", *arguments))
        return runs[every](*arguments, None)

    for every in (64, 128, 64, 128):
        check(forward, every, lengths=LENGTHS, padding=100, K=64, V=64, device="cuda")
