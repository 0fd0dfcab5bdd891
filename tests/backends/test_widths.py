"""Heads of widths that TMA cannot move: tensors are padded with zeros, and results are copied back."""

import functools

import pytest
import torch

pytest.importorskip("triton")

from gla_triton_kernels.gla.seen import seen_shape, seen_width
from gla_triton_kernels.gla.tensors import WRITTEN, Tensors
from gla_triton_runtime.architecture import Architecture, Gpu
from gla_triton_runtime.launch import start

pytestmark = pytest.mark.kernels


@pytest.fixture
def widened():
    from gla_triton_kernels.chunks.widths import widened

    gpu = Gpu(Architecture.SM90, 132)

    def wide(x):
        K, V = (seen_width(y.shape[3], y.dtype, gpu) for y in (x.k, x.v))
        return widened(x, functools.partial(seen_shape, K=K, V=V), WRITTEN)

    return wide


def forward(device, K=20, V=9):
    """Returns a call with all tensors. q is a slice of another tensor; checkpoints are 0, and other results are NaN."""

    def random(*shape, dtype=torch.bfloat16):
        return torch.randn(shape, device=device).to(dtype)

    B, T, H = 2, 5, 3
    state = random(B, H, K, V, dtype=torch.float32).transpose(0, 1).contiguous().transpose(0, 1)
    results = random(B, T, H, V) * torch.nan, state.contiguous() * torch.nan, random(B, 2, H, K, V) * 0
    tokens = random(B, T, H, 2 * K)[..., K:], random(B, T, H, K), random(B, T, H, V)
    return Tensors(*tokens, random(B, T, H, K, dtype=torch.float32), state, None, *results)


def padded(x, *widths):
    """Returns x, padded with zeros at the end of its last dimensions to these widths."""
    y = x.new_zeros(*x.shape[: -len(widths)], *widths)
    y[tuple(slice(size) for size in x.shape)] = x
    return y


def test_zeros_stand_behind_what_kernels_read(widened, device):
    x = forward(device)
    wide, read, _ = widened(x)
    start(read)
    for name in ("q", "k", "g"):
        assert torch.equal(getattr(wide, name), padded(getattr(x, name), 24))
    assert torch.equal(wide.v, padded(x.v, 16))
    assert torch.equal(wide.initial_state, padded(x.initial_state, 24, 16))


def test_results_are_copied_back(widened, device):
    x = forward(device)
    wide, _, back = widened(x)
    for name in ("o", "final_state", "checkpoints"):
        getattr(wide, name).normal_()
    start(back)
    assert torch.equal(x.o, wide.o[..., :9])
    assert torch.equal(x.final_state, wide.final_state[..., :20, :9])
    assert torch.equal(x.checkpoints, wide.checkpoints[..., :20, :9])


def test_only_what_has_such_a_width_is_copied(widened, device):
    x = forward(device, K=16)
    wide, read, back = widened(x)
    assert (wide.q is x.q, wide.k is x.k, wide.g is x.g) == (True, True, True)
    assert (len(read), len(back)) == (2, 3)  # v and the initial state; o, the final state and the checkpoints
    x = forward(device, K=16, V=8)
    assert widened(x) == (x, [], [])
