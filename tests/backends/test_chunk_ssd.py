"""Mamba-2's scan on Triton's kernels: its time steps, and which calls the kernel that reads them computes."""

import dataclasses

import pytest
import torch

from gla_core.cli.calls import describe_call
from gla_core.dispatch.backend import Layout
from gla_core.ops.gla.ssd import time_steps

pytest.importorskip("triton")
from gla_triton_kernels.gla import ssd
from gla_triton_kernels.gla.shared.skip import launch_skip_gradients
from gla_triton_kernels.gla.shared.time_steps import launch_time_step_gradients, launch_time_steps
from gla_triton_runtime.launch import start


def call(shape="4,4096,1,128,64", dtype="bfloat16", **changes):
    described = describe_call("chunk_ssd_fwd", shape, dtype=dtype, value_heads=80, assume="NVIDIA H200")
    return dataclasses.replace(described, **changes)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"dtype": "float16"}, None),
        ({"shape": "4,4096,1,256,128"}, None),
        ({"dtype": "float32"}, "reads time steps with bfloat16 or float16; q is float32"),
        ({"batch_invariant": 64}, "computes no batch invariance"),
        ({"shape": "4,0,1,128,64"}, "there are no tokens"),
        ({"shape": "4,4096,1,128,60"}, "copies x to a width that TMA can move"),
        ({"shape": "1,64,1,128,64"}, "computes by general.forward, which reads no time steps"),
        ({"shape": "4,64,1,128,64"}, None),  # its blocks fill the GPU
        ({"layouts": {"z": Layout((4, 4096, 80, 64), (4096 * 5128, 5128, 64, 1), torch.bfloat16)}}, None),
        (
            {"layouts": {"z": Layout((4, 4096, 80, 64), (4096 * 5124, 5124, 64, 1), torch.bfloat16)}},
            "reads z by TMA, which cannot address its strides",
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize("cut", [False, True])
def test_calls_of_the_kernel_that_reads_time_steps(changes, reason, cut):
    assert ssd.refusal(call(**changes), cut) == reason


@pytest.mark.kernels
@pytest.mark.parametrize("softplus", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_time_steps(device, softplus, bias):
    shape, heads = (2, 70, 5), torch.randn(2, 5, device=device)
    dt = torch.cat([5 * torch.randn(2, 69, 5), torch.tensor([-60.0, -20.0, 0.0, 19.0, 90.0]).expand(2, 1, 5)], 1)
    dt = dt.to(device).transpose(0, 1).contiguous().transpose(0, 1)
    A, bias = -heads[0].abs(), heads[1] if bias else None
    delta, g = (torch.empty(shape, device=device) for _ in range(2))
    start(launch_time_steps(dt, A, bias, delta, g, 1e-30, 60.0, softplus))
    expected = time_steps(dt, bias, softplus, torch.float64).clamp(1e-30, 60.0)
    torch.testing.assert_close(delta, expected.float(), rtol=2e-6, atol=0)
    torch.testing.assert_close(g, (expected * A).float(), rtol=2e-6, atol=0)


def gradients(shape="4,4096,1,128,64", dtype="bfloat16", value_heads=80, **changes):
    described = describe_call("chunk_ssd_bwd", shape, dtype=dtype, value_heads=value_heads, assume="NVIDIA H200")
    return dataclasses.replace(described, **changes)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"shape": "4,4096,1,256,128"}, None),
        ({"shape": "4,4096,80,64,64"}, None),  # no groups
        ({"layouts": {"D": Layout((80, 64), (64, 1), torch.float32)}}, None),
        ({"dtype": "float16"}, "computes gradients with bfloat16; q is float16"),
        ({"batch_invariant": 64}, "computes no batch invariance"),
        ({"shape": "4,0,1,128,64"}, "there are no tokens"),
        ({"shape": "4,4096,1,128,60"}, "copies x to a width that TMA can move"),
    ],
    ids=str,
)
@pytest.mark.parametrize("cut", [False, True])
def test_calls_of_the_kernel_that_computes_gradients_of_time_steps(changes, reason, cut):
    assert ssd.backward_refusal(gradients(**changes), cut) == reason


@pytest.mark.kernels
@pytest.mark.parametrize("softplus", [False, True])
@pytest.mark.parametrize("others", [False, True], ids=["alone", "bias, skip and padding"])
def test_gradients_of_time_steps(device, softplus, others):
    B, T, Hv = (1, 140, 19) if others else (2, 70, 5)
    torch.manual_seed(0)
    dt, ddelta, dg, dskip = ((3 * torch.randn(B, T, Hv)).to(device) for _ in range(4))
    A, bias, D = -torch.rand(Hv, device=device), torch.randn(Hv, device=device), torch.randn(Hv, device=device)
    dt = dt.transpose(0, 1).contiguous().transpose(0, 1)
    dt[:, -1], offsets = 30.0, torch.tensor([3, 60, T - 4], device=device) if others else None
    ends = slice(None) if offsets is None else slice(3, T - 4)
    dt64, A64, bias64 = (y.double().requires_grad_() for y in (dt, A, bias))
    low, high = (1e-3, 2.0) if others else (0.0, 60.0)
    delta = time_steps(dt64, bias64 if others else None, softplus, torch.float64).clamp(low, high)
    loss = (delta * ddelta + delta * A64 * dg)[:, ends].sum()
    expected = torch.autograd.grad(loss, (dt64, A64, bias64), allow_unused=True)
    if offsets is not None:  # whatever rows of no sequence hold
        for y in (dt, ddelta, dg, dskip):
            y[:, :3] = y[:, -4:] = torch.nan
    bias, D, dskip = (bias, D, dskip) if others else (None, None, None)
    ddt, (dA, dbias, dD) = (
        torch.empty(B, T, Hv, device=device),
        (None if y is None else torch.empty_like(y) for y in (A, bias, D)),
    )
    results = (ddt, dA, dbias, dD)
    start(launch_time_step_gradients(dt, A, bias, offsets, ddelta, dg, dskip, *results, low, high, softplus))
    torch.testing.assert_close(ddt, expected[0].float(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(dA, expected[1].float(), rtol=1e-5, atol=1e-4)
    if others:
        torch.testing.assert_close(dbias, expected[2].float(), rtol=1e-5, atol=1e-4)
        torch.testing.assert_close(dD, dskip[:, ends].sum((0, 1)), rtol=1e-5, atol=1e-4)


@pytest.mark.kernels
@pytest.mark.parametrize(("B", "T", "V", "dtype"), [(2, 300, 72, torch.float32), (1, 140, 64, torch.bfloat16)], ids=str)
def test_gradients_of_a_skip_for_each_channel(device, B, T, V, dtype):
    torch.manual_seed(0)
    x, do, dx = (torch.randn(B, 3, T, V, device=device).bfloat16().transpose(1, 2) for _ in range(3))
    D, dx = torch.randn(V, 3, device=device).to(dtype).mT, dx.contiguous()
    offsets, rows = None, slice(None)
    if B == 1:  # packed; whatever rows of no sequence hold
        offsets, rows = torch.tensor([3, 60, T - 4], device=device), slice(3, T - 4)
        for y in (x, do):
            y[:, :3] = y[:, -4:] = torch.nan
        dx[:, :3] = dx[:, -4:] = 0
    expected = dx.clone()
    expected[:, rows] = (dx.double() + do.double() * D.double())[:, rows].bfloat16()
    dD = torch.empty(3, V, device=device, dtype=dtype)
    start(launch_skip_gradients(x, D, offsets, do, dx, dD))
    torch.testing.assert_close(dx, expected)
    if offsets is not None:
        assert not dx[:, :3].any()
        assert not dx[:, -4:].any()
    torch.testing.assert_close(dD, (x.double() * do.double())[:, rows].sum((0, 1)).to(dtype))
